"""Save and resume: bitwise on as many ranks, conserving on another number, whole or not at all."""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import math
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import oktopk
from launch import Warm
from models import attached, loss_of, net, parameters, run, sgd
from oktopk.core.state import redistribute, sharers
from ranks import Rank, Ranks

OKTOPK = oktopk.OkTopk(density=0.05, warmup_steps=2)
Checkpoint = Callable[[int], tuple[Path, list[Any]]]


def through(rank: Rank, folder: str | None, algorithm: oktopk.Algorithm, momentum: float) -> Tensor:
    """Sixteen steps, with a stop after eight if there is a folder."""
    plain = {"momentum": 0.0} if momentum else {}
    model, handle = attached(rank, algorithm, momentum=momentum)
    optimizer = sgd(model, **plain)
    run(rank, model, optimizer, range(8))
    if folder is not None:
        shared = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        oktopk.checkpoint.save(folder, handle, shared=shared, own={"rank": rank.rank})
        model, handle = attached(rank, algorithm, net(seed=5), momentum=momentum)
        optimizer = sgd(model, **plain)
        restored = oktopk.checkpoint.load(folder, handle)
        assert restored.step == 8
        assert restored.own == {"rank": rank.rank}
        model.module.load_state_dict(restored.shared["model"])
        optimizer.load_state_dict(restored.shared["optimizer"])
    run(rank, model, optimizer, range(8, 16))
    handle.check_replicas()
    return parameters(model)


@pytest.mark.parametrize("name", oktopk.names())
def test_resume_is_bitwise_the_same(ranks: Ranks, name: str, tmp_path: Path) -> None:
    algorithm = oktopk.algorithm(name, density=0.05, warmup_steps=2)
    momentum = 0.9 if name in ("oktopk", "gtopk") else 0.0
    kept = ranks.run(3, through, None, algorithm, momentum)
    again = ranks.run(3, through, str(tmp_path), algorithm, momentum)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def saved(rank: Rank, folder: str, algorithm: oktopk.Algorithm = OKTOPK, steps: int = 6) -> Any:
    model, handle = attached(rank, algorithm, momentum=0.5)
    run(rank, model, sgd(model, momentum=0.0), range(steps))
    oktopk.checkpoint.save(folder, handle, shared={"steps": steps})
    return handle.state_dict()


@pytest.fixture(scope="module")
def checkpoint(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Saves with so many ranks, once for all tests: the folder, and the state of each rank."""

    @functools.cache
    def save(size: int) -> tuple[Path, list[Any]]:
        folder = tmp_path_factory.mktemp(f"ranks-{size}")
        return folder, ranks.run(size, saved, str(folder))

    return save


def loaded(
    rank: Rank,
    folder: str,
    strict: bool = True,
    algorithm: oktopk.Algorithm = OKTOPK,
    model: nn.Module | None = None,
    momentum: float = 0.5,
) -> Any:
    ddp, handle = attached(rank, algorithm, model, momentum=momentum)
    restored = oktopk.checkpoint.load(folder, handle, strict=strict)
    state = handle.state_dict()
    if model is None:
        run(rank, ddp, sgd(ddp, momentum=0.0), range(3))
        handle.check_replicas()
    return state, restored


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (3, 2), (2, 3), (5, 4), (1, 3), (3, 1)])
def test_another_number_of_ranks_keeps_the_pending_average(
    ranks: Ranks, old: int, new: int, checkpoint: Checkpoint
) -> None:
    folder, before = checkpoint(old)
    after = ranks.run(new, loaded, str(folder))
    for kind in ("residual", "velocity"):
        for name in before[0][kind]:
            pending = sum(state[kind][name] for state in before) / old
            now = sum(state[kind][name] for state, _ in after) / new
            torch.testing.assert_close(now, pending, atol=1e-6, rtol=1e-5)
    for state, restored in after:
        assert state["step"] == 6
        assert restored.shared == {"steps": 6}
        assert restored.own is None


@given(st.integers(1, 20), st.integers(1, 20))
def test_shares_of_old_ranks(old: int, new: int) -> None:
    taken = dict.fromkeys(range(old), 0.0)
    for rank in range(new):
        shares = sharers(rank, new, old)
        assert sum(shares.values()) == pytest.approx(1)
        for other, share in shares.items():
            taken[other] += share
    assert all(total / new == pytest.approx(1 / old) for total in taken.values())
    if old == new:
        assert all(sharers(rank, new, old) == {rank: 1.0} for rank in range(new))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_redistribution_conserves(old: int, new: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    states: list[dict[str, Any]] = [
        {
            "rank": rank,
            "size": old,
            "step": 3,
            "residual": {"w": torch.randn(7, generator=random, dtype=torch.float64)},
            "velocity": {},
            "squares": {},
            "buckets": [],
        }
        for rank in range(old)
    ]
    pending = sum(state["residual"]["w"] for state in states) / old
    ours = [
        redistribute([states[other] for other in sharers(rank, new, old)], rank, new)
        for rank in range(new)
    ]
    now = sum(state["residual"]["w"] for state in ours) / new
    torch.testing.assert_close(now, pending)
    assert [state["rank"] for state in ours] == list(range(new))


def test_files_load_safely_and_old_data_go(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, saved, str(tmp_path))
    ranks.run(2, saved, str(tmp_path), OKTOPK, 7)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["step"] == 7
    assert manifest["ranks"] == 2
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [manifest["data"], "manifest.json"]
    files = {path.name: path for path in (tmp_path / manifest["data"]).iterdir()}
    assert set(files) == set(manifest["files"]) == {"rank-0.pt", "rank-1.pt", "shared.pt"}
    states = [torch.load(files[f"rank-{rank}.pt"], weights_only=True) for rank in range(2)]
    residuals = [state["compression"]["residual"]["3.weight"] for state in states]
    assert residuals[0].shape == (64, 64)
    assert not torch.equal(*residuals)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("remove", "rank-1.pt is missing, though the manifest names it"),
        ("cut", "rank-1.pt is damaged"),
        ("flip", "rank-1.pt is damaged"),
        ("manifest", "there is no checkpoint in"),
        ("garbage", "manifest.json is damaged, it cannot be read as JSON"),
        ("format", "has format 99"),
    ],
)
def test_damage_is_an_error_on_every_rank(
    ranks: Ranks, damage: str, message: str, tmp_path: Path, checkpoint: Checkpoint
) -> None:
    shutil.copytree(checkpoint(2)[0], tmp_path, dirs_exist_ok=True)
    [file] = tmp_path.glob("data-*/rank-1.pt")
    manifest = tmp_path / "manifest.json"
    match damage:
        case "remove":
            file.unlink()
        case "cut":
            os.truncate(file, file.stat().st_size // 2)
        case "flip":
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        case "manifest":
            manifest.unlink()
        case "garbage":
            manifest.write_text("{")
        case "format":
            manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    errors = [error for _, error in ranks.outcomes(2, loaded, str(tmp_path))]
    assert all(error is not None for error in errors)
    assert message in str(errors[1])


def other_net() -> nn.Sequential:
    model = net()
    model[5] = nn.Linear(64, 12)
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": oktopk.OkTopk(density=0.1)}, "density=0.05 in the state, 0.1 here"),
        ({"algorithm": oktopk.GTopk(density=0.05)}, "name='OkTopk' in the state, 'GTopk' here"),
        ({"model": other_net()}, "5.weight: (10, 64) in the state, (12, 64) here"),
        ({"model": nn.Sequential(nn.Linear(32, 64))}, "6 parameters are not in this model"),
        ({"momentum": 0.0}, "another momentum (0.5 in the state, 0.0 here)"),
    ],
    ids=["density", "algorithm", "shape", "names", "momentum"],
)
def test_what_does_not_fit_is_an_error_or_logged(
    ranks: Ranks, change: dict[str, Any], message: str, checkpoint: Checkpoint
) -> None:
    folder, before = checkpoint(2)
    arguments = {"algorithm": OKTOPK, "model": None, "momentum": 0.5} | change
    for _, error in ranks.outcomes(2, loaded, str(folder), True, *arguments.values()):
        assert error is not None
        assert message in error
        assert "strict=False" in error
    for (state, _), old in zip(
        ranks.run(2, loaded, str(folder), False, *arguments.values()), before, strict=True
    ):
        assert state["step"] == 6
        assert torch.equal(state["residual"]["0.weight"], old["residual"]["0.weight"])


def test_a_missing_ranks_residual_counts_as_zero_if_asked(
    ranks: Ranks, tmp_path: Path, checkpoint: Checkpoint
) -> None:
    folder, before = checkpoint(3)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    [file] = tmp_path.glob("data-*/rank-1.pt")
    file.unlink()
    after = [state for state, _ in ranks.run(3, loaded, str(tmp_path), False)]
    for name in before[0]["residual"]:
        assert torch.equal(after[0]["residual"][name], before[0]["residual"][name])
        assert not after[1]["residual"][name].any()
    assert after[1]["step"] == 6


def swapped(rank: Rank) -> None:
    _, handle = attached(rank, OKTOPK)
    state = handle.state_dict()
    handle.load_state_dict(state | {"rank": 0})  # rank 0's file for everyone


def test_the_state_of_another_rank_is_refused(ranks: Ranks) -> None:
    errors = [error for _, error in ranks.outcomes(2, swapped)]
    assert "this is the state of rank 0, loaded on rank 1" in str(errors[1])
    assert "oktopk.integrations.accelerate.checkpoint_with" in str(errors[1])
    assert "ranks disagree" in str(errors[0])


def of_other_size(rank: Rank, states: list[Any]) -> None:
    _, handle = attached(rank, OKTOPK)
    handle.load_state_dict(states[rank.rank])


def test_states_of_more_ranks_need_the_checkpoint(ranks: Ranks, checkpoint: Checkpoint) -> None:
    _, states = checkpoint(3)
    for _, error in ranks.outcomes(2, of_other_size, states):
        assert "saved by 3 ranks, here are 2" in str(error)
        assert "oktopk.checkpoint.load" in str(error)


def unwritable(rank: Rank, folder: str) -> None:
    _, handle = attached(rank, OKTOPK)
    own = net if rank.rank == 1 else None  # a function is not a plain value
    oktopk.checkpoint.save(folder, handle, own=own)


def test_what_could_not_be_loaded_safely_is_not_saved(
    ranks: Ranks, tmp_path: Path, checkpoint: Checkpoint
) -> None:
    shutil.copytree(checkpoint(2)[0], tmp_path, dirs_exist_ok=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    for _, error in ranks.outcomes(2, unwritable, str(tmp_path)):
        assert "the checkpoint was not written, an earlier one is as it was" in str(error)
        assert "rank 1 could not write" in str(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    ranks.run(2, loaded, str(tmp_path))


def alone(width: int = 100) -> oktopk.DistributedOptimizer:
    model = nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return oktopk.DistributedOptimizer(optimizer, model.named_parameters(), OKTOPK)


ARGS = argparse.Namespace(lr=0.1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"shared": {"args": ARGS}}, 'shared["args"] is an object of type argparse.Namespace'),
        ({"shared": ARGS}, "shared is an object of type argparse.Namespace"),
        ({"own": [1, {"x": (ARGS,)}]}, 'own[1]["x"][0] is an object of type argparse.Namespace'),
        ({"shared": {int: 1}}, "a key of shared is an object of type builtins.type"),
        ({"own": {"log": sys.stdin}}, 'own["log"] is an object of type'),
    ],
)
def test_an_object_that_cannot_be_saved_is_named(
    tmp_path: Path, content: dict[str, Any], said: str
) -> None:
    with pytest.raises(OSError, match="the checkpoint was not written") as error:
        oktopk.checkpoint.save(tmp_path / "run" / "checkpoint", alone(), **content)
    assert said in str(error.value)
    assert "save vars(args) instead" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_what_torch_loads_safely_is_saved(tmp_path: Path) -> None:
    shared = {"size": torch.Size([2]), "type": torch.bool, "names": collections.OrderedDict(a={1})}
    oktopk.checkpoint.save(tmp_path, alone(), shared=shared)
    assert oktopk.checkpoint.read_shared(tmp_path) == shared


def test_the_checkpoint_of_another_model_is_not_replaced(tmp_path: Path) -> None:
    first, second = alone(100), alone(101)
    oktopk.checkpoint.save(tmp_path, first)
    with pytest.raises(ValueError, match=r"a checkpoint of another model.*a folder of its own"):
        oktopk.checkpoint.save(tmp_path, second)
    oktopk.checkpoint.load(tmp_path, first)
    oktopk.checkpoint.save(tmp_path, second, any_model=True)
    oktopk.checkpoint.load(tmp_path, second)
    edited(tmp_path, {})  # one of format 1 may be of any model
    oktopk.checkpoint.save(tmp_path, first)


def test_new_folders_are_on_disk_before_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a" / "b"
    synced, before = set(), set()
    fsync, replace = os.fsync, os.replace

    def note(file: int) -> None:
        synced.add(os.fstat(file).st_ino)
        fsync(file)

    def look(*paths: Any) -> None:
        before.update(synced)
        replace(*paths)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", look)
    oktopk.checkpoint.save(folder, alone())
    [data] = folder.glob("data-*")
    for path in (tmp_path, tmp_path / "a", folder, data, *data.iterdir()):
        assert path.stat().st_ino in before, path


def test_a_manifest_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, folder = alone(), tmp_path / "run"

    def fail(*_: Any) -> None:
        raise OSError("no room")

    replace = os.replace
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match=r"was not written.*no room"):
        oktopk.checkpoint.save(folder, handle)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "replace", replace)
    oktopk.checkpoint.save(folder, handle)
    names = sorted(folder.iterdir())
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="an earlier one is as it was"):
        oktopk.checkpoint.save(folder, handle)
    assert sorted(folder.iterdir()) == names
    oktopk.checkpoint.load(folder, handle)


def test_a_manifest_that_is_perhaps_not_on_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, fsync = alone(), os.fsync

    def fail(file: int) -> None:
        if (tmp_path / "manifest.json").exists():
            raise OSError("the disk is gone")
        fsync(file)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="is in its place, but perhaps not on disk"):
        oktopk.checkpoint.save(tmp_path, handle, shared="kept")
    assert oktopk.checkpoint.load(tmp_path, handle).shared == "kept"


@contextlib.contextmanager
def inside(folder: Path, patience: float) -> Iterator[None]:
    """What a relative path means is this process's own, as a disk of its own would be."""
    folder.mkdir(exist_ok=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        with mock.patch.object(oktopk.core.disk, "_VISIBLE_WITHIN", patience):
            yield
    finally:
        os.chdir(before)


def save_on_own_disk(rank: Rank, disks: Path) -> str:
    _, handle = attached(rank, OKTOPK)
    with (
        inside(disks / str(rank.rank), patience=0.2),
        pytest.raises(OSError, match="file system that all ranks share") as error,
    ):
        oktopk.checkpoint.save("run/checkpoint", handle)
    return str(error.value)


def test_disks_of_their_own_are_an_error(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks.run(3, save_on_own_disk, tmp_path):
        assert 'rank 0 does not see "rank-1.pt", "rank-2.pt" in run/checkpoint/data-0-' in error
    assert [list(disk.iterdir()) for disk in tmp_path.iterdir()] == [[]] * 3


def save_late(rank: Rank, disks: Path) -> None:
    """Rank 0 sees the other's file later than it was written."""
    _, handle = attached(rank, OKTOPK)
    with inside(disks / str(rank.rank), patience=30.0):

        def bring() -> None:
            while not (found := list(disks.glob("1/run/data-*/rank-1.pt"))):
                time.sleep(0.01)
            time.sleep(0.3)
            shutil.copy(found[0], disks / "0" / found[0].relative_to(disks / "1"))

        if rank.rank == 0:
            threading.Thread(target=bring).start()
        oktopk.checkpoint.save("run", handle)


def test_files_that_are_seen_late_are_waited_for(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, save_late, tmp_path)
    ranks.run(2, loaded, str(tmp_path / "0" / "run"), True, OKTOPK, None, 0.0)


@pytest.mark.parametrize("change", ["load", "algorithm"])
def test_a_change_after_backward_leaves_no_step_to_discard(tmp_path: Path, change: str) -> None:
    """For example to go back to a checkpoint because of a loss that is too large."""
    optimizer = alone()
    layer = optimizer.param_groups[0]["params"][0]

    def backward() -> None:
        optimizer.zero_grad()  # clears averages that nobody has stepped with
        (layer @ torch.randn(100, 4)).square().mean().backward()

    for _ in range(3):
        backward()
        optimizer.step()
    oktopk.checkpoint.save(tmp_path, optimizer)
    backward()
    if change == "load":
        oktopk.checkpoint.load(tmp_path, optimizer)
    else:
        optimizer.set_algorithm(oktopk.OkTopk(density=0.1))
    backward()
    optimizer.step()
    assert optimizer.reducer.step == 4 + (change == "algorithm")


def test_only_data_of_earlier_saves_are_removed(tmp_path: Path) -> None:
    handle = alone()
    (tmp_path / "data-wikitext-2").mkdir()
    (tmp_path / "data-2024-01.csv").write_text("mine")
    (tmp_path / "data-7-0123abcd").write_text("looks like ours, but cannot be removed as a folder")
    for _ in range(2):
        oktopk.checkpoint.save(tmp_path, handle)
    assert (tmp_path / "data-wikitext-2").is_dir()
    assert (tmp_path / "data-2024-01.csv").read_text() == "mine"
    assert len([path for path in tmp_path.glob("data-0-*") if path.is_dir()]) == 1
    assert oktopk.checkpoint.load(tmp_path, handle).step == 0


def edited(folder: Path, change: dict[str, Any], *without: str) -> None:
    """A manifest as format 1 has it, without a checksum, and with something else in it."""
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_text()) | {"format": 1} | change
    first = {k: v for k, v in content.items() if k not in ("crc32", "parameters", *without)}
    manifest.write_text(json.dumps(first))


FILE = {"bytes": 1, "crc32": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "../elsewhere"}, "must be the name of a folder that a save has written"),
        ({"data": "/etc"}, "must be the name of a folder that a save has written"),
        ({"data": "data-1-xyz"}, "must be the name of a folder that a save has written"),
        ({"data": 3}, "must be the name of a folder that a save has written"),
        ({"ranks": 0}, r'\["ranks"\] is 0, but must be a whole number, at least 1'),
        ({"ranks": "two"}, r'\["ranks"\] is "two", but must be a whole number'),
        ({"ranks": 10**12}, "but is of 1000000000000 ranks"),
        ({"files": {}}, "it names nothing, but is of 1 ranks"),
        ({"files": [1]}, r'\["files"\] is of type list'),
        ({"files": {"shared.pt": FILE, "rank-1.pt": FILE}}, "but is of 1 ranks"),
        ({"files": {"shared.pt": FILE, "rank-0.pt": {}}}, 'lacks "bytes", "crc32"'),
        ({"step": -1}, r'\["step"\] is -1'),
        ({"step": 5}, r'state\["step"\] is 0, but must be 5'),
        ({"format": "two"}, 'has format "two", this version of oktopk reads 1 and 2'),
        ({"more": 1}, 'has "more"'),
    ],
)
def test_a_wrong_manifest_is_an_error(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    handle = alone()
    oktopk.checkpoint.save(tmp_path, handle)
    edited(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        oktopk.checkpoint.load(tmp_path, handle)
    edited(tmp_path, {}, "files")
    with pytest.raises(ValueError, match='lacks "files"'):
        oktopk.checkpoint.load(tmp_path, handle)


def test_a_manifest_is_checked_as_a_whole(tmp_path: Path) -> None:
    handle = alone()
    oktopk.checkpoint.save(tmp_path, handle)
    manifest = tmp_path / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(json.dumps(json.loads(text), sort_keys=True))  # the same content
    oktopk.checkpoint.load(tmp_path, handle)
    assert '"density": 0.05' in text
    manifest.write_text(text.replace('"density": 0.05', '"density": 0.06'))
    with pytest.raises(ValueError, match="its checksum is wrong, so it was damaged or edited"):
        oktopk.checkpoint.load(tmp_path, handle)
    manifest.write_text("[" * 100_000)
    for read in (oktopk.checkpoint.read_shared, lambda path: oktopk.checkpoint.load(path, handle)):
        with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
            read(tmp_path)
    manifest.write_text(text)
    edited(tmp_path, {})  # of format 1
    assert oktopk.checkpoint.load(tmp_path, handle).step == 0


WRITER = """
import sys, torch, oktopk
model = torch.nn.Linear(300, 300)
optimizer = oktopk.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
    oktopk.OkTopk(density=0.05, warmup_steps=2))
while True:
    model(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    step = optimizer.stats().totals.steps
    oktopk.checkpoint.save(sys.argv[1], optimizer, shared={"step": step})
    print(step, flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(warm: Warm, tmp_path: Path) -> None:
    script, folder = tmp_path / "writer.py", tmp_path / "checkpoint"
    script.write_text(WRITER)
    for attempt in range(4):
        out, err = tmp_path / f"{attempt}.out", tmp_path / f"{attempt}.err"
        writer = warm.start(script, folder, out=out, err=err)
        until = time.monotonic() + 60
        while not out.exists() or out.read_text().count("\n") < 3:
            assert time.monotonic() < until, err.read_text()
            time.sleep(0.001)
        time.sleep(0.003 * attempt)
        os.kill(writer, signal.SIGKILL)
        assert warm.wait(writer) == [-signal.SIGKILL], err.read_text()
        written = [int(line) for line in out.read_text().split("\n")[:-1]]
        restored = oktopk.checkpoint.load(folder, alone(300))
        assert restored.shared == {"step": restored.step}
        assert restored.step >= max(written) >= 3


def save_dcp(rank: Rank, folder: str) -> Any:
    model, handle = attached(rank, OKTOPK)
    run(rank, model, sgd(model, momentum=0.0), range(6))
    part = oktopk.checkpoint.DistributedCheckpoint(handle)
    content = {"model": model.module.state_dict(), "compression": part}
    dcp.save(  # type: ignore[attr-defined]
        content, checkpoint_id=folder, process_group=rank.group
    )
    state = handle.state_dict()
    run(rank, model, sgd(model, momentum=0.0), range(6, 9))
    return state, parameters(model)


def load_dcp(rank: Rank, folder: str) -> Any:
    model, handle = attached(rank, OKTOPK, net(seed=3))
    weights = model.module.state_dict()
    part = oktopk.checkpoint.DistributedCheckpoint(handle, folder)
    dcp.load(  # type: ignore[attr-defined]
        {"model": weights, "compression": part}, checkpoint_id=folder, process_group=rank.group
    )
    model.module.load_state_dict(weights)
    state = handle.state_dict()
    run(rank, model, sgd(model, momentum=0.0), range(6, 9))
    handle.check_replicas()
    return state, parameters(model)


@pytest.mark.parametrize(("old", "sizes"), [(3, (3, 2)), (2, (3,))])
def test_with_torch_distributed_checkpoint(
    ranks: Ranks, old: int, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    before = ranks.run(old, save_dcp, str(tmp_path))
    for new in sizes:
        after = ranks.run(new, load_dcp, str(tmp_path))
        for name in before[0][0]["residual"]:
            pending = sum(state["residual"][name] for state, _ in before) / old
            now = sum(state["residual"][name] for state, _ in after) / new
            torch.testing.assert_close(now, pending, atol=1e-6, rtol=1e-5)
        if old == new:
            for (_, weights), (_, want) in zip(after, before, strict=True):
                assert torch.equal(weights, want)


def several_models(rank: Rank, folder: str, other: nn.Module | None) -> Any:
    """Only one model has sums of squares. `other` may have parameters of the same names."""
    parts = oktopk.checkpoint.DistributedCheckpoint
    where = {"checkpoint_id": folder, "process_group": rank.group}
    models = [attached(rank, OKTOPK), attached(rank, OKTOPK, other)]
    optimizer = oktopk.AdamW(models[0][0].parameters(), refresh_interval=2)
    run(rank, models[0][0], optimizer, range(6))
    run(rank, models[1][0], sgd(models[1][0]), range(6))
    handles = [handle for _, handle in models]
    assert [bool(handle.state_dict()["squares"]) for handle in handles] == [True, False]
    dcp.save({str(i): parts(h) for i, h in enumerate(handles)}, **where)  # type: ignore[attr-defined]
    again = [attached(rank, OKTOPK)[1], attached(rank, OKTOPK, other)[1]]
    content = {str(i): parts(handle, folder) for i, handle in enumerate(again)}
    dcp.load(content, **where)  # type: ignore[attr-defined]
    for handle, want in zip(again, handles, strict=True):
        for part in ("residual", "squares"):
            found, saved = handle.state_dict()[part], want.state_dict()[part]
            assert found.keys() == saved.keys()
            assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_several_models_in_one_distributed_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    small = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 10))
    ranks.run(2, several_models, str(tmp_path / "two"), small)
    for _, error in ranks.outcomes(2, several_models, str(tmp_path / "alike"), net(seed=3)):
        assert error is not None
        assert "holds 2 compression states that differ" in error


def with_extremes(rank: Rank, folder: str) -> None:
    """Numbers that are legal in a run must be legal in its checkpoints."""
    algorithm = oktopk.OkTopkVariable(
        density=np.float64(0.05), warmup_steps=1, balance_trigger=math.inf, wire="float32"
    )
    model, handle = attached(rank, algorithm)
    optimizer = oktopk.AdamW(model.parameters(), lr=1e-3, refresh_interval=2)
    for step in range(6):
        optimizer.zero_grad()
        (loss_of(model, step, rank.rank) * (1e25 if step == 3 else 1.0)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        oktopk.checkpoint.save(folder, handle)
        oktopk.checkpoint.load(folder, attached(rank, algorithm)[1])


def test_whatever_is_saved_can_be_loaded(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, with_extremes, str(tmp_path))


def test_a_disk_that_takes_no_more_is_said(tmp_path: Path) -> None:
    model = net()
    optimizer = oktopk.DistributedOptimizer(sgd(model), model.named_parameters(), OKTOPK)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            oktopk.checkpoint.save(tmp_path / "full", optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not (tmp_path / "full").exists()
