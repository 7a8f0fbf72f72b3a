"""A damaged state is a ValueError that says what is wrong, on all ranks, and changes nothing."""

from __future__ import annotations

import copy
import json
import math
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oktopk
from models import attached, loss_of, net, run, sgd
from oktopk.checkpoint import DistributedCheckpoint
from oktopk.core.state import TENSORS
from oktopk.core.upgrade import upgraded
from old_states import old_model
from ranks import Rank, Ranks

OKTOPK = oktopk.OkTopk(density=0.05, warmup_steps=2)
EMPTY: dict[str, Any] = {name: {} for name in TENSORS}
Place = tuple[Any, ...]


def deep() -> list[Any]:
    """Deeper than Python calls itself."""
    nested: list[Any] = []
    for _ in range(50_000):
        nested = [nested]
    return nested


WRONG: list[Any] = [
    *(None, "text", 7, -1, 1.5, math.nan, math.inf, -math.inf, True, 10**400, b"bytes", 1j, set),
    *([], {}, {"a": {"b": 1}, 3: "c"}, [math.nan, "b", [None]], deep()),
    torch.full((3,), math.nan),
    torch.ones(2, 2, dtype=torch.complex64),
    torch.ones(3, device="meta"),
    torch.ones(3).to_sparse(),
    torch.tensor([5, 1, 2]),
]


def places(content: Any, place: Place = ()) -> Iterator[Place]:
    """Of everything in a nested content."""
    if place:
        yield place
    if isinstance(content, dict | list):
        for key in content if isinstance(content, dict) else range(len(content)):
            yield from places(content[key], (*place, key))


def spoil(tensor: Tensor, dice: random.Random) -> Any:
    spoiled = tensor.clone()
    if spoiled.numel() and dice.random() < 0.7:
        value = dice.choice([math.nan, math.inf, -math.inf] if tensor.is_floating_point() else [-1])
        spoiled.view(-1)[dice.randrange(spoiled.numel())] = value
        return spoiled
    shapes = [torch.cat([spoiled.flatten(), spoiled.flatten(), spoiled.new_ones(1)]), spoiled[None]]
    types = [spoiled.to(torch.float16), spoiled.to(torch.int32), spoiled.tolist()]
    return dice.choice([*shapes, *types])


def damaged(state: Any, dice: random.Random) -> Any:
    """A copy, in which one place is not as it was."""
    content = copy.deepcopy(state)
    *path, last = dice.choice(list(places(state)))
    inner = content
    for key in path:
        inner = inner[key]
    match dice.randrange(4):
        case 0:
            del inner[last]
        case 1 if isinstance(inner, dict):
            inner[dice.choice(["more", 3, (), "\udc80"])] = dice.choice(WRONG)
        case 2 if isinstance(inner[last], Tensor):
            inner[last] = spoil(inner[last], dice)
        case _:
            inner[last] = dice.choice(WRONG)
    return content


def same(one: Any, other: Any) -> bool:
    """Bitwise, and whatever they are."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def fuzz(
    state: Any,
    take: Callable[[], Any],
    load: Callable[[Any], None],
    cases: int,
    seen: Callable[[Any], Any] = lambda content: content,
) -> None:
    """Damage by damage: refused without any change, or loaded as it is.

    Args:
        seen: what a content is to be when it has been loaded.
    """
    other, refused = take(), 0
    assert not same(other, state)
    for case in range(cases):
        broken = damaged(state, random.Random(case))
        error = refusal(load, broken)
        if error is None:
            assert same(take(), seen(broken)), f"case {case} was loaded as something else"
            load(other)
        else:
            assert same(take(), other), f"case {case} changed the state: {error}"
            refused += 1
    assert refused > 0.8 * cases
    load(state)
    assert same(take(), state)


def refusal(load: Callable[[Any], None], content: Any) -> ValueError | None:
    """Any other exception is a failure."""
    try:
        load(content)
    except ValueError as error:
        return error
    return None


class Alone:
    """A model on one rank, with all that a state can have."""

    def __init__(self, adam: bool, seed: int, steps: int) -> None:
        model = net(seed)
        options: dict[str, Any] = {"dense_below": 512, "bucket_mb": 0.018}
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if adam:
            optimizer = oktopk.AdamW(model.parameters(), refresh_interval=4)
        else:
            options["momentum"] = 0.5
        named = model.named_parameters()
        self.handle = oktopk.DistributedOptimizer(optimizer, named, OKTOPK, **options)
        for step in range(steps):
            self.handle.zero_grad()
            loss_of(model, step, 0).backward()
            self.handle.step()

    def state(self) -> dict[str, Any]:
        return self.handle.reducer.state_dict()

    def load(self, state: Any) -> None:
        self.handle.reducer.load_state_dict(state)

    def seen(self, state: dict[str, Any]) -> dict[str, Any]:
        """What becomes of a state here: it may be of another wire, or another interval of Adam's,
        whose sums begin anew. A bucket with an empty state begins anew as well."""
        now, state = self.state(), upgraded(state)
        for bucket, own in zip(state["buckets"], now["buckets"], strict=True):
            bucket["state"] = bucket["state"] or (own["state"] and OKTOPK.init().as_dict())
        there, here = (s["moments"]["counters"] for s in (state, now))
        if there.get("interval") != here.get("interval"):
            counters = {"counters": here | {"steps": 0, "turns": 0}}
            state = state | {"moments": state["moments"] | counters, "squares": {}}
        return state | {"algorithm": now["algorithm"]}


@pytest.fixture(params=[False, True], ids=["momentum", "adam"])
def pair(request: pytest.FixtureRequest) -> tuple[Alone, Alone]:
    """Two models of one kind, with other states."""
    source, target = Alone(request.param, 0, 9), Alone(request.param, 1, 7)
    state = source.state()
    assert state["moments"]["counters"] if request.param else state["velocity"]
    assert bool(state["squares"]) == bool(state["moments"]["steps"]) == request.param
    return source, target


def test_of_a_model(pair: tuple[Alone, Alone]) -> None:
    source, target = pair
    fuzz(source.state(), target.state, target.load, 300, target.seen)


def test_of_a_model_of_version_0_1(pair: tuple[Alone, Alone]) -> None:
    source, target = pair
    old, other = old_model(source.state(), 2), target.state()
    for case in range(150):
        if refusal(target.load, damaged(old, random.Random(case))) is not None:
            assert same(target.state(), other), f"case {case} changed the state"
        target.load(other)
    target.load(old)
    assert same(target.state(), source.state())
    old["buckets"][0]["step"] += 1  # another one than that of all buckets
    with pytest.raises(ValueError, match="the state is damaged: it has format 2, but not the"):
        target.load(old)


def test_of_a_reduction() -> None:
    source, target = (oktopk.SparseAllreduce(OKTOPK, 500, momentum=0.5) for _ in range(2))
    for step in range(9):
        source(torch.randn(500))
        if step > 1:
            target(torch.randn(500))
    fuzz(
        source.state_dict(),
        target.state_dict,
        target.load_state_dict,
        200,
        seen=lambda state: {"skipped": 0, "chooser": {}, **state},  # older states lack them
    )


def test_of_files_with_right_checksums(pair: tuple[Alone, Alone], tmp_path: Path) -> None:
    source, target = pair
    oktopk.checkpoint.save(tmp_path, target.handle)

    def load(state: Any) -> None:
        replace(tmp_path, {"compression": state, "own": 3})
        oktopk.checkpoint.load(tmp_path, target.handle)

    fuzz(source.state(), target.state, load, 60, target.seen)
    state = source.state()
    content: Any
    for content in ([], {"compression": state}, {"compression": state, "own": 1, "more": 2}):
        replace(tmp_path, content)
        with pytest.raises(ValueError, match=r"rank-0\.pt is damaged: it "):
            oktopk.checkpoint.load(tmp_path, target.handle)


def replace(folder: Path, content: Any) -> None:
    """Write a rank's file so that nothing but its content can be wrong."""
    manifest = json.loads((folder / "manifest.json").read_text())
    file = folder / manifest["data"] / "rank-0.pt"
    try:
        torch.save(content, file)
    except (RecursionError, UnicodeEncodeError):
        raise ValueError("torch.save cannot write this") from None
    manifest["files"]["rank-0.pt"] = {
        "bytes": file.stat().st_size,
        "crc32": zlib.crc32(file.read_bytes()),
    }
    if isinstance(content, dict) and type(content["compression"].get("step")) is int:
        manifest["step"] = max(0, content["compression"]["step"])
    first = {key: manifest[key] for key in manifest if key not in ("crc32", "parameters")}
    (folder / "manifest.json").write_text(json.dumps(first | {"format": 1}))


def test_of_torchs_checkpoints(pair: tuple[Alone, Alone]) -> None:
    parts = [DistributedCheckpoint(alone.handle) for alone in pair]

    def load(content: dict[str, Any]) -> None:
        parts[1].load_state_dict({key: as_leaves(own) for key, own in content.items()})

    def seen(content: dict[str, Any]) -> dict[str, Any]:
        [own] = content.values()
        rest = pair[1].seen(json.loads(json.dumps(own["rest"])))
        return {"oktopk-rank-0": {**EMPTY, **own, "rest": rest}}

    states = [lambda part=part: readable(part.state_dict()) for part in parts]
    fuzz(states[0](), states[1], load, 150, seen)


def readable(content: dict[str, Any]) -> dict[str, Any]:
    return {key: own | {"rest": json.loads(own["rest"])} for key, own in content.items()}


def as_leaves(own: Any) -> Any:
    """The rest as a text again, where that is possible."""
    if not isinstance(own, dict) or "rest" not in own:
        return own
    try:
        return own | {"rest": json.dumps(own["rest"])}
    except RecursionError:
        return own | {"rest": "[" * 100_000}
    except TypeError:
        return own


def on_one_rank_only(rank: Rank, kind: str) -> None:
    """Rank 1's state is damaged; no rank changes anything."""
    model, handle = attached(rank, OKTOPK)
    run(rank, model, sgd(model), range(5))
    state: Any = handle.state_dict()
    run(rank, model, sgd(model), range(5, 8))
    before = handle.state_dict()
    if rank.rank == 1 and kind == "residual":
        state["residual"]["3.weight"][0, 0] = math.nan
    if rank.rank == 1 and kind == "threshold":
        state["buckets"][1]["state"]["total"][0] *= 2
    if rank.rank == 1 and kind == "no state":
        state = [state]
    expected = {
        "residual": r'state\["residual"\]\["3\.weight"\] holds NaN or Inf',
        "threshold": "ranks disagree: load the checkpoint of the same step",
        "no state": "state is of type list, but must be a mapping",
    }[kind]
    with pytest.raises(ValueError, match=expected):
        handle.load_state_dict(state)
    assert same(handle.state_dict(), before)


@pytest.mark.parametrize("kind", ["residual", "threshold", "no state"])
def test_is_an_error_on_all_ranks(ranks: Ranks, kind: str) -> None:
    ranks.run(3, on_one_rank_only, kind)


def test_thresholds_of_another_shape_are_not_taken(ranks: Ranks) -> None:
    ranks.run(2, with_another_layer)


def with_another_layer(rank: Rank) -> None:
    model, handle = attached(rank, OKTOPK)
    run(rank, model, sgd(model), range(5))
    state = handle.state_dict()
    wider = net()
    wider[0], wider[3] = nn.Linear(32, 64), nn.Linear(64, 80)
    wider[5] = nn.Linear(80, 10)
    other, loaded = attached(rank, OKTOPK, wider)
    loaded.load_state_dict(state, strict=False)
    for bucket in loaded.state_dict()["buckets"]:
        shapes = [other.module.get_parameter(name).numel() for name in bucket["parameters"]]
        assert bucket["state"].get("boundaries", [])[-1:] in ([], [sum(shapes)])
    run(rank, other, sgd(other), range(5, 8))
    loaded.check_replicas()
