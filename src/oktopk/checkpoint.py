"""Save and resume: one file a rank, and a manifest that makes them one checkpoint.

A checkpoint is a folder that all ranks can reach:

    manifest.json             names the folder with the data, and the files in it
    data-1200-5f3a/           of step 1200
        rank-0.pt ...         what differs between ranks: residuals, and whatever else is `own`
        shared.pt             what does not: model, optimizer, counters

All data are written, and are safely on disk, before the manifest is replaced in one atomic
operation. A crash at any moment leaves the old checkpoint or the new one. Data that no manifest
names are removed by the next save.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .engine import AllReducer, log
from .handle import Handle
from .state import TENSORS, redistribute, sharers, upgraded
from .transport import Operation

MANIFEST = "manifest.json"
_FORMAT = 1
_PATIENCE = 600.0
"""Seconds that ranks wait for those that write before they say so."""
_DATA = re.compile(r"data-\d+-[0-9a-f]{8}")


@dataclass(frozen=True)
class Checkpoint:
    """What `load` gives back."""

    step: int
    """Steps taken when it was saved."""
    shared: Any
    """As given to `save` on rank 0."""
    own: Any
    """As given to `save` on this rank; None if it was saved by another number of ranks."""


def save(
    folder: str | os.PathLike[str],
    handle: Handle | AllReducer,
    *,
    shared: Any = None,
    own: Any = None,
) -> None:
    """Write a checkpoint, replacing the one in the folder. Collective.

    ```python
    oktopk.checkpoint.save("run/checkpoint", handle, shared={
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch})
    ```

    Args:
        folder: the same for all ranks.
        handle: from `attach` or `comm_hook`, or a DistributedOptimizer (its own optimizer's state
            goes to `shared`: `optimizer.optimizer.state_dict()`).
        shared: tensors and plain values that are the same on all ranks; rank 0's are saved.
        own: such as are each rank's own, for example random states.
    """
    reducer = _reducer(handle)
    state = reducer.state_dict()
    rank, size = state["rank"], state["size"]
    name = reducer.share(Operation.SAVE, f"data-{state['step']}-{secrets.token_hex(4)}")[0]
    data = Path(folder) / name
    files, problem = {}, None
    try:
        data.mkdir(parents=True, exist_ok=True)
        files[_rank_file(rank)] = _write(
            data / _rank_file(rank), {"compression": state, "own": own}
        )
        if rank == 0:
            files["shared.pt"] = _write(data / "shared.pt", shared)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = f"rank {rank} could not write to {data}: {type(error).__name__}: {error}"
        problem = problem.encode("ascii", "replace").decode()[:700]
    told = reducer.share(Operation.SAVE, json.dumps([problem, files]), _PATIENCE)
    answers = [json.loads(text) for text in told]
    problems = [problem for problem, _ in answers if problem]
    if not problems and rank == 0:
        manifest = {
            "format": _FORMAT,
            "data": name,
            "step": state["step"],
            "ranks": size,
            "algorithm": state["algorithm"],
            "files": {file: about for _, files in answers for file, about in files.items()},
        }
        try:
            _replace(Path(folder) / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        except OSError as error:
            problems = [f"rank 0 could not write the manifest: {error}"]
        else:
            _remove_others(Path(folder), name)
    if problems and rank == 0 and not _names(Path(folder), name):
        shutil.rmtree(data, ignore_errors=True)
    # Nobody goes on before the checkpoint is whole; and all hear if the manifest failed.
    failed = reducer.share(Operation.SAVE, "; ".join(problems)[:900], _PATIENCE)[0]
    if failed:
        raise OSError(f"the checkpoint was not written, an earlier one is as it was. {failed}")


def load(
    folder: str | os.PathLike[str], handle: Handle | AllReducer, *, strict: bool = True
) -> Checkpoint:
    """Continue from a checkpoint. Collective.

    On as many ranks as saved it, training continues bitwise as if it had not stopped. On another
    number, residuals are redistributed: the pending average, sum(residuals) / ranks, is the same.

    Args:
        folder: the same for all ranks.
        handle: attached to the same model, with the same algorithm.
        strict: if False, take what fits: parameters that have no residual in the checkpoint begin
            without, another algorithm begins with new thresholds, and a rank's missing file counts
            as a residual of zero, so what was pending on that rank is lost. It is logged.
    """
    reducer = _reducer(handle)
    problem, manifest, shared, own, state = None, {}, None, None, {}
    rank, size = reducer.rank, reducer.size
    try:
        manifest = _manifest(Path(folder))
        data = Path(folder) / manifest["data"]
        shared = _read(data, "shared.pt", manifest)
        contents = _contents(data, list(sharers(rank, size, manifest["ranks"])), manifest, strict)
        states = {old: upgraded(content["compression"]) for old, content in contents.items()}
        state = _of_rank(states, rank, size, manifest["ranks"])
        if manifest["ranks"] == size and rank in contents:
            own = contents[rank]["own"]
    except Exception as error:  # whatever it is, the other ranks must hear of it
        known = isinstance(error, ValueError)
        problem = str(error) if known else f"{folder}: {type(error).__name__}: {error}"
    here = f"{folder} has {manifest.get('data')}"
    reducer.agree(Operation.LOAD, problem, here, "load from the same folder")
    reducer.load_state_dict(state, strict)
    return Checkpoint(manifest["step"], shared, own)


def read_shared(folder: str | os.PathLike[str]) -> Any:
    """What was given to `save` as `shared`, for one process alone: to use a trained model, say."""
    manifest = _manifest(Path(folder))
    return _read(Path(folder) / manifest["data"], "shared.pt", manifest)


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
            self._ranks, self._squared = _saved_parts(checkpoint_id)

    def state_dict(self) -> dict[str, Any]:
        """To save: this rank's state. To load: room for those of the old ranks it takes on."""
        olds = sharers(self._reducer.rank, self._reducer.size, self._ranks)
        # Tensors of its own for each: what is loaded is written into them.
        states = {f"oktopk-rank-{old}": self._reducer.state_dict() for old in olds}
        if self._squared is not None:  # to load: those that are there
            for state in states.values():
                state["squares"] = {
                    name: torch.zeros_like(residual, dtype=torch.float32)
                    for name, residual in state["residual"].items()
                    if name in self._squared
                }
        return {name: _as_leaves(state) for name, state in states.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        states = {}
        for key, leaves in saved.items():
            tensors = {name: leaves.get(name, {}) for name in TENSORS}
            state = upgraded(json.loads(leaves["rest"]) | tensors)
            states[int(key.rpartition("-")[2])] = state
        for state in states.values():
            for bucket in state["buckets"]:
                bucket["boundaries"] = torch.tensor(bucket["boundaries"], dtype=torch.int64)
        rank, size = self._reducer.rank, self._reducer.size
        self._reducer.load_state_dict(_of_rank(states, rank, size, self._ranks))


def _as_leaves(state: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by parameter, and the rest as one text: only they must have their size in advance."""
    rest = {key: value for key, value in state.items() if key not in TENSORS}
    text = json.dumps(rest, default=Tensor.tolist)
    return {name: state[name] for name in TENSORS} | {"rest": text}


def _saved_parts(checkpoint_id: str | os.PathLike[str]) -> tuple[int, set[str]]:
    """How many ranks saved a checkpoint, and the parameters of which it has sums of squares."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    names = FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
    found = {match[1] for name in names if (match := re.search(r"oktopk-rank-(\d+)\.", name))}
    if not found:
        raise ValueError(f"{checkpoint_id} holds no compression state: was it saved with one?")
    squares = (re.search(r"oktopk-rank-\d+\.squares\.(.+)", name) for name in names)
    return len(found), {match[1] for match in squares if match}


def _contents(
    data: Path, olds: list[int], manifest: Mapping[str, Any], strict: bool
) -> dict[int, Any]:
    """The files of old ranks; without `strict`, those that can be read, and at least one."""
    contents: dict[int, Any] = {}
    for old in [*olds, *range(manifest["ranks"])]:
        if old in contents or (old not in olds and contents):
            continue
        try:
            contents[old] = _read(data, _rank_file(old), manifest)
        except ValueError as error:
            if strict:
                raise
            if old in olds:
                log.warning("checkpoint: %s. Its residual counts as zero", error)
    if not contents:
        raise ValueError(f"no rank's file in {data} can be read")
    return contents


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


def _reducer(handle: Handle | AllReducer) -> AllReducer:
    return handle if isinstance(handle, AllReducer) else handle.start()


def _rank_file(rank: int) -> str:
    return f"rank-{rank}.pt"


def _write(path: Path, content: Any) -> dict[str, int]:
    """Write a file so that it is on disk, and check that it can be read back safely."""
    with open(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    return {"bytes": path.stat().st_size, "crc32": _crc32(path)}


def _read(data: Path, name: str, manifest: Mapping[str, Any]) -> Any:
    path, about = data / name, manifest["files"][name]
    again = "restore the file, or go back to an earlier checkpoint"
    if not path.is_file():
        raise ValueError(f"{path} is missing, though the manifest names it: {again}")
    if path.stat().st_size != about["bytes"] or _crc32(path) != about["crc32"]:
        raise ValueError(f"{path} is damaged, it is not what was written: {again}")
    return torch.load(path, weights_only=True, map_location="cpu")


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != _FORMAT:
            raise ValueError(
                f"{path} has format {manifest['format']}, this version of oktopk reads {_FORMAT}"
            )
        if not _DATA.fullmatch(manifest["data"]):
            raise ValueError(
                f"{path} names data in {manifest['data']!r}, which no save has written"
            )
        return dict(manifest)
    except FileNotFoundError:
        raise ValueError(f"there is no checkpoint in {folder}: it has no {MANIFEST}") from None
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read as a manifest: {error}") from error


def _names(folder: Path, data: str) -> bool:
    """Whether the manifest names these data, in spite of an error while it was replaced."""
    try:
        return bool(_manifest(folder)["data"] == data)
    except ValueError:
        return False


def _remove_others(folder: Path, data: str) -> None:
    """Data of earlier saves. What cannot be removed now is removed by a later one."""
    for old in folder.iterdir():
        if _DATA.fullmatch(old.name) and old.name != data:
            shutil.rmtree(old, onerror=lambda *error: log.warning("cannot remove %s", error[1]))


def _crc32(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            value = zlib.crc32(chunk, value)
    return value


def _replace(path: Path, text: str) -> None:
    """The old content or the new one, whenever the machine stops."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    for folder in (path.parent / json.loads(text)["data"], path.parent):
        _sync_folder(folder)
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
