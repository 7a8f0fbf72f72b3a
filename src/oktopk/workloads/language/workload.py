"""The language workload: text, model, loss and validation."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Generator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ...common.cache import expanded
from ...common.together import attempt, gather
from ..base import Context, Example, Validation
from ..checks import check_agreement, check_step, make_model
from .config import LanguageConfig
from .text import read_text
from .transformer import Shape, Transformer, generate
from .windows import Order, cut, split

_VALIDATED = 1024
"""Windows of the held-out text that are validated at most, from all over it."""
_BATCH = 32
"""Windows that are validated at once."""
_PROMPT, _CONTINUATION = 48, 160
"""Bytes of an example that are given, and that the model adds."""


class Language:
    """A `Workload`. All workers make one together. A batch is a tensor of windows."""

    def __init__(self, config: LanguageConfig, context: Context) -> None:
        self.config, self.context = config, context
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.train, self.held_out = attempt(lambda: train_and_held_out(config, self.rank > 0))
        parts = (self.train, self.held_out)
        check_agreement([zlib.crc32(part.numpy().data) for part in parts])
        batches = config.epoch_windows // (context.batch_size * self.size)
        self.order = Order(
            len(self.train),
            config.window,
            max(batches, context.nsteps_update),
            context.batch_size,
            self.size,
            context.seed,
        )
        check_step(context, self.samples, config.sample)
        shape = Shape(config.width, config.depth, config.heads, config.window)
        self.model = make_model(
            lambda: Transformer(shape),
            context,
            {"--width": config.width, "--depth": config.depth, "--window": config.window},
        )

    @property
    def samples(self) -> int:
        """Windows of a pass over the text."""
        return self.order.windows

    @property
    def batches_per_epoch(self) -> int:
        """Of each worker."""
        return self.order.batches

    def batches(self, epoch: int, done: int = 0) -> Generator[Tensor, None, None]:
        """This worker's batches of an epoch, without the first `done`."""
        for starts in self.order.epoch(epoch, self.rank)[done:]:
            yield self._cut(self.train, starts)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean over all bytes of the negative log-likelihood, in nats."""
        return self._losses(model, batch).mean()

    def validate(self, model: nn.Module, progress: Callable[[int, int], None]) -> Validation:
        """Loss and bits per byte of the held-out text, and how the model continues parts of it."""
        starts = torch.arange(0, len(self.held_out) - self.config.window, self.config.window)
        starts = starts[spread(len(starts), _VALIDATED)]
        mine = starts[self.rank :: self.size]
        total = 0.0
        model.eval()
        with torch.no_grad():
            for done in range(0, len(mine), _BATCH):
                windows = self._cut(self.held_out, mine[done : done + _BATCH])
                total += float(self._losses(model, windows).double().sum())
                progress(min(done + _BATCH, len(mine)), len(mine))
        examples = self._examples(model)
        model.train()
        loss = sum(gather(total)) / (len(starts) * self.config.window)
        return Validation({"loss": loss, "bits_per_byte": loss / math.log(2)}, examples)

    def _examples(self, model: nn.Module) -> tuple[Example, ...]:
        """Workers take turns in making them."""
        prompt = min(_PROMPT, self.config.window)
        mine = {}
        places = spread(len(self.held_out) - prompt, self.config.examples)
        for index in range(self.rank, len(places), self.size):
            given = next_line(self.held_out[int(places[index]) :])[:prompt].to(self.context.device)
            added = generate(model, given, _CONTINUATION, self.config.window, self.context.seed)
            mine[index] = {"prompt": _shown(bytes(given.tolist())), "text": _shown(added)}
        made = {index: example for part in gather(mine) for index, example in part.items()}
        return tuple(made[index] for index in sorted(made))

    def _cut(self, text: Tensor, starts: Tensor) -> Tensor:
        return cut(text, starts, self.config.window).to(self.context.device)

    def _losses(self, model: nn.Module, windows: Tensor) -> Tensor:
        """Of each byte."""
        logits = model(windows[:, :-1]).float().flatten(0, 1)
        return F.cross_entropy(logits, windows[:, 1:].flatten().long(), reduction="none")


def train_and_held_out(config: LanguageConfig, quiet: bool = False) -> tuple[Tensor, Tensor]:
    """The two parts of the text, as bytes."""
    path = expanded(config.data_dir) if config.data_dir else None
    return split(read_text(path, quiet), config.window)


def spread(total: int, count: int) -> Tensor:
    """`count` numbers below `total`, or all of them, at equal distances."""
    count = min(count, total)
    return torch.arange(count) * total // max(1, count)


def next_line(text: Tensor) -> Tensor:
    """The text from its first line break on; all of it if that leaves nothing."""
    breaks = (text[:-1] == ord("\n")).nonzero()
    return text[int(breaks[0]) + 1 :] if len(breaks) else text


def _shown(text: bytes) -> str:
    return text.decode(errors="replace")
