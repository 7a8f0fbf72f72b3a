"""Whether Adam survives sudden, large gradients when gradients are sparse.

    python benchmarks/spikes.py --text wikitext2/train.txt

Trains a small GPT-2 to write on, word by word, in DDP on local ranks over loopback: once for each
variant and seed, from the same weights and with the same batches. Nothing is clipped, the learning
rate is constant, and only the first steps are dense. So now and then, some steps later, a gradient
is a hundred times as large as the ones before. The text is a file, or else the sources of Python's
own library. A run takes 10 to 20 seconds.

columns
  seed 1 ...  loss on the last part of the text, which is not trained on, of the run with that seed
  mean        their mean
  worst       the largest training loss of rank 0 in a step after the dense ones, of all seeds

variants
  dense       every gradient is averaged whole, torch's AdamW
  torch       Ok-Topk, torch's AdamW on the sparse average
  adamw       Ok-Topk, oktopk.AdamW
  unbounded   the same, but that a step may be of any size
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
import oktopk.adam
from common import add_text_arguments, on_ranks, parser_for, progress, read_text, table
from oktopk.common.flags import positive, share

WORDS, LENGTH, BATCH = 4096, 64, 8
VARIANTS = ("dense", "torch", "adamw", "unbounded")


def main() -> None:
    parser = parser_for(__doc__)
    add_text_arguments(parser, VARIANTS, steps=120, seeds=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--warmup", type=positive, default=30, help="dense steps (30)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (0.001)")
    parser.add_argument("--density", type=share, default=0.02, help="(0.02)")
    args = parser.parse_args()
    rows = on_ranks(args.ranks, compare, args)
    parameters = sum(p.numel() for p in gpt().parameters())
    print(f"{parameters:,} parameters, {args.steps} steps, P = {args.ranks}, lr {args.lr}")
    print(table(rows))


def compare(rank: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    text = numbered(read_text(args.text).decode(errors="replace"))
    rows = []
    for variant in args.variants:
        row: dict[str, Any] = {"variant": variant}
        runs = []
        for seed in args.seeds:
            progress(rank, f"{variant}, seed {seed}")
            runs.append(learn(variant, text, args, seed))
            row[f"seed {seed}"] = f"{runs[-1][0]:.3f}"
        row["mean"] = f"{fmean(loss for loss, _ in runs):.3f}"
        row["worst"] = f"{max(worst for _, worst in runs):.2f}"
        rows.append(row)
    return rows


def numbered(text: str) -> Tensor:
    """The words of a text as numbers; rare ones are 0."""
    found = [word for word in text.replace("\n", " \n ").split(" ") if word]
    common = Counter(found).most_common(WORDS - 1)
    numbers = {word: number for number, (word, _) in enumerate(common, 1)}
    return torch.tensor([numbers.get(word, 0) for word in found])


def gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": LENGTH, "n_embd": 128, "n_layer": 3, "n_head": 4}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **sizes, **drops, **ends))  # type: ignore[arg-type]


def learn(variant: str, text: Tensor, args: argparse.Namespace, seed: int) -> tuple[float, float]:
    """One run: the loss at the end, and the largest one after the dense steps."""
    torch.manual_seed(seed)
    inner = gpt()
    model = DDP(inner)
    sparse = oktopk.OkTopk(args.density, args.warmup)
    handle = oktopk.attach(model, oktopk.Dense() if variant == "dense" else sparse)
    plain = variant in ("dense", "torch")
    kind: Any = torch.optim.AdamW if plain else oktopk.AdamW
    optimizer = kind(model.parameters(), lr=args.lr)
    oktopk.adam._LARGEST_STEP = math.inf if variant == "unbounded" else 2.0
    train, valid = text[: -len(text) // 10], text[-len(text) // 10 :]
    random = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    losses = []
    for _ in range(args.steps):
        starts = torch.randint(len(train) - LENGTH, (BATCH,), generator=random)
        loss = loss_of(model, train, starts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    handle.check_replicas()
    with torch.no_grad():
        starts = torch.linspace(0, len(valid) - LENGTH - 1, 100).long()
        final = fmean(float(loss_of(inner, valid, part)) for part in starts.split(20))
    handle.close()
    return final, max(losses[args.warmup :], default=0.0)


def loss_of(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    windows = text[starts[:, None] + torch.arange(LENGTH)]
    loss: Tensor = model(windows, labels=windows).loss
    return loss


if __name__ == "__main__":
    main()
