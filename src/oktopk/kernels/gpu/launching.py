"""How kernels are launched. All launches go through `launch`, and a test can take its place."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start a kernel on the current stream, and do not wait for it.

    Products and sums are not fused, so that they round as the reference does.

    Args:
        constants: compile-time constants and options of Triton, such as `num_warps`.
    """
    kernel[grid](*arguments, **constants, enable_fp_fusion=False)


def blocks(count: int, block: int) -> int:
    """How many blocks have `count` elements: at least one, as grids are not empty."""
    return max(1, -(-count // block))


def power(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()
