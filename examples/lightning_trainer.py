"""Lightning: one callback, on any device, saved and resumed with Lightning's own checkpoints.

    torchrun --standalone --nproc-per-node 2 examples/lightning_trainer.py
    torchrun --standalone --nproc-per-node 2 examples/lightning_trainer.py --algorithm dense

Run it with `--checkpoint run --steps 60` and then with `--checkpoint run --steps 120`: training may
stop and go on, bit for bit as if it had not stopped.

The task is made up here: tell ten patterns apart, each buried in three times as much noise.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import oktopk
from oktopk.integrations.lightning import Compress

CLASSES, WIDTH, NOISE = 10, 16, 3.0
BATCH, STEPS_AN_EPOCH = 32, 20


class Classifier(LightningModule):
    """An ordinary LightningModule: compression needs nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * (WIDTH // 4) ** 2, 64),
            nn.ReLU(),
            nn.Linear(64, CLASSES),
        )
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def main() -> None:
    args = parse_args()
    seed_everything(0, verbose=False)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 2))
    nodes = int(os.environ.get("WORLD_SIZE", processes)) // processes

    # The callback. The first steps are dense, since gradients change fastest there. `dense_below`
    # is for this small model, which has one layer of more than 8192 weights only.
    algorithm = oktopk.algorithm(args.algorithm, density=args.density, warmup_steps=4)
    states = args.checkpoint and args.checkpoint / "compression"
    compress = Compress(algorithm, folder=states, keep=2, dense_below=500)

    callbacks: list[Callback] = [compress]
    if args.checkpoint:
        callbacks += [ModelCheckpoint(args.checkpoint, "last", enable_version_counter=False)]
    trainer = Trainer(
        accelerator="cpu",
        devices=processes,
        num_nodes=nodes,
        strategy="ddp",
        callbacks=callbacks,
        max_epochs=math.ceil(args.steps / STEPS_AN_EPOCH),
        enable_checkpointing=args.checkpoint is not None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    loader = DataLoader(patterns(BATCH * STEPS_AN_EPOCH * processes * nodes), BATCH, shuffle=True)
    last = args.checkpoint and args.checkpoint / "last.ckpt"
    trainer.fit(model, loader, ckpt_path=last if last and last.exists() else None)
    if not model.losses:
        if trainer.is_global_zero:
            print("nothing to do: --steps counts those before the checkpoint, too")
        return

    compress.handle.check_replicas()  # raises unless all ranks have the same model, to the bit
    if trainer.is_global_zero:
        totals = compress.handle.stats().totals
        print(f"first loss         {model.losses[0]:.4f}")
        print(f"last loss          {model.losses[-1]:.4f}")
        print(f"compression ratio  {totals.compression_ratio:.1f}")
        print(f"sparsity           {totals.sparsity:.3f}")
        print(f"megabytes sent     {totals.bytes_sent / 1e6:.3f}")
    torch.distributed.destroy_process_group()  # Lightning leaves it; torch may abort at exit then


def patterns(count: int) -> TensorDataset:
    """Noisy copies of the patterns, and which they are."""
    random = torch.Generator().manual_seed(0)
    originals = torch.randn(CLASSES, 1, WIDTH, WIDTH, generator=random)
    labels = torch.randint(CLASSES, (count,), generator=random)
    noise = torch.randn(count, 1, WIDTH, WIDTH, generator=random)
    return TensorDataset(originals[labels] + NOISE * noise, labels)


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
        default=120,
        help=f"steps in all, those before a checkpoint included; training goes on to the end of an "
        f"epoch, which has {STEPS_AN_EPOCH} (default: 120)",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="go on from the checkpoint in this folder, if it has one; write one after each epoch",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
