"""The settings of the speech workload, its recipes and its metrics. Imported without torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...common.errors import UserError
from ...common.sections import option
from ..base import Context, Metric, Recipe, WorkloadConfig

if TYPE_CHECKING:
    from .workload import Speech

_SMALL = {
    "dnn": "lstman4-small",
    "features": "logmel",
    "augment": True,
    "optimizer": "adamw",
    "weight_decay": 0.01,
    "schedule": "onecycle",
    "clip": 5.0,
    "dense_below": 1024,
    "nworkers": 2,
}
_RECIPES = {
    "spoken": Recipe(
        "small model, synthesised corpus: no download, minutes on 2 cores",
        {**_SMALL, "dataset": "spoken", "batch_size": 8, "lr": 0.003, "max_epochs": 12},
    ),
    "an4": Recipe(
        "small model, CMU AN4: a good WER in a quarter of an hour",
        {**_SMALL, "dataset": "an4", "batch_size": 4, "lr": 0.002, "max_epochs": 40},
    ),
    "lstman4": Recipe(
        "published model and settings, CMU AN4, 100 epochs",
        {},
    ),
    "lstm_debug": Recipe(
        "the same for 2 epochs, to see that everything works",
        {"max_epochs": 2},
    ),
    "lstm_extended": Recipe(
        "the same for 10 epochs: 140 steps at 8 workers, 12 sparse",
        {"max_epochs": 10, "nworkers": 8},
    ),
}


@dataclass(frozen=True)
class SpeechConfig(WorkloadConfig):
    """LSTM speech recognition."""

    name: ClassVar[str] = "speech"
    title: ClassVar[str] = "Speech recognition"
    sample: ClassVar[str] = "utterance"
    recipes: ClassVar[Mapping[str, Recipe]] = _RECIPES
    metrics: ClassVar[Sequence[Metric]] = (
        Metric("loss", "val loss"),
        Metric("wer", "WER", note="WER counts inserted words too, so it can exceed 1"),
        Metric("cer", "CER"),
    )

    dataset: str = option(
        "an4",
        "Corpus: an4, spoken (synthesised here, no download), or manifest (files that you name).",
        choices=("an4", "spoken", "manifest"),
    )
    data_dir: str = option(
        "", "Folder of the corpus; by default a folder in the user's cache.", path=True
    )
    train_manifest: str = option(
        "",
        "List of training utterances, for --dataset manifest; see `oktopk data --help`.",
        path=True,
    )
    val_manifest: str = option(
        "", "List of validation utterances, for --dataset manifest.", path=True
    )
    dnn: str = option(
        "lstman4",
        "Model: lstman4 (27.6 million parameters), or lstman4-small (2.3 million, for CPUs).",
        choices=("lstman4", "lstman4-small"),
    )
    features: str = option(
        "spectrogram",
        "Input of the model: spectrogram (161 bins) or logmel (80 bins).",
        choices=("spectrogram", "logmel"),
    )
    augment: bool = option(
        False, "From the second epoch on, mask bands of time and frequency and stretch time."
    )
    width: int | None = option(
        None, "Units of an LSTM layer; by default those of --dnn.", least=1, most=1_000_000
    )
    depth: int | None = option(None, "LSTM layers; by default those of --dnn.", least=1, most=1000)
    bidirectional: bool | None = option(
        None, "Read the utterance in both directions; by default as --dnn does."
    )
    examples: int = option(3, "Validation utterances to show, with their hypotheses.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset == "manifest" and not (self.train_manifest and self.val_manifest):
            raise UserError("--dataset manifest needs --train-manifest and --val-manifest")

    def make(self, context: Context) -> Speech:
        from .workload import Speech

        return Speech(self, context)

    def elements(self) -> int:
        from ..checks import elements
        from .deepspeech import DeepSpeech, shape
        from .features import BINS
        from .transcripts import LABELS

        sizes = shape(self.dnn, self.width, self.depth, self.bidirectional)
        return elements(lambda: DeepSpeech(sizes, BINS[self.features], len(LABELS)))

    def prepare(self, progress: bool) -> None:
        from .workload import corpora

        corpora(self, progress)

    @classmethod
    def default_recipe(cls, given: Mapping[str, Any]) -> str:
        """Users of the published trainer name a model or a corpus instead of a recipe."""
        if given.get("dnn") == "lstman4":
            return "lstman4"
        return "an4" if given.get("dataset") in ("an4", "manifest") else "spoken"

    @classmethod
    def add_data_commands(cls, commands: argparse._SubParsersAction[Any]) -> None:
        from . import command

        command.add_commands(commands)
