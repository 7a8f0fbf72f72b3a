"""States that earlier versions saved, in the form of this one.

Until format 4 there was no chooser. Until version 0.2 every algorithm had the same state, side by
side with the counters of each bucket, and optimizers kept untyped notes. The first states had no
squares, and no count of skipped steps.
A damaged state may stay as it is. The caller checks the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

FORMAT = 4
OLD_FIELDS = ("steps", "local", "total", "boundaries")
"""Fields of every algorithm's state before version 0.2."""
_THRESHOLDS = ("local_threshold", "local_trend", "global_threshold", "global_trend")
_OLD = (*_THRESHOLDS, "boundaries", "sparse_steps")


def upgraded_progress(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Counters and state of one vector."""
    if "state" in saved or not all(name in saved for name in _OLD):
        return {"chooser": {}, **saved}
    local, local_trend, total, total_trend = (saved[name] for name in _THRESHOLDS)
    bounds = saved["boundaries"]
    bounds = bounds.tolist() if isinstance(bounds, Tensor) else bounds
    values = (saved["sparse_steps"], [local, local_trend], [total, total_trend], bounds)
    state = dict(zip(OLD_FIELDS, values, strict=True))
    kept = {name: value for name, value in saved.items() if name not in _OLD}
    return {"skipped": 0, "chooser": {}, **kept, "state": state}


def upgraded(saved: Any) -> Any:
    """The state of a model on one rank."""
    form = saved.get("format") if isinstance(saved, Mapping) else None
    if type(form) is not int or not 1 <= form < FORMAT:
        return saved
    state: dict[str, Any] = dict(saved)
    if form == 3:
        return {"chooser": {}} | state | {"format": FORMAT}
    if form == 1:
        state |= {"squares": {}, "moments": {}, "notes": {}}
    try:
        buckets = [upgraded_progress(bucket) for bucket in state["buckets"]]
        first = {name: buckets[0][name] for name in ("step", "skipped")}
        same = all(bucket[name] == first[name] for bucket in buckets for name in first)
        notes, moments = dict(state.pop("notes")), dict(state["moments"])
        if not same or first["step"] != state["step"]:
            return saved
        return state | {
            "format": FORMAT,
            "skipped": first["skipped"],
            "optimized": notes.get("optimized", False),
            "algorithm": _upgraded_algorithm(dict(state["algorithm"])),
            "chooser": {},
            "moments": {
                "counters": {"discards": False, **moments} if moments else {},
                "steps": notes.get("steps", {}),
                "ratio": notes.get("ratio", {}),
                "clipping": notes.get("clipping", []),
            },
            "buckets": [{name: b[name] for name in ("parameters", "state")} for b in buckets],
        }
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError):  # as tensors raise
        return saved


def _upgraded_algorithm(knobs: dict[str, Any]) -> dict[str, Any]:
    """OkTopk without a capacity was what OkTopkVariable is now."""
    if knobs.get("name") != "OkTopk":
        return knobs
    fixed = bool(knobs.get("capacity"))
    for unused in ("region_interval", "balance_trigger") if fixed else ("capacity",):
        knobs.pop(unused, None)
    return knobs | {"name": "OkTopk" if fixed else "OkTopkVariable"}
