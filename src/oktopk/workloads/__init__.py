"""Workloads, one folder for each. `base.py` is their interface."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ..common.errors import UserError
from .base import Recipe, WorkloadConfig

WORKLOADS: list[type[WorkloadConfig]] = []
"""All that are registered. The first one is the default."""
RECIPES: dict[str, Recipe] = {}
"""Those of all workloads."""


def register(workload: type[WorkloadConfig]) -> type[WorkloadConfig]:
    """Make a workload known to `oktopk train`."""
    for other in WORKLOADS:
        names = {*other.datasets(), *other.recipes} & {*workload.datasets(), *workload.recipes}
        kinds = other.options()
        names |= {
            name
            for name, each in workload.options().items()
            if name in kinds and kinds[name].kind is not each.kind
        }
        if names:
            raise ValueError(f"{workload.name} and {other.name} both have {', '.join(names)}")
    WORKLOADS.append(workload)
    RECIPES.update(workload.recipes)
    return workload


def workload_for(values: Mapping[str, Any]) -> type[WorkloadConfig]:
    """The workload that values are for: by dataset, else by recipe, else the default."""
    recipe, dataset = values.get("recipe", ""), values.get("dataset")
    of_recipe = next((each for each in WORKLOADS if recipe in each.recipes), None)
    if dataset is None:
        return of_recipe or WORKLOADS[0]
    for each in WORKLOADS:
        if dataset in each.datasets():
            if of_recipe not in (None, each):
                assert of_recipe is not None
                known = ", ".join(of_recipe.datasets())
                raise UserError(f"--recipe {recipe} is for --dataset {known}, not for {dataset}")
            return each
    known = ", ".join(name for each in WORKLOADS for name in each.datasets())
    raise UserError(f"--dataset is {dataset!r}, but must be one of {known}")


# One line for each workload.
for _folder in (
    "speech",
    "language",
):  # fmt: skip
    register(import_module(f".{_folder}", __name__).WORKLOAD)
