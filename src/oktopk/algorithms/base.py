"""An algorithm: a configuration, a state of its own, and one function.

    state = algorithm.init()
    reduced, state = algorithm.reduce(state, accumulator, comm)

The configuration is a frozen dataclass. `reduce` is value in, value out: it returns the sums over
ranks and the state for the next step, and changes nothing that outlives a failed step. Memory,
rounding to 16 bits, statistics and the decision to commit belong to the transaction around it, in
core/reduction.py.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Generic

from torch import Tensor
from typing_extensions import Self, TypeVar

from ..core import schema
from ..core.accumulator import Accumulator
from ..core.comm import Comm
from ..core.select import TREND_LIMIT, Carried
from ..core.upgrade import OLD_FIELDS
from ..wire.message import FORMATS, Entries


@dataclass(frozen=True)
class State:
    """The memory of an algorithm between sparse steps: empty, unless a subclass adds fields.

    A field is a whole number from 0 on, a float, a flag, a `Carried` threshold or a tuple of region
    boundaries, and has a default. All fields are the same on every rank, except `local`. A subclass
    with other fields overrides the methods; the values that it saves must be plain.
    """

    def as_dict(self) -> dict[str, Any]:
        """Plain values, to save."""
        return {knob.name: _plain(getattr(self, knob.name)) for knob in fields(self)}

    def loaded(self, saved: Mapping[str, Any], size: int) -> Self:
        """The saved state, for `size` ranks. Regions of another number of ranks are cut anew."""
        values = self._own(saved)
        for name, value in values.items():
            if isinstance(getattr(self, name), Carried):
                values[name] = Carried(float(value[0]), float(value[1]))
            elif isinstance(getattr(self, name), tuple):
                values[name] = tuple(value) if len(value) == size + 1 else ()
        return dataclasses.replace(self, **values)

    def problem(self, saved: Mapping[str, Any], numel: int) -> str | None:
        """Why a saved state does not fit, if it does not."""
        checks = {knob.name: _check(getattr(self, knob.name), numel) for knob in fields(self)}
        return schema.record(checks)(self._own(saved))

    def _own(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of this class. Before version 0.2 all algorithms saved the same fields."""
        names = [knob.name for knob in fields(self)]
        if saved.keys() != set(OLD_FIELDS):
            return dict(saved)
        return {name: value for name, value in saved.items() if name in names}

    def shared(self) -> dict[str, Any]:
        """The values that must be the same on all ranks."""
        return {name: value for name, value in self.as_dict().items() if name != "local"}


def _plain(value: Any) -> Any:
    if isinstance(value, Carried):
        return [value.value, value.trend]
    return list(value) if isinstance(value, tuple) else value


def _check(value: Any, numel: int) -> schema.Check:
    if isinstance(value, Carried):  # infinity: no threshold yet
        least, trend = schema.number(0, finite=False), schema.number(-TREND_LIMIT, TREND_LIMIT)
        return schema.pair(least, trend)
    if isinstance(value, bool):
        return schema.flag
    if isinstance(value, float):
        return schema.number(finite=False)
    return schema.regions(numel) if isinstance(value, tuple) else schema.whole()


@dataclass(frozen=True)
class Reduced:
    """The result of a reduction."""

    sums: Entries | Tensor
    """The sums over ranks, bitwise the same on every rank: entries, or all elements."""
    residual: Tensor | None
    """The values that this rank keeps for later steps; None: nothing."""
    offered: int
    """Entries that this rank offered."""
    local_threshold: float = 0.0
    """Magnitude that all offered entries reach."""
    global_threshold: float = 0.0
    """Magnitude that all applied sums reach; 0 where there is no such limit."""
    overflow: int = 0
    """Entries that this rank held back because a message had no room for them."""
    regions: tuple[int, ...] = ()
    """Where the owners' regions begin, and the number of elements; empty if there are none."""


@dataclass(frozen=True)
class Written:
    """The result of a reduction that has written averages and the new residual itself.

    Averages are in `acc.out`, the residual is in `acc.values`. If `comm.finite` is False, neither
    is looked at.
    """

    applied: tuple[int, ...]
    """Entries applied in each part of the vector."""
    offered: int
    local_threshold: float
    global_threshold: float
    overflow: int
    """These four are as in `Reduced`."""
    regions: tuple[int, ...] = ()
    """As in `Reduced`."""


S = TypeVar("S", bound=State, default=Any)


@dataclass(frozen=True)
class Algorithm(ABC, Generic[S]):
    """Configuration of a reduction. Subclasses add their own knobs."""

    fixed_size: ClassVar[bool] = False
    """Whether its steps are those of `kernels.Step`."""
    other_wires: ClassVar[tuple[str, ...]] = ()
    """Values that `wire` may have besides wire formats."""
    density: float = 0.02
    """Share of the elements that is applied in a step, above 0 and at most 1."""
    warmup_steps: int = 0
    """Dense steps before the first sparse one."""
    ramp: tuple[float, ...] = field(default=(), kw_only=True)
    """Densities to pass through after the warm-up, such as (0.25, 0.06), `ramp_steps` each."""
    ramp_steps: int = field(default=64, kw_only=True)
    wire: str = field(default="int8", kw_only=True)
    """How entries travel: plain, float32, bfloat16, float16, int8 or int4; see wire/."""

    def __post_init__(self) -> None:
        for knob in fields(self):  # numpy's numbers could not be saved
            object.__setattr__(self, knob.name, _native(getattr(self, knob.name)))
        object.__setattr__(self, "ramp", tuple(map(_native, self.ramp)))
        for density in (self.density, *self.ramp):
            if not (isinstance(density, int | float) and 0 < density <= 1):
                raise ValueError(
                    f"density is {density!r}, but must be above 0 and at most 1: "
                    "0.02 applies 2 % of the elements in each step"
                )
        wires = (*FORMATS, *self.other_wires)
        if self.wire not in wires:
            raise ValueError(f"wire is {self.wire!r}, but must be one of {', '.join(wires)}")
        for knob in fields(self):
            value = getattr(self, knob.name)
            least = 0 if knob.name == "warmup_steps" else 1
            if knob.type in (int, "int") and not (type(value) is int and value >= least):
                raise ValueError(
                    f"{knob.name} is {value!r}, but must be a whole number, at least {least}"
                )

    def density_at(self, step: int) -> float:
        """The density to reach in a step that is not dense."""
        stage = (step - self.warmup_steps) // self.ramp_steps
        return self.ramp[stage] if 0 <= stage < len(self.ramp) else self.density

    def target(self, numel: int, step: int | None = None) -> int:
        """k, the number of entries to apply: in one step or, without a step, after any ramp."""
        density = self.density if step is None else self.density_at(step)
        return max(1, round(density * numel))

    def first(self) -> Algorithm:
        """What to run in the first step: this, unless it is to be chosen from what is measured."""
        return self

    @abstractmethod
    def init(self) -> S:
        """The state before the first sparse step."""

    @abstractmethod
    def reduce(self, state: S, acc: Accumulator, comm: Comm) -> tuple[Reduced | Written, S]:
        """Sum over ranks the entries that this step applies, or all elements.

        Args:
            state: from `init`, or from the last step that was committed. It is not changed.
            acc: this rank's residual and gradient. `acc.values` is left as the residual to keep.
            comm: the other ranks. At the end, `comm.finite` must be the same on all ranks.

        Returns:
            The result, and the state for the next step, of the same type as that of `init`.
        """

    @abstractmethod
    def words(self, numel: int, size: int) -> float:
        """Most words that a rank sends in a step on average; an index or a value is a word."""


def _native(value: Any) -> Any:
    return float(value) if isinstance(value, float) else value
