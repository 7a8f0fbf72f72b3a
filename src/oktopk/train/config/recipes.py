"""Recipes: named settings, as differences from the defaults. Workloads bring their own."""

from __future__ import annotations

from typing import Any

from ...common.errors import UserError
from ...workloads import RECIPES, WORKLOADS
from .config import Config

DEFAULT = WORKLOADS[0].default_recipe({})


def recipe(name: str, **values: Any) -> Config:
    """The configuration of a recipe, with some values changed."""
    if name not in RECIPES:
        raise UserError(f"unknown recipe {name!r}; `oktopk recipes` lists {', '.join(RECIPES)}")
    return Config.of(**{**RECIPES[name].values, **values, "recipe": name})
