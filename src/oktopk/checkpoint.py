"""Save and resume: one file a rank, and a manifest that makes them one checkpoint.

A checkpoint is a folder on a file system that all ranks share:

    manifest.json             names the folder with the data, and the files in it
    data-1200-5f3a0b1c/       of step 1200
        rank-0.pt ...         parts that differ between ranks: residuals and `own`
        shared.pt             what does not: model, optimizer, counters

Where several groups of ranks hold a shard of the model each, each group's checkpoint is in a folder
of its own inside, named by the shard. Each of them is atomic, but not all together: a crash may
leave shards of different steps. So compare the `step` that `load` returns over all shards.

All data are written, and are safely on disk, before the manifest is replaced in one atomic
operation. A crash at any moment leaves the old checkpoint or the new one. Data that no manifest
names are removed by the next save. Whatever is read is checked, the manifest, the files, and the
values in them. A mistake is a ValueError on all ranks, and nothing has changed then.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .core import disk, schema
from .core.disk import MANIFEST
from .core.reducer import AllReducer, log
from .core.state import TENSORS, problem_of, redistribute, sharers
from .core.transport import Operation
from .core.upgrade import upgraded
from .handle import Handle

__all__ = ["MANIFEST", "Checkpoint", "DistributedCheckpoint", "load", "read_shared", "save"]

_PATIENCE = 600.0
"""Seconds that ranks wait for those that write before they say so."""


@dataclass(frozen=True)
class Checkpoint:
    """What `load` gives back."""

    step: int
    """Steps taken when it was saved."""
    shared: Any
    """The value given to `save` on rank 0."""
    own: Any
    """The value given to `save` on this rank; None if another number of ranks saved it."""


def save(
    folder: str | os.PathLike[str],
    handle: Handle | AllReducer,
    *,
    shared: Any = None,
    own: Any = None,
    any_model: bool = False,
) -> None:
    """Write a checkpoint, replacing the one in the folder. Collective.

    ```python
    oktopk.checkpoint.save("run/checkpoint", handle, shared={
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch})
    ```

    If it cannot be written, all ranks raise OSError: an earlier checkpoint is then as it was, and
    nothing of the new one is left.

    Args:
        folder: the same for all ranks, on a file system that all of them share.
        handle: from `attach` or `comm_hook`, or a DistributedOptimizer (its own optimizer's state
            goes to `shared`: `optimizer.optimizer.state_dict()`).
        shared: tensors and plain values that are the same on all ranks; rank 0's are saved.
        own: values that are each rank's own, for example random states.
        any_model: replace a checkpoint of other parameters, too; otherwise that is a ValueError.
    """
    reducer = _reducer(handle)
    folder = Path(folder) / reducer.shard
    state = reducer.state_dict(to_resume=True)
    data = folder / _new_name(reducer, folder, state, any_model)
    new: list[Path] = []
    files, problem = _write(data, new, state, shared, own)
    written = reducer.peers.share(Operation.SAVE, json.dumps([problem, files]), _PATIENCE)
    answers = [json.loads(text) for text in written]
    problems = [problem for problem, _ in answers if problem]
    published = False
    if reducer.rank == 0 and not problems:
        files = {file: about for _, own_files in answers for file, about in own_files.items()}
        try:
            disk.publish(folder, disk.new_manifest(data.name, state, files))
        except Exception as error:  # of any kind: the other ranks must hear of it
            problems, published = [_ascii(_said(error))], disk.names(folder, data.name)
    # Nobody goes on before the checkpoint is whole; and all hear if the manifest failed.
    text = f"{int(published)} {'; '.join(problems)[:900]}"
    told = reducer.peers.share(Operation.SAVE, text, _PATIENCE)[0]
    if told == "0":
        return
    if told.startswith("1"):
        raise OSError(f"the checkpoint is in its place, but perhaps not on disk yet: {told[2:]}")
    disk.remove(data, new)
    raise OSError(f"the checkpoint was not written, an earlier one is as it was. {told[2:]}")


def _new_name(reducer: AllReducer, folder: Path, state: Mapping[str, Any], any_model: bool) -> str:
    """Rank 0's name for the new data; or all refuse to replace the checkpoint in the folder."""
    text = disk.new_name(state["step"])
    if reducer.rank == 0 and not any_model and _is_of_another(folder, state):
        text = _ascii(
            f"{folder} holds a checkpoint of another model, with other parameters: save this one "
            "to a folder of its own. save(..., any_model=True) replaces the other one"
        )
    text = reducer.peers.share(Operation.SAVE, text)[0]
    if not disk.is_name(text):
        raise ValueError(text)
    return text


def _is_of_another(folder: Path, state: Mapping[str, Any]) -> bool:
    """A manifest that cannot be read, or is of the first format, may be of any model."""
    mine = disk.parameters(state)
    try:
        return bool(disk.read_manifest(folder).get("parameters", mine) != mine)
    except ValueError:
        return False


def _write(
    data: Path, new: list[Path], state: Mapping[str, Any], shared: Any, own: Any
) -> tuple[dict[str, Any], str | None]:
    """Write this rank's files; returns facts about them, and the error if there was one.

    Args:
        new: gets the folders that had to be made.
    """
    rank = state["rank"]
    path, content = data / disk.rank_file(rank), {"compression": state, "own": own}
    try:
        wrong = problem_of(state)  # `load` would refuse it for good
        if wrong:
            raise ValueError(wrong)
        new += disk.missing(data)
        disk.make(data, new)
        files = {path.name: disk.write(path, content, {"own": own})}
        if rank == 0:
            files[disk.SHARED] = disk.write(data / disk.SHARED, shared, {"shared": shared})
    except Exception as error:  # of any kind: the other ranks must hear of it
        return {}, _ascii(f"rank {rank} could not write to {data}: {_said(error)}", 480)
    return files, None


def load(
    folder: str | os.PathLike[str], handle: Handle | AllReducer, *, strict: bool = True
) -> Checkpoint:
    """Continue from a checkpoint. Collective.

    On as many ranks as saved it, training continues bitwise as if it had not stopped. On another
    number, residuals are redistributed: the pending average, sum(residuals) / ranks, is the same.

    Raises ValueError on all ranks if anything is wrong. Nothing has changed then.

    Args:
        folder: the same for all ranks.
        handle: attached to the same model, with the same algorithm.
        strict: if False, take the parts that fit, and log the others. Parameters that have no
            residual in the checkpoint begin without. Another algorithm begins with new thresholds.
            A rank's missing file counts as a residual of zero, so its pending values are lost.
    """
    reducer = _reducer(handle)
    folder = Path(folder) / reducer.shard
    problem, name, found = None, "", Checkpoint(0, None, None)
    state: dict[str, Any] = {}
    try:
        manifest = disk.read_manifest(folder)
        name = manifest["data"]
        found, state = _found(folder / name, manifest, reducer, strict)
    except Exception as error:  # of any kind: the other ranks must hear of it
        problem = _ascii(_said(error))
    here = _ascii(f"{folder} has {name}")
    reducer.peers.agree(Operation.LOAD, problem, here, "load from the same folder")
    reducer.load_state_dict(state, strict)
    return found


def read_shared(folder: str | os.PathLike[str]) -> Any:
    """The `shared` part of a checkpoint, for one process alone: to use a trained model, say."""
    manifest = disk.read_manifest(Path(folder))
    return disk.read(Path(folder) / manifest["data"], disk.SHARED, manifest)


def _found(
    data: Path, manifest: Mapping[str, Any], reducer: AllReducer, strict: bool
) -> tuple[Checkpoint, dict[str, Any]]:
    """This rank's part of a checkpoint: the answer of `load`, and the state to load."""
    rank, size, ranks = reducer.rank, reducer.size, manifest["ranks"]
    shared = disk.read(data, disk.SHARED, manifest)
    contents = _contents(data, list(sharers(rank, size, ranks)), manifest, strict)
    states = {old: content["compression"] for old, content in contents.items()}
    own = contents[rank]["own"] if ranks == size and rank in contents else None
    return Checkpoint(manifest["step"], shared, own), _of_rank(states, rank, size, ranks)


def _contents(
    data: Path, olds: list[int], manifest: Mapping[str, Any], strict: bool
) -> dict[int, Any]:
    """The files of old ranks; without `strict`, those that can be read, and at least one."""
    contents: dict[int, Any] = {}
    for old in [*olds, *range(manifest["ranks"])]:
        if old in contents or (old not in olds and contents):
            continue
        try:
            contents[old] = _content(data, old, manifest)
        except ValueError as error:
            if strict:
                raise
            if old in olds:
                log.warning("checkpoint: %s. Its residual counts as zero", error)
    if not contents:
        raise ValueError(f"no rank's file in {data} can be read")
    return contents


def _content(data: Path, old: int, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The file of a rank: `own`, and its checked state, `compression`."""
    content = disk.read(data, disk.rank_file(old), manifest)
    try:
        wrong = schema.record({"compression": schema.anything, "own": schema.anything})(content)
        if wrong:
            raise ValueError(f"it{wrong}")
        state = _checked(content["compression"], old, manifest["ranks"], manifest["step"])
    except ValueError as error:
        raise ValueError(f"{data / disk.rank_file(old)} is damaged: {error}") from None
    return {"compression": state, "own": content["own"]}


def _checked(saved: Any, rank: int, size: int, step: Any) -> dict[str, Any]:
    """A state as this version writes it, if it is the one that it should be."""
    state = upgraded(saved)
    problem = problem_of(state)
    if problem:
        raise ValueError(problem)
    for name, right in (("rank", rank), ("size", size), ("step", step)):
        if state[name] != right:
            raise ValueError(f'state["{name}"] is {state[name]}, but must be {right}')
    return dict(state)


def _of_rank(
    states: Mapping[int, Mapping[str, Any]], rank: int, size: int, ranks: int
) -> dict[str, Any]:
    """The state for this rank, from those of the old ranks that share in it."""
    if ranks != size:
        log.info("checkpoint of %d ranks, redistributed to %d", ranks, size)
        return redistribute(list(states.values()), rank, size)
    if rank in states:
        return dict(states[rank])
    other = next(iter(states.values()))  # only its thresholds are of use
    zeros = {
        name: {key: torch.zeros_like(value) for key, value in other[name].items()}
        for name in TENSORS
    }
    return dict(other) | {"rank": rank} | zeros


class DistributedCheckpoint:
    """Compression as a part of what torch.distributed.checkpoint saves and loads.

    ```python
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": model.state_dict(), "compression": DistributedCheckpoint(handle)},
             checkpoint_id=path)
    dcp.load({"model": ..., "compression": DistributedCheckpoint(handle, path)},
             checkpoint_id=path)
    ```

    Args:
        handle: as for `save`.
        checkpoint_id: the folder to load from; it tells how many ranks saved it.
    """

    def __init__(
        self, handle: Handle | AllReducer, checkpoint_id: str | os.PathLike[str] | None = None
    ) -> None:
        self._reducer = _reducer(handle)
        self._ranks = self._reducer.size
        self._squared: set[str] | None = None
        if checkpoint_id is not None:
            self._ranks, self._squared = _saved_parts(checkpoint_id, self._reducer)

    def state_dict(self) -> dict[str, Any]:
        """To save: this rank's state. To load: room for the states that it takes over."""
        # Each has its own tensors: loading writes into them.
        states = {self._key(old): self._reducer.state_dict(to_resume=True) for old in self._olds()}
        if self._squared is not None:  # to load: those that are there
            for state in states.values():
                state["squares"] = {
                    name: torch.zeros_like(residual, dtype=torch.float32)
                    for name, residual in state["residual"].items()
                    if name in self._squared
                }
        return {name: _as_leaves(state) for name, state in states.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where the state was taken. Collective; errors are as with `load`."""
        reducer, problem, state = self._reducer, None, {}
        try:
            state = _of_rank(self._states(saved), reducer.rank, reducer.size, self._ranks)
        except ValueError as error:
            problem = _ascii(str(error))
        reducer.peers.agree(Operation.LOAD, problem, "", "load the same checkpoint")
        reducer.load_state_dict(state)

    def _key(self, rank: int) -> str:
        return _key(rank, self._reducer.shard)

    def _olds(self) -> list[int]:
        """The old ranks whose states this one takes over."""
        return list(sharers(self._reducer.rank, self._reducer.size, self._ranks))

    def _states(self, saved: Any) -> dict[int, dict[str, Any]]:
        wrong = schema.record({self._key(old): schema.anything for old in self._olds()})(saved)
        if wrong:
            raise ValueError(f"this is not what a DistributedCheckpoint has saved: it{wrong}")
        states = {old: _from_leaves(saved[self._key(old)]) for old in self._olds()}
        if self._squared is None and any(map(_lacks_squares, states.values())):
            raise ValueError(
                "room for the sums of squares is missing: name the folder that is loaded from, "
                "DistributedCheckpoint(handle, checkpoint_id)"
            )
        step = next(iter(states.values())).get("step")
        return {old: _checked(state, old, self._ranks, step) for old, state in states.items()}


def _key(rank: int, shard: str = "") -> str:
    return f"oktopk-{shard}-rank-{rank}" if shard else f"oktopk-rank-{rank}"


def _as_leaves(state: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by parameter, and the rest as one text: only they must have their size in advance."""
    rest = {key: value for key, value in state.items() if key not in TENSORS}
    text = json.dumps(rest, default=Tensor.tolist)
    return {name: state[name] for name in TENSORS} | {"rest": text}


def _from_leaves(leaves: Any) -> dict[str, Any]:
    """A state as it was, unchecked. torch.distributed.checkpoint drops empty mappings."""
    parts: Any = leaves
    if isinstance(leaves, Mapping):
        parts = {name: {} for name in TENSORS} | dict(leaves)
    wrong = schema.record(dict.fromkeys(TENSORS, schema.anything) | {"rest": schema.text})(parts)
    if wrong:
        raise ValueError(f"this is not what a DistributedCheckpoint has saved: a part{wrong}")
    rest = disk.parsed(parts.pop("rest"), "the state")
    return {**rest, **parts}


def _lacks_squares(state: Mapping[str, Any]) -> bool:
    """Whether an unchecked state has counters of squares, but no squares."""
    moments = state.get("moments")
    counted = isinstance(moments, Mapping) and moments.get("counters", moments)
    return bool(counted) and not state["squares"]


def _saved_parts(
    checkpoint_id: str | os.PathLike[str], reducer: AllReducer
) -> tuple[int, set[str]]:
    """How many ranks saved a reducer's state, and the parameters that have sums of squares in it.

    A checkpoint may hold several states, under keys that are not known here. Names and shapes of
    the parameters tell which one is meant.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
    pattern = re.compile(rf"(.*?){re.escape(_key(0, reducer.shard)[:-1])}(\d+)\.(\w+)\.?(.*)")
    states: dict[str, dict[str, dict[str, Any]]] = {}
    for match in filter(None, map(pattern.fullmatch, metadata)):
        state, rank, part, name = match.groups()
        saved = states.setdefault(state, {"rest": {}, "residual": {}, "squares": {}})
        saved.setdefault(part, {})[name or rank] = getattr(metadata[match[0]], "size", None)
    if not states:
        raise ValueError(f"{checkpoint_id} holds no compression state: was it saved with one?")
    fits = [saved for saved in states.values() if saved["residual"] == reducer.shapes]
    found = [(len(saved["rest"]), set(saved["squares"])) for saved in fits or states.values()]
    if any(other != found[0] for other in found):
        raise ValueError(
            f"{checkpoint_id} holds {len(found)} compression states that differ, and all may be of "
            "this model: save each model to a folder of its own"
        )
    return found[0]


def _reducer(handle: Handle | AllReducer) -> AllReducer:
    return handle if isinstance(handle, AllReducer) else handle.start()


def _said(error: Exception) -> str:
    """The text of an error, with its type if it is not one of ours."""
    ours = isinstance(error, ValueError) or type(error) is OSError
    return str(error) if ours else f"{type(error).__name__}: {error}"


def _ascii(text: str, most: int = 900) -> str:
    """A text in printable ASCII, so that it can travel."""
    plain = text.encode("ascii", "backslashreplace").decode()[:most]
    return "".join(character if character.isprintable() else " " for character in plain)
