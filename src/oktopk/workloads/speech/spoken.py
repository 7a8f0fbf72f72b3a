"""A corpus that needs no download: AN4's kind of utterances, said by espeak-ng on first use.

Spelled names, numbers, dates, commands and addresses, in several accents of English. No voice is
in both sets. No text is in both sets either, except single commands.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import IO

import numpy as np

from ...common.cache import cache_dir
from ...common.errors import INSTALL, UserError
from ...common.extras import need
from . import audio, manifest, phrases
from .manifest import Utterance

VERSION = 1
"""Goes up when the same request would give another corpus."""
_MOST = 1_000_000
MANIFESTS = ("spoken_train_manifest.csv", "spoken_val_manifest.csv")

ACCENTS = ("en-us", "en-us-nyc", "en", "en-gb-x-rp", "en-gb-scotland", "en-029")
SPEAKERS = {
    "train": (
        *("m1", "m2", "m3", "m5", "m6", "m7", "adam", "Alex", "benjamin", "david", "edward"),
        *("f1", "f2", "f4", "f5", "Annie", "belinda", "linda"),
    ),
    "validation": ("m4", "f3", "Alicia", "caleb", "robert", "steph"),
}
"""espeak-ng's voice variants. Each speaks in all accents."""

# Within a sentence, espeak-ng would say these two letters as words.
_LETTERS = {"A": "[['eI]]", "I": "[['aI]]"}


@dataclass(frozen=True)
class Line:
    """An utterance before it is said."""

    accent: str
    speaker: str
    text: str
    words_a_minute: int
    pitch: int
    """Of 99; 50 is the voice's own."""
    gap: int
    """Pause between words beyond the usual one, in 10 ms."""

    @property
    def voice(self) -> str:
        return f"{self.accent}+{self.speaker}"


def prepare(
    data_dir: Path | None = None,
    *,
    progress: bool = True,
    train: int = 1200,
    validation: int = 160,
) -> tuple[Path, Path]:
    """Manifests for training and for validation. The corpus is made if it is not there.

    The same request gives the same recordings, on all machines of a kind. The corpus is built
    beside its place and then moved there, so a crash leaves nothing half-made, and any number of
    processes may do this at the same time.
    """
    if not (1 <= train <= _MOST and 1 <= validation <= _MOST):
        raise UserError(
            f"{train} and {validation} utterances: at least 1 and at most {_MOST} of each can be "
            "made"
        )
    home = Path(data_dir) if data_dir is not None else cache_dir()
    folder = home / f"spoken-{VERSION}-{train}-{validation}"
    if not _complete(folder, train, validation):
        try:
            home.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".spoken-", dir=home) as name:
                built = Path(name, "new")
                _build(built, plan(train, validation), progress)
                _install(built, folder, Path(name, "old"), (train, validation))
        except OSError as error:
            raise UserError(
                f"the corpus cannot be written to {folder} ({error.strerror or error}); name a "
                "folder with --data-dir, or set OKTOPK_CACHE"
            ) from None
    return folder / MANIFESTS[0], folder / MANIFESTS[1]


def plan(train: int, validation: int) -> dict[str, list[Line]]:
    """The lines to say. The same numbers give the same lines."""
    heldout = _lines("validation", validation, frozenset())
    known = frozenset(line.text for line in heldout) - frozenset(phrases.COMMANDS)
    return {"train": _lines("train", train, known), "validation": heldout}


def _lines(split: str, count: int, avoid: frozenset[str]) -> list[Line]:
    random = Random(f"spoken {VERSION} {split}")
    lines: list[Line] = []
    while len(lines) < count:
        text = phrases.phrase(random)
        accent, speaker = phrases.pick(random, ACCENTS), phrases.pick(random, SPEAKERS[split])
        rate, pitch = 145 + phrases.below(random, 55), 35 + phrases.below(random, 31)
        if text not in avoid:
            lines.append(Line(accent, speaker, text, rate, pitch, phrases.below(random, 5)))
    return lines


def _build(folder: Path, planned: dict[str, list[Line]], progress: bool) -> None:
    """Say everything, training first, and write recordings and manifests."""
    need("rich")
    from rich.console import Console
    from rich.progress import Progress

    total = sum(map(len, planned.values()))
    bar = Progress(console=Console(stderr=True), disable=not progress, transient=True)
    with _speech() as say, bar:
        task = bar.add_task("making the corpus", total=total)
        for number, (split, lines) in enumerate(planned.items()):
            said = []
            for index, (line, speech) in enumerate(zip(lines, say(lines), strict=True)):
                voice = f"{line.accent}-{line.speaker}"
                path = folder / split / voice / f"{index:05d}.wav"
                samples = _record(*speech, seed=(VERSION, number, index))
                _write(path, samples)
                said.append(Utterance(path.resolve(), line.text, len(samples) / audio.RATE))
                bar.advance(task)
            manifest.write(folder / MANIFESTS[number], said)


def _record(
    speech: audio.Samples, rate: int, *, seed: tuple[int, int, int]
) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    """Like a microphone: some distance, some noise, and some silence before and after."""
    random = np.random.Generator(np.random.PCG64(seed))
    before, after = random.integers(audio.RATE // 16, audio.RATE // 5, size=2)
    loudness, noise = random.uniform(0.2, 0.8), 10 ** random.uniform(-4, -2.5)
    samples = np.pad(audio.resample(speech, rate), (int(before), int(after)))
    samples *= loudness / max(float(np.abs(samples).max()), 1e-3)
    samples += noise * random.standard_normal(len(samples), dtype=np.float32)
    return np.rint(np.clip(samples, -1, 1) * 32767).astype(np.int16)


def _write(path: Path, samples: np.ndarray[tuple[int], np.dtype[np.int16]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(audio.RATE)
        file.writeframes(samples.astype("<i2").tobytes())


def _complete(folder: Path, train: int, validation: int) -> bool:
    try:
        counts = [len(manifest.read(folder / name)) for name in MANIFESTS]
    except UserError:
        return False
    return counts == [train, validation]


def _install(built: Path, folder: Path, aside: Path, counts: tuple[int, int]) -> None:
    """Move the corpus to its place, unless another process was faster. A damaged one is removed."""
    try:
        os.replace(built, folder)
    except OSError:
        if _complete(folder, *counts):
            return
        os.replace(folder, aside)
        os.replace(built, folder)
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _speech() -> Iterator[Callable[[list[Line]], Iterator[tuple[audio.Samples, int]]]]:
    """A process that says lines. `espeak.py` tells why it must be a process of its own."""
    loader = need("espeakng_loader")
    try:
        library, data = loader.get_library_path(), loader.get_data_path()
    except RuntimeError as error:
        raise UserError(f"espeakng-loader has no voices: {INSTALL} ({error})") from None
    variants = Path(data, "voices", "!v")
    script = Path(__file__).with_name("espeak.py")
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), library, data],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def number() -> int:
            return int(struct.unpack("=i", _exactly(answers, 4))[0])

        def ask(line: Line) -> None:
            text = " ".join(_LETTERS.get(word, word) for word in line.text.split())
            request = [line.voice, line.words_a_minute, line.pitch, line.gap, text]
            requests.write(json.dumps(request).encode() + b"\n")
            requests.flush()

        def say(lines: list[Line]) -> Iterator[tuple[audio.Samples, int]]:
            ask(lines[0])
            for index, line in enumerate(lines):
                if index + 1 < len(lines):
                    ask(lines[index + 1])  # said while this one is recorded
                count = number()
                # An unknown variant is the accent's own voice, which may be in the other set.
                if count <= 0 or not (variants / line.speaker).is_file():
                    raise UserError(
                        f"espeak-ng has no voice {line.voice}: pip install -U espeakng-loader"
                    )
                samples = np.frombuffer(_exactly(answers, 2 * count), np.int16).astype(np.float32)
                samples /= 32768
                yield samples, rate

        try:
            rate = number()
            yield say
        except (EOFError, BrokenPipeError):
            process.wait()
            errors.seek(0)
            reason = errors.read().decode(errors="replace").strip().splitlines()
            raise UserError(
                f"espeak-ng failed ({reason[-1] if reason else f'exit {process.returncode}'}); "
                "pip install --force-reinstall espeakng-loader"
            ) from None
        finally:
            process.kill()
            process.wait()
            answers.close()
            with suppress(BrokenPipeError):
                requests.close()


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data
