"""Hugging Face Accelerate: attach to the model that `prepare` returns; the loop stays as it is.

    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py
    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --algorithm dense

The task: this file learns its own source by heart, one character after the other.
"""

from __future__ import annotations

import argparse
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import oktopk

ALPHABET, CONTEXT, BATCH = 128, 12, 64


def main() -> None:
    args = parse_args()
    set_seed(0)
    accelerator = Accelerator(cpu=True)

    net = nn.Sequential(
        nn.Embedding(ALPHABET, 16),
        nn.Flatten(),
        nn.Linear(16 * CONTEXT, 512),
        nn.ReLU(),
        nn.Linear(512, ALPHABET),
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    loader = DataLoader(text(), batch_size=BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)

    # The one line, after `prepare`, which has put the model in DistributedDataParallel. The first
    # steps are dense, since gradients change fastest there. `dense_below` is for this small model,
    # whose embedding has 2048 elements.
    algorithm = oktopk.algorithm(args.algorithm, density=args.density, warmup_steps=4)
    handle = oktopk.attach(model, algorithm, dense_below=2000)

    losses = []
    batches = chain.from_iterable(repeat(loader))  # epoch after epoch
    for context, following in islice(batches, args.steps):
        loss = nn.functional.cross_entropy(model(context), following)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())

    handle.check_replicas()  # raises unless all ranks have the same model, to the bit
    if accelerator.is_main_process:
        totals = handle.stats().totals
        print(f"first loss         {losses[0]:.4f}")
        print(f"last loss          {losses[-1]:.4f}")
        print(f"compression ratio  {totals.compression_ratio:.1f}")
        print(f"sparsity           {totals.sparsity:.3f}")
        print(f"megabytes sent     {totals.bytes_sent / 1e6:.3f}")
    accelerator.end_training()


def text() -> TensorDataset:
    """Every piece of this file, and the character that follows it."""
    letters = torch.tensor(list(Path(__file__).read_bytes()))
    pieces = letters.unfold(0, CONTEXT + 1, 1)
    return TensorDataset(pieces[:, :-1], pieces[:, -1])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--algorithm",
        default="oktopk",
        choices=oktopk.names(),
        help="how gradients are averaged; dense sends all of them (default: oktopk)",
    )
    parser.add_argument(
        "--density",
        type=float,
        default=0.02,
        help="share of a gradient that is applied in a step; the rest waits (default: 0.02)",
    )
    parser.add_argument("--steps", type=int, default=100, help="(default: 100)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
