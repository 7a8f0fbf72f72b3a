"""Compiles the Triton kernels ahead of time, without a GPU, and prints what each one takes.

    PYTHONPATH=.venv/triton python benchmarks/compile_gpu.py     # `make env` puts Triton there

The step runs on meta tensors, which have no values: a phase that asks for one fails here. The
launches that it makes are compiled for each target.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
except ImportError:
    sys.exit("Triton is needed: `make env`, then PYTHONPATH=.venv/triton python ...")

from common import table
from oktopk.kernels import numbers
from oktopk.kernels.gpu import launching
from oktopk.kernels.gpu.loops import choosing, dense, reading, recording, writing
from oktopk.kernels.gpu.step import GpuStep
from oktopk.kernels.plan import Plan, Vectors, rooms
from oktopk.wire.codecs import CODECS

MODULES = (choosing, dense, reading, recording, writing)
TARGETS = (80, 90, 100)
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32",
    torch.int64: "*i64", torch.uint8: "*u8",
}  # fmt: skip
OPTIONS = ("num_warps", "enable_fp_fusion")
INEXACT = re.compile(r"\bfma\.\S*f32|\S+\.ftz\S*|div\.full\S*|\S+\.approx\S*")
"""Instructions that do not round as the reference does."""


@dataclass(frozen=True)
class Case:
    """Settings of a step that need kernels of their own."""

    wire: str = "int8"
    kind: torch.dtype = torch.float32
    numel: int = 27_569_568
    k: int = 551_391
    span: int = 4_000_000
    size: int = 8
    momentum: float = 0.0
    scale: float = 1.0


SMALL = (
    Case(),
    Case("int4", torch.bfloat16, span=500_000, momentum=0.9, scale=0.5),
)
"""They launch each kernel."""
LARGE = (
    Case(kind=torch.float16, span=150_000),  # a bitmap
    Case("int4", torch.float16, k=100_000, span=20_000_000),  # 8 low bits
    Case(k=5_000, span=20_000_000),  # 12
    Case(k=300, span=20_000_000),  # 16
    Case(numel=3 << 31, k=1 << 32, span=1 << 31),  # long indices, and sizes beyond 32 bits
    Case(numel=1, k=1, span=1, size=1, momentum=0.9),  # Triton knows a size of 1
)


@dataclass(frozen=True)
class Launch:
    """A kernel and what it is specialised for."""

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]


def kernels() -> dict[str, ModuleType]:
    """The module of each kernel: of all that are defined, launched or not."""
    return {
        name: module
        for module in MODULES
        for name, found in vars(module).items()
        if isinstance(found, triton.JITFunction) and not name.startswith("_")
    }


def launches(case: Case) -> dict[Launch, None]:
    """What a step launches."""
    found: dict[Launch, None] = {}

    def record(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        options = {"num_warps": 4, "enable_fp_fusion": False}
        options |= {name: constants.pop(name) for name in OPTIONS if name in constants}
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
        assert len(values) == len(arguments) + len(constants) == len(kernel.arg_names), kernel
        signature = {
            parameter.name: _type(
                values[parameter.name], parameter.is_constexpr, not parameter.do_not_specialize
            )
            for parameter in kernel.params
        }
        known = {name: values[name] for name, kind in signature.items() if kind == "constexpr"}
        found[
            Launch(
                kernel.__module__,
                kernel.__name__,
                tuple(signature.items()),
                tuple(known.items()),
                tuple(options.items()),
            )
        ] = None

    codec = CODECS[case.wire](torch.float32)
    numel, size, k, span = case.numel, case.size, case.k, case.span
    most = min(span, -(-k * 6 // (5 * size)))
    room = rooms(codec, most, span, numbers.index_dtype(numel).itemsize)
    parts = numel // 2, numel - numel // 2
    plan = Plan(
        numel, size, size - 1, k, k, k, most, 1, 1, span, *room, room[-1], parts, codec
    )  # fmt: skip
    with patch.object(launching, "launch", record):
        step = GpuStep(plan, torch.float32, torch.device("meta"))
        flat = torch.empty(numel, dtype=case.kind, device="meta")
        dense = [torch.empty(numel, device="meta") for _ in range(4)]
        vectors = Vectors(
            flat.split(list(plan.parts)), flat.split(list(plan.parts)), dense[0], dense[1], 0.5,
            case.scale, case.momentum, *(dense[2:] if case.momentum else ()),
        )  # fmt: skip
        step.prepare(vectors, k, 1)
        step.combine()
        step.apply(vectors)
    return found


def _type(value: Any, constant: bool, special: bool) -> str:
    """As Triton calls it. To Triton, an integer of 1 is a constant."""
    if constant or (special and isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compiled(launch: Launch, target: int) -> dict[str, Any]:
    """Compile for a target; registers and shared memory of the result."""
    kernel = getattr(sys.modules[launch.module], launch.kernel)
    source = ASTSource(kernel, dict(launch.signature), dict(launch.constants))
    result = triton.compile(source, GPUTarget("cuda", target, 32), dict(launch.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", used)}
    return {
        "kernel": launch.kernel,
        "constants": " ".join(f"{name}={value}" for name, value in launch.constants),
        "target": f"sm_{target}",
        "registers": usage["REG"],
        "stack bytes": usage["STACK"],
        "shared bytes": result.metadata.shared,
        "inexact": " ".join(sorted(set(INEXACT.findall(result.asm["ptx"])))),
    }


def jobs(cases: tuple[Case, ...]) -> Iterator[Launch]:
    """All launches, each once."""
    found: dict[Launch, None] = {}
    for case in cases:
        found |= launches(case)
    missing = kernels().keys() - {launch.kernel for launch in found}
    if missing:
        raise SystemExit(f"no case launches {', '.join(sorted(missing))}")
    return iter(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="also rare settings")
    parser.add_argument("--targets", type=int, nargs="+", default=TARGETS, metavar="SM")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    todo = [(launch, target) for launch in jobs(SMALL + LARGE if args.all else SMALL)
            for target in args.targets]  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda job: compiled(*job), todo))
    print(json.dumps(rows) if args.json else table(rows))


if __name__ == "__main__":
    main()
