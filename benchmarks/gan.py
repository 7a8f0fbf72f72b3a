"""What becomes of a GAN when gradients that it throws away come back, or do not.

    python benchmarks/gan.py --images cifar-10-batches-bin/data_batch_1.bin

Trains a small DCGAN on CIFAR-10 (its binary version) with 2 ranks, with the usual loop: the
generator's loss goes back through the discriminator, whose gradients are then cleared. Each run
takes about a minute on 2 cores; all, with three seeds, about ten.

rows
  dense      plain DDP
  keep       Ok-Topk, density 2 %, 20 dense steps first; gradients that were thrown away come back
  discard    the same, but that their steps are taken back (the default)

columns
  seed 1 ... loss of the discriminator, mean of the second half of the iterations. Where it learns
             nothing, that is 1.39.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from common import on_ranks, parser_for, table
from oktopk.common.flags import positive

ROWS = ("dense", "keep", "discard")
LATENT = 64


def discriminator() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        norm = [nn.BatchNorm2d(outputs)] if inputs > 3 else []
        return [nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False), *norm, nn.LeakyReLU(0.2)]

    last = nn.Conv2d(128, 1, 4, bias=False)
    return nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128), last, nn.Flatten())


def generator() -> nn.Module:
    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        up = nn.ConvTranspose2d(inputs, outputs, 4, stride, stride - 1, bias=False)
        return [up, nn.BatchNorm2d(outputs), nn.ReLU()]

    last = nn.ConvTranspose2d(32, 3, 4, 2, 1, bias=False)
    return nn.Sequential(
        *block(LATENT, 128, 1), *block(128, 64, 2), *block(64, 32, 2), last, nn.Tanh()
    )


def images(path: Path) -> Tensor:
    """Of CIFAR-10's binary version: a label and 3 x 32 x 32 bytes each."""
    raw = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    return raw.view(-1, 3073)[:4000, 1:].reshape(-1, 3, 32, 32).float() / 127.5 - 1


def train(rank: int, row: str, seed: int, steps: int, path: Path) -> float:
    """The loss at the end."""
    torch.manual_seed(seed)
    data, random = images(path), torch.Generator().manual_seed(10 * seed + rank)
    judge, artist = DDP(discriminator()), DDP(generator())
    if row != "dense":
        for model in (judge, artist):
            algorithm = oktopk.OkTopk(density=0.02, warmup_steps=20)
            oktopk.attach(model, algorithm, dense_below=512, cleared=row)
    optimizers = [
        torch.optim.Adam(model.parameters(), 2e-4, betas=(0.5, 0.999)) for model in (judge, artist)
    ]

    def loss(pictures: Tensor, real: float) -> Tensor:
        answers = judge(pictures)
        goal = torch.full_like(answers, real)
        return nn.functional.binary_cross_entropy_with_logits(answers, goal)

    losses = []
    for _ in range(steps):
        judge.zero_grad()
        of_real = loss(data[torch.randint(len(data), (32,), generator=random)], 1.0)
        of_real.backward()
        pictures = artist(torch.randn(32, LATENT, 1, 1, generator=random))
        of_fake = loss(pictures.detach(), 0.0)
        of_fake.backward()
        optimizers[0].step()
        artist.zero_grad()
        loss(pictures, 1.0).backward()  # through the discriminator, whose gradients nobody wants
        optimizers[1].step()
        losses.append(of_real.item() + of_fake.item())
    return sum(losses[steps // 2 :]) / (steps - steps // 2)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--images", type=Path, required=True, help="data_batch_1.bin of CIFAR-10")
    parser.add_argument("--steps", type=positive, default=400)
    parser.add_argument("--seeds", type=positive, default=3)
    options = parser.parse_args()
    if not options.images.is_file():
        parser.error(f"there is no file {options.images}")
    rows: list[dict[str, str | float]] = [{"": row} for row in ROWS]
    for seed in range(1, options.seeds + 1):
        for line in rows:
            done = on_ranks(2, train, line[""], seed, options.steps, options.images)
            line[f"seed {seed}"] = done
    print(table(rows))


if __name__ == "__main__":
    main()
