"""How the page looks: colours and lines of runs, and the plots' light and dark templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Okabe and Ito chose these so that colour-blind people can tell them apart. Two of theirs are left
# out: black cannot be seen on a dark page, nor yellow on a light one.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#8A8F98"
DASHES = ("solid", "dash", "dot", "dashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "star")
PATTERNS = ("", "/", ".", "x", "-", "\\", "|", "+")
_SVG_DASHES = {"solid": "", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}


@dataclass(frozen=True)
class Style:
    """How the curves of one subject are drawn. No two of the first 24 look alike, and the first six
    differ in colour, in line and in marker."""

    place: int

    @property
    def colour(self) -> str:
        return COLOURS[self.place % len(COLOURS)]

    @property
    def dash(self) -> str:
        turn = self.place // len(COLOURS)
        return DASHES[(self.place + turn) % len(DASHES)]

    @property
    def svg_dash(self) -> str:
        """The same, for the legend."""
        return _SVG_DASHES[self.dash]

    @property
    def marker(self) -> str:
        return MARKERS[self.place % len(MARKERS)]

    def faint(self, share: float) -> str:
        """The colour, mixed with what is behind it."""
        red, green, blue = (int(self.colour[at : at + 2], 16) for at in (1, 3, 5))
        return f"rgba({red},{green},{blue},{share})"


FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def template(*, dark: bool) -> dict[str, Any]:
    """A plotly template: what differs between a light page and a dark one."""
    text, line, grid, paper = (
        ("#c9d1d9", "#4b535d", "#2a3038", "#1b2027")
        if dark
        else ("#3a4350", "#b4bcc6", "#e8ebef", "#ffffff")
    )
    axis = {
        "gridcolor": grid,
        "linecolor": line,
        "tickcolor": line,
        "zerolinecolor": line,
        "zerolinewidth": 1,
        "spikecolor": line,
    }
    return {
        "layout": {
            "font": {"family": FONT, "size": 12, "color": text},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {
                "bgcolor": paper,
                "bordercolor": line,
                "font": {"color": text, "size": 12},
                "align": "left",
                "namelength": -1,
            },
            "annotationdefaults": {"font": {"size": 11, "color": text}, "showarrow": False},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": line, "activecolor": text},
            "legend": {"bgcolor": "rgba(0,0,0,0)", "font": {"size": 11}},
        }
    }
