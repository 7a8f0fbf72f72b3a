"""Code that the benchmarks share: arguments, local ranks, times and tables."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn

from oktopk.common import format
from oktopk.common.flags import positive


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows the description as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_text_arguments(
    parser: argparse.ArgumentParser, variants: Iterable[str], steps: int, seeds: list[int]
) -> None:
    """Flags of benchmarks that learn a text, with each variant and each seed."""
    parser.add_argument("--text", type=_file, help="file to learn from (Python's own library)")
    parser.add_argument("--steps", type=positive, default=steps, help=f"of each run ({steps})")
    parser.add_argument("--ranks", type=positive, default=2, help="number of local ranks, P (2)")
    parser.add_argument("--seeds", type=int, nargs="+", default=seeds, metavar="N")
    parser.add_argument(
        "--variants", nargs="+", choices=variants, default=list(variants), metavar="VARIANT"
    )


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text}: there is no such file")
    return Path(text)


def read_text(path: Path | None) -> bytes:
    """A file's content, or the sources of Python's own library."""
    if path is not None:
        return path.read_bytes()
    library = Path(sysconfig.get_path("stdlib"))
    return b"".join(file.read_bytes() for file in sorted(library.glob("*.py")))


def on_ranks(size: int, work: Callable[..., Any], *args: Any, threads: int = 1) -> Any:
    """Call `work(rank, *args)` on local ranks that talk over loopback; the result of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank_main, args=(size, threads, folder, work, args), nprocs=size)
        return json.loads(Path(folder, "result.json").read_text())


def _rank_main(
    rank: int, size: int, threads: int, folder: str, work: Callable[..., Any], args: Any
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(threads)
    store = FileStore(os.path.join(folder, "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    result = work(rank, *args)
    progress(rank, "")
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def median_ms(job: Callable[[], Any], repeats: int) -> float:
    """The median time of a call, after one that warms up."""
    job()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        job()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


def slowest_ms(job: Callable[[], Any]) -> float:
    """The time of a call on the slowest rank; all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    job()
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return 1000 * float(seconds)


def progress(rank: int, text: str) -> None:
    if rank == 0 and sys.stderr.isatty():
        print(f"\r{text:40}" + ("" if text else "\r"), end="", file=sys.stderr, flush=True)


def table(rows: list[dict[str, Any]], left: int = 1) -> str:
    """Rows as aligned columns. The first `left` of them hold names; the others hold numbers."""

    def text(value: Any) -> str:
        if isinstance(value, float):
            return format.digits(value)
        return f"{value:,}" if isinstance(value, int) else str(value)

    cells = [list(rows[0]), *([text(value) for value in row.values()] for row in rows)]
    return "\n".join(format.table(cells, left))
