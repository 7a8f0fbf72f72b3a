"""Windows over a text: which part is trained on, and which windows each worker has when."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...common.errors import UserError
from ...common.format import count
from ..prefetch import generator

_HELD_OUT = 0.1
"""Share of the text, at its end, that is validated and never trained on."""


def split(text: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The text to train on, and the held-out rest."""
    held_out = max(window + 1, round(len(text) * _HELD_OUT))
    least = 3 * window + 1
    if len(text) < least:
        raise UserError(
            f"the text has {count(len(text))} bytes, but --window {window} needs at least "
            f"{count(least)}: name a longer text with --data-dir, or make --window smaller"
        )
    return text[:-held_out], text[-held_out:]


def cut(text: Tensor, starts: Tensor, window: int) -> Tensor:
    """Windows (starts, window + 1): each byte but the last is an input, each but the first a
    target."""
    return text[starts[:, None] + torch.arange(window + 1)]


class Order:
    """Which windows each worker has in each of its batches.

    1. A pass cuts the text into windows that do not overlap. It begins at a random byte of the
       first window, so that each pass cuts elsewhere.
    2. The windows of a pass are shuffled and dealt out in batches, to one worker after another: no
       window occurs twice in a pass. Windows that do not fill a batch for every worker are left
       out; each pass leaves out others.
    3. One pass follows another. An epoch is a fixed number of batches, whether that is a part of a
       pass or many passes.

    The order follows from seed and epoch alone, so that a resumed run needs no more.

    Args:
        length: bytes of the text.
        batches: of a worker in an epoch.
    """

    def __init__(
        self, length: int, window: int, batches: int, batch_size: int, workers: int, seed: int
    ) -> None:
        self.window = window
        self.windows = (length - window) // window
        """Windows of a pass, wherever it begins."""
        self.batches = batches
        self.batch_size = batch_size
        self.workers = workers
        self.seed = seed
        self.batches_of_pass = self.windows // (batch_size * workers)

    def epoch(self, epoch: int, worker: int) -> Tensor:
        """Where the windows of the worker begin, (batches, batch_size); the first epoch is 1."""
        first, skipped = divmod((epoch - 1) * self.batches, self.batches_of_pass)
        passes = math.ceil((skipped + self.batches) / self.batches_of_pass)
        starts = torch.cat([self._pass(first + number) for number in range(passes)])
        return starts[skipped : skipped + self.batches, worker]

    def _pass(self, number: int) -> Tensor:
        """(batches, workers, batch_size)."""
        random = generator(self.seed, number)
        phase = int(torch.randint(self.window, (), generator=random))
        shape = (self.batches_of_pass, self.workers, self.batch_size)
        chosen = torch.randperm(self.windows, generator=random)[: math.prod(shape)]
        return phase + self.window * chosen.view(shape)
