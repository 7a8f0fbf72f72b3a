"""Recipes: named settings, as differences from `Config`'s defaults, the published ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...common.errors import UserError
from .config import Config

DEFAULT = "spoken"


@dataclass(frozen=True)
class Recipe:
    """A line for `oktopk recipes`, and the values that differ from the defaults."""

    summary: str
    values: dict[str, Any]


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

RECIPES = {
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


def recipe(name: str, **values: Any) -> Config:
    """The configuration of a recipe, with some values changed."""
    if name not in RECIPES:
        raise UserError(f"unknown recipe {name!r}; `oktopk recipes` lists {', '.join(RECIPES)}")
    return Config(**{**RECIPES[name].values, **values, "recipe": name})
