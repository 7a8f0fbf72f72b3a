"""How often a threshold that is carried from step to step must be evaluated anew.

Error feedback on several simulated ranks, without communication. For each rule, the share of
steps in which the local threshold of a rank, or the global one, selected fewer than 0.9 k values
or (the global one) so many that the exact threshold must be looked for; and the mean number of
candidates, which is what is sent.

rules
  reuse      the last exact threshold, evaluated every 32 steps
  corrected  the last threshold times (count / k) ** 0.1
  forecast   oktopk.core.select.Carried, as the library does it: aims at 1.2 k, follows the trend

gradients
  noise      heavy-tailed, independent, its scale rising and falling by a factor of 7
  moving     the same, and where the large values are moves
  persistent two thirds of each gradient are the same in every step
  steady     mostly noise with some persistent part, its scale nearly constant
  jumps      noise whose scale jumps by a factor of 3 every 25 steps
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from common import parser_for, table
from oktopk.algorithms.oktopk_variable import MANY
from oktopk.common.flags import positive, share
from oktopk.core.select import TOLERANCE, Carried, aim, is_due, keep_from, kth_largest, select
from oktopk.lab.bench.raw import heavy_tailed

Gradients = Callable[[int, int, Tensor, Tensor], Tensor]
"""(step, numel, fresh noise, noise that stays the same) -> gradient"""


def profile(step: int, numel: int) -> Tensor:
    return 1 + 3 * torch.sin(2 * math.pi * (torch.arange(numel) / numel + step / 40)) ** 8


def wave(step: int) -> float:
    return math.exp(math.sin(step / 6))


GRADIENTS: dict[str, Gradients] = {
    "noise": lambda step, numel, fresh, same: fresh * wave(step),
    "moving": lambda step, numel, fresh, same: fresh * profile(step, numel) * wave(step),
    "persistent": lambda step, numel, fresh, same: (0.5 * fresh + same) * wave(step),
    "steady": lambda step, numel, fresh, same: (
        (fresh + 0.3 * same) * math.exp(0.3 * math.sin(step / 20))
    ),
    "jumps": lambda step, numel, fresh, same: fresh * (1 if step // 25 % 2 else 3),
}


class Rule:
    """One threshold under one rule; counts how often it had to be evaluated anew."""

    def __init__(self, name: str, k: int, numel: int, most: float) -> None:
        self.name, self.k, self.most = name, k, most
        self.aim = aim(k, numel) if name == "forecast" else k
        self.carried = Carried()
        self.off = 0
        self.counts: list[float] = []

    def select(self, values: Tensor, step: int) -> float:
        """The threshold of the k values to take in this step."""
        threshold = self.carried.value
        candidates = select(values, threshold)
        off = not (1 - TOLERANCE) * self.k <= len(candidates) <= self.most * self.k
        if step >= 40:
            self.counts.append(len(candidates) / self.k)
            self.off += off
        if off or (is_due(step, 32) and len(candidates) < self.aim):
            threshold, _ = kth_largest(values, self.aim)
            candidates = select(values, threshold)
        if self.name == "forecast":
            _, taken, right = keep_from(candidates, threshold, self.k, self.aim)
            self.carried = self.carried.after(right, values.dtype)
            return taken
        change = (len(candidates) / self.k) ** 0.1 if self.name == "corrected" else 1.0
        self.carried = Carried(threshold * change)
        return threshold


def simulate(
    rule: str, gradients: Gradients, numel: int, k: int, ranks: int, steps: int
) -> dict[str, float]:
    same = [heavy_tailed(numel, seed=rank) for rank in range(ranks)]
    residuals = [torch.zeros(numel) for _ in range(ranks)]
    # Locally too many cost nothing with a forecast: the k largest are picked from them.
    local = [Rule(rule, k, numel, numel if rule == "forecast" else 1.1) for _ in range(ranks)]
    total = Rule(rule, k, numel, MANY if rule == "forecast" else 1.1)
    for step in range(steps):
        sums = torch.zeros(numel)
        offered = []
        for rank in range(ranks):
            fresh = heavy_tailed(numel, seed=1000 * rank + step + 100)
            residuals[rank] += gradients(step, numel, fresh, same[rank])
            threshold = local[rank].select(residuals[rank], step)
            offered.append(residuals[rank].abs() >= threshold)
            sums += residuals[rank] * offered[rank]
        applied = sums.abs() >= total.select(sums, step)
        for residual, mine in zip(residuals, offered, strict=True):
            residual[applied & mine] = 0
    measured = len(total.counts)
    return {
        "local anew": sum(each.off for each in local) / (ranks * measured),
        "global anew": total.off / measured,
        "global candidates / k": sum(total.counts) / measured,
    }


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--numel", type=positive, default=100_000, help="elements (100,000)")
    parser.add_argument("--density", type=share, default=0.02, help="share to select (0.02)")
    parser.add_argument("--ranks", type=positive, default=4, help="simulated ranks (4)")
    parser.add_argument("--steps", type=positive, default=100, help="steps after 40 first (100)")
    args = parser.parse_args()
    k = max(1, round(args.density * args.numel))
    rows = [
        {"gradients": name, "rule": rule}
        | simulate(rule, gradients, args.numel, k, args.ranks, args.steps + 40)
        for name, gradients in GRADIENTS.items()
        for rule in ("reuse", "corrected", "forecast")
    ]
    print(f"n = {args.numel:,}, k = {k:,}, P = {args.ranks}, {args.steps} steps after 40")
    print(table(rows, left=2))


if __name__ == "__main__":
    main()
