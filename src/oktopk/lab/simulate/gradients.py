"""Gradients for simulated ranks: synthetic ones, or recorded ones from a file."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from ...common.errors import UserError, printable

SHAPES = {
    "noise": "large values everywhere",
    "skewed": "nearly all large values in a tenth of the elements, which moves",
    "apart": "large values of each rank in other elements than those of the others",
}
_COMMON = 0.6
"""Share of a gradient that is the same on all ranks."""
_PERIOD = 40
"""Steps in which the place of large values goes once around."""
_HEIGHT = 20.0
"""How much larger values are there."""


class Source(ABC):
    """Where gradients come from."""

    numel: int
    name: str

    @abstractmethod
    def write(self, rank: int, size: int, step: int, out: Tensor) -> None:
        """The gradient of a rank in a step."""


class Noise(Source):
    """Synthetic gradients: heavy tails, a part that all ranks have, and drift over steps.

    Args:
        shape: one of `SHAPES`.
        numel: number of elements.
        seed: of everything random.
    """

    def __init__(self, shape: str, numel: int, seed: int = 1) -> None:
        self.name, self.numel, self._seed = shape, numel, seed
        # Some parameters have larger gradients than others, for the whole run.
        self._spread = torch.randn(numel, generator=self._random(0, 0)).mul_(1.2).exp_()
        self._place = torch.arange(numel, dtype=torch.float32) / numel
        self._common: dict[int, Tensor] = {}

    def write(self, rank: int, size: int, step: int, out: Tensor) -> None:
        torch.randn(self.numel, generator=self._random(1 + step, 1 + rank), out=out)
        out.add_(self._of_all(step), alpha=_COMMON).mul_(self._spread)
        out.mul_(math.exp(0.3 * math.sin(step / 6)))
        if self.name == "noise":
            out.mul_(1 + torch.sin(2 * math.pi * (self._place + step / _PERIOD)) ** 2)
        else:
            begin = step / _PERIOD + (rank / size if self.name == "apart" else 0)
            width = 1 / size if self.name == "apart" else 0.1
            out.mul_(1 + _HEIGHT * ((self._place - begin) % 1 < width))

    def _of_all(self, step: int) -> Tensor:
        """What all ranks have in a step. Ranks are never more than a step apart."""
        if step not in self._common:
            self._common = {old: noise for old, noise in self._common.items() if old == step - 1}
            self._common[step] = torch.randn(self.numel, generator=self._random(1 + step, 0))
        return self._common[step]

    def _random(self, step: int, rank: int) -> torch.Generator:
        return torch.Generator().manual_seed((self._seed << 40) + (step << 16) + rank)


class Recorded(Source):
    """Gradients from a file. Each is of one rank in one step; ranks take them in turn.

    Args:
        path: a file of `torch.save` with a list of tensors of one size, or with a tensor whose rows
            are gradients.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._gradients = _read(path)
        self.numel = self._gradients[0].numel()

    @property
    def count(self) -> int:
        """Gradients in the file."""
        return len(self._gradients)

    def write(self, rank: int, size: int, step: int, out: Tensor) -> None:
        out.copy_(self._gradients[(step * size + rank) % self.count])


def _read(path: Path) -> list[Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"--gradients {path}: {error.strerror or error}") from None
    except Exception as error:  # torch raises many kinds for a damaged file
        reason = printable(str(error)).split(". ")[0][:100]
        raise UserError(
            f"--gradients {path} is not a file that torch.save wrote, or holds more than tensors "
            f"({type(error).__name__}: {reason})"
        ) from None
    rows = isinstance(found, list | tuple) or (_ordinary(found) and found.ndim > 0)
    gradients = list(found) if rows else []
    if not gradients or not all(map(_ordinary, gradients)):
        raise UserError(
            f"--gradients {path} must hold a list of tensors, one for each gradient, or a tensor "
            "with a gradient in each row"
        )
    flat = [each.detach().flatten() for each in gradients]
    sizes = {each.numel() for each in flat}
    if len(sizes) > 1 or 0 in sizes:
        raise UserError(
            f"--gradients {path}: all gradients must have the same number of elements, at least "
            f"one; these have {min(sizes):,} to {max(sizes):,}"
        )
    if not all(each.is_floating_point() and bool(each.isfinite().all()) for each in flat):
        raise UserError(
            f"--gradients {path}: gradients must be real numbers, without NaN or infinity"
        )
    return [each.float() for each in flat]


def _ordinary(value: object) -> bool:
    """Whether it is a tensor with all its elements in memory."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
