"""A network learns to write, from real text, compressed as well as dense.

The text is WikiText-2 where OKTOPK_DATA names a folder that has it, and otherwise the sources of
Python's own library, which are everywhere.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from ranks import Rank, Ranks

CONTEXT, BATCH = 16, 48
OKTOPK = oktopk.OkTopk(density=0.02, warmup_steps=50)
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "torch": lambda p: torch.optim.AdamW(p, lr=0.003, betas=(0.9, 0.98)),
    "ours": lambda p: oktopk.AdamW(p, lr=0.003, betas=(0.9, 0.98), refresh_interval=64),
}


def text() -> Tensor:
    """A megabyte of it, as bytes."""
    folder = os.environ.get("OKTOPK_DATA")
    if folder:
        content = (Path(folder) / "wikitext2" / "train.txt").read_bytes()
    else:
        library = Path(sysconfig.get_path("stdlib"))
        content = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    return torch.frombuffer(bytearray(content[:1_000_000]), dtype=torch.uint8)


def writer() -> nn.Module:
    """Guesses the next byte from those before."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(256, 32),
        nn.Flatten(),
        nn.Linear(CONTEXT * 32, 256),
        nn.ReLU(),
        nn.LayerNorm(256),
        nn.Linear(256, 256),
    )


def learn(rank: Rank, algorithm: oktopk.Algorithm, name: str, steps: int) -> tuple[float, ...]:
    """The loss at the first step, its mean over the last 50, and the ratio of the last step."""
    corpus = text()
    model = DDP(writer(), process_group=rank.group)
    options = {"dense_below": 1024, "norm_clip": 0.5}
    handle = oktopk.attach(model, algorithm, group=rank.own_group, **options)
    seen: list[oktopk.StepStats] = []
    handle.subscribe(seen.append)
    optimizer = OPTIMIZERS[name](model.parameters())
    random = torch.Generator().manual_seed(rank.rank)
    losses = []
    for _ in range(steps):
        starts = torch.randint(0, len(corpus) - CONTEXT, (BATCH,), generator=random)
        windows = corpus[starts[:, None] + torch.arange(CONTEXT + 1)].long()
        loss = nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    handle.check_replicas()
    last = torch.tensor(losses[-50:]).mean()
    torch.distributed.all_reduce(last, group=rank.group)
    return losses[0], float(last) / rank.size, seen[-1].compression_ratio


def test_compressed_training_reaches_the_loss_of_dense(ranks: Ranks) -> None:
    (first, dense, _), *_ = ranks.run(4, learn, oktopk.Dense(), "sgd", 200)
    (_, sparse, ratio), *_ = ranks.run(4, learn, OKTOPK, "sgd", 200)
    print(f"loss {first:.3f} -> {dense:.3f} dense, {sparse:.3f} with Ok-Topk ({ratio:.1f} x)")
    assert dense < 0.6 * first
    assert sparse < 1.05 * dense
    assert ratio > 30


def test_our_adamw_loses_less_than_torchs(ranks: Ranks) -> None:
    losses = {
        name: ranks.run(2, learn, algorithm, kind, 400)[0][1]
        for name, algorithm, kind in (
            ("dense", oktopk.Dense(), "torch"),
            ("torch", OKTOPK, "torch"),
            ("ours", OKTOPK, "ours"),
        )
    }
    print(losses)
    assert losses["ours"] - losses["dense"] < 0.8 * (losses["torch"] - losses["dense"])
