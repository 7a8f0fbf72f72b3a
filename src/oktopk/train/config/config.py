"""The configuration of a run: one flat dataclass, whose fields are the flags of `oktopk train`.

A field's docstring is its help text. Values come, in this order, from the defaults here, the
recipe, a TOML file, and the command line.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...common.errors import UserError

if TYPE_CHECKING:
    from ...algorithms import Algorithm


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on. The defaults are the published settings of lstman4, but
    for clipping: at 400, as published, training diverges in its second epoch."""

    recipe: str = ""
    """Name of the recipe that the other values began with."""

    # What is trained.
    dnn: str = "lstman4"
    """Model: lstman4 (27.6 million parameters), or lstman4-small (2.3 million, for CPUs)."""
    dataset: str = "an4"
    """Corpus: an4, spoken (synthesised here, no download), or manifest (files that you name)."""
    data_dir: str = ""
    """Folder of the corpus; by default a folder in the user's cache."""
    train_manifest: str = ""
    """List of training utterances, for --dataset manifest; see `oktopk data --help`."""
    val_manifest: str = ""
    """List of validation utterances, for --dataset manifest."""
    features: str = "spectrogram"
    """What the model hears: spectrogram (161 bins) or logmel (80 bins)."""
    augment: bool = False
    """From the second epoch on, mask bands of time and frequency and stretch time."""
    width: int | None = None
    """Units of an LSTM layer; by default what the model has."""
    depth: int | None = None
    """LSTM layers; by default what the model has."""
    bidirectional: bool | None = None
    """Read the utterance in both directions; by default what the model does."""
    pretrain: str = ""
    """Begin with the weights of this checkpoint: a run's folder, or a file of a state_dict. A run
    that is resumed has its own."""

    # How it is trained.
    max_epochs: int = 100
    """Passes over the training set."""
    max_steps: int | None = None
    """End after this many steps, if that is sooner."""
    batch_size: int = 8
    """Utterances of each worker in one forward and backward."""
    nsteps_update: int = 1
    """Batches whose gradients are accumulated for one step."""
    optimizer: str = "sgd"
    """sgd (with Nesterov's momentum), adamw (oktopk.AdamW), or torch-adamw."""
    lr: float = 0.01
    """Learning rate; with --schedule onecycle its peak."""
    momentum: float = 0.9
    """Of sgd; the beta1 of adamw and torch-adamw."""
    momentum_correction: bool = False
    """Accumulate momentum on each worker before compression, as DGC does, instead of after it."""
    refresh_interval: int = 512
    """Sparse steps in which adamw brings its second moment up to date; 0 keeps it as the warm-up
    left it."""
    weight_decay: float = 0.0
    """Weight decay, of matrices only."""
    schedule: str = "anneal"
    """Learning rate: constant, anneal (divided by --anneal after each epoch), or onecycle."""
    anneal: float = 1.01
    """What --schedule anneal divides by after each epoch."""
    clip: float = 20.0
    """Largest norm of the averaged gradient; 0 does not clip."""
    norm_clip: float = 0.0
    """Largest norm of each worker's own gradient before compression; 0 does not clip."""
    autocast: str = "no"
    """Precision of forward and backward: no (float32) or bf16."""
    seed: int = 1
    """Seed of weights, order and augmentation."""

    # How gradients are averaged.
    compression: bool = True
    """Compress gradients; `--compression False` averages them densely."""
    compressor: str = "oktopk"
    """Algorithm: oktopk, topka, topka2, topkaopt, topkdsa, gtopk, gaussiank or dense."""
    density: float = 0.02
    """Share of the gradient's entries that is applied in a step."""
    wire: str = "int8"
    """How entries travel: plain (8 bytes each), float32, bfloat16 (3 bytes), float16 or int8 (2
    bytes). What rounding costs stays in the residual."""
    capacity: float = 1.15
    """Of oktopk: room of a message in multiples of k/P, so that messages have a fixed size; 0:
    sizes are exchanged first."""
    warmup_steps: int = 128
    """Dense steps before the first sparse one."""
    sigma_scale: float = 2.5
    """Gaussiank's first threshold, in standard deviations."""
    scope: str = "bucket"
    """Select the largest entries of each bucket, overlapping with backward, or of the whole
    model."""
    bucket_mb: float = 25.0
    """Megabytes of gradient in a bucket."""
    dense_below: int = 8192
    """Parameters with fewer elements than this are averaged densely."""

    # Where and how it runs.
    nworkers: int | None = None
    """Workers to start on this machine; under torchrun, mpirun or srun, how many there must be.
    By default 2 or, if launched, as many as there are."""
    nwpernode: int | None = None
    """Workers of each machine. Only checked: who launches the workers decides."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU for each worker if there is one."""
    threads: int = 0
    """CPU threads of each worker; 0 shares the cores among the workers of a machine."""
    run_dir: str = ""
    """Folder for results; by default runs/RECIPE-DATE-TIME."""
    resume: str = ""
    """Go on with a run: auto (what is in --run-dir, or else the latest run of the recipe; a new one
    if there is none), or a run's folder."""
    validate_every: int = 5
    """Epochs between validations; the first and the last epoch are always validated."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 makes one after every epoch, -1 none but at the end."""
    examples: int = 3
    """Validation utterances to show with what was recognised."""
    tensorboard: bool = True
    """Write event files for TensorBoard."""

    def __post_init__(self) -> None:
        # Here, not above: torch is not needed to show what flags there are.
        from ...wire.message import FORMATS

        for name, allowed in {**_CHOICES, "wire": FORMATS}.items():
            if getattr(self, name) not in allowed:
                raise UserError(
                    f"{flag(name)} is {getattr(self, name)!r}, but must be one of "
                    f"{', '.join(allowed)}"
                )
        self._check_values()
        if not 0 <= self.momentum < 1:
            raise UserError(f"--momentum is {self.momentum}, but must be at least 0 and below 1")
        if self.capacity != 0 and not 1 <= self.capacity < 100:
            raise UserError(
                f"--capacity is {self.capacity}, but must be at least 1, such as 1.15, or 0 to "
                "exchange sizes"
            )
        if self.momentum_correction and self.optimizer != "sgd":
            raise UserError("--momentum-correction needs --optimizer sgd")
        if self.dataset == "manifest" and not (self.train_manifest and self.val_manifest):
            raise UserError("--dataset manifest needs --train-manifest and --val-manifest")
        self.make_algorithm()

    def _check_values(self) -> None:
        """Ranges, whatever the compressor: the run saves values that are not used, too."""
        for name, value in self.as_dict().items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{flag(name)} is {value}, but must be a finite number")
            if isinstance(value, str) and ("\0" in value or _broken(value)):
                raise UserError(f"{flag(name)} is {value}, but must be text in UTF-8: rename it")
            if name in _ABOVE_ZERO and not value > 0:
                raise UserError(
                    f"{flag(name)} is {value}, but must be above 0: the default is "
                    f"{getattr(Config, name)}"
                )
            if name in _LEAST and value < _LEAST[name]:
                raise UserError(f"{flag(name)} is {value}, but must be at least {_LEAST[name]}")
            if name in _MOST and value > _MOST[name]:
                raise UserError(f"{flag(name)} is {value}, but must be at most {_MOST[name]}")

    def make_algorithm(self) -> Algorithm:
        """How gradients are averaged."""
        from ...algorithms import Dense, algorithm

        if not self.compression:
            return Dense()
        options: dict[str, Any] = {
            "density": self.density,
            "warmup_steps": self.warmup_steps,
            "wire": self.wire,
        }
        if self.compressor.lower() == "oktopk":
            options["capacity"] = self.capacity or None
        if self.compressor.lower() == "gaussiank":
            options["sigma_scale"] = self.sigma_scale
        try:
            return algorithm(self.compressor, **options)
        except ValueError as error:
            raise UserError(f"--compressor {self.compressor}: {error}") from None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without those that are unset."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if value is not None}


_CHOICES = {
    "dnn": ("lstman4", "lstman4-small"),
    "dataset": ("an4", "spoken", "manifest"),
    "features": ("spectrogram", "logmel"),
    "optimizer": ("sgd", "adamw", "torch-adamw"),
    "schedule": ("constant", "anneal", "onecycle"),
    "autocast": ("no", "bf16"),
    "scope": ("bucket", "model"),
    "device": ("auto", "cpu", "cuda"),
}
_ABOVE_ZERO = ("lr", "density", "sigma_scale", "bucket_mb")
_LEAST: dict[str, float] = {
    "width": 1,
    "depth": 1,
    "max_epochs": 1,
    "max_steps": 1,
    "batch_size": 1,
    "nsteps_update": 1,
    "seed": 0,
    "refresh_interval": 0,
    "weight_decay": 0,
    "anneal": 1,
    "clip": 0,
    "norm_clip": 0,
    "warmup_steps": 0,
    "dense_below": 0,
    "nworkers": 1,
    "nwpernode": 1,
    "threads": 0,
    "validate_every": 1,
    "checkpoint_every": -1,
    "examples": 0,
}
_MOST: dict[str, float] = {
    "density": 1,
    # Nobody means more than this; it would take all memory, or never end.
    "width": 1_000_000,
    "depth": 1000,
    "threads": 4096,
    "seed": (1 << 40) - 1,
    "bucket_mb": 1 << 20,
}


def _broken(text: str) -> bool:
    """Neither TOML nor torch take names that are not UTF-8."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def flag(name: str) -> str:
    """A field as it is written on the command line."""
    return "--" + name.replace("_", "-")
