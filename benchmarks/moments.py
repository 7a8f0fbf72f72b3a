"""Which moments Adam should have when gradients are sparse.

    python benchmarks/moments.py --text wikitext2/train.txt

Trains a small network to write on, byte by byte, in DDP on local ranks over loopback: once for
each variant and seed, from the same weights and with the same batches. Gradients are clipped after
they are averaged. The text is a file, or else the sources of Python's own library.

columns
  loss        training loss, mean of the last tenth of the steps and of all ranks, over seeds
  spread      the largest minus the smallest of the seeds
  valid       loss on the last part of the text, which is not trained on
  kB sent     by rank 0 in a step, mean of the last tenth

variants
  dense       every gradient is averaged whole
  torch       Ok-Topk, torch's AdamW on the sparse average; also with a beta1 of 0.5 throughout
  frozen      Ok-Topk, oktopk.AdamW: second moment as the warm-up left it
  every N     the same, but refreshed from the ranks' own gradients every N steps
  fast        every 64 steps, following as fast as beta2 says, not slowed down
  unclipped   every 64 steps, from gradients as they are before clipping
  beta1 B     every 256 steps, momentum of the sparse average with this beta1 instead of 0.5
  local       every 256 steps, momentum kept by each rank before compression, as DGC does; the
              learning rate is not tuned for it
  warm N      frozen after N dense steps
  at D        every 256 steps, density D
  WIRE        every 256 steps, entries travel as WIRE instead of int8
  sizes       every 256 steps, ranks exchange sizes before messages
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
import oktopk.adam
from common import add_text_arguments, on_ranks, parser_for, progress, read_text, table
from oktopk.core.moments import SecondMoments

CONTEXT, WIDTH, BATCH = 24, 384, 96
LR, BETAS, CLIP = 3e-3, (0.9, 0.98), 0.3
NOTE_CLIPPING = oktopk.adam._note_clipping


def ignore_clipping(moments: SecondMoments, named: Mapping[str, Tensor]) -> None:
    """Instead of taking clipping into account."""


@dataclass(frozen=True)
class Variant:
    density: float = 0.02
    warmup: int = 100
    refresh: int | None = None
    torch: bool = False
    """torch's AdamW instead of ours."""
    torch_beta1: float = BETAS[0]
    """Of torch's AdamW, in dense steps too."""
    fast: bool = False
    unclipped: bool = False
    beta1: float = 0.5
    """Of sparse steps."""
    local: bool = False
    """Momentum before compression."""
    wire: str = "int8"
    """How entries travel."""
    variable: bool = False
    """Messages of variable size."""


VARIANTS = {
    "dense": Variant(density=1.0, torch=True),
    "torch": Variant(torch=True),
    "torch beta1 0.5": Variant(torch=True, torch_beta1=0.5),
    "frozen": Variant(),
    "every 16": Variant(refresh=16),
    "every 64": Variant(refresh=64),
    "every 256": Variant(refresh=256),
    "fast": Variant(refresh=64, fast=True),
    "unclipped": Variant(refresh=64, unclipped=True),
    "beta1 0.9": Variant(refresh=256, beta1=0.9),
    "beta1 0": Variant(refresh=256, beta1=0.0),
    "local": Variant(refresh=256, local=True),
    "plain": Variant(refresh=256, wire="plain"),
    "bfloat16": Variant(refresh=256, wire="bfloat16"),
    "int4": Variant(refresh=256, wire="int4"),
    "sizes": Variant(refresh=256, variable=True),
    "plain sizes": Variant(refresh=256, variable=True, wire="plain"),
    "warm 2": Variant(warmup=2),
    "warm 5": Variant(warmup=5),
    "warm 25": Variant(warmup=25),
    "warm 200": Variant(warmup=200),
    "at 1 %": Variant(density=0.01, refresh=256),
    "torch at 1 %": Variant(density=0.01, torch=True),
    "at 0.5 %": Variant(density=0.005, refresh=256),
    "torch at 0.5 %": Variant(density=0.005, torch=True),
}


def main() -> None:
    parser = parser_for(__doc__)
    add_text_arguments(parser, VARIANTS, steps=500, seeds=[1])
    args = parser.parse_args()
    rows = on_ranks(args.ranks, compare, args)
    parameters = sum(p.numel() for p in Writer().parameters())
    print(f"{parameters:,} parameters, {args.steps} steps, P = {args.ranks}, seeds {args.seeds}")
    print(table(rows))


def compare(rank: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    text = torch.frombuffer(bytearray(read_text(args.text)), dtype=torch.uint8)
    rows = []
    for name in args.variants:
        runs = []
        for seed in args.seeds:
            progress(rank, f"{name}, seed {seed}")
            runs.append(learn(VARIANTS[name], text, args.steps, seed))
        losses = [run["loss"] for run in runs]
        rows.append(
            {
                "variant": name,
                "loss": f"{fmean(losses):.4f}",
                "spread": f"{max(losses) - min(losses):.4f}",
                "valid": f"{fmean(run['valid'] for run in runs):.4f}",
                "kB sent": fmean(run["sent"] for run in runs) / 1000,
            }
        )
    return rows


class Writer(nn.Module):
    """Guesses the next byte from those before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.first = nn.Linear(CONTEXT * 32, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.output = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.first(self.embedding(x).flatten(1)).relu())
        scores: Tensor = self.output(self.norms[1](x + self.second(x).relu()))
        return scores


def learn(variant: Variant, text: Tensor, steps: int, seed: int) -> dict[str, float]:
    """One run; the same result on all ranks."""
    torch.manual_seed(seed)
    model = DDP(Writer())
    make = oktopk.OkTopkVariable if variant.variable else oktopk.OkTopk
    algorithm: oktopk.Algorithm = make(variant.density, variant.warmup, wire=variant.wire)
    if variant.density == 1:
        algorithm = oktopk.Dense()
    beta1, momentum = (0.0, BETAS[0]) if variant.local else (variant.torch_beta1, 0.0)
    handle = oktopk.attach(model, algorithm, dense_below=1024, momentum=momentum)
    sent: list[int] = []
    handle.subscribe(lambda stats: sent.append(stats.bytes_sent))
    kind: Any = torch.optim.AdamW if variant.torch else oktopk.AdamW
    own = {} if variant.torch else {"refresh_interval": variant.refresh}
    optimizer = kind(model.parameters(), lr=LR, betas=(beta1, BETAS[1]), **own)
    oktopk.adam._SPARSE_BETA1 = variant.beta1
    oktopk.adam._HORIZON_BETA = 0.0 if variant.fast else 0.999
    oktopk.adam._note_clipping = ignore_clipping if variant.unclipped else NOTE_CLIPPING

    train, valid = text[: -len(text) // 10], text[-len(text) // 10 :]
    random = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    losses = []
    for step in range(steps):
        rise = steps // 20  # then half a cosine
        fall = 0.5 + 0.5 * math.cos(math.pi * (step - rise) / (steps - rise))
        optimizer.param_groups[0]["lr"] = LR * ((step + 1) / rise if step < rise else fall)
        loss = loss_of(
            model, train, torch.randint(len(train) - CONTEXT, (BATCH,), generator=random)
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    handle.check_replicas()
    last = steps // 10
    with torch.no_grad():
        starts = torch.linspace(0, len(valid) - CONTEXT - 1, 20_000).long()
        means = torch.tensor([fmean(losses[-last:]), float(loss_of(model, valid, starts))])
    dist.all_reduce(means)
    loss_mean, valid_mean = (means / dist.get_world_size()).tolist()
    handle.close()
    return {"loss": loss_mean, "valid": valid_mean, "sent": fmean(sent[-last:])}


def loss_of(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])


if __name__ == "__main__":
    main()
