"""CMU AN4: spelled names, numbers, dates and commands. 948 utterances train, 130 validate.

The corpus is read as Carnegie Mellon distributes it:

    an4/etc/an4_train.fileids          an4_clstk/fash/an251-fash-b
    an4/etc/an4_train.transcription    <s> YES </s> (an251-fash-b)
    an4/etc/an4_test.*                 the same; transcripts without <s> and </s>
    an4/wav/an4_clstk/fash/...         .sph, .raw or .wav

`an4_archive.py` downloads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from ...common.cache import cache_dir
from ...common.errors import UserError
from . import an4_archive, audio, manifest
from .an4_archive import SOURCES, Source
from .manifest import Utterance

EXPECTED = (948, 130)
"""Utterances for training and for testing."""
MANIFESTS = ("an4_train_manifest.csv", "an4_val_manifest.csv")

_SETS = ("train", "test")
_FOLDERS = ("wav", "raw", "")
_KINDS = (".sph", ".raw", ".wav", ".flac")
_TRANSCRIPT = re.compile(r"(?P<text>.*?)\s*\((?P<id>[^()\s]+)\)")
_MARK = re.compile(r"</?\w+>")  # <s>, </s>, <sil>


def prepare(
    data_dir: Path,
    *,
    download: bool = True,
    progress: bool = True,
    sources: Sequence[Source] | None = None,
    sha256: str = "",
    expected: tuple[int, int] = EXPECTED,
) -> tuple[Path, Path]:
    """Manifests of AN4 for training and for validation.

    1. The corpus is `data_dir` itself or `data_dir/an4`, or is downloaded (64 MB) to the latter.
    2. Manifests that are there, complete, and newer than the corpus are taken as they are.
    3. Otherwise they are written to `data_dir` or, if that is read-only, to the user's cache.

    Any number of processes may do this at the same time.

    Args:
        sources: instead of `SOURCES`.
        sha256: of the archive, instead of the published one. A corpus that is there must come from
            an archive that had it.
    """
    data_dir = Path(data_dir)
    corpus = find(data_dir)
    ready = (data_dir / MANIFESTS[0], data_dir / MANIFESTS[1])
    if sha256 and corpus is not None:
        an4_archive.check_record(corpus, sha256)
    if corpus is None and not sha256 and all(map(os.path.isfile, ready)):
        return ready  # manifests of recordings that are elsewhere
    if corpus is None:
        if not download:
            raise UserError(
                f"AN4 is neither {data_dir} nor {data_dir / 'an4'} (there is no "
                "etc/an4_train.fileids); name its folder, or allow the download"
            )
        corpus = fetch(
            data_dir, sources or SOURCES, sha256=sha256, expected=expected, progress=progress
        )
    identity = hashlib.sha256(os.fsencode(corpus.resolve())).hexdigest()[:12]
    homes = ((data_dir, False), (cache_dir() / f"an4-{identity}", True))
    for home, _ in homes:
        paths = (home / MANIFESTS[0], home / MANIFESTS[1])
        if _fresh(paths, corpus, expected):
            return paths
    sets = _both_sets(corpus, expected)
    problems = []
    for home, absolute in homes:
        try:
            for name, listed in zip(MANIFESTS, sets, strict=True):
                if (home / name).is_file():  # outdated, or somebody else's
                    os.replace(home / name, home / f"{name}.old")
                manifest.write(home / name, listed, absolute=absolute)
        except OSError as error:
            problems.append(f"{home} ({error.strerror or error})")
            continue
        return home / MANIFESTS[0], home / MANIFESTS[1]
    raise UserError(
        f"AN4's manifests can be written neither to {' nor to '.join(problems)}; set OKTOPK_CACHE "
        "to a folder that is yours"
    )


def find(data_dir: Path) -> Path | None:
    """The corpus in this folder, if it is there."""
    for folder in (data_dir, data_dir / "an4"):
        if os.path.isfile(folder / "etc" / "an4_train.fileids"):
            return folder
    return None


def utterances(corpus: Path, name: str) -> list[Utterance]:
    """The utterances of `train` or `test`, in the order of the corpus."""
    fileids = corpus / "etc" / f"an4_{name}.fileids"
    identifiers = [line.strip() for line in _lines(fileids) if line.strip()]
    texts = _transcripts(corpus / "etc" / f"an4_{name}.transcription")
    recordings = _Recordings(corpus)
    result: list[Utterance] = []
    missing: list[str] = []
    for identifier in identifiers:
        basename = PurePosixPath(identifier).name
        if basename not in texts:
            raise UserError(f"{fileids}: {basename} has no transcript; fetch the archive again")
        recording = recordings.find(identifier)
        if recording is None:
            missing.append(identifier)
        else:
            result.append(Utterance(recording, texts[basename], audio.seconds(recording)))
    if missing:
        raise UserError(
            f"{corpus}: {len(missing)} of {len(identifiers)} recordings are missing, the first is "
            f"{missing[0]} (as {', '.join(_KINDS)}); fetch the archive again"
        )
    return result


def _both_sets(corpus: Path, expected: tuple[int, int]) -> list[list[Utterance]]:
    """All utterances. Names, transcripts and lengths of recordings are checked."""
    sets = [utterances(corpus, name) for name in _SETS]
    if (found := (len(sets[0]), len(sets[1]))) != expected:
        raise UserError(
            f"{corpus} lists {found[0]} utterances for training and {found[1]} for testing, but "
            f"AN4 has {expected[0]} and {expected[1]}; fetch the archive again"
        )
    return sets


def fetch(
    data_dir: Path,
    sources: Sequence[Source] = SOURCES,
    *,
    sha256: str = "",
    expected: tuple[int, int] = EXPECTED,
    progress: bool = True,
) -> Path:
    """Download the archive and unpack it to `data_dir/an4`, all of it or nothing.

    An archive without the hash that was published, or asked for, is not unpacked. Members that
    would leave the folder, and links and devices that could, are refused. The unpacked corpus must
    be complete.
    """
    if not hasattr(tarfile, "data_filter"):
        raise UserError(
            "this Python unpacks archives unsafely: use 3.10.12, 3.11.4 or newer, or unpack "
            f"{sources[0].url} into {data_dir} yourself"
        )
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=".an4-", dir=data_dir)
    except OSError as error:
        raise UserError(
            f"AN4 cannot be stored in {data_dir} ({error.strerror or error}); choose a folder "
            "that is yours"
        ) from None
    with temporary as name:
        archive, unpacked = Path(name, "archive"), Path(name, "unpacked")
        record = an4_archive.verify(
            *an4_archive.download(sources, archive, data_dir, progress, sha256), sha256
        )
        try:
            an4_archive.unpack(archive, unpacked)
        except an4_archive.UNPACKING as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{record['url']} cannot be unpacked ({reason}); try again, or unpack it into "
                f"{data_dir} yourself"
            ) from None
        corpus = find(unpacked)
        if corpus is None:
            raise UserError(f"{record['url']} is not AN4: it has no an4/etc/an4_train.fileids")
        try:
            _both_sets(corpus, expected)
        except UserError as error:
            raise UserError(f"{record['url']} is not all of AN4: {error}") from None
        target = data_dir / "an4"
        try:
            (corpus / an4_archive.RECORD).write_text(json.dumps(record, indent=2) + "\n")
            os.replace(corpus, target)
        except OSError as error:
            # Another process may have been faster, and its corpus is as good.
            if find(data_dir) is None:
                raise UserError(
                    f"AN4 cannot be put at {target} ({error.strerror or error}); move away what "
                    "is there"
                ) from None
    return target


def _fresh(paths: tuple[Path, Path], corpus: Path, expected: tuple[int, int]) -> bool:
    """Whether these manifests are complete, of this corpus, and not older than its lists."""
    try:
        lists = [
            (corpus / "etc" / f"an4_{name}.{kind}").stat().st_mtime_ns
            for name in _SETS
            for kind in ("fileids", "transcription")
        ]
        if min(path.stat().st_mtime_ns for path in paths) < max(lists):
            return False
        sets = [manifest.read(path) for path in paths]
    except (OSError, UserError):
        return False
    home = corpus.resolve()
    return tuple(map(len, sets)) == expected and all(
        utterance.audio.is_relative_to(home) for listed in sets for utterance in listed
    )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); fetch the archive again") from None


def _transcripts(path: Path) -> dict[str, str]:
    """Texts by identifier, from lines with or without `<s>` and `</s>`."""
    texts: dict[str, str] = {}
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        match = _TRANSCRIPT.fullmatch(line.strip())
        if match is None:
            raise UserError(f"{where}: expected WORDS (identifier), but found {line.strip()!r}")
        try:
            text = manifest.normalise(_MARK.sub(" ", match["text"]))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        if not text:
            raise UserError(f"{where}: {match['id']} has an empty transcript")
        if texts.setdefault(match["id"], text) != text:
            raise UserError(f"{where}: {match['id']} has a second, different transcript")
    return texts


class _Recordings:
    """Where the recordings of a corpus are: in the usual places, or else anywhere in it."""

    def __init__(self, corpus: Path) -> None:
        self.corpus = corpus
        self.others: dict[str, list[Path]] | None = None

    def find(self, identifier: str) -> Path | None:
        for folder in _FOLDERS:
            for kind in _KINDS:
                path = self.corpus / folder / f"{identifier}{kind}"
                if os.path.isfile(path):
                    return path.resolve()
        if self.others is None:
            self.others = {}
            for path in self.corpus.rglob("*"):
                if path.suffix.lower() in _KINDS:
                    self.others.setdefault(path.stem, []).append(path)
        found = self.others.get(PurePosixPath(identifier).name, [])
        if len(found) > 1:
            raise UserError(
                f"{self.corpus} has {identifier} more than once, as {found[0]} and {found[1]}; "
                "leave one of them"
            )
        return found[0].resolve() if found else None
