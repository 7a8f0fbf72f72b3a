"""Input of the model: spectrograms, computed once and kept in a file that all workers map.

A corpus of features is one tensor (frames of all utterances, bins), with the offset of each
utterance. Workers map it into memory, so that eight of them on a machine hold it once.
"""

from __future__ import annotations

import errno
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from ...common.errors import UserError
from ...common.files import replacing
from .audio import RATE, load
from .manifest import Utterance

WINDOW = RATE // 50
"""20 ms."""
HOP = RATE // 100
"""10 ms."""
_VERSION = 1


@dataclass(frozen=True)
class Corpus:
    """Utterances and their features."""

    utterances: Sequence[Utterance]
    frames: Tensor
    """(frames of all utterances, bins)."""
    starts: Tensor
    """Where each utterance begins in `frames`, and where the last one ends."""

    @property
    def lengths(self) -> Tensor:
        """Frames of each utterance."""
        return self.starts.diff()

    def features(self, index: int) -> Tensor:
        """(bins, frames) of an utterance."""
        return self.frames[int(self.starts[index]) : int(self.starts[index + 1])].T


def spectrogram(wave: Tensor) -> Tensor:
    """Logarithm of 1 + magnitude: (161, frames), with mean 0 and standard deviation 1."""
    return _normalise(torch.log1p(_stft(wave, WINDOW)))


def logmel(wave: Tensor) -> Tensor:
    """Logarithm of the power in 80 mel bands: (80, frames), with mean 0, standard deviation 1."""
    power = _stft(wave, 512).square()
    return _normalise(torch.log(_mel_bands(80, 512) @ power + 1e-6))


_KINDS: dict[str, Callable[[Tensor], Tensor]] = {"spectrogram": spectrogram, "logmel": logmel}
BINS = {"spectrogram": WINDOW // 2 + 1, "logmel": 80}


def compute(
    utterances: Sequence[Utterance], kind: str, folder: Path, *, progress: bool = True
) -> Path:
    """Write the features of a corpus into a file, unless it is there; returns its path.

    The file's name depends on kind, recordings, their sizes and times, so the features of a
    changed corpus are computed again.
    """
    path = folder / f"{kind}-{_key(utterances, kind)}.pt"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    bar = track(
        utterances,
        f"features ({kind})",
        console=Console(stderr=True),
        disable=not progress,
        transient=True,
    )
    parts = [_KINDS[kind](load(utterance.audio)).T.contiguous() for utterance in bar]
    starts = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    with replacing(path) as part:
        _save({"frames": torch.cat(parts), "starts": starts}, part)
    return path


def _save(content: dict[str, Tensor], path: Path) -> None:
    try:
        torch.save(content, path)
    except RuntimeError as error:  # torch does not say why
        raise OSError(errno.ENOSPC, "torch could not write, there may be no room left") from error


def open_corpus(
    utterances: Sequence[Utterance], kind: str, folder: Path, *, progress: bool = True
) -> Corpus:
    """A corpus with its features, mapped into memory. They are computed if they are not there."""
    path = compute(utterances, kind, folder, progress=progress)
    try:
        return _open(path, utterances, kind)
    except Exception:  # torch.load raises all sorts; a power cut may have left half a file
        path.unlink(missing_ok=True)
        path = compute(utterances, kind, folder, progress=progress)
        return _open(path, utterances, kind)


def _open(path: Path, utterances: Sequence[Utterance], kind: str) -> Corpus:
    content = torch.load(path, mmap=True, weights_only=True)
    corpus = Corpus(utterances, content["frames"], content["starts"])
    whole = (int(corpus.starts[-1]), BINS[kind])
    if len(corpus.lengths) != len(utterances) or corpus.frames.shape != whole:
        raise ValueError(f"{path} has features of another corpus")
    return corpus


def _key(utterances: Sequence[Utterance], kind: str) -> str:
    facts = [str(_VERSION), kind]
    for utterance in utterances:
        try:
            stat = utterance.audio.stat()
        except OSError as error:
            raise UserError(
                f"{utterance.audio} cannot be read: {error.strerror or error}"
            ) from None
        facts.append(f"{utterance.audio} {stat.st_size} {stat.st_mtime_ns}")
    # Names of files need not be UTF-8.
    return hashlib.sha256("\n".join(facts).encode(errors="surrogateescape")).hexdigest()[:16]


def _stft(wave: Tensor, size: int) -> Tensor:
    """Magnitudes (size / 2 + 1, frames)."""
    window = torch.hamming_window(WINDOW, periodic=False)
    short = size - wave.numel()  # reflection needs at least as much as it pads
    if short > 0:
        wave = torch.nn.functional.pad(wave, (0, short))
    return torch.stft(wave, size, HOP, WINDOW, window, return_complex=True).abs()


def _normalise(features: Tensor) -> Tensor:
    return (features - features.mean()) / (features.std() + 1e-6)


@cache
def _mel_bands(bands: int, size: int) -> Tensor:
    """Triangles that are equally wide on the mel scale: (bands, size / 2 + 1)."""

    def mel(hertz: float) -> float:
        return 2595.0 * math.log10(1.0 + hertz / 700.0)

    edges = torch.linspace(mel(0.0), mel(RATE / 2), bands + 2, dtype=torch.float64)
    edges = 700.0 * (10.0 ** (edges / 2595.0) - 1.0)
    bins = torch.linspace(0.0, RATE / 2, size // 2 + 1, dtype=torch.float64)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp_min(0.0).float()
