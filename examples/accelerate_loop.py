"""Hugging Face Accelerate: attach to the model that `prepare` returns; the loop stays as it is.

    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py
    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --algorithm dense

Run it with `--checkpoint run --steps 50` and then with `--checkpoint run --steps 100`: training may
stop and go on, bit for bit as if it had not stopped.

The task: this file learns its own source by heart, one character after the other.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import oktopk
from oktopk.integrations.accelerate import checkpoint_with

ALPHABET, CONTEXT, BATCH = 128, 12, 64


class Progress:
    """How many steps were taken; saved and loaded by Accelerate, like any such object."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def main() -> None:
    args = parse_args()
    set_seed(0)
    # The order of batches follows from seed and epoch.
    order = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=order)

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
    handle = None
    if accelerator.num_processes > 1:  # alone, there is nothing to average
        handle = oktopk.attach(model, algorithm, dense_below=2000)
        # Compression is saved and loaded with the rest: residuals differ on every rank.
        checkpoint_with(accelerator, handle)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.checkpoint and args.checkpoint.exists():
        accelerator.load_state(args.checkpoint)

    losses = []
    while progress.steps < args.steps:
        epoch, done = divmod(progress.steps, len(loader))
        loader.set_epoch(epoch)
        for context, following in accelerator.skip_first_batches(loader, done):
            loss = nn.functional.cross_entropy(model(context), following)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            progress.steps += 1
            if progress.steps == args.steps:
                break

    if args.checkpoint:
        accelerator.save_state(args.checkpoint)
    if handle is not None:
        handle.check_replicas()  # raises unless all ranks have the same model, to the bit
    if accelerator.is_main_process and not losses:
        print("nothing to do: --steps counts those before the checkpoint, too")
    elif accelerator.is_main_process:
        print(f"first loss         {losses[0]:.4f}")
        print(f"last loss          {losses[-1]:.4f}")
    if accelerator.is_main_process and losses and handle is not None:
        totals = handle.stats().totals
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
    parser.add_argument(
        "--steps",
        type=int,
        default=100,
        help="steps in all, those before a checkpoint included (default: 100)",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="go on from the checkpoint in this folder, if it has one; write one at the end",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
