"""The page: one HTML file with everything that it needs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..common import files
from ..common.errors import UserError
from .sources import RunSource, Table


def write_page(
    path: str | os.PathLike[str], runs: Sequence[RunSource], tables: Sequence[Table] = ()
) -> None:
    """Write a page that shows runs side by side. It opens from disk and needs no network.

    Args:
        path: the HTML file. One that is there is replaced.
        runs: at least one. If there are many, or groups of several, each group is drawn as a mean
            with its spread.
        tables: shown above the plots.
    """
    if not runs:
        raise UserError("a report needs at least one run folder")
    files.write(Path(path), _render(runs, tables).encode())


def _render(runs: Sequence[RunSource], tables: Sequence[Table]) -> str:
    from ..common.extras import need

    environment = need("jinja2").Environment(autoescape=True)
    template = environment.from_string(
        "<!doctype html><html lang=en><meta charset=utf-8><title>oktopk</title>"
        "{% for run in runs %}<h2>{{ run.label or run.folder.name }}</h2>{% endfor %}"
        "{% for table in tables %}<h2>{{ table.title }}</h2><table>"
        "<tr>{% for name in table.columns %}<th>{{ name }}</th>{% endfor %}</tr>"
        "{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>"
        "{% endfor %}</table><p>{{ table.note }}</p>{% endfor %}"
    )
    text: str = template.render(runs=runs, tables=tables)
    return text
