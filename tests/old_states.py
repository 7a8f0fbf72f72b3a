"""States as version 0.1 saved them, made from those of today."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

NONE = [math.inf, 0.0]
"""No threshold yet, and no trend."""


def old_progress(state: Mapping[str, Any]) -> dict[str, Any]:
    """Of an algorithm's state: fields that all algorithms had."""
    local, total = state.get("local", NONE), state.get("total", NONE)
    return {
        "boundaries": torch.tensor(state.get("boundaries", []), dtype=torch.int64),
        "local_threshold": local[0],
        "local_trend": local[1],
        "global_threshold": total[0],
        "global_trend": total[1],
        "sparse_steps": state.get("steps", 0),
    }


def old_vector(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Of a SparseAllreduce, before skipped steps were counted."""
    kept = ("residual", "velocity", "step")
    return {name: saved[name] for name in kept} | old_progress(saved["state"])


def old_model(saved: Mapping[str, Any], form: int) -> dict[str, Any]:
    """Of a model: format 1, which knew nothing of second moments, or format 2."""
    moments = saved["moments"]
    new = ("optimized", "skipped", "moments", "squares")
    kept = {name: value for name, value in saved.items() if name not in new}
    counted = {"step": saved["step"]} | ({"skipped": saved["skipped"]} if form == 2 else {})
    buckets = [
        {"parameters": bucket["parameters"]} | counted | old_progress(bucket["state"])
        for bucket in saved["buckets"]
    ]
    algorithm = dict(saved["algorithm"])
    if algorithm["name"].startswith("OkTopk"):
        knobs = {"region_interval": 64, "balance_trigger": 4.0, "capacity": None}
        algorithm = {**knobs, **algorithm, "name": "OkTopk"}
    old = kept | {"format": form, "algorithm": algorithm, "buckets": buckets}
    if form == 2:
        notes = {name: moments[name] for name in ("steps", "ratio", "clipping") if moments[name]}
        notes |= {"optimized": True} if saved["optimized"] else {}
        old |= {"moments": moments["counters"], "notes": notes, "squares": saved["squares"]}
    return old
