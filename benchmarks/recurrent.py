"""An LSTM layer on padded sequences, as the speech model runs it, against torch's on packed ones.

    python benchmarks/recurrent.py

Forward and backward of one layer on one core; the ratio is of medians within this run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from oktopk.workloads.speech.deepspeech import Recurrent, Spans


def median(run: Callable[[], Tensor], repeats: int = 7) -> float:
    seconds = []
    for _ in range(repeats + 1):
        since = time.perf_counter()
        run().square().sum().backward()
        seconds.append(time.perf_counter() - since)
    return statistics.median(seconds[1:])


def main() -> None:
    torch.set_num_threads(1)
    print("layer                          packed ms   padded ms   ratio")
    for inputs, width, frames, batch, bidirectional in (
        (800, 800, 150, 8, False),
        (320, 256, 75, 8, True),
        (320, 256, 75, 4, True),
    ):
        x = torch.randn(frames, batch, inputs)
        lengths = torch.linspace(frames, 0.85 * frames, batch).long()
        theirs = nn.LSTM(inputs, width, bidirectional=bidirectional)
        ours = Recurrent(inputs, width, bidirectional)

        def packed(layer: nn.LSTM = theirs, x: Tensor = x, lengths: Tensor = lengths) -> Tensor:
            data: Tensor = layer(pack_padded_sequence(x, lengths))[0].data
            return data

        def padded(layer: Recurrent = ours, x: Tensor = x, lengths: Tensor = lengths) -> Tensor:
            spans = Spans(lengths, x.size(0))
            return spans.apply(nn.Identity(), layer(x, spans))

        a, b = median(packed), median(padded)
        name = f"{inputs} -> {width}{' both ways' if bidirectional else ''}, batch {batch}"
        print(f"{name:30} {1000 * a:9.0f}   {1000 * b:9.0f}   {a / b:5.1f}")


if __name__ == "__main__":
    main()
