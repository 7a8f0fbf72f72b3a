"""Records of a run: its plan, each step, each epoch, and the outcome.

Fields with a default were added later. Runs of earlier versions do not have them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ..core.detail import Detail
from ..workloads.base import Example
from .config.config import Config


@dataclass(frozen=True)
class Plan:
    """The plan of a run, known before its first step."""

    config: Config
    folder: str
    workers: int
    device: str
    parameters: int
    """Parameters of the model."""
    samples: int
    """Samples of the training set."""
    epochs: int
    steps_per_epoch: int
    steps: int
    """Steps of the whole run."""
    first_step: int
    """Steps done before, by the run that is resumed."""
    dense_steps: int
    """Steps before sparsity begins; with dense averaging, all of them."""
    dense_bytes: int
    """Bytes that a worker sends in a dense step."""
    weights_from: str = ""
    """The checkpoint that was resumed, or the weights that training began with."""
    resumed: int = 0
    """How often the run was resumed, this time included."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as rank 0 saw it. All numbers are finite."""

    step: int
    """From 0, over the whole run."""
    epoch: int
    """From 1."""
    loss: float
    """Mean loss of rank 0's batches."""
    lr: float
    grad_norm: float
    """Norm of the averaged gradient, before it is clipped."""
    samples: int
    """Samples of all workers in this step."""
    phase: str
    """dense or sparse."""
    sparsity: float
    """Share of the gradient's entries that were not applied."""
    compression_ratio: float
    bytes_sent: int
    """By rank 0."""
    bytes_received: int
    seconds: dict[str, float]
    """data (waiting for a batch), forward, backward, synchronise (waiting for communication after
    backward), update (clipping and the optimizer), total."""
    target: int = 0
    """Entries that the step should apply."""
    offered: int = 0
    """Entries that rank 0 offered."""
    applied: int = 0
    overflow: int = 0
    """Entries that rank 0 held back because messages had no room for them."""
    skipped: bool = False
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds that rank 0's communication thread spent in accumulate, select, exchange, reduce,
    gather and apply, over all buckets."""
    busy: float = 0.0
    """Seconds that this thread worked. What exceeds `synchronise` was hidden behind backward."""


DetailRecord = Detail
"""A look into one step, as rank 0 saw it; see `--detail-every`."""


@dataclass(frozen=True)
class EpochRecord:
    """One pass over the training set, by all workers."""

    epoch: int
    """From 1."""
    steps: int
    """Steps of the run until now."""
    loss: float
    """Mean over steps and workers."""
    lr: float
    phase: str
    """dense, sparse, or mixed."""
    sparsity: float
    """Mean of the epoch's steps."""
    compression_ratio: float
    bytes_sent: int
    """By rank 0, in this epoch."""
    seconds: float
    """Of training, without validation."""
    samples_per_second: float
    waited_for_data: float
    """Seconds, of `seconds`, that rank 0 waited for batches."""
    validation: dict[str, float]
    """Metrics of the workload by name; empty where the epoch was not validated."""
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True)
class BucketTiming:
    """Mean seconds of the parts of a step, for one bucket."""

    parameters: tuple[str, ...]
    numel: int
    algorithm: str
    sparsity: float
    bytes_sent: float
    """Mean of a step."""
    backward: float
    """From when the bucket before it was ready until this one was."""
    merge: float
    """Adding the gradient to the residual; with the selection, where both are one pass."""
    compression: float
    """Selecting the entries to send."""
    allreduce: float
    """Exchanging, adding up and gathering."""
    demerge: float
    """Writing the average to the gradient."""

    @property
    def total(self) -> float:
        return self.backward + self.merge + self.compression + self.allreduce + self.demerge


@dataclass(frozen=True)
class KindTotals:
    """The parameters of one kind, such as `convolution`: what was applied in sparse steps."""

    numel: int
    elements: int
    """Elements of these parameters, summed over sparse steps."""
    applied: int


@dataclass(frozen=True)
class Faults:
    """What did not go as planned, in the whole run."""

    resumed: int = 0
    """How often the run was resumed."""
    skipped_steps: int = 0
    """Steps left out because of a NaN or Inf."""
    discarded_steps: int = 0
    """Steps whose averages were not used."""
    skipped_samples: int = 0
    """Samples that the workload left out on rank 0."""


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    plan: Plan
    epochs: tuple[EpochRecord, ...]
    """Those of the resumed run included."""
    steps: int
    sparse_steps: int
    sparsity: float
    """Mean of the sparse steps; 0 if there was none."""
    compression_ratio: float
    """Entries of all steps, by entries applied."""
    bytes_sent: int
    """By rank 0, in all steps."""
    dense_bytes: int
    """Bytes that a worker would have sent in as many dense steps."""
    seconds: float
    """Of this process, validation and checkpoints included."""
    step_seconds: dict[str, float]
    """Mean seconds of each part of a step, named as in StepRecord."""
    buckets: tuple[BucketTiming, ...]
    memory: dict[str, float]
    """Megabytes: peak_rss (of all workers, the largest), on GPUs allocated, max, cached too."""
    kinds: dict[str, KindTotals] = field(default_factory=dict)
    """By kind: convolution, recurrent, linear, embedding, norm, bias, other."""
    busy: float = 0.0
    """Seconds that rank 0's communication thread worked, in all steps."""
    waited: float = 0.0
    """Seconds that rank 0 waited for it after backward, in all steps."""
    faults: Faults = Faults()
    choice: str = ""
    """What `--compressor auto` has chosen, and why."""


class Observer(Protocol):
    """Follows a run. Trainer calls it on rank 0."""

    def started(self, plan: Plan) -> None: ...

    def stepped(self, record: StepRecord) -> None: ...

    def detailed(self, record: DetailRecord) -> None:
        """After `stepped` of the same step."""
        ...

    def validating(self, done: int, total: int) -> None: ...

    def epoch_ended(self, record: EpochRecord) -> None: ...

    def finished(self, outcome: Outcome) -> None: ...

    def close(self) -> None:
        """Called last, whatever happened."""
        ...
