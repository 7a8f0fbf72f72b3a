"""The interface of workloads.

A workload is a folder with two classes.

1. A `WorkloadConfig`: the workload's flags, datasets, recipes and metrics. Help and recipes need
   it, so it is imported without torch. One line in `workloads/__init__.py` registers it.
2. A `Workload`: model, batches, loss and validation. `WorkloadConfig.make` imports and builds it
   when a run begins.
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from ..common.errors import UserError
from ..common.format import number
from ..common.sections import Section

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Batch = TypeVar("Batch")

Example = dict[str, str]
"""Texts of a validation to show, by label: `reference` and `hypothesis`, or `text`. They may have
several lines."""


@dataclass(frozen=True)
class Metric:
    """A number that a validation gives, and how to show it."""

    name: str
    """As it is recorded."""
    label: str
    """As it is shown."""
    format: Callable[[float], str] = number
    lower_is_better: bool = True
    note: str = ""
    """A remark for the summary."""


@dataclass(frozen=True)
class Recipe:
    """A line for `oktopk recipes`, and the values that differ from the defaults."""

    summary: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Validation:
    """The outcome of a validation. All workers have the same."""

    metrics: dict[str, float]
    """By name. `loss` is one of them."""
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True)
class Context:
    """The run that a workload is part of."""

    device: torch.device
    local_rank: int
    """Among the workers of this machine. Number 0 gets the data ready, the others wait."""
    batch_size: int
    """Samples of each worker in one forward and backward."""
    nsteps_update: int
    """Batches of each step."""
    seed: int
    copies: int = 4
    """Tensors of the model's size that training holds for certain."""


class Workload(Protocol[Batch]):
    """A model and its data. All workers make one together, and call its methods in the same
    order."""

    @property
    def model(self) -> nn.Module:
        """On any device; the trainer moves it."""
        ...

    @property
    def samples(self) -> int:
        """Samples of the training set."""
        ...

    @property
    def batches_per_epoch(self) -> int:
        """Of each worker. All workers have as many."""
        ...

    def batches(self, epoch: int, done: int = 0) -> Generator[Batch, None, None]:
        """This worker's batches of an epoch, without the first `done`.

        They depend on the seed and the epoch alone, so that a run can be resumed. The first epoch
        is 1. The trainer closes the generator.
        """
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a batch.

        Args:
            model: `self.model`, as DistributedDataParallel wraps it.
        """
        ...

    def validate(self, model: nn.Module, progress: Callable[[int, int], None]) -> Validation:
        """Measure the model on the validation set, all workers together.

        Args:
            model: `self.model`. It is in training mode, before and after.
            progress: called with how much is done, and of how much.
        """
        ...


@dataclass(frozen=True)
class WorkloadConfig(Section, ABC):
    """The settings of a workload, and all that help, console and recipes know of it.

    Subclasses have at least the options `dataset`, with choices, and `data_dir`. Other workloads
    may have an option of the same name, if it has the same type.
    """

    name: ClassVar[str]
    sample: ClassVar[str]
    """One sample, such as "utterance"."""
    metrics: ClassVar[Sequence[Metric]]
    """Of a validation, in the order in which they are shown."""
    recipes: ClassVar[Mapping[str, Recipe]]

    @abstractmethod
    def make(self, context: Context) -> Workload[Any]:
        """The workload, built by all workers together."""

    @abstractmethod
    def prepare(self, progress: bool) -> None:
        """Fetch or make the data, and check that they can be read.

        Args:
            progress: whether to show it.
        """

    def elements(self) -> int:
        """Elements of the model's gradient, found without data and without memory for the model."""
        raise UserError(f"the model of {self.name} does not say how large it is: give --params")

    @classmethod
    def default_recipe(cls, given: Mapping[str, Any]) -> str:
        """The recipe for somebody who gave these values and named none."""
        return next(iter(cls.recipes))

    @classmethod
    def add_data_commands(cls, commands: argparse._SubParsersAction[Any]) -> None:
        """Subcommands of `oktopk data`. Each sets `run`, a function that gives the exit code."""

    @classmethod
    def datasets(cls) -> Sequence[str]:
        """The values of --dataset that choose this workload."""
        return cls.options()["dataset"].choices

    @classmethod
    def metric(cls, name: str) -> Metric:
        """How to show a metric; runs of earlier versions may have others."""
        return next((each for each in cls.metrics if each.name == name), Metric(name, name))
