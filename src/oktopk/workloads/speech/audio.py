"""Recordings are read whole, or refused.

libsndfile decodes SPHERE, WAV, FLAC and more. But it shortens a truncated SPHERE or WAV file
silently, and then the transcript has words that the audio lacks. So the length in such a header is
compared with the file's size first. Files that end in `.raw` have no header: they are signed 16-bit
big-endian samples at 16 kHz, as in AN4's `an4_raw.bigendian` archive.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...common.errors import UserError
from ...common.extras import need

RATE = 16_000
"""Samples a second, of everything that `load` returns."""

Samples = npt.NDArray[np.float32]

# Writers that do not know the length in advance put the largest number there, or nearly.
_UNKNOWN = 0x7FFF_F000
_BLOCK = 1 << 20
_RATES = (1_000, 1_000_000)


def load(path: str | os.PathLike[str]) -> Tensor:
    """The recording as one channel at 16 kHz: float32, between -1 and 1.

    Other rates are resampled, and several channels averaged.
    """
    path = Path(path)
    _check(path)
    if _headerless(path):
        samples = _raw(path)
    else:
        samples, rate = _decode(path)
        if rate != RATE:
            samples = resample(samples, rate)
    if not np.isfinite(samples).all():
        raise UserError(f"{path} has samples that are not numbers; record or convert it again")
    return torch.from_numpy(np.clip(samples, -1.0, 1.0))


def seconds(path: str | os.PathLike[str]) -> float:
    """How long the recording is, by its header; nothing is decoded."""
    path = Path(path)
    _check(path)
    if _headerless(path):
        return path.stat().st_size / 2 / RATE
    soundfile = need("soundfile")
    try:
        info = soundfile.info(os.fsencode(path))
    except soundfile.SoundFileError as error:
        raise _unreadable(path, error) from None
    _check_rate(path, info.samplerate)
    if info.frames >= 1 << 62:  # FLAC from a pipe: the header has no length
        return len(load(path)) / RATE
    if info.frames <= 0:
        raise _empty(path)
    return float(info.frames / info.samplerate)


def resample(samples: Samples, rate: int) -> Samples:
    """Resample to 16 kHz."""
    result: Samples = need("soxr").resample(samples, rate, RATE).astype(np.float32)
    return result


def _decode(path: Path) -> tuple[Samples, int]:
    soundfile = need("soundfile")
    try:
        with soundfile.SoundFile(os.fsencode(path)) as file:
            frames, rate = file.frames, int(file.samplerate)
            _check_rate(path, rate)
            samples = _read(file)
    except soundfile.SoundFileError as error:
        raise _unreadable(path, error) from None
    if len(samples) == 0:
        raise _empty(path)
    if len(samples) < frames < 1 << 62:
        raise _truncated(path, f"{frames} samples", f"{len(samples)}")
    return samples.mean(axis=1, dtype=np.float32), rate


def _read(file: Any) -> Samples:
    """All samples of a SoundFile, in blocks: its header may promise more than memory can hold."""
    blocks: list[Samples] = []
    while not blocks or len(blocks[-1]) == _BLOCK:
        blocks.append(file.read(_BLOCK, dtype="float32", always_2d=True))
    return np.concatenate(blocks)


def _check_rate(path: Path, rate: int) -> None:
    if not _RATES[0] <= rate <= _RATES[1]:
        raise UserError(
            f"{path} has {rate} samples a second by its header, which cannot be speech; record or "
            "convert it again"
        )


def _raw(path: Path) -> Samples:
    stored = np.frombuffer(path.read_bytes(), ">i2")
    if _roughness(stored.byteswap()) < 0.5 * _roughness(stored):
        raise UserError(
            f"{path} seems to be little-endian, but .raw files are read as big-endian; "
            "use AN4's big-endian or SPHERE archive, or convert the file to WAV"
        )
    samples = stored.astype(np.float32)
    samples /= 32768
    return samples


def _roughness(samples: npt.NDArray[Any]) -> float:
    """Mean change from sample to sample, by their mean size. Exchanging the bytes of speech makes
    noise of it: rougher in all of AN4's recordings, and more than twice as rough in 93% of them."""
    wide = samples.astype(np.float64)
    return float(np.abs(np.diff(wide)).sum() / max(np.abs(wide).sum(), 1.0))


def _headerless(path: Path) -> bool:
    return path.suffix.lower() == ".raw"


def _check(path: Path) -> None:
    """Refuse a file that is missing, empty or shorter than its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if size == 0:
                raise _empty(path)
            if _headerless(path):
                if size % 2:
                    raise _truncated(path, "samples of 2 bytes", f"{size} bytes")
                return
            start = file.read(12)
            file.seek(0)
            promised = None
            if start.startswith(b"NIST_1A"):
                promised = _sphere_bytes(path, file)
            elif start[8:] == b"WAVE" and start[:4] in (b"RIFF", b"RIFX"):
                promised = _wave_bytes(file, "<" if start[:4] == b"RIFF" else ">")
            elif start.startswith(b"OggS") and not _ogg_ends(file, size):
                raise _truncated(path, "a last page", "none")
    except FileNotFoundError:
        raise UserError(
            f"there is no recording {path}; `oktopk data manifest` repairs the manifests of a "
            "corpus that moved"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    if promised is not None and promised > size:
        raise _truncated(path, f"{promised} bytes", f"{size}")


def _sphere_bytes(path: Path, file: BinaryIO) -> int | None:
    """Size of a whole SPHERE file: a text header of fixed size, then the samples."""
    lines = file.read(1024).decode("latin-1").splitlines()
    fields: dict[str, str] = {}
    for line in lines[2:]:
        if line.strip() == "end_head":
            break
        name, _, rest = line.partition(" ")
        fields[name] = rest.partition(" ")[2].strip()
    if "," in fields.get("sample_coding", ""):  # pcm,embedded-shorten-v2.00
        raise UserError(
            f"{path} is compressed with {fields['sample_coding'].partition(',')[2]}, which cannot "
            "be read; expand it with NIST's `w_decode -o pcm`, or convert it to WAV"
        )
    try:
        header = int(lines[1])
        width, channels = int(fields["sample_n_bytes"]), int(fields.get("channel_count", "1"))
        return header + int(fields["sample_count"]) * width * channels
    except (IndexError, KeyError, ValueError):
        if "end_head" not in (line.strip() for line in lines):
            raise UserError(f"{path} has a damaged SPHERE header; fetch it again") from None
        return None  # a header need not give the length


def _wave_bytes(file: BinaryIO, order: str) -> int | None:
    """Where the data of a WAV file end, by the size of its data chunk."""
    file.seek(12)
    while len(head := file.read(8)) == 8:
        size = int(struct.unpack(order + "I", head[4:])[0])
        if head[:4] == b"data":
            return None if size >= _UNKNOWN else file.tell() + size
        file.seek(size + size % 2, os.SEEK_CUR)
    return None


def _ogg_ends(file: BinaryIO, size: int) -> bool:
    """Whether the last page says that it is the last. Pages have at most 65,307 bytes."""
    file.seek(max(0, size - 65_307))
    tail = file.read()
    page = tail.rfind(b"OggS")
    return 0 <= page < len(tail) - 5 and bool(tail[page + 5] & 4)


def _empty(path: Path) -> UserError:
    return UserError(f"{path} has no samples; fetch or record it again, or leave it out")


def _truncated(path: Path, promised: str, found: str) -> UserError:
    return UserError(
        f"{path} is truncated: it should have {promised}, and has {found}; fetch it again, or "
        "leave it out of the manifest"
    )


def _unreadable(path: Path, error: Exception) -> UserError:
    # Without the name, which it would repeat.
    text = str(getattr(error, "error_string", error))
    reason = text.strip().rstrip(".") or "the data are damaged"
    return UserError(f"{path} cannot be read as audio ({reason}); fetch it again, or convert it")
