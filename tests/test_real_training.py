"""A recurrent network learns to write, from real text, compressed as well as dense.

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

STEPS, WARMUP, LENGTH, BATCH = 200, 30, 48, 8


def text() -> Tensor:
    """A megabyte of it, as bytes."""
    folder = os.environ.get("OKTOPK_DATA")
    if folder:
        content = (Path(folder) / "wikitext2" / "train.txt").read_bytes()
    else:
        library = Path(sysconfig.get_path("stdlib"))
        content = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    return torch.frombuffer(bytearray(content[:1_000_000]), dtype=torch.uint8)


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.memory = nn.GRU(64, 128, batch_first=True)
        self.output = nn.Linear(128, 256)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.output(self.memory(self.embedding(x))[0])
        return result


def learn(rank: Rank, algorithm: oktopk.Algorithm) -> tuple[float, float, float]:
    """The loss at the first step, its mean over the last 50, and the ratio of the last step."""
    corpus = text()
    torch.manual_seed(0)
    model = DDP(Writer(), process_group=rank.group)
    options = {"dense_below": 1024, "norm_clip": 0.5}
    handle = oktopk.attach(model, algorithm, group=rank.own_group, **options)
    seen: list[oktopk.StepStats] = []
    handle.subscribe(seen.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    random = torch.Generator().manual_seed(rank.rank)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(0, len(corpus) - LENGTH - 1, (BATCH,), generator=random)
        lines = torch.stack([corpus[s : s + LENGTH + 1] for s in starts.tolist()]).long()
        scores = model(lines[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), lines[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    handle.check_replicas()
    last = torch.tensor(losses[-50:]).mean()
    torch.distributed.all_reduce(last, group=rank.group)
    return losses[0], float(last) / rank.size, seen[-1].compression_ratio


def test_compressed_training_reaches_the_loss_of_dense(ranks: Ranks) -> None:
    (first, dense, _), *_ = ranks.run(4, learn, oktopk.Dense())
    (_, sparse, ratio), *_ = ranks.run(4, learn, oktopk.OkTopk(density=0.02, warmup_steps=WARMUP))
    print(f"loss {first:.3f} -> {dense:.3f} dense, {sparse:.3f} with Ok-Topk ({ratio:.1f} x)")
    assert dense < 0.6 * first
    assert sparse < 1.05 * dense
    assert ratio > 30
