"""What compression costs a training step, and how much of it hides behind backward.

Trains a stack of linear layers in DDP on local ranks over loopback: first on one rank, where
there is nothing to send and all that compression adds is its own work, then on several. In every
round each contender takes one step, so that ratios mean something on a noisy machine.

columns
  ms        median time of a step (forward, backward, communication, SGD), the slowest rank
  added     ms more than plain DDP
  / ddp     ms over the ms of plain DDP
  busy      ms in a step that the communication thread works
  waited    ms in a step that the end of backward waits for it
  hidden    1 - waited / busy: the share that is hidden behind backward

Ranks and their communication threads share the cores. Where there are fewer cores than threads
that work, what is hidden behind backward also slows it down: then `ms` tells, not `hidden`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from common import on_ranks, parser_for, progress, slowest_ms, table
from oktopk.common.flags import positive, share
from oktopk.common.host import cores


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--width", type=positive, default=1448, help="of a layer (1448)")
    parser.add_argument("--depth", type=positive, default=6, help="number of layers (6)")
    parser.add_argument("--batch", type=positive, default=128, help="samples of a rank (128)")
    parser.add_argument("--density", type=share, default=0.02, help="share that is sent (0.02)")
    parser.add_argument("--ranks", type=positive, default=2, help="number of local ranks, P (2)")
    parser.add_argument("--steps", type=positive, default=20, help="steps that are measured (20)")
    parser.add_argument("--skip", type=positive, default=40, help="steps before, unmeasured (40)")
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="size of a bucket (25)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args()
    results = {size: on_ranks(size, measure, args, size) for size in dict.fromkeys((1, args.ranks))}
    if args.json:
        print(json.dumps({"arguments": vars(args), "rows": results}))
        return
    parameters = args.depth * (args.width + 1) * args.width
    print(f"{parameters:,} parameters, batch {args.batch}, {args.steps} steps, 1 thread a rank")
    for size, rows in results.items():
        print(f"\nP = {size}, {len(cores())} cores\n{table(rows)}")


def measure(rank: int, args: argparse.Namespace, size: int) -> list[dict[str, Any]]:
    sparse = oktopk.OkTopk(density=args.density)
    contenders = {
        "ddp": Contender(args, None),
        "dense": Contender(args, oktopk.Dense()),
        "oktopk": Contender(args, sparse),
        "oktopk after backward": Contender(args, sparse, scope="model"),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for step in range(args.skip + args.steps):
        progress(rank, f"P = {size}: step {step + 1} of {args.skip + args.steps}")
        for name, contender in contenders.items():
            x = torch.randn(args.batch, args.width)
            ms = slowest_ms(partial(contender.step, x))
            if step == args.skip - 1:
                contender.start_counting()
            elif step >= args.skip:
                times[name].append(ms)
    plain = statistics.median(times["ddp"])
    rows = []
    for name, contender in contenders.items():
        ms = statistics.median(times[name])
        row: dict[str, Any] = {
            "contender": name,
            "ms": ms,
            "added": ms - plain,
            "/ ddp": ms / plain,
        }
        rows.append(row | contender.communication(args.steps))
    return rows


class Contender:
    """A model of its own, and one way to average its gradients."""

    def __init__(
        self, args: argparse.Namespace, algorithm: oktopk.Algorithm | None, **options: Any
    ) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(args.width, args.width) for _ in range(args.depth)]
        self.model = DDP(nn.Sequential(*layers), bucket_cap_mb=25)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.handle: oktopk.Compression | None = None
        if algorithm is not None:
            options = {"bucket_mb": args.bucket_mb} | options
            self.handle = oktopk.attach(self.model, algorithm, **options)

    def step(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()

    def start_counting(self) -> None:
        if self.handle is not None:
            self.before = self.handle.stats()

    def communication(self, steps: int) -> dict[str, Any]:
        if self.handle is None:
            return {"busy": 0.0, "waited": 0.0, "hidden": ""}
        now = self.handle.stats()
        busy, waited = now.busy - self.before.busy, now.waited - self.before.waited
        return {
            "busy": 1000 * busy / steps,
            "waited": 1000 * waited / steps,
            "hidden": f"{max(0.0, 1 - waited / busy):.0%}",
        }


if __name__ == "__main__":
    main()
