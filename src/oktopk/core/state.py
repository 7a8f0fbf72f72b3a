"""The state that a run must keep to go on, as tensors and plain values.

Residuals are kept by the name of their parameter and in its shape. So they can be taken up by a
model in other buckets, with another memory format, or on another number of ranks.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..algorithms import Algorithm
from . import schema
from .buckets import Bucket
from .chooser import SAVED as CHOOSER
from .chooser import Chooser, chooser_for
from .moments import NOTHING as NO_MOMENTS
from .moments import SAVED as MOMENTS
from .moments import SecondMoments
from .reduction import FLOATS
from .transport import Transport
from .upgrade import FORMAT, upgraded

log = logging.getLogger("oktopk")

TENSORS = ("residual", "velocity", "squares")
"""Tensors that are saved by parameter. Another number of ranks takes means of them."""
_STATE = schema.record(
    {
        "format": schema.whole(FORMAT, FORMAT),
        "rank": schema.whole(),
        "size": schema.whole(1),
        "step": schema.whole(),
        "skipped": schema.whole(),
        "optimized": schema.flag,
        "algorithm": schema.record({}, others=schema.plain),
        "chooser": CHOOSER,
        "momentum": schema.number(0, 1),
        "residual": schema.entries(FLOATS),
        "velocity": schema.entries(FLOATS),
        "squares": schema.entries(schema.tensor(torch.float32, least=0)),
        "moments": MOMENTS,
        "buckets": schema.several(
            schema.record(
                {
                    "parameters": schema.several(schema.text),
                    "state": schema.entries(schema.plain),
                }
            )
        ),
    }
)


def pack(
    buckets: Sequence[Bucket],
    algorithm: Algorithm,
    chooser: Chooser | None,
    transport: Transport,
    moments: SecondMoments | None,
) -> dict[str, Any]:
    """The state of one rank, but for `optimized`."""
    tensors: dict[str, dict[str, Tensor]] = {"residual": {}, "velocity": {}}
    states = []
    for bucket in buckets:
        for name, kept in tensors.items():
            flat = getattr(bucket.reduction, name)
            if flat.numel():
                kept |= {slot.name: piece.clone() for slot, piece in bucket.pieces(flat)}
        progress = bucket.reduction.progress()
        parameters = [slot.name for slot in bucket.slots]
        states.append({"parameters": parameters, "state": progress["state"]})
    return {
        "format": FORMAT,
        "rank": transport.rank,
        "size": transport.size,
        "step": progress["step"],
        "skipped": progress["skipped"],
        "algorithm": describe(algorithm),
        "chooser": {} if chooser is None else chooser.state_dict(),
        "momentum": buckets[0].reduction.momentum,
        "buckets": states,
        "moments": NO_MOMENTS if moments is None else moments.state_dict(),
        "squares": {} if moments is None else moments.squares(),
        **tensors,
    }


def problem_of(state: Any) -> str | None:
    """Why this, upgraded, is not the state of any rank of any model."""
    format = state.get("format") if isinstance(state, Mapping) else None
    if type(format) is int and format > FORMAT:
        return f"the state has format {format}, this version of oktopk reads 1 to {FORMAT}"
    if type(format) is int and 1 <= format < FORMAT:
        return f"the state is damaged: it has format {format}, but not the parts of that format"
    wrong = _STATE(state)
    if wrong:
        return f"this is not the state of a compressed model: state{wrong}"
    wrong = next(_contradictions(state), None)
    return wrong and f"the state is damaged: state{wrong}"


def _contradictions(state: Mapping[str, Any]) -> Iterator[str]:
    """Parts of a state that are valid alone, but contradict each other."""
    if state["rank"] >= state["size"]:
        yield f'["rank"] is {state["rank"]}, but ranks are below {state["size"]}'
    if state["skipped"] > state["step"]:
        yield f'["skipped"] is {state["skipped"]}, but of {state["step"]} steps in all'
    shapes = _shapes(state["residual"])
    if _shapes(state["velocity"]) != (shapes if state["momentum"] else {}):
        yield f'["velocity"] has other parameters than momentum={state["momentum"]} needs'
    counters = state["moments"]["counters"]
    used, totals = (counters.get(name, {}).keys() for name in ("used", "totals"))
    begun = state["squares"] or counters.get("steps")
    if begun and _shapes(state["squares"]) != {name: shapes.get(name) for name in used}:
        yield '["squares"] has other parameters than state["moments"] and state["residual"]'
    if totals and totals != used:
        yield '["moments"]["counters"]["totals"] has other parameters than its "used"'
    named = [name for bucket in state["buckets"] for name in bucket["parameters"]]
    if sorted(named) != sorted(shapes):
        yield '["buckets"] has other parameters than state["residual"]'


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def unpack(
    saved: Any,
    buckets: Sequence[Bucket],
    algorithm: Algorithm,
    chooser: Chooser | None,
    transport: Transport,
    strict: bool,
) -> tuple[dict[str, Any], Chooser | None]:
    """Put the state of one rank in its place; all ranks fail together, before anything changed.

    Returns the state as this version writes it, and the chooser to go on with.
    """
    state, differences = upgraded(saved), []
    problem = problem_of(state) or _misplaced(state, transport)
    if not problem:
        differences = _differences(state, buckets, algorithm)
        if differences and strict:
            problem = "; ".join(differences) + ". To take what fits, load with strict=False"
    parts: list[_Part] = []
    if not problem:
        chooser = _chooser(state, algorithm, chooser)
        parts = [_part(bucket, state, algorithm, chooser) for bucket in buckets]
    for index, part in enumerate(parts):
        wrong = part.bucket.reduction.contradiction(part.progress, part.running)
        if wrong:
            problem = f"the state is damaged: that of bucket {index}, state{wrong}"
    common = "" if problem else _common(state, parts, chooser, strict)
    transport.agree(problem, common, "load the checkpoint of the same step")
    for difference in differences:
        log.warning("checkpoint: %s; the rest is taken", difference)
    for part in parts:
        kept = _tensors(part.bucket, state) | part.progress
        part.bucket.reduction.restore(kept, part.running)
    return dict(state), chooser


@dataclass(frozen=True)
class _Part:
    """A bucket, and what a state says of it."""

    bucket: Bucket
    running: Algorithm
    """What it is to run."""
    progress: dict[str, Any]


def _chooser(
    state: Mapping[str, Any], algorithm: Algorithm, present: Chooser | None
) -> Chooser | None:
    """The chooser to go on with. A decision counts only for the same knobs and number of ranks."""
    if present is None:
        return None
    saved = {} if _changed(state["algorithm"], algorithm) else state["chooser"]
    return chooser_for(algorithm, present.numel, saved)


def _common(
    state: Mapping[str, Any], parts: Sequence[_Part], chooser: Chooser | None, strict: bool
) -> str:
    """A summary that must be the same on all ranks."""
    agreed = [part.bucket.reduction.agreed(part.progress, part.running) for part in parts]
    agreed += [] if chooser is None else [chooser.agreed()]
    moments = zlib.crc32(json.dumps(state["moments"], sort_keys=True).encode())
    return (
        f"step {state['step']}, {state['algorithm']}, strict={strict}, crc32 of buckets="
        f"{zlib.crc32('; '.join(agreed).encode())}, of moments={moments}"
    )


def _part(
    bucket: Bucket, state: Mapping[str, Any], algorithm: Algorithm, chooser: Chooser | None
) -> _Part:
    running = bucket.reduction.algorithm
    if chooser is not None and not bucket.small:
        running = chooser.running
    return _Part(bucket, running, _progress(bucket, state, algorithm, running))


def _progress(
    bucket: Bucket, state: Mapping[str, Any], algorithm: Algorithm, running: Algorithm
) -> dict[str, Any]:
    """How far a bucket is. The algorithm's state counts only for the same elements and knobs."""
    counted = {"step": state["step"], "skipped": state["skipped"]}
    mine = [(slot.name, slot.size) for slot in bucket.slots]
    for saved in () if _changed(state["algorithm"], algorithm) else state["buckets"]:
        theirs = [(name, state["residual"][name].shape) for name in saved["parameters"]]
        if theirs == mine and saved["state"]:  # empty: to begin anew
            return counted | {"state": saved["state"]}
    return counted | {"state": running.init().as_dict()}


@torch.no_grad()
def _tensors(bucket: Bucket, state: Mapping[str, Any]) -> dict[str, Any]:
    """Residual and velocity of a bucket; zeros for a parameter that the state lacks."""
    reduction = bucket.reduction
    own = {name: torch.zeros_like(getattr(reduction, name)) for name in ("residual", "velocity")}
    for name, flat in own.items():
        if flat.numel():
            for slot, piece in bucket.pieces(flat):
                kept = state[name].get(slot.name)
                if kept is not None and kept.shape == piece.shape:
                    piece.copy_(kept)
    return own


def redistribute(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """The state for one of `size` ranks, from the states that another number of ranks saved.

    The pending average, sum(residuals) / ranks, is the same before and after.
    Rank j of P takes the mean of the old residuals over its share of them: old rank i of Q stands
    for the interval from i/Q to (i+1)/Q, new rank j for that from j/P to (j+1)/P, and each old
    residual counts by its part of the new interval. The algorithm begins with a new state.

    Args:
        states: those of the old ranks that `sharers` names. A missing one counts as zero.
    """
    shares = sharers(rank, size, states[0]["size"])

    def mean(name: str) -> dict[str, Tensor]:
        means: dict[str, Tensor] = {}
        for old in states:
            for key, value in old[name].items():
                part = value * shares.get(old["rank"], 0.0)
                means[key] = means[key].add_(part) if key in means else part
        return means

    buckets = [{**old, "state": {}} for old in states[0]["buckets"]]
    changed = {"rank": rank, "size": size, "buckets": buckets, "chooser": {}}
    return dict(states[0]) | changed | {name: mean(name) for name in TENSORS}


def sharers(rank: int, size: int, old_size: int) -> dict[int, float]:
    """The old ranks whose residuals rank `rank` of `size` takes on, and their weights in it."""
    weights = {}
    for old in range(old_size):
        # The overlap of both intervals, in units of 1 / (size * old_size).
        overlap = min((old + 1) * size, (rank + 1) * old_size) - max(old * size, rank * old_size)
        if overlap > 0:
            weights[old] = overlap / old_size
    return weights


def describe(algorithm: Algorithm) -> dict[str, Any]:
    """An algorithm in plain values."""
    knobs = {k: list(v) if k == "ramp" else v for k, v in dataclasses.asdict(algorithm).items()}
    return {"name": type(algorithm).__name__} | knobs


def _changed(theirs: Mapping[str, Any], algorithm: Algorithm) -> list[str]:
    """Knobs that have other values here. `wire` and `capacity` do not count: they change how
    entries travel, but not the meaning of a state."""
    mine = describe(algorithm)
    return [
        f"{knob}={theirs.get(knob)!r} in the state, {mine.get(knob)!r} here"
        for knob in {**theirs, **mine}
        if knob not in ("wire", "capacity") and theirs.get(knob) != mine.get(knob)
    ]


def _misplaced(state: Mapping[str, Any], transport: Transport) -> str | None:
    """Why a state is not for this rank."""
    if state["size"] != transport.size:
        return (
            f"the state was saved by {state['size']} ranks, here are {transport.size}: load it "
            "with oktopk.checkpoint.load, which redistributes residuals"
        )
    if state["rank"] != transport.rank:
        return (
            f"this is the state of rank {state['rank']}, loaded on rank {transport.rank}: "
            "residuals differ on every rank, so each must save and load its own, as "
            "oktopk.checkpoint does. (Accelerate's register_for_checkpointing saves the main "
            "process's only: use oktopk.integrations.accelerate.checkpoint_with instead)"
        )
    return None


def _differences(
    saved: Mapping[str, Any], buckets: Sequence[Bucket], algorithm: Algorithm
) -> list[str]:
    """How the saved model, algorithm and momentum differ from those here."""
    found = []
    here = {slot.name: slot.size for bucket in buckets for slot in bucket.slots}
    there = _shapes(saved["residual"])
    for what, names in (("not in this model", there.keys() - here), ("new", here.keys() - there)):
        if names:
            listed = ", ".join(sorted(names)[:5])
            found.append(f"another model: {len(names)} parameters are {what} ({listed})")
    other = [name for name, size in here.items() if name in there and there[name] != size]
    if other:
        name = other[0]
        shapes = f"{tuple(there[name])} in the state, {tuple(here[name])} here"
        found.append(f"another model: {len(other)} parameters have another shape ({name}: {shapes}")
        found[-1] += ")"
    types = _other_types(saved, buckets)
    if types:
        found.append(f"another model: {len(types)} parameters have another type ({types[0]})")
    changed = _changed(saved["algorithm"], algorithm)
    if changed:
        found.append(f"another algorithm ({', '.join(changed)})")
    if saved["momentum"] != buckets[0].reduction.momentum:
        momentum = buckets[0].reduction.momentum
        found.append(f"another momentum ({saved['momentum']} in the state, {momentum} here)")
    return found


def _other_types(saved: Mapping[str, Any], buckets: Sequence[Bucket]) -> list[str]:
    """Residuals and velocities of another type than here."""
    return [
        f"{slot.name}: {there} in the state, {here} here"
        for bucket in buckets
        for here in (bucket.reduction.residual.dtype,)
        for slot in bucket.slots
        for kind in ("residual", "velocity")
        if slot.name in saved[kind] and (there := saved[kind][slot.name].dtype) != here
    ]
