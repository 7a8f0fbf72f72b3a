"""The configuration and the plan, shown before a run."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...algorithms import Auto, Dense
from ...common.format import plural
from ..config.config import Config
from ..records import Plan

_LONG = 26
"""Characters of a value that gets a line of its own in the configuration."""


def configuration(config: Config, width: int, safe: Callable[[str], str]) -> RenderableType:
    """Names and values in as many columns as fit. A star marks values that are not the default."""
    options = {name: each for part in config.parts for name, each in part.options().items()}
    short: list[tuple[Text, Text, Text]] = []
    long: list[tuple[Text, Text, Text]] = []
    for name, value in config.as_dict().items():
        if value == "":
            continue
        changed = value != options[name].default
        style = "bold" if changed else ""
        text = safe(str(value))
        row = Text("* " if changed else "  ", style), Text(name, style or "dim"), Text(text, style)
        (long if len(text) > _LONG else short).append(row)
    mark, names, values = (max((len(row[i]) for row in short), default=1) for i in range(3))
    across = max(1, min(4, (width + 2) // (mark + names + values + 4)))
    down = -(-len(short) // across)
    grid = Table.grid(padding=(0, 2, 0, 0))
    for line in range(down):
        cells = []
        for row in short[line::down]:
            cells += [Text.assemble(row[0], row[1]), row[2]]
        grid.add_row(*cells)
    rest = [Text.assemble(row[0], row[1].append("  "), row[2]) for row in long]
    return Group(grid, *rest, Text("  * not the default", "dim"), "")


def plan_lines(plan: Plan) -> list[str]:
    ended = plan.config.run.max_steps == plan.steps
    lines = [
        f"{plural(plan.workers, 'worker')} on {plan.device}, "
        f"{plural(plan.parameters, 'parameter')}, "
        f"{plural(plan.samples, plan.config.workload.sample)}",
        f"{plural(plan.epochs, 'epoch')} of {plural(plan.steps_per_epoch, 'step')}, "
        f"{plural(plan.steps, 'step')} in all" + (" (--max-steps)" if ended else ""),
    ]
    if plan.first_step:
        source = f", from {plan.weights_from}" if plan.weights_from else ""
        lines.append(f"resumed at step {plan.first_step}{source}")
    elif plan.weights_from:
        lines.append(f"begins with the weights of {plan.weights_from}")
    return lines


def when_sparse(plan: Plan) -> tuple[str, bool]:
    """When sparsity begins, and whether that needs a warning."""
    dense, steps = plan.dense_steps, plan.steps
    if dense_by_choice(plan):
        return "gradients are averaged densely", False
    if dense >= steps:
        longer = "--max-steps" if plan.config.run.max_steps == steps else "--max-epochs"
        return (
            f"this run has {plural(steps, 'step')}, but sparsity begins only after {dense}: no "
            f"step will be sparse. `--warmup-steps {steps // 2}` begins sooner, more `{longer}` "
            f"go on longer",
            True,
        )
    if isinstance(plan.config.compression.algorithm(), Auto):
        return f"auto: measures after step {dense}, then goes on with dense or Ok-Topk", False
    if dense == 0:
        return "every step is sparse", False
    if plan.first_step >= dense:
        return f"warm-up ended at step {dense}: every step from here is sparse", False
    warm_up = "step 0 is dense" if dense == 1 else f"steps 0 to {dense - 1} are dense"
    epoch = dense // plan.steps_per_epoch + 1
    return (
        f"{warm_up} (warm-up), sparsity begins at step {dense} of {steps} (epoch {epoch})",
        False,
    )


def dense_by_choice(plan: Plan) -> bool:
    return isinstance(plan.config.compression.algorithm(), Dense)
