"""Importing this module loads the compiled kernels. Processes forked later have them: launch.py."""

from __future__ import annotations

import torch

import oktopk

for dtype in (torch.float32, torch.float64):
    reduce = oktopk.SparseAllreduce(oktopk.OkTopk(density=0.1), numel=1000, dtype=dtype)
    for _ in range(3):
        reduce(torch.randn(1000, dtype=dtype))
