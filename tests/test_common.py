"""Common ground: files that are replaced, JSON as dataclasses, tables, flags and the host."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from oktopk.common import files, flags, format, host, values
from oktopk.common.errors import UserError

# Files.


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_as_a_whole(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with files.replacing(path, durable=durable) as part:
        part.write_text("new")
        assert path.read_text() == "old"
        assert part.parent == tmp_path
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write(path, b"old")
    with contextlib.suppress(ZeroDivisionError), files.replacing(path) as part:
        part.write_text("half")
        1 / 0  # noqa: B018
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_the_last_of_several_writers_wins(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with files.replacing(path) as one, files.replacing(path) as other:
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one"


def test_content_is_on_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(file: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{file}") else "content")
        fsync(file)

    def note_replace(*paths: Any) -> None:
        done.append("name")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    files.write(tmp_path / "file", b"content")
    assert done == ["content", "name", "folder"]


def test_what_cannot_be_replaced_is_told_before(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        files.probe(tmp_path / "nowhere" / "file")
    files.probe(tmp_path / "file")
    assert not os.listdir(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is not an ordinary file"):
        files.check_ordinary(tmp_path / "pipe")
    files.check_ordinary(tmp_path / "file")


# JSON.


@dataclass(frozen=True)
class Inner:
    number: float


@dataclass(frozen=True)
class Outer:
    inner: list[Inner]
    choice: int | str | None = None
    named: dict[str, tuple[int, ...]] = field(default_factory=dict)
    anything: Any = None


def test_dataclasses_survive_json() -> None:
    for choice in (3, "three", None):
        value = Outer([Inner(1.0), Inner(2.5)], choice, {"a": (1, 2)}, {"x": [None]})
        assert values.build(Outer, json.loads(json.dumps(values.plain(value)))) == value
    infinite = values.plain(Outer([Inner(math.inf)]))
    assert infinite["inner"] == [{"number": None}]
    with pytest.raises(ValueError, match=r"inner\[0\].number is null, but must be a number"):
        values.build(Outer, infinite)
    with pytest.raises(ValueError, match=r"choice is 2\.5, but must be a whole number or text"):
        values.build(Outer, {"inner": [], "choice": 2.5})


# Tables and numbers.


def test_columns_are_aligned() -> None:
    rows = [["name", "ms", ""], ["x", "1,000", "1"], ["long one", "2", "10"]]
    assert format.table(rows) == ["name         ms", "x         1,000   1", "long one      2  10"]
    assert format.table(rows, left=0)[1] == "       x  1,000   1"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.01234, "0.0123"), (31.41, "31.4"), (12345.6, "12,346"), (None, "-"), (math.nan, "-")],
)
def test_measurements_have_three_digits(value: float | None, shown: str) -> None:
    assert format.digits(value) == shown


# Flags and the host.


def test_numbers_are_read_as_people_write_them() -> None:
    assert flags.positive("1_000") == flags.positive("1,000") == 1000
    assert flags.share("0.5") == 0.5
    for read, text in ((flags.positive, "0"), (flags.positive, "x"), (flags.share, "nan")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"^{text} is not "):
            read(text)
    with pytest.raises(argparse.ArgumentTypeError, match="is too much, 9 is the most"):
        flags.whole(1, 9)("10")
    assert flags.did_you_mean("dens", ["dense", "oktopk"]) == "; did you mean dense?"
    assert flags.did_you_mean("dens", ["oktopk"]) == ""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes have no affinity here")
def test_cores_are_those_that_the_process_may_use() -> None:
    program = """if True:
        import os
        from oktopk.common import host
        os.sched_setaffinity(0, host.cores()[:1])
        print(host.cores())
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == f"{host.cores()[:1]}\n", done.stderr
    assert host.processor()
