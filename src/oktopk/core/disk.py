"""The files of a checkpoint. They survive a crash, and are checked when they are read.

`checkpoint` says which rank does what; this module knows nothing of ranks' communication.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import shutil
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.files import replacing, sync
from . import schema
from .state import log

MANIFEST = "manifest.json"
SHARED = "shared.pt"
_FORMAT = 2
_DATA = re.compile(r"data-\d+-[0-9a-f]{8}")
_VISIBLE_WITHIN = 5.0
"""Seconds until a file that another machine has written must be seen; NFS may show it late."""

_CRC32 = schema.whole(0, 2**32 - 1)
_FIRST: dict[str, schema.Check] = {
    "format": schema.anything,
    "data": schema.matching(_DATA, "the name of a folder that a save has written"),
    "step": schema.whole(),
    "ranks": schema.whole(1),
    "algorithm": schema.entries(schema.plain),
    "files": schema.entries(schema.record({"bytes": schema.whole(), "crc32": _CRC32})),
}
_MANIFESTS = {
    1: schema.record(_FIRST),
    2: schema.record(_FIRST | {"parameters": _CRC32, "crc32": _CRC32}),
}
"""By format. The second has checksums of itself, and of the parameters' names and shapes."""


def rank_file(rank: int) -> str:
    return f"rank-{rank}.pt"


def new_name(step: int) -> str:
    """A new name for a folder of data, unlike any other."""
    return f"data-{step}-{secrets.token_hex(4)}"


def is_name(text: str) -> bool:
    return _DATA.fullmatch(text) is not None


# The manifest.


def new_manifest(
    name: str, state: Mapping[str, Any], files: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """The manifest for the data of this name.

    Args:
        state: of any rank.
        files: the answer of `write` for each.
    """
    manifest = {
        "format": _FORMAT,
        "data": name,
        "step": state["step"],
        "ranks": state["size"],
        "algorithm": state["algorithm"],
        "parameters": parameters(state),
        "files": files,
    }
    return manifest | {"crc32": _checksum(manifest)}


def parameters(state: Mapping[str, Any]) -> int:
    """A checksum of the names and shapes of a model's parameters: as good as its name."""
    shapes = sorted((name, list(tensor.shape)) for name, tensor in state["residual"].items())
    return zlib.crc32(json.dumps(shapes).encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The checked manifest. Raises ValueError if anything is wrong."""
    path = folder / MANIFEST
    try:
        manifest = parsed(path.read_text(), str(path))
    except FileNotFoundError:
        raise ValueError(f"there is no checkpoint in {folder}: it has no {MANIFEST}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    problem = _problem(manifest)
    if problem:
        raise ValueError(f"{path} is not a manifest that a save has written: {problem}")
    return manifest


def parsed(text: str, what: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is damaged, it cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{what} is damaged, it is {schema.shown(found)} instead of a mapping")
    return found


def _problem(manifest: Mapping[str, Any]) -> str | None:
    format = manifest.get("format")
    if type(format) is not int or format not in _MANIFESTS:
        return f"it has format {schema.shown(format)}, this version of oktopk reads 1 and {_FORMAT}"
    wrong = _MANIFESTS[format](manifest)
    if wrong:
        return f"manifest{wrong}"
    if manifest.get("crc32", _checksum(manifest)) != _checksum(manifest):
        return "its checksum is wrong, so it was damaged or edited"
    count, files = manifest["ranks"], manifest["files"]
    if len(files) != count + 1 or files.keys() != {SHARED, *map(rank_file, range(count))}:
        return f"it names {schema.listed(files)}, but is of {count} ranks"
    return None


def _checksum(manifest: Mapping[str, Any]) -> int:
    content = {key: value for key, value in manifest.items() if key != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


# Writing.


def missing(path: Path) -> list[Path]:
    """The folders that must be made for this one, from the innermost outwards."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def make(path: Path, new: Sequence[Path]) -> None:
    """Make a folder, and make sure that `new` ones (see `missing`) survive a crash."""
    path.mkdir(parents=True, exist_ok=True)
    for folder in new:
        sync(folder.parent)


def write(path: Path, content: Any, parts: Mapping[str, Any]) -> dict[str, int]:
    """Write a file so that it is on disk, and check that it can be read back safely.

    Args:
        parts: the user's parts of the content, by the names that the user knows.
    """
    with open(path, "wb") as file:
        try:
            torch.save(content, file)
            file.flush()
            torch.load(path, weights_only=True, mmap=True, map_location="cpu")
        except OSError:
            raise
        except Exception as error:  # torch.save and torch.load raise all sorts
            if isinstance(error.__context__, OSError):  # a disk that is full, say
                raise error.__context__ from None
            raise ValueError(_culprit(parts) or f"{type(error).__name__}: {error}") from error
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "crc32": _crc32(path)}


def _culprit(parts: Mapping[str, Any]) -> str | None:
    """Which object cannot be saved, or not be loaded safely."""
    try:
        for name, part in parts.items():
            for place, value in _objects(name, part):
                if not _loads(value):
                    kind = f"{type(value).__module__}.{type(value).__qualname__}"
                    return (
                        f"{place} is an object of type {kind}, but a checkpoint holds tensors and "
                        "plain values only: save vars(args) instead of an argparse.Namespace, for "
                        "example, or dataclasses.asdict(config), or torch.as_tensor(array)"
                    )
    except RecursionError:
        return "the content is nested too deeply, or holds itself"
    return None


def _objects(place: str, content: Any) -> Iterator[tuple[str, Any]]:
    """All objects that are neither tensors nor plain values, and where they are."""
    if type(content) in (dict, OrderedDict):
        for key, value in content.items():
            yield from _objects(f"a key of {place}", key)
            yield from _objects(f"{place}[{_shown(key)}]", value)
    elif type(content) in (list, tuple, set):
        for index, value in enumerate(content):
            yield from _objects(f"{place}[{index}]", value)
    elif type(content) not in (Tensor, str, bytes, int, float, bool, type(None)):
        yield place, content


def _shown(key: Any) -> str:
    return schema.shown(key) if type(key) in (str, int, float, bool, type(None)) else "..."


def _loads(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # torch.save and torch.load raise all sorts
        return False
    return True


def publish(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Make written data the checkpoint in the folder: the old one or the new one, at any moment."""
    data = folder / manifest["data"]
    unseen = _unseen(data, manifest["files"])
    if unseen:
        raise OSError(
            f"rank 0 does not see {schema.listed(unseen, 5)} in {data}, though other ranks have "
            f"written them: {folder} must be on a file system that all ranks share"
        )
    with replacing(folder / MANIFEST, durable=True) as part:
        part.write_text(json.dumps(manifest, indent=2) + "\n")
        sync(data)
        sync(folder)
    _remove_others(folder, data.name)


def _unseen(data: Path, files: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Files that are not there, or not whole, after some patience."""

    def whole(name: str) -> bool:
        try:
            return (data / name).stat().st_size == files[name]["bytes"]
        except OSError:
            return False

    until = time.monotonic() + _VISIBLE_WITHIN
    while unseen := [name for name in files if not whole(name)]:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return unseen


def names(folder: Path, data: str) -> bool:
    """Whether the manifest names these data, in spite of an error while it was replaced."""
    try:
        return bool(read_manifest(folder)["data"] == data)
    except ValueError:
        return False


def _remove_others(folder: Path, data: str) -> None:
    """Remove data of earlier saves. A later save removes the rest if this one cannot."""
    for old in os.listdir(folder):
        if is_name(old) and old != data:
            shutil.rmtree(
                folder / old, onerror=lambda *error: log.warning("cannot remove %s", error[1])
            )


def remove(data: Path, new: Sequence[Path]) -> None:
    """Undo a save that failed: all data, and the folders that were made for them.

    All ranks do it, on one disk or on their own. A late rank finds nothing to remove.
    """
    shutil.rmtree(data, ignore_errors=True)
    for folder in new:
        with contextlib.suppress(OSError):  # somebody may have put something else in it
            folder.rmdir()


# Reading.


def read(data: Path, name: str, manifest: Mapping[str, Any]) -> Any:
    """The content of a file that the manifest names. Raises ValueError if anything is wrong."""
    path, about = data / name, manifest["files"][name]
    again = "restore the file, or go back to an earlier checkpoint"
    if not path.is_file():
        raise ValueError(f"{path} is missing, though the manifest names it: {again}")
    if path.stat().st_size != about["bytes"] or _crc32(path) != about["crc32"]:
        raise ValueError(f"{path} is damaged, it is not what was written: {again}")
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch.load raises all sorts
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _crc32(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            value = zlib.crc32(chunk, value)
    return value
