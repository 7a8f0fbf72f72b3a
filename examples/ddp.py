"""Plain PyTorch: a model in DistributedDataParallel, and one line that compresses its gradients.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py
    torchrun --standalone --nproc-per-node 2 examples/ddp.py --algorithm dense
    torchrun --standalone --nproc-per-node 2 examples/ddp.py --checkpoint run --steps 50
    torchrun --standalone --nproc-per-node 2 examples/ddp.py --checkpoint run --steps 100

The first two compare: about the same loss, for a fraction of the bytes. The last two show that
training may stop and go on: step 51 is, bit for bit, what it would have been without the break.

The task is made up here: tell ten patterns apart, each buried in four times as much noise.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import oktopk

CLASSES, PIXELS, BATCH, NOISE = 10, 768, 32, 4.0


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(PIXELS, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    # The one line. The first steps are dense, since gradients change fastest there. `dense_below`
    # is for this small model: it has no weights of 8192 elements but one.
    algorithm = oktopk.algorithm(args.algorithm, density=args.density, warmup_steps=4)
    handle = oktopk.attach(model, algorithm, dense_below=1000)

    done = 0
    if args.checkpoint and (args.checkpoint / oktopk.checkpoint.MANIFEST).exists():
        saved = oktopk.checkpoint.load(args.checkpoint, handle)
        net.load_state_dict(saved.shared["model"])
        optimizer.load_state_dict(saved.shared["optimizer"])
        done = saved.step

    losses = []
    for step in range(done, args.steps):
        images, labels = batch(step * size + rank)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # averages gradients over ranks, as always with DDP
        optimizer.step()
        losses.append(loss.item())

    if args.checkpoint:
        # Model and optimizer are the same on all ranks; the handle's residuals are each rank's own.
        shared = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        oktopk.checkpoint.save(args.checkpoint, handle, shared=shared)
    handle.check_replicas()  # raises unless all ranks have the same model, to the bit
    if rank == 0 and not losses:
        print(f"nothing to do: {args.checkpoint} is at step {done}, --steps counts from the first")
    elif rank == 0:
        totals = handle.stats().totals
        print(f"first loss         {losses[0]:.4f}")
        print(f"last loss          {losses[-1]:.4f}")
        print(f"compression ratio  {totals.compression_ratio:.1f}")
        print(f"sparsity           {totals.sparsity:.3f}")
        print(f"megabytes sent     {totals.bytes_sent / 1e6:.3f}")
    dist.destroy_process_group()


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Noisy copies of the patterns, and which they are. Each number gives other ones."""
    patterns = torch.randn(CLASSES, PIXELS, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(number + 1)
    labels = torch.randint(CLASSES, (BATCH,), generator=random)
    return patterns[labels] + NOISE * torch.randn(BATCH, PIXELS, generator=random), labels


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
