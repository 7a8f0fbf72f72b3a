"""What an optimizer costs or saves in accuracy when gradients are sparse.

    python benchmarks/optimizers.py --data-dir corpora --plot optimizers.svg

Trains the recipe an4 with each variant and each seed, one run after the other, and compares the
word error rates (WER) at the end. A run of 20 epochs with 4 workers takes about 7 minutes on 2
cores; the default, 4 variants with 3 seeds each, about an hour and a half. Runs are kept in
RUNS/VARIANT-SEED, their output in RUNS/VARIANT-SEED.log. A finished one is taken as it is, so the
same command goes on where it was stopped; what was under way then must be removed first.

variants
  dense        dense AdamW
  torch-2      Ok-Topk with a density of 2 %, torch's AdamW
  torch-2-b5   the same with beta1 0.5, which is what oktopk.AdamW takes for sparse averages
  adamw-2      Ok-Topk 2 %, oktopk.AdamW
  adamw-1      Ok-Topk 1 %, oktopk.AdamW
  adamw-05     Ok-Topk 0.5 %, oktopk.AdamW
  frozen-2     Ok-Topk 2 %, oktopk.AdamW whose second moment stays as the warm-up left it

columns
  seed 1 ...   WER at the end in %, of the run with that seed
  mean         their mean
  spread       the largest minus the smallest
  - dense      the mean minus that of dense, in points
  loss         training loss of the last epoch, mean over seeds
  kB sent      by rank 0 in a sparse step, mean over steps and seeds; for dense, in a dense step
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from common import parser_for, table
from oktopk.common.errors import UserError
from oktopk.common.flags import positive
from oktopk.common.format import NOTHING
from oktopk.train.metrics_file import METRICS, read_metrics


@dataclass(frozen=True)
class Variant:
    label: str
    flags: str
    """Of `oktopk train an4`."""
    colour: str
    """In the plot. Okabe and Ito chose these so that colour-blind people can tell them apart."""


VARIANTS = {
    "dense": Variant("dense AdamW", "--compression false", "#000000"),
    "torch-2": Variant(
        "Ok-Topk 2 %, torch's AdamW", "--optimizer torch-adamw --density 0.02", "#D55E00"
    ),
    "torch-2-b5": Variant(
        "Ok-Topk 2 %, torch's AdamW, beta1 0.5",
        "--optimizer torch-adamw --momentum 0.5 --density 0.02",
        "#E69F00",
    ),
    "adamw-2": Variant("Ok-Topk 2 %, oktopk.AdamW", "--optimizer adamw --density 0.02", "#0072B2"),
    "adamw-1": Variant("Ok-Topk 1 %, oktopk.AdamW", "--optimizer adamw --density 0.01", "#56B4E9"),
    "adamw-05": Variant(
        "Ok-Topk 0.5 %, oktopk.AdamW", "--optimizer adamw --density 0.005", "#CC79A7"
    ),
    "frozen-2": Variant(
        "Ok-Topk 2 %, second moment frozen",
        "--optimizer adamw --refresh-interval 0 --density 0.02",
        "#009E73",
    ),
}


@dataclass(frozen=True)
class Run:
    """What is read of a finished run."""

    loss: dict[int, float]
    """Training loss of each epoch."""
    wer: dict[int, float]
    """WER in %, of the epochs that were validated."""
    sent: dict[str, list[int]]
    """Bytes that rank 0 sent in each step, for the phases dense and sparse."""


Runs = dict[str, dict[int, Run]]
"""Finished runs by variant and seed."""


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument(
        "--data-dir", metavar="DIR", help="folder of the corpus (one in the user's cache)"
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default="runs/optimizers",
        metavar="DIR",
        help="folder of the runs (runs/optimizers)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[1, 2, 3],
        metavar="N",
        help="one run of each variant for each (1 2 3)",
    )
    parser.add_argument("--epochs", type=positive, default=20, metavar="N", help="of a run (20)")
    parser.add_argument("--workers", type=positive, default=4, metavar="N", help="of a run (4)")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=["dense", "torch-2", "adamw-2", "adamw-1"],
        metavar="NAME",
        help="which of them (dense torch-2 adamw-2 adamw-1)",
    )
    parser.add_argument(
        "--plot", type=plot_file, metavar="FILE", help="draw loss and WER, to a .svg or .png"
    )
    parser.add_argument(
        "--report-only", action="store_true", help="train nothing, report the runs that are there"
    )
    args = parser.parse_args()
    args.variants, args.seeds = list(dict.fromkeys(args.variants)), list(dict.fromkeys(args.seeds))
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib: pip install 'oktopk[plots]'")
    if not args.report_only:
        train_all(args)
    runs = finished_runs(args)
    print(f"an4, {args.epochs} epochs; WER in %")
    print(table([row(name, runs, args.seeds) for name in runs]))
    if args.plot:
        plot(runs, args.plot)


def plot_file(text: str) -> Path:
    """An argparse type: a file that plots can be written to."""
    path = Path(text)
    if path.suffix not in (".svg", ".png"):
        raise argparse.ArgumentTypeError(f"{text} does not end in .svg or .png")
    return path


def train_all(args: argparse.Namespace) -> None:
    """Make the runs that are not there yet. A seed's variants come one after the other."""
    missing = []
    for seed in args.seeds:
        for name in args.variants:
            folder = args.runs / f"{name}-{seed}"
            run = read(folder, args.epochs)
            if run:
                print(f"{folder} is finished: WER {run.wer[args.epochs]:.2f} %")
            elif (folder / METRICS).exists():
                raise UserError(
                    f"{folder} holds a run that is not finished, or not of {args.epochs} epochs: "
                    f"remove it, or name another folder with --runs"
                )
            else:
                missing.append((name, seed, folder))
    args.runs.mkdir(parents=True, exist_ok=True)
    for name, seed, folder in missing:
        train(command(name, seed, folder, args), folder, args.epochs)


def command(name: str, seed: int, folder: Path, args: argparse.Namespace) -> list[str]:
    words = [sys.executable, "-m", "oktopk", "train", "an4"]
    words += ["--nworkers", str(args.workers), "--max-epochs", str(args.epochs)]
    words += ["--seed", str(seed), "--checkpoint-every", "-1", "--tensorboard", "false"]
    words += ["--run-dir", str(folder)]
    if args.data_dir:
        words += ["--data-dir", args.data_dir]
    return words + VARIANTS[name].flags.split()


def train(words: list[str], folder: Path, epochs: int) -> None:
    print(shlex.join(words), end=": ", flush=True)
    # Not with_suffix, which would take a dot in the name for one.
    log = folder.with_name(folder.name + ".log")
    since = time.perf_counter()
    with open(log, "w") as output:
        code = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    run = read(folder, epochs)
    if code or not run:
        print("failed")
        last_lines = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise UserError(f"{folder} failed with exit code {code}; {log} ends with\n{last_lines}")
    print(f"WER {run.wer[epochs]:.2f} %, {time.perf_counter() - since:.0f} s")


def read(folder: Path, epochs: int) -> Run | None:
    """A run, if it is finished: its last epoch is the one asked for, and was validated."""
    if not (folder / METRICS).exists():
        return None
    steps, records = read_metrics(folder)
    if not records or records[-1]["epoch"] != epochs or not records[-1]["validation"]:
        return None
    return Run(
        loss={record["epoch"]: record["loss"] for record in records},
        wer={x["epoch"]: 100 * x["validation"]["wer"] for x in records if x["validation"]},
        sent={
            phase: [step["bytes_sent"] for step in steps if step["phase"] == phase]
            for phase in ("dense", "sparse")
        },
    )


def finished_runs(args: argparse.Namespace) -> Runs:
    """Those that are there; says which are not."""
    runs: Runs = {}
    missing = []
    for name in args.variants:
        for seed in args.seeds:
            run = read(args.runs / f"{name}-{seed}", args.epochs)
            if run:
                runs.setdefault(name, {})[seed] = run
            else:
                missing.append(f"{name}-{seed}")
    if not runs:
        raise UserError(f"{args.runs} has no finished run of {args.epochs} epochs: see --runs")
    if missing:
        print(f"not in {args.runs}, or not finished: {', '.join(missing)}", file=sys.stderr)
    return runs


def row(name: str, runs: Runs, seeds: list[int]) -> dict[str, str]:
    wers = final_wers(runs[name])
    sent = [
        count
        for run in runs[name].values()
        for count in run.sent["dense" if name == "dense" else "sparse"]
    ]
    mean = fmean(wers.values())
    cells = {f"seed {seed}": f"{wers[seed]:.2f}" if seed in wers else NOTHING for seed in seeds}
    cells["mean"] = f"{mean:.2f}"
    cells["spread"] = f"{max(wers.values()) - min(wers.values()):.2f}" if len(wers) > 1 else NOTHING
    cells["- dense"] = (
        f"{mean - fmean(final_wers(runs['dense']).values()):+.2f}"
        if "dense" in runs and name != "dense"
        else NOTHING
    )
    cells["loss"] = f"{fmean(run.loss[max(run.loss)] for run in runs[name].values()):.2f}"
    cells["kB sent"] = f"{fmean(sent) / 1000:,.0f}" if sent else NOTHING
    return {"variant": VARIANTS[name].label} | cells


def final_wers(runs: dict[int, Run]) -> dict[int, float]:
    return {seed: run.wer[max(run.wer)] for seed, run in runs.items()}


def plot(runs: Runs, file: Path) -> None:
    """Loss and WER by epoch: the mean over seeds, in a band from the smallest to the largest."""
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    def draw(axes: Axes, name: str, curves: list[dict[int, float]], marker: str) -> None:
        epochs = sorted(set.intersection(*(set(curve) for curve in curves)))
        values = [[curve[epoch] for curve in curves] for epoch in epochs]
        variant = VARIANTS[name]
        axes.plot(
            epochs,
            [fmean(each) for each in values],
            color=variant.colour,
            label=variant.label,
            linewidth=1.5,
            marker=marker,
            markersize=4,
        )
        axes.fill_between(
            epochs,
            [min(each) for each in values],
            [max(each) for each in values],
            color=variant.colour,
            alpha=0.15,
            linewidth=0,
        )

    # Text stays text, which keeps the file small; and the same runs give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "oktopk"}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for name in runs:
            draw(left, name, [run.loss for run in runs[name].values()], marker="")
            draw(right, name, [run.wer for run in runs[name].values()], marker="o")
        left.set(xlabel="epoch", ylabel="training loss", yscale="log")
        left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        left.yaxis.set_major_formatter("{x:g}")
        left.yaxis.set_minor_formatter(NullFormatter())
        right.set(xlabel="epoch", ylabel="WER, %", ylim=(0, None))
        right.legend(frameon=False)
        for axes in (left, right):
            axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 5, 10], integer=True))
            axes.grid(color="0.9")
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=150, metadata={"Date": None})
    print(f"{file} has the curves")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"optimizers.py: {error}")
