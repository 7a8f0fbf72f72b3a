"""Corpora: recordings are read whole or refused, and manifests name what is there."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import http.server
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.common.cache import cache_dir
from oktopk.common.errors import UserError
from oktopk.workloads.speech import an4, audio, command, features, manifest, phrases, spoken
from oktopk.workloads.speech.an4_archive import SOURCES, Source
from oktopk.workloads.speech.manifest import Utterance

soundfile: Any = pytest.importorskip("soundfile")
pytest.importorskip("soxr")

Wave = npt.NDArray[np.int16]


def tone(seconds: float = 0.25, rate: int = 16_000, pitch: float = 440) -> Wave:
    time = np.arange(int(seconds * rate)) / rate
    samples: Wave = np.rint(12_000 * np.sin(2 * np.pi * pitch * time)).astype(np.int16)
    return samples


def store(path: Path, samples: npt.NDArray[Any], rate: int = 16_000) -> Path:
    """In the format that the name ends with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".raw":
        path.write_bytes(samples.astype(">i2").tobytes())
    else:
        kind = {".sph": "NIST", ".wav": "WAV", ".flac": "FLAC", ".ogg": "OGG"}[path.suffix]
        soundfile.write(os.fsencode(path), samples, rate, format=kind)
    return path


@pytest.fixture(scope="module")
def real() -> Path:
    """The folder that AN4 is in."""
    folder = Path(
        os.environ.get("OKTOPK_DATA") or Path(__file__).parents[1].parent / "shared" / "data"
    )
    if an4.find(folder) is None:
        pytest.skip("AN4 is not here; OKTOPK_DATA names the folder that has it")
    return folder


# Recordings.


@pytest.mark.parametrize("kind", ["sph", "wav", "flac", "raw"])
def test_reads_each_format(tmp_path: Path, kind: str) -> None:
    samples = tone()
    path = store(tmp_path / f"a.{kind}", samples)
    heard = audio.load(path)
    assert heard.dtype == torch.float32
    assert heard.tolist() == (samples / 32768).tolist()
    assert audio.seconds(path) == len(samples) / audio.RATE


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100])
def test_resamples(tmp_path: Path, rate: int) -> None:
    path = store(tmp_path / "a.wav", tone(1.0, rate), rate)
    heard = audio.load(path)
    assert audio.seconds(path) == 1.0
    assert abs(len(heard) - audio.RATE) <= 1
    assert int(torch.fft.rfft(heard).abs().argmax()) == 440


def test_averages_channels(tmp_path: Path) -> None:
    left, right = tone(pitch=300), tone(pitch=500)
    heard = audio.load(store(tmp_path / "a.wav", np.stack([left, right], 1)))
    assert heard.tolist() == pytest.approx((left / 65536 + right / 65536).tolist(), abs=1e-6)


@pytest.mark.parametrize("kind", ["sph", "wav", "flac", "raw"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_refuses_every_truncation(kind: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = store(Path(folder, f"a.{kind}"), tone())
        whole = path.read_bytes()
        odd = st.integers(0, len(whole) // 2 - 1).map(lambda half: 2 * half + 1)
        cuts = odd if kind == "raw" else st.integers(0, len(whole) - 1)
        path.write_bytes(whole[: data.draw(cuts)])
        with pytest.raises(UserError, match=r"a\.") as caught:
            audio.load(path)
        assert "\n" not in str(caught.value)


def test_refuses_truncated_ogg(tmp_path: Path) -> None:
    path = store(tmp_path / "a.ogg", tone(3.0))
    assert abs(audio.seconds(path) - 3.0) < 0.01
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(UserError, match="truncated"):
        audio.load(path)


@pytest.mark.parametrize("kind", ["sph", "wav"])
def test_length_of_a_truncated_file_is_no_length(tmp_path: Path, kind: str) -> None:
    path = store(tmp_path / f"a.{kind}", tone())
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match="truncated"):
        audio.seconds(path)


def test_wave_of_unknown_length_is_read_to_its_end(tmp_path: Path) -> None:
    path = store(tmp_path / "a.wav", tone())
    data = bytearray(path.read_bytes())
    data[40:44] = struct.pack("<I", 0xFFFF_FFFF)
    path.write_bytes(data)
    assert len(audio.load(path)) == len(tone())


def sphere(**fields: str) -> bytes:
    """A recording with a header of our own."""
    usual = {
        **{"sample_count": "-i 100", "sample_n_bytes": "-i 2", "channel_count": "-i 1"},
        **{"sample_byte_format": "-s2 01", "sample_rate": "-i 16000", "sample_coding": "-s3 pcm"},
    }
    lines = "".join(f"{name} {value}\n" for name, value in {**usual, **fields}.items())
    return f"NIST_1A\n   1024\n{lines}end_head\n".encode().ljust(1024) + b"\0\1" * 100


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("empty.wav", b"", "no samples"),
        ("empty.raw", b"", "no samples"),
        ("odd.raw", b"abc", "truncated"),
        ("text.wav", b"this is no recording", "cannot be read as audio"),
        ("broken.sph", b"NIST_1A\n   1024\nsample_count -i 7\n", "damaged SPHERE header"),
        ("slow.sph", sphere(sample_rate="-i 1"), "1 samples a second"),
        ("fast.sph", sphere(sample_rate="-i 2000000000"), "2000000000 samples a second"),
        ("still.sph", sphere(sample_rate="-i 0"), "cannot be read as audio"),
        (
            "long.sph",
            sphere(sample_count=f"-i {10**12}"),
            "truncated: it should have 2000000001024",
        ),
        (
            "short.sph",
            b"NIST_1A\n   1024\nsample_coding -s26 pcm,embedded-shorten-v2.00\nend_head\n",
            "compressed with embedded-shorten",
        ),
    ],
)
def test_refuses_what_is_no_recording(
    tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    for read in (audio.load, audio.seconds):
        with pytest.raises(UserError, match=problem) as caught:
            read(path)
        assert name in str(caught.value)


def test_a_length_that_memory_cannot_hold(tmp_path: Path) -> None:
    """The header of a FLAC file has 36 bits for it."""
    path = store(tmp_path / "a.flac", tone())
    content = bytearray(path.read_bytes())
    content[21] |= 0x0F
    content[22:26] = b"\xff" * 4
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.flac cannot be read as audio"):
        audio.load(path)


def test_refuses_header_without_samples_and_missing_files(tmp_path: Path) -> None:
    path = store(tmp_path / "a.wav", tone()[:0])
    with pytest.raises(UserError, match="no samples"):
        audio.load(path)
    with pytest.raises(UserError, match="no samples"):
        audio.seconds(path)
    with pytest.raises(UserError, match="there is no recording"):
        audio.load(tmp_path / "b.wav")
    with pytest.raises(UserError, match="cannot be read"):
        audio.load(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_refuses_values_that_are_no_numbers(tmp_path: Path, value: float) -> None:
    samples = tone().astype(np.float32) / 32768
    samples[100] = value
    path = tmp_path / "a.wav"
    soundfile.write(path, samples, 16_000, subtype="FLOAT")
    with pytest.raises(UserError, match="not numbers"):
        audio.load(path)


def test_values_stay_between_minus_one_and_one(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, 3 * tone().astype(np.float32) / 32768, 16_000, subtype="FLOAT")
    assert audio.load(path).abs().max() == 1


def test_refuses_the_other_byte_order(tmp_path: Path) -> None:
    path = tmp_path / "a.raw"
    path.write_bytes(tone().astype("<i2").tobytes())
    with pytest.raises(UserError, match="little-endian"):
        audio.load(path)


def test_real_recordings(real: Path, tmp_path: Path) -> None:
    corpus = an4.find(real)
    assert corpus is not None
    for utterance in an4.utterances(corpus, "test")[::10]:
        heard = audio.load(utterance.audio)
        assert utterance.seconds == audio.seconds(utterance.audio) == len(heard) / audio.RATE
        path = store(tmp_path / "same.raw", (heard.numpy() * 32768).astype(np.int16))
        assert torch.equal(audio.load(path), heard)
        path = tmp_path / "cut.sph"
        path.write_bytes(utterance.audio.read_bytes()[:-1000])
        with pytest.raises(UserError, match="truncated"):
            audio.load(path)


# Texts.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("yes", "YES"),
        ("  It's\t a\n test, no? ", "IT'S A TEST NO"),
        ("twenty-one", "TWENTY ONE"),
        ("don\u2019t", "DON'T"),
        ("Ren\u00e9e", "RENEE"),
        ("...", ""),
    ],
)
def test_normalise(text: str, expected: str) -> None:
    assert manifest.normalise(text) == expected


@pytest.mark.parametrize("text", ["at 5", "\u0416", "\u0665", "\u00bd"])
def test_normalise_refuses_what_it_cannot_say(text: str) -> None:
    with pytest.raises(UserError):
        manifest.normalise(text)


@given(st.text())
def test_normalised_text_has_only_labels(text: str) -> None:
    try:
        result = manifest.normalise(text)
    except UserError:
        return
    assert set(result) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZ' ")
    assert result == " ".join(result.split()) == manifest.normalise(result)


# Manifests.

LABELS = st.text("ABCXYZ' ", min_size=1).map(manifest.normalise).filter(bool)
NAMES = st.text(
    st.characters(exclude_characters="/", exclude_categories=("Cc", "Cs")), min_size=1, max_size=20
).filter(lambda name: name not in (".", ".."))


@settings(max_examples=50, deadline=None)
@given(
    entries=st.dictionaries(
        NAMES, st.tuples(LABELS, st.floats(0.001, 1e4)), min_size=1, max_size=5
    ),
    absolute=st.booleans(),
)
def test_manifest_round_trip(entries: dict[str, tuple[str, float]], absolute: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder).resolve()
        (home / "corpus").mkdir()
        utterances = []
        for name, (text, seconds) in entries.items():
            path = home / "corpus" / name
            path.touch()
            utterances.append(Utterance(path, text, seconds))
        path = home / "lists" / "list.csv"
        manifest.write(path, utterances, absolute=absolute)
        assert manifest.read(path) == utterances
        assert [file.name for file in path.parent.iterdir()] == ["list.csv"]
        shutil.move(home / "corpus", home / "lists" / "corpus")
        with pytest.raises(UserError, match=f"{len(entries)} of {len(entries)} recordings"):
            manifest.read(path)


def test_manifest_moves_with_its_corpus(tmp_path: Path) -> None:
    recording = store(tmp_path / "old" / "wav" / "a.wav", tone()).resolve()
    manifest.write(tmp_path / "old" / "list.csv", [Utterance(recording, "YES", 0.25)])
    assert (tmp_path / "old" / "list.csv").read_text() == (
        "path,transcript,seconds\nwav/a.wav,YES,0.25\n"
    )
    (tmp_path / "old").rename(tmp_path / "new")
    moved = (tmp_path / "new" / "wav" / "a.wav").resolve()
    assert manifest.read(tmp_path / "new" / "list.csv") == [Utterance(moved, "YES", 0.25)]


def deepspeech(folder: Path) -> tuple[Path, Path]:
    recording = store(folder / "wav" / "a.wav", tone())
    transcript = folder / "txt" / "a.txt"
    transcript.parent.mkdir()
    transcript.write_text("yes, it is\n")
    return recording, transcript


@pytest.mark.parametrize("base", ["absolute", "manifest", "current"])
@pytest.mark.parametrize("kind", ["csv", "json"])
def test_reads_manifests_of_deepspeech(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, kind: str
) -> None:
    corpus = tmp_path / "corpus"
    recording, transcript = deepspeech(corpus)
    path = (tmp_path if base == "manifest" else tmp_path / "lists") / f"list.{kind}"
    path.parent.mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path if base == "current" else "/")
    root = corpus if base == "absolute" else Path("corpus")
    names = [file.relative_to(corpus) for file in (recording, transcript)]
    if kind == "csv":
        path.write_text(f"{root / names[0]},{root / names[1]}\n")
    else:
        sample = {"wav_path": str(names[0]), "transcript_path": str(names[1])}
        path.write_text(json.dumps({"root_path": str(root), "samples": [sample]}))
    assert manifest.read(path) == [Utterance(recording.resolve(), "YES IT IS", 0.25)]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.csv", "", "lists no utterance"),
        ("a.csv", "path,transcript,seconds\n", "lists no utterance"),
        ("a.csv", "path,transcript,seconds\na.wav,YES\n", "line 2: expected path,transcript"),
        ("a.csv", "path,transcript,seconds\na.wav,YES,soon\n", "line 2: seconds is 'soon'"),
        ("a.csv", "path,transcript,seconds\na.wav,YES,-1\n", "line 2: seconds is '-1'"),
        ("a.csv", "path,transcript,seconds\na.wav,NO 5,1\n", "line 2: .*write numbers as words"),
        ("a.csv", "path,transcript,seconds\na.wav,?,1\n", "line 2: the transcript is empty"),
        ("a.csv", "a.wav,YES,1.0\n", "header path,transcript,seconds is missing"),
        ("a.csv", "a.wav,a.txt\n", "no transcript a.txt"),
        ("a.csv", "path,transcript,seconds\nb.wav,YES,1\na.wav,NO,1\n", "1 of 2 .* is b.wav"),
        ("a.json", '{"samples": []}', "lists no utterance"),
        ("a.json", "[1]", "not a manifest of deepspeech"),
        ("a.json", '{"samples": [{"wav_path": "a.wav"}]}', "not a manifest of deepspeech"),
        ("a.json", "nothing", "not a manifest of deepspeech"),
        ("a.json", '{"samples": ' * 100_000, "nested too deeply"),
        ("a.csv", f"path,transcript,seconds\na.wav,{'NO 5 ' * 999},1\n", "5 \\.\\.\\.' has digits"),
    ],
)
def test_refuses_bad_manifests(tmp_path: Path, name: str, content: str, problem: str) -> None:
    store(tmp_path / "a.wav", tone())
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=problem) as caught:
        manifest.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    """Recordings, transcripts and manifests have them; a transcript itself must be UTF-8."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    recording = store(folder / os.fsdecode(b"r\xff.wav"), tone())
    transcript = folder / os.fsdecode(b"t\xff.txt")
    transcript.write_text("yes")
    foreign = folder / os.fsdecode(b"l\xff.csv")
    foreign.write_bytes(b"r\xff.wav,t\xff.txt\n")
    said = [Utterance(recording.resolve(), "YES", 0.25)]
    assert manifest.read(foreign) == said
    ours = folder / "ours.csv"
    manifest.write(ours, said)
    assert manifest.read(ours) == manifest.rebuild(ours, tmp_path).utterances == said
    made = [features.open_corpus(said, "logmel", tmp_path / "features", progress=False)]
    made += [features.open_corpus(said, "logmel", tmp_path / "features", progress=False)]
    assert torch.equal(made[0].frames, made[1].frames)
    assert len(list((tmp_path / "features").iterdir())) == 1
    transcript.write_bytes(b"Ren\xe9e")
    with pytest.raises(UserError, match=r"t\\xff\.txt is not UTF-8"):
        manifest.read(foreign)
    ours.write_bytes(b"path,transcript,seconds\nr\xff.wav,Ren\xe9e,0.25\n")
    with pytest.raises(UserError, match="'Ren\\\\udce9e' is not UTF-8; convert"):
        manifest.read(ours)
    recording.unlink()
    for read in (
        lambda: manifest.read(ours),
        lambda: features.open_corpus(said, "logmel", tmp_path, progress=False),
    ):
        with pytest.raises(UserError, match=r"r\\xff\.wav") as caught:
            read()
        assert str(caught.value).isprintable()


def test_features_without_room(tmp_path: Path) -> None:
    """torch does not say why it cannot write; somebody must."""
    resource: Any = pytest.importorskip("resource")
    said = [Utterance(store(tmp_path / "a.wav", tone()).resolve(), "YES", 0.25)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # bytes of a file
    try:
        with pytest.raises(OSError, match="there may be no room left"):
            features.open_corpus(said, "logmel", tmp_path / "features", progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "features").iterdir()) == []


def test_features_of_something_else_are_computed_anew(tmp_path: Path) -> None:
    said = [Utterance(store(tmp_path / "a.wav", tone()).resolve(), "YES", 0.25)]
    whole = features.open_corpus(said, "logmel", tmp_path, progress=False)
    kept = features.compute(said, "logmel", tmp_path, progress=False)
    frames, starts = whole.frames.clone(), whole.starts.clone()
    for content in (
        {},
        {"frames": frames[:, :3], "starts": starts},
        {"frames": frames, "starts": starts[:1]},
    ):
        torch.save(content, kept)
        again = features.open_corpus(said, "logmel", tmp_path, progress=False)
        assert torch.equal(again.frames, frames)


def test_missing_recordings_name_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("path,transcript,seconds\nb.wav,YES,1\n")
    with pytest.raises(UserError, match="`oktopk data manifest` rebuilds"):
        manifest.read(tmp_path / "a.csv")
    with pytest.raises(UserError, match="cannot be read"):
        manifest.read(tmp_path / "b.csv")


def test_failed_write_leaves_the_old_manifest(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    manifest.write(path, [Utterance(tmp_path / "a.wav", "YES", 1.0)])
    before = path.read_bytes()
    for bad in ([], [Utterance(tmp_path / "a\nb.wav", "YES", 1.0)]):
        with pytest.raises(UserError):
            manifest.write(path, bad)
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(OSError, match="folder"):
        manifest.write(tmp_path / "folder.csv", [Utterance(tmp_path / "a.wav", "YES", 1.0)])
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.csv", "folder.csv"]


def listing(path: Path, *names: str) -> Path:
    rows = [f"{name},{'ABCDEFG'[index]},1.0" for index, name in enumerate(names)]
    path.write_text("\n".join(["path,transcript,seconds", *rows]) + "\n")
    return path


def test_rebuild_takes_the_longest_end_and_never_guesses(tmp_path: Path) -> None:
    new = tmp_path / "new"
    for name in ("x/a.wav", "y/a.wav", "deep/y/b.wav", "p/c.wav", "q/c.wav", "r/d.wav"):
        store(new / name, tone())
    (new / "e.wav").write_bytes(b"")
    path = listing(
        tmp_path / "old.csv",
        *("/old/x/a.wav", "C:\\old\\y\\a.wav", "gone/b.wav", "old/c.wav", "old/r/d.wav"),
        *("old/s/d.wav", "old/e.wav"),
    )
    rebuilt = manifest.rebuild(path, new)
    found = [(item.audio.relative_to(new.resolve()), item.text) for item in rebuilt.utterances]
    assert found == [
        (Path("x/a.wav"), "A"),
        (Path("y/a.wav"), "B"),
        (Path("deep/y/b.wav"), "C"),
        (Path("r/d.wav"), "E"),
    ]
    assert [item.seconds for item in rebuilt.utterances] == [0.25] * 4  # not the manifest's 1.0
    ambiguous, stolen, damaged = rebuilt.missing
    assert ambiguous.startswith("old/c.wav: found 2 times")
    assert stolen.startswith("old/s/d.wav: ")
    assert "another entry" in stolen
    assert "no samples" in damaged


def test_rebuild_gives_a_file_to_no_one_of_equal_claims(tmp_path: Path) -> None:
    store(tmp_path / "new" / "a.wav", tone())
    path = listing(tmp_path / "old.csv", "x/a.wav", "y/a.wav")
    rebuilt = manifest.rebuild(path, tmp_path / "new")
    assert rebuilt.utterances == []
    assert len(rebuilt.missing) == 2
    twice = listing(tmp_path / "twice.csv", "x/a.wav", "x/a.wav")
    assert len(manifest.rebuild(twice, tmp_path / "new").utterances) == 2


def test_rebuild_follows_links_once(tmp_path: Path) -> None:
    store(tmp_path / "real" / "a.wav", tone())
    (tmp_path / "real" / "loop").symlink_to(tmp_path / "real")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "corpus").symlink_to(tmp_path / "real")
    rebuilt = manifest.rebuild(listing(tmp_path / "old.csv", "gone/a.wav"), tmp_path / "new")
    assert [item.audio for item in rebuilt.utterances] == [(tmp_path / "real/a.wav").resolve()]
    with pytest.raises(UserError, match="no folder"):
        manifest.rebuild(tmp_path / "old.csv", tmp_path / "nowhere")


def test_rebuild_finds_transcripts_too(tmp_path: Path) -> None:
    recording, _ = deepspeech(tmp_path / "new")
    path = tmp_path / "old.csv"
    path.write_text("/gone/wav/a.wav,/gone/txt/a.txt\n")
    rebuilt = manifest.rebuild(path, tmp_path / "new")
    assert rebuilt.utterances == [Utterance(recording.resolve(), "YES IT IS", 0.25)]
    assert rebuilt.missing == []


# AN4.


def small_an4(folder: Path, place: str = "wav", kind: str = "sph") -> Path:
    """Two utterances for training and one for testing, in the official arrangement."""
    lists = {
        "train": ("<s> YES </s> (an1-fash-b)\n<s> G O </s> (an2-fash-b)\n", ["an1", "an2"]),
        "test": ("RUBOUT G M (an3-fash-b)\n", ["an3"]),
    }
    (folder / "etc").mkdir(parents=True)
    for name, (transcription, numbers) in lists.items():
        ids = [f"an4_clstk/fash/{number}-fash-b" for number in numbers]
        (folder / "etc" / f"an4_{name}.transcription").write_text(transcription)
        (folder / "etc" / f"an4_{name}.fileids").write_text("\n".join(ids) + "\n")
        for number, identifier in enumerate(ids):
            store(folder / place / f"{identifier}.{kind}", tone(0.1 * (number + 1)))
    return folder


def ready(data_dir: Path, **options: Any) -> tuple[Path, Path]:
    options.setdefault("download", False)
    options.setdefault("progress", False)
    return an4.prepare(data_dir, expected=(2, 1), **options)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OKTOPK_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("place", "kind"),
    [("wav", "sph"), ("raw", "raw"), ("", "wav"), ("wav", "raw"), ("elsewhere/deep", "wav")],
)
@pytest.mark.parametrize("nested", [True, False])
def test_an4_in_its_official_forms(tmp_path: Path, place: str, kind: str, nested: bool) -> None:
    data_dir = tmp_path / "data"
    small_an4(data_dir / "an4" if nested else data_dir, place, kind)
    train, validation = ready(data_dir)
    assert train == data_dir / "an4_train_manifest.csv"
    assert validation == data_dir / "an4_val_manifest.csv"
    said = [(item.text, item.seconds) for item in manifest.read(train)]
    assert said == [("YES", 0.1), ("G O", 0.2)]
    assert [item.text for item in manifest.read(validation)] == ["RUBOUT G M"]


def test_an4_manifests_are_reused_until_the_corpus_changes(tmp_path: Path) -> None:
    small_an4(tmp_path)
    train, _ = ready(tmp_path)
    os.utime(train, ns=(2**62, 2**62))
    ready(tmp_path)
    assert train.stat().st_mtime_ns == 2**62
    for damage in (
        lambda: os.utime(train, ns=(0, 0)),
        lambda: train.write_text("path,transcript,seconds\n"),
        lambda: train.write_text(train.read_text().replace("an1-fash-b", "gone")),
    ):
        damage()
        ready(tmp_path)
        assert [item.text for item in manifest.read(train)] == ["YES", "G O"]


def test_an4_keeps_manifests_of_others(tmp_path: Path) -> None:
    """What is replaced stays beside it; without a corpus, they are taken as they are."""
    small_an4(tmp_path / "an4")
    theirs = tmp_path / "an4_train_manifest.csv"
    theirs.write_text("/somewhere/a.wav,/somewhere/a.txt\n")
    ready(tmp_path)
    assert theirs.with_name(f"{theirs.name}.old").read_text().startswith("/somewhere")
    moved = tmp_path / "lists"
    moved.mkdir()
    for name in ("an4_train_manifest.csv", "an4_val_manifest.csv"):
        (tmp_path / name).rename(moved / name)
    paths = ready(moved, download=False)
    assert paths == (moved / "an4_train_manifest.csv", moved / "an4_val_manifest.csv")


def test_an4_manifests_go_to_the_cache_if_the_corpus_is_read_only(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    small_an4(data_dir)
    # Nobody can replace a folder by a file, not even root, whom permissions do not stop.
    (data_dir / "an4_train_manifest.csv").mkdir()
    train, validation = ready(data_dir)
    assert train.parent == validation.parent
    assert train.parent.parent == cache_dir() == tmp_path / "cache"
    assert str(data_dir.resolve()) in train.read_text()
    before = train.stat().st_mtime_ns
    assert ready(data_dir) == (train, validation)
    assert train.stat().st_mtime_ns == before


def _without(name: str) -> Callable[[Path], object]:
    return lambda corpus: next(corpus.rglob(name)).unlink()


def _with_text(name: str, text: str) -> Callable[[Path], object]:
    return lambda corpus: (corpus / "etc" / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_without("an2-fash-b.sph"), "1 of 2 recordings are missing.*an2-fash-b"),
        (_without("an4_train.transcription"), "an4_train.transcription cannot be read"),
        (_without("an4_test.fileids"), "an4_test.fileids cannot be read"),
        (_with_text("an4_train.transcription", "YES (an1-fash-b)\n"), "an2-fash-b has no trans"),
        (_with_text("an4_train.transcription", "YES\n"), "line 1: expected WORDS"),
        (_with_text("an4_train.transcription", "<s> </s> (an1-fash-b)\n"), "empty transcript"),
        (_with_text("an4_train.transcription", "A (a)\nB (a)\n"), "line 2: a has a second"),
        (_with_text("an4_test.fileids", ""), "2 utterances for training and 0 for testing"),
        (
            lambda corpus: next(corpus.rglob("an1-fash-b.sph")).write_bytes(b"NIST_1A\n"),
            "damaged SPHERE header",
        ),
    ],
)
def test_an4_damaged(tmp_path: Path, damage: Callable[[Path], object], problem: str) -> None:
    damage(small_an4(tmp_path / "an4"))
    with pytest.raises(UserError, match=problem):
        ready(tmp_path)
    assert not list(tmp_path.glob("*.csv"))


def test_an4_does_not_choose_between_copies(tmp_path: Path) -> None:
    small_an4(tmp_path, "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with pytest.raises(UserError, match="more than once"):
        ready(tmp_path)


def test_an4_real(real: Path, tmp_path: Path) -> None:
    corpus = an4.find(real)
    assert corpus is not None
    (tmp_path / "an4").symlink_to(corpus.resolve())
    train, validation = an4.prepare(tmp_path, download=False, progress=False)
    sets = [manifest.read(path) for path in (train, validation)]
    assert [len(listed) for listed in sets] == [948, 130]
    speakers = [{item.audio.parent.name for item in listed} for listed in sets]
    assert [len(names) for names in speakers] == [74, 10]
    assert not speakers[0] & speakers[1]
    assert sets[1][0].text == "RUBOUT G M E F THREE NINE"
    assert sum(item.seconds for item in sets[0]) == pytest.approx(2546.3, abs=0.1)


def pack(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def promised(size: int) -> bytes:
    """An archive whose only member claims this size."""
    member = tarfile.TarInfo("an4/large")
    member.size = size
    return gzip.compress(member.tobuf())


PROMISED = promised(1 << 40)


@pytest.fixture
def served() -> Iterator[tuple[str, dict[str, tuple[bytes, int]]]]:
    """An address, and what it serves: content, and the length that is announced."""
    pages: dict[str, tuple[bytes, int]] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path not in pages:
                self.send_error(404)
                return
            content, length = pages[self.path]
            self.send_response(200)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", pages
    server.shutdown()
    thread.join()
    server.server_close()


def archived(folder: Path) -> bytes:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return pack(*((f"an4/{path.relative_to(folder)}", path.read_bytes()) for path in files))


def test_an4_download(
    tmp_path: Path,
    served: tuple[str, dict[str, tuple[bytes, int]]],
    capfd: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url, pages = served
    content = archived(small_an4(tmp_path / "original"))
    pages["/an4.tar.gz"] = (content, len(content))
    data_dir = tmp_path / "new" / "data"
    sources = [Source(url + "an4.tar.gz")]
    train, _ = ready(data_dir, download=True, sources=sources, progress=True)
    assert [item.text for item in manifest.read(train)] == ["YES", "G O"]
    assert sorted(path.name for path in data_dir.iterdir()) == [
        "an4",
        "an4_train_manifest.csv",
        "an4_val_manifest.csv",
    ]
    pages.clear()  # not needed again
    assert ready(data_dir, download=True, sources=sources)[0] == train
    assert capfd.readouterr().out == ""
    # It cannot be verified, which is said and recorded; so later it can be.
    right = hashlib.sha256(content).hexdigest()
    assert "over plain http" in caplog.text
    assert "cannot be verified: no SHA-256 is published for this archive" in caplog.text
    assert f"It has {len(content)} bytes and the SHA-256 {right}" in caplog.text
    assert json.loads((data_dir / "an4" / "oktopk-archive.json").read_text()) == {
        **{"url": url + "an4.tar.gz", "size": len(content), "sha256": right, "verified": "no"}
    }
    assert ready(data_dir, sha256=right.upper())[0] == train
    with pytest.raises(UserError, match=rf"with the SHA-256 {right}: move it away"):
        ready(data_dir, sha256="0" * 64)
    for damage in (b"[" * 100_000, b"[]", b'{"sha256": 3}'):
        (data_dir / "an4" / "oktopk-archive.json").write_bytes(damage)
        with pytest.raises(UserError, match="move it away"):
            ready(data_dir, sha256=right)


def test_an4_hashes(
    tmp_path: Path,
    served: tuple[str, dict[str, tuple[bytes, int]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The one that is asked for counts, else the published one; a wrong one is never unpacked."""
    url, pages = served
    content = archived(small_an4(tmp_path / "original"))
    pages["/a"] = pages["/b"] = (content, len(content))
    right, wrong = hashlib.sha256(content).hexdigest(), "0" * 64

    def verified(name: str, asked: str, *sources: Source) -> str:
        options = {"download": True, "sources": sources, "sha256": asked}
        ready(tmp_path / name, **options)
        record = json.loads((tmp_path / name / "an4" / "oktopk-archive.json").read_text())
        return str(record["verified"])

    assert verified("published", "", Source(url + "a", right)) == "published"
    assert verified("asked", right, Source(url + "a", wrong)) == "asked for"
    assert caplog.text == ""
    # The next source is only for one that cannot be reached, or has not the hash asked for.
    for asked, source, says in (
        ("", Source(url + "a", wrong), f"but {wrong} is published for it.*--sha256 {right}`"),
        (wrong, Source(url + "a", right), f"but {wrong} is asked for"),
    ):
        with pytest.raises(UserError, match=says) as caught:
            verified("bad", asked, source, Source(url + "b"))
        assert "\n" not in str(caught.value)
        assert list((tmp_path / "bad").iterdir()) == []
        assert ("trying" in caplog.text) == bool(asked)
    pages["/other"] = (content[:-100], len(content) - 100)
    assert verified("other", right, Source(url + "other"), Source(url + "b")) == "asked for"
    gone = Source("http://127.0.0.1:9/gone", right)
    assert verified("second", "", gone, Source(url + "b")) == "no"
    assert f"trying {url}b, over plain http, where anybody on the way can change it" in caplog.text


def test_an4_sources() -> None:
    """https before http; and the first one is verified."""
    kinds = [source.url.partition(":")[0] for source in SOURCES]
    assert kinds == sorted(kinds, reverse=True)
    assert kinds[0] == "https"
    assert len(bytes.fromhex(SOURCES[0].sha256)) == 32


@pytest.mark.parametrize(
    ("content", "missing", "problem"),
    [
        (pack(("an4/../../evil", b"x")), 0, "would leave the folder"),
        (pack(("../evil", b"x")), 0, "would leave the folder"),
        (pack(("/tmp/evil-oktopk", b"x")), 0, "would leave the folder"),
        (pack(("an4/README", b"x")), 0, "is not AN4"),
        (pack(("an4/etc/an4_train.fileids", b"")), 0, "is not all of AN4.*transcription cannot"),
        (PROMISED, 0, "far larger than AN4"),
        (pack(("an4/README", b"x"))[:-12], 0, "cannot be unpacked"),
        (b"<html>moved</html>", 0, "cannot be unpacked"),
        (pack(("an4/README", b"x")), 7, "could not be downloaded.*yourself"),
        (None, 0, "404"),
    ],
    ids=[
        *("up", "above", "absolute", "other", "partial", "bomb", "cut", "page", "interrupted"),
        "missing",
    ],
)
def test_an4_bad_downloads_leave_nothing(
    tmp_path: Path,
    served: tuple[str, dict[str, tuple[bytes, int]]],
    content: bytes | None,
    missing: int,
    problem: str,
) -> None:
    url, pages = served
    if content is not None:
        pages["/a"] = (content, len(content) + missing)
    data_dir = tmp_path / "data"
    with pytest.raises(UserError, match=problem) as caught:
        ready(data_dir, download=True, sources=[Source(url + "a")])
    assert "\n" not in str(caught.value)
    assert list(tmp_path.rglob("*")) == [data_dir]
    assert not Path("/tmp/evil-oktopk").exists()


def test_an4_refuses_links_out_of_the_archive(
    tmp_path: Path, served: tuple[str, dict[str, tuple[bytes, int]]]
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        link = tarfile.TarInfo("an4/etc")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        tar.addfile(link)
    url, pages = served
    pages["/a"] = (buffer.getvalue(), len(buffer.getvalue()))
    with pytest.raises(UserError, match="cannot be unpacked"):
        ready(tmp_path / "data", download=True, sources=[Source(url + "a")])
    assert list((tmp_path / "data").iterdir()) == []


def test_an4_offline(tmp_path: Path, served: tuple[str, dict[str, tuple[bytes, int]]]) -> None:
    with pytest.raises(UserError, match="name its folder, or allow the download"):
        ready(tmp_path)
    with pytest.raises(UserError, match=r"refused.*corpus `spoken`"):
        ready(tmp_path, download=True, sources=[Source("http://127.0.0.1:1/a")])
    with pytest.raises(UserError, match="could not be downloaded"):
        ready(tmp_path, download=True, sources=[Source("no address")])
    url, pages = served
    content = archived(small_an4(tmp_path / "original"))
    pages["/a"] = (content, len(content))
    (tmp_path / "an4" / "mine").mkdir(parents=True)
    with pytest.raises(UserError, match="move away what is there"):
        ready(tmp_path, download=True, sources=[Source(url + "a")])
    assert (tmp_path / "an4" / "mine").is_dir()


# The spoken corpus.


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_spoken_is_the_same_again(tmp_path: Path, capfd: Any) -> None:
    pytest.importorskip("espeakng_loader")
    first = spoken.prepare(tmp_path / "one", progress=False, train=60, validation=3)
    time.sleep(1.01 - time.time() % 1)  # its random numbers would begin with the time in seconds
    second = spoken.prepare(tmp_path / "two", progress=False, train=60, validation=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert len(contents(tmp_path / "one")) == 65
    sets = [manifest.read(path) for path in first]
    assert [len(listed) for listed in sets] == [60, 3]
    for item in (utterance for listed in sets for utterance in listed):
        heard = audio.load(item.audio)
        assert item.seconds == len(heard) / audio.RATE
        assert 0.4 < item.seconds < 5
        assert heard.abs().max() > 0.15
    assert len({item.audio.read_bytes() for item in sets[0]}) == 60
    assert second[0].parent.name == f"spoken-{spoken.VERSION}-60-3"
    assert capfd.readouterr() == ("", "")


def test_spoken_survives_races_and_damage(tmp_path: Path) -> None:
    pytest.importorskip("espeakng_loader")

    def make(_: int) -> tuple[Path, Path]:
        return spoken.prepare(tmp_path, progress=False, train=6, validation=3)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(make, range(3)))
    assert len(set(results)) == 1
    folder = results[0][0].parent
    assert list(tmp_path.iterdir()) == [folder]
    whole = contents(folder)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    make(0)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == times
    shutil.rmtree(folder / "validation")
    make(0)
    assert contents(folder) == whole
    assert list(tmp_path.iterdir()) == [folder]


def test_spoken_sets_are_disjoint() -> None:
    planned = spoken.plan(1200, 160)
    voices = {name: {line.speaker for line in lines} for name, lines in planned.items()}
    assert not voices["train"] & voices["validation"]
    assert [len(voices["train"]), len(voices["validation"])] == [18, 6]
    texts = {name: {line.text for line in lines} for name, lines in planned.items()}
    assert texts["train"] & texts["validation"] <= set(phrases.COMMANDS)
    assert len(texts["train"]) > 800
    said = texts["train"] | texts["validation"]
    assert said == {manifest.normalise(text) for text in said}
    assert {letter for text in said for letter in text} == set("ABCDEFGHIJKLMNOPQRSTUVWXYZ ")


def test_synthesiser_that_cannot_begin_says_so(tmp_path: Path) -> None:
    loader: Any = pytest.importorskip("espeakng_loader")
    script = Path(spoken.__file__).with_name("espeak.py")
    (tmp_path / "empty").mkdir()
    arguments = [sys.executable, str(script), loader.get_library_path(), str(tmp_path / "empty")]
    done = subprocess.run(arguments, input=b"", capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout == b""
    assert b"espeak-ng cannot begin" in done.stderr.splitlines()[-1]


def test_spoken_refusals(tmp_path: Path) -> None:
    for count in (0, 10**30):
        with pytest.raises(UserError, match="at least 1 and at most 1000000 of each"):
            spoken.prepare(tmp_path, train=count)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="set OKTOPK_CACHE"):
        spoken.prepare(tmp_path / "file", train=1, validation=1)


# The command.


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_commands(parser.add_subparsers())
    return command.run(parser.parse_args(arguments))


def test_command_spoken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("espeakng_loader")
    sizes = ("--train", "2", "--validation", "1")
    assert run("spoken", "--data-dir", str(tmp_path), *sizes) == 0
    out = capsys.readouterr().out
    assert "spoken_train_manifest.csv" in out
    assert f"in {tmp_path}/spoken-{spoken.VERSION}-2-1\n" in out


def test_command_an4(
    real: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    corpus = an4.find(real)
    assert corpus is not None
    (tmp_path / "an4").symlink_to(corpus.resolve())
    assert run("an4", "--data-dir", str(tmp_path), "--no-download") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert " ".join(rows[1]) == "an4_train_manifest.csv 948 42.4 min 74 0.7 s 6.4 s"
    with pytest.raises(UserError):
        run("an4", "--data-dir", str(tmp_path / "nowhere"), "--no-download")
    with pytest.raises(UserError, match="an unrecorded SHA-256"):
        run("an4", "--data-dir", str(tmp_path), "--sha256", "A" * 64)
    with pytest.raises(SystemExit):
        run("an4", "--data-dir", str(tmp_path), "--sha256", "A" * 63)
    assert f"'{'A' * 63}' is no SHA-256" in capsys.readouterr().err


def test_command_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(tmp_path / "new" / "a.wav", tone())
    old = listing(tmp_path / "old.csv", "x/a.wav")
    output = tmp_path / "out.csv"
    arguments = ("--data-dir", str(tmp_path / "new"), "--output", str(output))
    assert run("manifest", str(old), *arguments) == 0
    assert len(manifest.read(output)) == 1
    with pytest.raises(UserError, match="is a folder; name a file in it"):
        run("manifest", str(old), *arguments[:2], "--output", "")
    many = listing(tmp_path / "many.csv", "x/a.wav", "x/b.wav")
    assert run("manifest", str(many), "--data-dir", str(tmp_path / "new")) == 1
    assert len(manifest.read(many)) == 1  # written over
    assert "x/b.wav,B,1.0" in (tmp_path / "many.csv.old").read_text()
    assert "1 of 2 utterances are missing:\n  x/b.wav: not found\n" in capsys.readouterr().out
    lost = tmp_path / "lost.csv"
    lost.write_text("path,transcript,seconds\n" + "".join(f"{n}.wav,A,1\n" for n in range(13)))
    before = lost.read_bytes()
    assert run("manifest", str(lost), "--data-dir", str(tmp_path / "new")) == 1
    assert lost.read_bytes() == before
    out = capsys.readouterr().out
    assert "13 of 13 utterances are missing" in out
    assert "  9.wav: not found\n  and 3 more\n" in out
    assert "nothing was written" in out


@pytest.mark.parametrize("name", ["an4", "spoken", "manifest"])
def test_help_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(name, "--help")
    assert caught.value.code == 0
    assert f"example:\n  oktopk data {name}" in capsys.readouterr().out


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OKTOPK_CACHE", "/own")
    assert cache_dir() == Path("/own")
    monkeypatch.delenv("OKTOPK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/common")
    assert cache_dir() == Path("/common/oktopk")
    for bad, says in (("~nobody-at-all", "no such home"), ("/a\udcff", r"/a\\xff is not UTF-8")):
        monkeypatch.setenv("OKTOPK_CACHE", bad)
        with pytest.raises(UserError, match=says):
            cache_dir()
    monkeypatch.delenv("OKTOPK_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "oktopk"
