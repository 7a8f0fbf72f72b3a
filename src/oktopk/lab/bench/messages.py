"""Messages between `oktopk bench` and its ranks: lines of JSON, one dataclass for each kind.

    parent                     rank
    Start                  ->  joins the group
                           <-  Ready
    RawJob or TrainingJob  ->  measures one contender
                           <-  Progress, of rank 0, after each step
                           <-  Answer
    End                    ->  ends

A rank that cannot go on says Mistake or Failed instead, and ends. Both sides check a message when
it arrives: `decode` raises ValueError for anything but a whole message of an expected kind.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, get_args

from ...common.values import build, parse, plain


@dataclass(frozen=True)
class Start:
    """The first message: which rank this is, and how ranks meet."""

    rank: int
    size: int
    folder: str
    """A folder that all ranks share."""
    interface: str
    counts: bool
    """The interface counts the bytes of this rank, and no others."""
    threads: int
    timeout: float


@dataclass(frozen=True)
class RawJob:
    """Average the same gradients again and again."""

    contender: str
    density: float | None
    numel: int
    seed: int
    first: int
    """The number of the first gradient."""
    settle: int
    """Steps to skip in any case."""
    skip: int
    """Steps to skip if there is time; at least `settle`."""
    steps: int
    """Steps to measure, unless time runs out."""
    least: int
    """Steps to measure even then."""
    seconds: float


@dataclass(frozen=True)
class TrainingJob:
    """Train the model of a recipe."""

    contender: str
    density: float | None
    recipe: str
    values: dict[str, bool | int | float | str | None]
    """Fields of the configuration that differ from the recipe."""
    steps: int
    """0 for the epochs of the configuration."""
    seconds: float
    warmup_steps: int


@dataclass(frozen=True)
class End:
    """The last message."""


@dataclass(frozen=True)
class Ready:
    """The rank has joined the group."""


@dataclass(frozen=True)
class Progress:
    step: int
    steps: int


@dataclass(frozen=True)
class Mistake:
    """An error that the user can fix, as one line."""

    text: str


@dataclass(frozen=True)
class Failed:
    """Any other error."""

    text: str


@dataclass(frozen=True)
class Cost:
    """The parts of one step. Times are in seconds."""

    compute: float
    communication: float
    nbytes: int
    """Bytes that the rank sends, by our count."""
    stages: dict[str, float] = field(default_factory=dict)
    applied: int | None = None
    """Raw: elements of the gradient that were applied."""
    loss: float | None = None
    """Training; None where it is not finite."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that an interface has counted."""

    sent: int
    received: int


@dataclass(frozen=True)
class Step:
    """One step of one rank. Times are in seconds."""

    cost: Cost
    seconds: float
    cpu: float
    """Of all threads, and of the system for them."""
    elapsed: float = 0.0
    """Training: from the start to the end of this step."""
    measured: bool = True
    moved: Traffic | None = None
    """Until the next step began; None where the interface does not count."""


@dataclass(frozen=True)
class Course:
    """How a training went."""

    steps_per_epoch: int
    planned: int
    """Steps."""
    samples: int
    """Of all ranks, in a step."""
    dense_steps: int
    failed: str = ""
    """Why it ended early."""


@dataclass(frozen=True)
class Answer:
    """What one rank measured in one job."""

    numel: int
    """Elements of the gradient."""
    steps: list[Step]
    course: Course | None = None
    """None in a raw job."""
    notes: list[str] = field(default_factory=list)
    """Warnings."""


Job = RawJob | TrainingJob
ToRank = Start | Job | End
FromRank = Ready | Progress | Mistake | Failed | Answer


def encode(message: ToRank | FromRank) -> str:
    """A message as a line."""
    return json.dumps({"kind": type(message).__name__, **plain(message)}) + "\n"


def decode(line: str, expected: Any) -> Any:
    """The message on a line, which is of the expected type, or of one of a union of types."""
    values = parse(line)
    name = values.get("kind") if isinstance(values, dict) else None
    kinds = {kind.__name__: kind for kind in get_args(expected) or (expected,)}
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(f"the kind of a message is {name!r}, but must be {' or '.join(kinds)}")
    return build(kinds[name], values)
