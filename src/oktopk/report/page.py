"""The page: one HTML file with everything that it needs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ..common import files
from ..common.errors import UserError
from ..common.extras import need
from ..common.version import version_of
from . import facts
from .figures import Curves, Plot, Section, drawn, graph
from .gradients import gradients
from .runs import read_runs
from .sources import RunSource, Table
from .staleness import waiting
from .style import template
from .subjects import Subject, subjects_of
from .times import times
from .traffic import traffic
from .training import training

_ASSETS = resources.files(__package__) / "assets"
_MOST_CARDS = 4
"""With more subjects than this, the summary is a table."""


def write(
    path: str | os.PathLike[str], runs: Sequence[RunSource], tables: Sequence[Table] = ()
) -> None:
    """See `write_page` of the package."""
    if not runs:
        raise UserError("a report needs at least one run folder")
    text = render(subjects_of(read_runs(runs)), tables)
    with files.replacing(Path(path)) as part:
        part.write_text(text, encoding="utf-8")


def render(subjects: Sequence[Subject], tables: Sequence[Table] = ()) -> str:
    """The page as text."""
    jinja, plotly = need("jinja2", "report"), need("plotly.offline", "report")
    sections = sections_of(subjects)
    environment = jinja.Environment(
        loader=jinja.FunctionLoader(_asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja.StrictUndefined,
    )
    dumps = need("plotly.io.json", "report").to_json_plotly
    text: str = environment.get_template("page.html").render(
        title=_title(subjects),
        lead=facts.lead(subjects[0].first),
        subjects=subjects,
        cards=len(subjects) <= _MOST_CARDS,
        summary=facts.summary(subjects),
        settings=facts.settings(subjects),
        environment=facts.environment(subjects),
        faults=facts.faults(subjects),
        examples=facts.examples(subjects),
        sections=sections,
        drawn=len(drawn(subjects)),
        tables=tables,
        version=version_of("oktopk"),
        css=_safe(jinja, "page.css"),
        js=_safe(jinja, "page.js"),
        plotly=need("markupsafe", "report").Markup(plotly.get_plotlyjs()),
        figures=jinja.utils.htmlsafe_json_dumps(_figures(sections), dumps=dumps),
        templates={"light": template(dark=False), "dark": template(dark=True)},
    )
    return text


def sections_of(subjects: Sequence[Subject]) -> list[Section]:
    """All plots of a page."""
    curves = Curves(drawn(subjects))
    return [each(curves) for each in (training, traffic, times, gradients, waiting)]


def _figures(sections: Sequence[Section]) -> dict[str, Any]:
    """What the page's script draws, by the key of the plot."""
    return {
        plot.key: {**_figure(plot), "seconds": plot.seconds}
        for section in sections
        for plot in section.plots
        if plot.traces
    }


def _figure(plot: Plot) -> dict[str, Any]:
    figure: dict[str, Any] = graph().Figure(plot.traces, plot.layout).to_dict()
    figure["layout"].pop("template", None)  # the page has its own, a light one and a dark one
    return figure


def _title(subjects: Sequence[Subject]) -> str:
    names = [subject.label for subject in subjects]
    runs = sum(len(subject.runs) for subject in subjects)
    if runs > len(names):
        return f"{runs} runs in {len(names)} groups"
    if len(names) > 3:
        return f"{runs} runs side by side"
    return " · ".join(names)


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _safe(jinja: Any, name: str) -> Any:
    return need("markupsafe", "report").Markup(_asset(name))
