"""Triton kernels on a machine without a GPU: interpreted, and compiled ahead of time.

Both are processes of their own. The interpreter is chosen when triton is imported, and then nothing
can be compiled.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fleet import Fleet
from oktopk import kernels

HERE = Path(__file__).parent
TRITON = Path(sys.prefix) / "triton"
"""Where `make env` puts it; see requirements-triton.lock."""
needs_triton = pytest.mark.skipif(
    not TRITON.exists() and importlib.util.find_spec("triton") is None, reason="needs Triton"
)


def run(*command: str | Path, **environment: str) -> str:
    """What a Python program prints."""
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings["OMP_NUM_THREADS"] = "1"
    if TRITON.exists():
        settings["PYTHONPATH"] = os.pathsep.join([str(TRITON), os.environ.get("PYTHONPATH", "")])
    program = subprocess.run(
        [sys.executable, *command],
        env=settings | environment,
        cwd=HERE.parent,
        capture_output=True,
        text=True,
    )
    assert program.returncode == 0, program.stdout[-20_000:] + program.stderr[-5_000:]
    return program.stdout


@needs_triton
def test_cuda_has_them() -> None:
    code = "from oktopk.kernels import for_type; print(for_type('cuda').__name__)"
    assert run("-c", code) == "GpuKernels\n"


def test_the_reference_runs_without_triton() -> None:
    hidden = {"triton": None, "oktopk.kernels.gpu": None}
    with mock.patch.dict(sys.modules, hidden):
        assert kernels.for_type.__wrapped__("cuda") is kernels.Kernels


@needs_triton
@pytest.mark.timeout(900)
def test_they_equal_the_reference() -> None:
    """Bit for bit; `gpu_cases.py` has the cases."""
    cases = HERE / "gpu_cases.py"
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", cases, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_a_gpu_gives_the_bits_of_the_reference(wire: str, gradient: torch.dtype) -> None:
    """Of the reference on a CPU. It takes one GPU, and no NCCL."""
    kind = kernels.for_type("cuda").Step
    common: dict[str, Any] = {
        "numel": 100_003,
        "size": 3,
        "k": 2_000,
        "parts": (40_000, 3, 60_000),
        "wire": wire,
        "gradient_dtype": gradient,
        "momentum": 0.9,
        "rider": 24,
    }
    one, other = Fleet(kernels.Step, **common), Fleet(kind, device="cuda", **common)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        gradients = [torch.randn(100_003, generator=generator) ** 3 for _ in range(3)]
        expected = one.run(gradients, scale=0.7)
        found = other.run(gradients, scale=0.7)
        assert one.records() == other.records()
        for a, b in zip([*expected, *one.residuals], [*found, *other.residuals], strict=True):
            assert torch.equal(a, b.cpu())


@needs_triton
@pytest.mark.timeout(900)
def test_all_kernels_compile(tmp_path: Path) -> None:
    """For each target, with nothing that rounds otherwise than the reference, and without a spill.

    The program fails if a kernel is never launched, and if the host asks for a value.
    """
    program = HERE.parent / "benchmarks" / "compile_gpu.py"
    rows = json.loads(run(program, "--json", TRITON_CACHE_DIR=str(tmp_path)))
    assert {row["target"] for row in rows} == {"sm_80", "sm_90", "sm_100"}
    assert not [row for row in rows if row["inexact"] or row["stack bytes"]]
