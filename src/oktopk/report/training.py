"""Figures of learning: loss, validation, learning rate, sparsity and density."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .figures import LOG, Curves, Plot, Quantity, Section, column, safe, titled
from .runs import Points, Run


def training(curves: Curves) -> Section:
    """How the runs learn."""
    plots = [
        curves.plot(
            "loss",
            "Training loss",
            "The loss of rank 0's batches. Lower is better. Look for a bump where sparsity starts.",
            column("loss"),
            smoothed=True,
            yaxis=titled("loss"),
            wide=True,
            height=380,
        ),
        *_validation(curves),
        curves.plot(
            "lr",
            "Learning rate",
            "The step size of the optimizer, as its schedule gives it.",
            column("lr"),
            yaxis=titled("learning rate", exponentformat="power"),
        ),
        curves.plot(
            "gradient",
            "Norm of the averaged gradient",
            "Measured before clipping. It is spikier in sparse steps: few entries are applied, "
            "and each of them holds what several steps have saved up.",
            column("grad_norm"),
            smoothed=True,
            yaxis=titled("norm"),
        ),
        curves.plot(
            "sparsity",
            "Sparsity",
            "The share of the gradient's elements that a step did not apply. Dense steps have "
            "none. Small parameters, such as biases, are always averaged densely, so it stays a "
            "little below 1 - density.",
            column("sparsity"),
            yaxis=titled("not applied", tickformat=".0%", rangemode="tozero"),
        ),
        curves.plot(
            "density",
            "Density",
            "The share of the elements that a step applied, 1 - sparsity, on a logarithmic axis.",
            _density,
            yaxis=titled("applied", **(LOG | {"tickformat": "~%"})),
        ),
    ]
    return Section(
        "training",
        "Learning",
        "Learning",
        "Grey shading is the warm-up, in which all elements are averaged. The dashed line is the "
        "step where sparsity starts.",
        plots,
    )


def _density(run: Run) -> Points:
    density = 1 - run.column("sparsity")
    return run.points(np.where(density > 0, density, np.nan))


def _validation(curves: Curves) -> list[Plot]:
    runs = [run for subject in curves.subjects for run in subject.runs]
    names = list(
        dict.fromkeys(
            name for run in runs for each in run.validations for name in each["validation"]
        )
    )
    if not names:
        return [
            Plot(
                "validation",
                "Validation",
                "Metrics on data that the model does not learn from.",
                nothing="No epoch has been validated yet.",
            )
        ]
    return [_metric(curves, name, runs) for name in names]


def _metric(curves: Curves, name: str, runs: Sequence[Run]) -> Plot:
    metric = next(
        run for run in runs if any(name in each["validation"] for each in run.validations)
    ).metric(name)
    better = "Lower is better" if metric.lower_is_better else "Higher is better"
    label = "loss" if name == "loss" else metric.label
    note = f" {metric.note}." if metric.note else ""
    return curves.plot(
        f"validation-{name}",
        f"Validation: {label}",
        f"On data that the model does not learn from, at the end of an epoch. {better}.{note}",
        _values(name),
        markers=True,
        yaxis=titled(safe(label)),
    )


def _values(name: str) -> Quantity:
    def quantity(run: Run) -> Points:
        having = [each for each in run.validations if name in each["validation"]]
        return run.points_at(
            [each["steps"] - 1 for each in having], [each["validation"][name] for each in having]
        )

    return quantity
