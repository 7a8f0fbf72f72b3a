"""The configuration of a run, in sections. Their fields are the flags of `oktopk train`.

Values come, in this order, from the defaults here, the recipe, a TOML file, and the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from ...common.errors import UserError
from ...common.sections import Section, flag, option, words
from ...workloads import WORKLOADS, workload_for
from ...workloads.base import WorkloadConfig

if TYPE_CHECKING:
    from ...algorithms import Algorithm


@dataclass(frozen=True)
class Run(Section):
    """How long to train, with which batches, and where results go."""

    title: ClassVar[str] = "The run"

    recipe: str = option("", "The same as RECIPE: values to begin with, see `oktopk recipes`.")
    max_epochs: int = option(100, "Passes over the training set.", least=1)
    max_steps: int | None = option(None, "End after this many steps, if that is sooner.", least=1)
    batch_size: int = option(8, "Samples of each worker in one forward and backward.", least=1)
    nsteps_update: int = option(1, "Batches whose gradients are accumulated for one step.", least=1)
    autocast: str = option(
        "no", "Precision of forward and backward: no (float32) or bf16.", choices=("no", "bf16")
    )
    seed: int = option(1, "Seed of weights, order and augmentation.", least=0, most=(1 << 40) - 1)
    pretrain: str = option(
        "", "Begin with these weights: a run's folder, or a file of a state_dict.", path=True
    )
    run_dir: str = option("", "Folder for results; by default runs/RECIPE-DATE-TIME.", path=True)
    resume: str = option(
        "",
        "Go on with a run: a run's folder; or auto, for the run in --run-dir, else the recipe's "
        "latest run, else a new one.",
        path=True,
    )
    page: bool = option(True, "Write the page of the run, report.html, at its end.")
    validate_every: int = option(
        5, "Epochs between validations; the first and the last are always validated.", least=1
    )
    checkpoint_every: int = option(
        0, "Steps between checkpoints; 0: one after every epoch, -1: one at the end.", least=-1
    )
    detail_every: int = option(
        50,
        "Steps between looks into a step: magnitudes, thresholds, regions, staleness; 0: none.",
        least=0,
    )
    report_to: str = option(
        "",
        "Where series also go: tensorboard, wandb, trackio, several of them, or none. By default "
        "tensorboard, if it is installed.",
        choices=("tensorboard", "wandb", "trackio", "none"),
        several=True,
    )
    tensorboard: bool = option(
        True, "Write event files for TensorBoard; False leaves it out of --report-to."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if "none" in (names := words(self.report_to)) and len(names) > 1:
            raise UserError(f"--report-to is {self.report_to}: none goes with no other name")

    @property
    def reporters(self) -> tuple[str, ...]:
        """The names in --report-to, or its default."""
        left_out = ("none",) if self.tensorboard else ("none", "tensorboard")
        names = dict.fromkeys(words(self.report_to or "tensorboard"))
        return tuple(name for name in names if name not in left_out)


@dataclass(frozen=True)
class Optimizer(Section):
    """How weights are updated."""

    title: ClassVar[str] = "The optimizer"

    name: str = option(
        "sgd",
        "sgd (with Nesterov's momentum), adamw (oktopk.AdamW), or torch-adamw.",
        name="optimizer",
        choices=("sgd", "adamw", "torch-adamw"),
    )
    lr: float = option(0.01, "Learning rate; with --schedule onecycle its peak.", above=0)
    momentum: float = option(0.9, "Of sgd; the beta1 of adamw and torch-adamw.", least=0, below=1)
    momentum_correction: bool = option(
        False, "Accumulate momentum on each worker, before compression, as DGC does."
    )
    refresh_interval: int = option(
        512,
        "Sparse steps that renew all of adamw's second moment; 0 keeps warm-up's.",
        least=0,
    )
    weight_decay: float = option(0.0, "Weight decay, of matrices only.", least=0)
    schedule: str = option(
        "anneal",
        "Learning rate: constant, anneal (divided by --anneal after each epoch), or onecycle.",
        choices=("constant", "anneal", "onecycle"),
    )
    anneal: float = option(1.01, "Divisor of --schedule anneal after each epoch.", least=1)
    clip: float = option(20.0, "Largest norm of the averaged gradient; 0 does not clip.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum_correction and self.name != "sgd":
            raise UserError("--momentum-correction needs --optimizer sgd")


@dataclass(frozen=True)
class Compression(Section):
    """How gradients are averaged."""

    title: ClassVar[str] = "How gradients are averaged"

    enabled: bool = option(
        True, "Compress gradients; False averages them densely.", name="compression"
    )
    compressor: str = option(
        "oktopk",
        "oktopk, oktopk-variable, topka, topka2, topkaopt, topkdsa, gtopk, gaussiank or dense.",
    )
    density: float = option(
        0.02, "Share of the gradient's elements that is applied in a step.", above=0, most=1
    )
    wire: str = option(
        "int8",
        "How entries travel: plain (8.7 bytes each), float32, bfloat16 (3.3 bytes), float16, int8 "
        "(2.2 bytes) or int4 (1.7 bytes). Rounding errors stay in the residual.",
    )
    capacity: float = option(
        1.08, "Of oktopk: fixed size of a message, in multiples of k/P; 0: sizes are exchanged."
    )
    warmup_steps: int = option(128, "Dense steps before the first sparse one.", least=0)
    sigma_scale: float = option(2.5, "Gaussiank's first threshold, in deviations.", above=0)
    scope: str = option(
        "bucket",
        "Select the largest entries of each bucket, during backward, or of the whole model.",
        choices=("bucket", "model"),
    )
    bucket_mb: float = option(25.0, "Megabytes of gradient in a bucket.", above=0, most=1 << 20)
    dense_below: int = option(
        8192, "Parameters with fewer elements than this are averaged densely.", least=0
    )
    norm_clip: float = option(
        0.0, "Largest norm of a worker's gradient before compression; 0 does not clip.", least=0
    )

    def __post_init__(self) -> None:
        # Imported here, so that help does without torch.
        from ...wire.message import FORMATS

        super().__post_init__()
        if self.wire not in FORMATS:
            raise UserError(f"--wire is {self.wire!r}, but must be one of {', '.join(FORMATS)}")
        if self.capacity != 0 and not 1 <= self.capacity < 100:
            raise UserError(
                f"--capacity is {self.capacity}, but must be at least 1, such as 1.08, or 0 to "
                "exchange sizes"
            )
        self.algorithm()

    def algorithm(self) -> Algorithm:
        """As it is attached to a model."""
        from ...algorithms import Dense, algorithm

        if not self.enabled:
            return Dense()
        options: dict[str, Any] = {
            "density": self.density,
            "warmup_steps": self.warmup_steps,
            "wire": self.wire,
        }
        compressor = self.compressor
        if compressor.lower() == "oktopk":
            if self.capacity:
                options["capacity"] = self.capacity
            else:
                compressor = "oktopk-variable"
        if self.compressor.lower() == "gaussiank":
            options["sigma_scale"] = self.sigma_scale
        try:
            return algorithm(compressor, **options)
        except ValueError as error:
            raise UserError(f"--compressor {self.compressor}: {error}") from None


@dataclass(frozen=True)
class Launch(Section):
    """Workers and devices."""

    title: ClassVar[str] = "Workers"

    nworkers: int | None = option(
        None,
        "Workers to start on this machine (2 by default); under torchrun, mpirun or srun, the "
        "number that there must be.",
        least=1,
    )
    nwpernode: int | None = option(
        None, "Workers of each machine. Only checked: the launcher decides.", least=1
    )
    device: str = option(
        "auto",
        "cpu, cuda, or auto: a GPU for each worker if there is one.",
        choices=("auto", "cpu", "cuda"),
    )
    threads: int = option(
        0, "CPU threads of each worker; 0: an equal share of the cores.", least=0, most=4096
    )


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on. The defaults are the published settings of lstman4, but
    for clipping: at 400, as published, training diverges in its second epoch."""

    run: Run = field(default_factory=Run)
    workload: WorkloadConfig = field(default_factory=lambda: WORKLOADS[0]())
    optimizer: Optimizer = field(default_factory=Optimizer)
    compression: Compression = field(default_factory=Compression)
    launch: Launch = field(default_factory=Launch)

    @classmethod
    def of(cls, **values: Any) -> Config:
        """A configuration from the values of options, as flags name them.

        The dataset or the recipe says which workload it is for.
        """
        workload = workload_for(values)
        kinds = sections(workload)
        for name in values:
            if not any(name in kind.options() for kind in kinds.values()):
                owners = [each for each in WORKLOADS if name in each.options()]
                datasets = ", ".join(dataset for each in owners for dataset in each.datasets())
                raise UserError(
                    f"{flag(name)} is for --dataset {datasets}, not for {workload.name}"
                    if owners
                    else f"there is no {flag(name)}"
                )
        made: dict[str, Any] = {section: kind.of(values) for section, kind in kinds.items()}
        return cls(**made)

    def replace(self, **values: Any) -> Config:
        """The same with some values changed."""
        return Config.of(**{**self.as_dict(), **values})

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name, without those that are unset."""
        return {name: value for part in self.parts for name, value in part.as_dict().items()}

    @property
    def parts(self) -> tuple[Section, ...]:
        """All sections."""
        return self.run, self.workload, self.optimizer, self.compression, self.launch


def sections(workload: type[WorkloadConfig]) -> Mapping[str, type[Section]]:
    """The sections of a configuration for a workload, as `Config` names them."""
    made: dict[str, Any] = {each.name: each.default_factory for each in fields(Config)}
    return {**made, "workload": workload}
