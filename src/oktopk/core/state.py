"""What a run must keep to go on, as tensors and plain values, and whether replicas are equal.

Residuals are kept by the name of their parameter and in its shape. So they can be taken up by a
model in other buckets, with another memory format, or on another number of ranks.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..algorithms import Algorithm
from . import schema
from .allreduce import FLOATS, KEPT, agreed, contradiction
from .buckets import Bucket
from .moments import MOMENTS
from .transport import Transport

log = logging.getLogger("oktopk")

_FORMAT = 2
TENSORS = ("residual", "velocity", "squares")
"""What is kept by parameter, and is a mean over ranks for another number of them."""
_NOTES: dict[str, schema.Check] = {
    "steps": schema.entries(schema.whole(-(2**53))),
    "ratio": schema.entries(schema.number(0, finite=False)),
    "clipping": schema.several(schema.number(0), length=2),
    "optimized": schema.flag,
}
"""What is noted of optimizers; further notes may be anything plain."""
_STATE = schema.record(
    {
        "format": schema.whole(_FORMAT, _FORMAT),
        "rank": schema.whole(),
        "size": schema.whole(1),
        "step": schema.whole(),
        "algorithm": schema.record({}, others=schema.plain),
        "momentum": schema.number(0, 1),
        "residual": schema.entries(FLOATS),
        "velocity": schema.entries(FLOATS),
        "squares": schema.entries(schema.tensor(torch.float32, least=0)),
        "moments": schema.empty_or(MOMENTS),
        "notes": schema.record(_NOTES, others=schema.plain),
        "buckets": schema.several(
            schema.record(KEPT | {"parameters": schema.several(schema.text)}),
        ),
    }
)
_CHUNK = 1 << 20


class ReplicaError(RuntimeError):
    """Ranks no longer hold the same parameters."""


def pack(buckets: Sequence[Bucket], algorithm: Algorithm, transport: Transport) -> dict[str, Any]:
    """The state of one rank, but for what belongs to its optimizer."""
    residuals: dict[str, Tensor] = {}
    velocities: dict[str, Tensor] = {}
    thresholds = []
    for bucket in buckets:
        own = bucket.reduce.state_dict()
        for kept, name in ((residuals, "residual"), (velocities, "velocity")):
            flat = own.pop(name)
            if flat.numel():
                kept |= {slot.name: piece.clone() for slot, piece in bucket.pieces(flat)}
        thresholds.append(own | {"parameters": [slot.name for slot in bucket.slots]})
    return {
        "format": _FORMAT,
        "rank": transport.rank,
        "size": transport.size,
        "step": buckets[0].reduce.steps,
        "algorithm": describe(algorithm),
        "momentum": buckets[0].reduce.momentum,
        "residual": residuals,
        "velocity": velocities,
        "buckets": thresholds,
    }


def upgraded(saved: Any) -> Any:
    """A state as this version writes it. Format 1 knew nothing of squares, and the first states of
    format 2 nothing of discarded steps, nor which were skipped."""
    if not isinstance(saved, Mapping):
        return saved
    state = dict(saved)
    if type(state.get("format")) is int and state["format"] == 1:
        state |= {"format": _FORMAT, "squares": {}, "moments": {}, "notes": {}}
    moments = state.get("moments")
    if isinstance(moments, Mapping) and moments:
        state["moments"] = {"discards": False, **moments}
    buckets = state.get("buckets")
    if isinstance(buckets, list) and all(isinstance(bucket, Mapping) for bucket in buckets):
        state["buckets"] = [{"skipped": 0, **bucket} for bucket in buckets]
    return state


def problem_of(state: Any) -> str | None:
    """Why this, upgraded, is not the state of any rank of any model."""
    format = state.get("format") if isinstance(state, Mapping) else None
    if type(format) is int and format > _FORMAT:
        return f"the state has format {format}, this version of oktopk reads 1 and {_FORMAT}"
    wrong = _STATE(state)
    if wrong:
        return f"this is not the state of a compressed model: state{wrong}"
    wrong = next(_contradictions(state), None)
    return wrong and f"the state is damaged: state{wrong}"


def _contradictions(state: Mapping[str, Any]) -> Iterator[str]:
    """Parts of a state that are right as such, but do not go together."""
    if state["rank"] >= state["size"]:
        yield f'["rank"] is {state["rank"]}, but ranks are below {state["size"]}'
    shapes = _shapes(state["residual"])
    if _shapes(state["velocity"]) != (shapes if state["momentum"] else {}):
        yield f'["velocity"] has other parameters than momentum={state["momentum"]} needs'
    used, totals = (state["moments"].get(name, {}).keys() for name in ("used", "totals"))
    begun = state["squares"] or state["moments"].get("steps")
    if begun and _shapes(state["squares"]) != {name: shapes.get(name) for name in used}:
        yield '["squares"] has other parameters than state["moments"] and state["residual"]'
    if totals and totals != used:
        yield '["moments"]["totals"] has other parameters than state["moments"]["used"]'
    named = [name for bucket in state["buckets"] for name in bucket["parameters"]]
    if sorted(named) != sorted(shapes):
        yield '["buckets"] has other parameters than state["residual"]'
        return
    for index, bucket in enumerate(state["buckets"]):
        numel = sum(shapes[name].numel() for name in bucket["parameters"])
        wrong = contradiction(bucket, numel, state["size"])
        if bucket["step"] != state["step"]:
            wrong = f'["step"] is {bucket["step"]}, but the state is of step {state["step"]}'
        if bucket["skipped"] != state["buckets"][0]["skipped"]:
            wrong = f'["skipped"] is {bucket["skipped"]}, but another number in the first bucket'
        if wrong:
            yield f'["buckets"][{index}]{wrong}'


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def unpack(
    saved: Any,
    buckets: Sequence[Bucket],
    algorithm: Algorithm,
    transport: Transport,
    strict: bool,
) -> dict[str, Any]:
    """Put the state of one rank in its place; all ranks fail together, before anything changed.

    Returns the state as this version writes it.
    """
    state, differences = upgraded(saved), []
    problem = problem_of(state) or _misplaced(state, transport)
    if not problem:
        differences = _differences(state, buckets, algorithm)
        if differences and strict:
            problem = "; ".join(differences) + ". To take what fits, load with strict=False"
    kept = [] if problem else [_kept(bucket, state, algorithm) for bucket in buckets]
    common = "" if problem else _common(state, kept, strict)
    transport.agree(problem, common, "load the checkpoint of the same step")
    for difference in differences:
        log.warning("checkpoint: %s; the rest is taken", difference)
    for bucket, thresholds in zip(buckets, kept, strict=True):
        bucket.reduce.restore(_tensors(bucket, state) | thresholds)
    return dict(state)


def _common(state: Mapping[str, Any], kept: Sequence[Mapping[str, Any]], strict: bool) -> str:
    """What must be the same on all ranks."""
    thresholds = zlib.crc32("; ".join(map(agreed, kept)).encode())
    moments = zlib.crc32(json.dumps(state["moments"], sort_keys=True).encode())
    return (
        f"step {state['step']}, {state['algorithm']}, strict={strict}, crc32 of thresholds="
        f"{thresholds}, of moments={moments}"
    )


def _kept(bucket: Bucket, state: Mapping[str, Any], algorithm: Algorithm) -> dict[str, Any]:
    """Thresholds and regions of a bucket, if they are for the same elements and algorithm."""
    mine = [(slot.name, slot.size) for slot in bucket.slots]
    for saved in () if _changed(state["algorithm"], algorithm) else state["buckets"]:
        if [(name, state["residual"][name].shape) for name in saved["parameters"]] == mine:
            return {name: saved[name] for name in KEPT}
    return _fresh(state)


@torch.no_grad()
def _tensors(bucket: Bucket, state: Mapping[str, Any]) -> dict[str, Any]:
    """Residual and velocity of a bucket; zeros for a parameter of which the state has none."""
    own = bucket.reduce.state_dict()
    for name in ("residual", "velocity"):
        if own[name].numel():
            own[name].zero_()
            for slot, piece in bucket.pieces(own[name]):
                kept = state[name].get(slot.name)
                if kept is not None and kept.shape == piece.shape:
                    piece.copy_(kept)
    return own


def redistribute(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """The state for one of `size` ranks, from the states that another number of ranks saved.

    What matters is the pending average, sum(residuals) / ranks: it is the same before and after.
    Rank j of P takes the mean of the old residuals over its share of them: old rank i of Q stands
    for the interval from i/Q to (i+1)/Q, new rank j for that from j/P to (j+1)/P, and each old
    residual counts by its part of the new interval. Thresholds and regions begin anew.

    Args:
        states: those of the old ranks that share in this one, see `sharers`; one that is not
            there counts as zero.
    """
    shares = sharers(rank, size, states[0]["size"])

    def mean(name: str) -> dict[str, Tensor]:
        means: dict[str, Tensor] = {}
        for old in states:
            for key, value in old[name].items():
                part = value * shares.get(old["rank"], 0.0)
                means[key] = means[key].add_(part) if key in means else part
        return means

    buckets = [{**old, **_fresh(states[0])} for old in states[0]["buckets"]]
    changed = {"rank": rank, "size": size, "buckets": buckets}
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
    """What another algorithm has other values of, but for how entries travel: all that is kept
    means the same whatever way they take."""
    mine = describe(algorithm)
    return [
        f"{knob}={theirs.get(knob)!r} in the state, {mine.get(knob)!r} here"
        for knob in {**theirs, **mine}
        if knob not in ("wire", "capacity") and theirs.get(knob) != mine.get(knob)
    ]


def _fresh(saved: Mapping[str, Any]) -> dict[str, Any]:
    """For a bucket that starts without thresholds and regions."""
    return {
        "boundaries": torch.zeros(0, dtype=torch.int64),
        "local_threshold": math.inf,
        "local_trend": 0.0,
        "global_threshold": math.inf,
        "global_trend": 0.0,
        "step": saved["step"],
        "skipped": saved["buckets"][0]["skipped"],
        "sparse_steps": 0,
    }


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
    """What a state was saved with that is not so here."""
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
    if saved["momentum"] != buckets[0].reduce.momentum:
        momentum = buckets[0].reduce.momentum
        found.append(f"another momentum ({saved['momentum']} in the state, {momentum} here)")
    return found


def _other_types(saved: Mapping[str, Any], buckets: Sequence[Bucket]) -> list[str]:
    """Residuals and velocities of another type than here."""
    return [
        f"{slot.name}: {saved[kind][slot.name].dtype} in the state, {bucket.reduce.residual.dtype} "
        "here"
        for bucket in buckets
        for slot in bucket.slots
        for kind in ("residual", "velocity")
        if slot.name in saved[kind] and saved[kind][slot.name].dtype != bucket.reduce.residual.dtype
    ]


def check_replicas(named_parameters: Iterable[tuple[str, Tensor]], transport: Transport) -> None:
    """Compare a hash of each parameter over ranks; all ranks raise, or none."""
    names, parameters = zip(*named_parameters, strict=True)
    mine = torch.tensor([_hash(p) for p in parameters], dtype=torch.int64, device=transport.device)
    table = torch.stack(transport.all_gather(mine)).tolist()
    lines = []
    for name, hashes in zip(names, zip(*table, strict=True), strict=True):
        [(usual, _)] = Counter(hashes).most_common(1)
        odd = [str(rank) for rank, value in enumerate(hashes) if value != usual]
        if odd:
            lines.append(f"  {name}: rank {', '.join(odd)}")
    if lines:
        raise ReplicaError(
            f"{len(lines)} of {len(names)} parameters are not the same on all ranks, so they no "
            "longer train one model. Look for code that changes parameters on some ranks only, or "
            "restart from a checkpoint. They differ on:\n" + "\n".join(lines[:20])
        )


def _hash(parameter: Tensor) -> int:
    """A sum of all elements' bits, weighted by odd numbers: any one change changes it."""
    values = parameter.detach().flatten()
    values = torch.view_as_real(values).flatten() if values.is_complex() else values
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = torch.zeros((), dtype=torch.int64, device=parameter.device)
    if not values.numel():
        return 0
    for chunk in values.view(sizes[values.element_size()]).split(_CHUNK):
        weights = torch.arange(1, 2 * chunk.numel(), 2, device=chunk.device)
        total = total * 31 + (chunk.to(torch.int64) * weights).sum()  # wraps around
    return int(total)
