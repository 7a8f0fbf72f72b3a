"""The speech model: convolutions over the spectrogram, LSTM layers, one label a frame.

`lstman4` is the model of the published experiments, to the parameter (27,569,568 of them);
`lstman4-small` learns AN4 on a CPU: fewer bins, half as many frames, both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Conv:
    """A convolution over (bins, frames)."""

    channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]

    @property
    def padding(self) -> tuple[int, int]:
        return self.kernel[0] // 2, self.kernel[1] // 2

    def output(self, size: int, axis: int) -> int:
        """How many bins (axis 0) or frames (axis 1) are left of `size`."""
        return (size + 2 * self.padding[axis] - self.kernel[axis]) // self.stride[axis] + 1


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    convs: tuple[Conv, ...]
    width: int
    depth: int
    bidirectional: bool
    lookahead: int
    """Future frames that a model of one direction may look at."""


SHAPES = {
    "lstman4": Shape(
        convs=(Conv(32, (41, 11), (2, 2)), Conv(32, (21, 11), (2, 1))),
        width=800,
        depth=5,
        bidirectional=False,
        lookahead=20,
    ),
    "lstman4-small": Shape(
        convs=(Conv(16, (11, 11), (2, 2)), Conv(16, (11, 5), (2, 2))),
        width=256,
        depth=2,
        bidirectional=True,
        lookahead=20,
    ),
}


def shape(
    name: str, width: int | None = None, depth: int | None = None, bidirectional: bool | None = None
) -> Shape:
    """The shape of a model by name, with some sizes changed."""
    known = SHAPES[name]
    return replace(
        known,
        width=width or known.width,
        depth=depth or known.depth,
        bidirectional=known.bidirectional if bidirectional is None else bidirectional,
    )


class DeepSpeech(nn.Module):
    """Spectrograms in, log probabilities of labels out.

    1. Convolutions, each with batch norm and Hardtanh(0, 20). Their output behind the end of an
       utterance is set to zero, so that padding does not leak into the utterance.
    2. LSTM layers, with batch norm before all but the first. The two directions of a
       bidirectional layer are added.
    3. With one direction, a depthwise convolution over this frame and `lookahead` future ones.
    4. Batch norm, a linear layer, log-softmax.

    From step 2 on, only the frames of utterances count, as with packed sequences; see `Recurrent`.
    """

    def __init__(self, shape: Shape, bins: int, labels: int) -> None:
        super().__init__()
        self.shape = shape
        self.convs = nn.ModuleList()
        self.conv_norms = nn.ModuleList()
        channels = 1
        for conv in shape.convs:
            self.convs.append(
                nn.Conv2d(channels, conv.channels, conv.kernel, conv.stride, conv.padding)
            )
            self.conv_norms.append(nn.BatchNorm2d(conv.channels))
            channels, bins = conv.channels, conv.output(bins, 0)
        inputs = channels * bins
        self.layers = nn.ModuleList()
        self.norms = nn.ModuleList()
        for index in range(shape.depth):
            self.norms.append(nn.BatchNorm1d(inputs) if index else nn.Identity())
            self.layers.append(Recurrent(inputs, shape.width, shape.bidirectional))
            inputs = shape.width
        self.lookahead = None if shape.bidirectional else Lookahead(shape.width, shape.lookahead)
        self.norm = nn.BatchNorm1d(shape.width)
        self.linear = nn.Linear(shape.width, labels, bias=False)

    def frames(self, lengths: Tensor) -> Tensor:
        """Output frames of utterances with so many input frames."""
        for conv in self.shape.convs:
            lengths = (lengths + 2 * conv.padding[1] - conv.kernel[1]) // conv.stride[1] + 1
        return lengths

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            features: (batch, bins, frames), zero behind each utterance's end.
            lengths: frames of each utterance.

        Returns:
            Log probabilities (frames, batch, labels), and how many frames of each count.
        """
        x = features.unsqueeze(1)
        for conv, convolve, norm in zip(self.shape.convs, self.convs, self.conv_norms, strict=True):
            lengths = (lengths + 2 * conv.padding[1] - conv.kernel[1]) // conv.stride[1] + 1
            beyond = torch.arange(conv.output(x.size(3), 1), device=x.device) >= lengths[:, None]
            beyond = beyond[:, None, None, :]
            x = convolve(x).masked_fill(beyond, 0.0)
            x = nn.functional.hardtanh(norm(x), 0.0, 20.0).masked_fill(beyond, 0.0)
        x = x.flatten(1, 2).permute(2, 0, 1)  # frames, batch, channels and bins
        spans = Spans(lengths, x.size(0))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = layer(spans.apply(norm, x), spans)
        if self.lookahead is not None:
            x = self.lookahead(spans.apply(nn.Identity(), x))
        x = spans.apply(lambda rows: self.linear(self.norm(rows)), x)
        return x.float().log_softmax(dim=2), lengths


class Spans:
    """Which rows of a padded batch (frames, batch, ...) belong to utterances."""

    def __init__(self, lengths: Tensor, frames: int) -> None:
        time = torch.arange(frames, device=lengths.device)[:, None]
        inside = time < lengths
        self.rows = inside.flatten().nonzero().squeeze(1)
        # Utterances backwards, each within its own length; padding stays where it is.
        self.backwards = torch.where(inside, lengths - 1 - time, time)[:, :, None]

    def apply(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply a function to the rows of utterances. The other rows become zero."""
        rows = function(x.flatten(0, 1)[self.rows])
        zeros = rows.new_zeros(x.size(0) * x.size(1), rows.size(1))
        return zeros.index_copy(0, self.rows, rows).view(*x.shape[:2], -1)

    def reverse(self, x: Tensor) -> Tensor:
        """Each utterance backwards. Twice is the identity."""
        return x.gather(0, self.backwards.expand_as(x))


class Recurrent(nn.Module):
    """An LSTM layer whose results are those of nn.LSTM on packed sequences.

    On CPUs torch takes several times as long for packed sequences (benchmarks/recurrent.py). So it
    runs on padded ones. The backward direction gets each utterance reversed within its own length,
    so padding always comes last and does not influence the utterance.
    """

    def __init__(self, inputs: int, width: int, bidirectional: bool) -> None:
        super().__init__()
        self.forth = nn.LSTM(inputs, width)
        self.back = nn.LSTM(inputs, width) if bidirectional else None

    def forward(self, x: Tensor, spans: Spans) -> Tensor:
        forth: Tensor = self.forth(x)[0]
        if self.back is None:
            return forth
        return forth + spans.reverse(self.back(spans.reverse(x))[0])


class Lookahead(nn.Module):
    """For each unit, a weighted sum of this frame and the next ones (Wang et al., 2016)."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.conv = nn.Conv1d(width, width, context + 1, groups=width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(x.permute(1, 2, 0), (0, self.context))
        x = self.conv(x).permute(2, 0, 1)
        return nn.functional.hardtanh(x, 0.0, 20.0)
