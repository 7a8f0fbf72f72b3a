"""How fast the kernels are, against what torch offers for the same job.

All rows are medians of one run with the same number of threads; read the ratios, not the
milliseconds. The inputs are heavy-tailed, as gradients are.
"""

from __future__ import annotations

import argparse
import json

import torch

from common import median_ms, table
from oktopk.common.flags import positive, share
from oktopk.core.select import kth_largest
from oktopk.kernels import for_device
from oktopk.lab.bench.raw import heavy_tailed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--numel", type=positive, default=27_569_568, help="elements of the gradient"
    )
    parser.add_argument("--density", type=share, default=0.02, help="share that is selected")
    parser.add_argument(
        "--threads", type=positive, default=torch.get_num_threads(), help="threads to use"
    )
    parser.add_argument("--repeats", type=positive, default=11, help="runs that the median is of")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    residual, gradient = heavy_tailed(args.numel, seed=0), heavy_tailed(args.numel, seed=1)
    accumulated, scratch = residual + gradient, residual.clone()
    magnitudes = accumulated.abs()
    k = max(1, round(args.density * args.numel))
    kernels = for_device(residual.device)
    threshold, _ = kth_largest(accumulated, k)
    assert threshold == float(torch.topk(magnitudes, k, sorted=False).values.min())
    out = torch.empty_like(residual)
    jobs = {
        "residual.add_(gradient)": lambda: scratch.add_(gradient),
        "torch.add(residual, gradient, out=)": lambda: torch.add(residual, gradient, out=out),
        "accumulate + select, fused": lambda: kernels.accumulate(
            residual, [gradient], out, threshold
        ),
        "select alone": lambda: kernels.select(accumulated, threshold),
        "exact k-th largest": lambda: kth_largest(accumulated, k),
        "torch.topk": lambda: torch.topk(magnitudes, k, sorted=False),
    }
    times = {name: median_ms(job, args.repeats) for name, job in jobs.items()}
    add, topk = times["residual.add_(gradient)"], times["torch.topk"]
    rows = [
        {"job": name, "ms": ms, "x add_": ms / add, "topk / this": topk / ms}
        for name, ms in times.items()
    ]
    if args.json:
        print(json.dumps({"arguments": vars(args), "rows": rows}))
    else:
        print(f"n = {args.numel:,}, k = {k:,}, {args.threads} threads, float32")
        print(table(rows))


if __name__ == "__main__":
    main()
