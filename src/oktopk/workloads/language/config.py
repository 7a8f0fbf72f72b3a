"""The settings of the language workload, its recipe and its metrics. Imported without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...common.errors import UserError
from ...common.sections import option
from ..base import Context, Metric, Recipe, WorkloadConfig

if TYPE_CHECKING:
    from .workload import Language

_TEXT = Recipe(
    "byte-level transformer, any text: no download, minutes on 2 cores",
    {
        "dataset": "text",
        "batch_size": 8,
        "optimizer": "adamw",
        "lr": 0.003,
        "weight_decay": 0.01,
        "schedule": "onecycle",
        "clip": 1.0,
        "max_epochs": 10,
        "validate_every": 2,
        "nworkers": 2,
    },
)


@dataclass(frozen=True)
class LanguageConfig(WorkloadConfig):
    """A byte-level transformer."""

    name: ClassVar[str] = "language"
    title: ClassVar[str] = "Language modelling"
    sample: ClassVar[str] = "window"
    recipes: ClassVar[Mapping[str, Recipe]] = {"text": _TEXT}
    metrics: ClassVar[Sequence[Metric]] = (
        Metric("loss", "val loss"),
        Metric("bits_per_byte", "bits/byte"),
    )

    dataset: str = option("text", "Text: any that is in UTF-8.", choices=("text",))
    data_dir: str = option(
        "",
        "File of text, or folder of such files; by default the sources of Python's library.",
        path=True,
    )
    # Nobody means more than this; it would take all memory.
    width: int = option(128, "Length of the vector for a byte.", least=1, most=1_000_000)
    depth: int = option(4, "Blocks of attention and MLP.", least=1, most=1000)
    heads: int = option(
        4, "Attention heads of a block; they share the width equally.", least=1, most=1_000_000
    )
    window: int = option(128, "Bytes that the model can look back on.", least=1, most=1_000_000)
    epoch_windows: int = option(
        4096, "Windows of an epoch, for all workers together.", least=1, most=100_000_000
    )
    examples: int = option(1, "Continuations of held-out text to show.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise UserError(
                f"--width {self.width} must be a multiple of --heads {self.heads}: change one"
            )

    def make(self, context: Context) -> Language:
        from .workload import Language

        return Language(self, context)

    def elements(self) -> int:
        from ..checks import elements
        from .transformer import Shape, Transformer

        shape = Shape(self.width, self.depth, self.heads, self.window)
        return elements(lambda: Transformer(shape))

    def prepare(self, progress: bool) -> None:
        from .workload import train_and_held_out

        train_and_held_out(self)
