"""The page of runs: in a real browser, from real run folders, good ones and damaged ones."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from browser import Browser
from oktopk import cli
from oktopk.common.format import number
from oktopk.lab.compare.trained import read_trained
from oktopk.report import RunSource, Table, facts, write_page
from oktopk.report.page import sections_of
from oktopk.report.runs import Points, read_runs
from oktopk.report.subjects import band, subjects_of
from oktopk.report.thinning import smooth, thin
from oktopk.train.page import Page
from pages import make_run, outcome_of

LIMIT = 6_000_000
HOSTILE = "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'>%{x}</script>"
SECTIONS = [
    "summary",
    "training",
    "traffic",
    "time",
    "gradients",
    "staleness",
    "faults",
    "configuration",
    "environment",
]
PLOTS = [
    *(
        "loss",
        "validation-loss",
        "validation-bits_per_byte",
        "lr",
        "gradient",
        "sparsity",
        "density",
    ),
    *("bytes", "ratio", "sent", "messages"),
    *("parts", "stages", "overlap", "hidden", "seconds", "buckets-0"),
    *("kinds", "selected", "threshold", "balance", "regions", "overflow", "magnitudes-0-0"),
    *("waited", "waiting", "waits"),
]
VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400).map(lambda x: np.array(x))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, only to be read."""
    return make_run(tmp_path_factory.mktemp("runs") / "run", seed=2)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "dense"
    return make_run(folder, dense_steps=200, compressor="dense")


@pytest.fixture(scope="module")
def page(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of one run."""
    path = tmp_path_factory.mktemp("pages") / "one.html"
    write_page(path, [RunSource(run)])
    return path


@pytest.fixture(scope="module")
def compared(run: Path, dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two runs, with a table."""
    path = tmp_path_factory.mktemp("pages") / "two.html"
    table = Table("Losses", ["run", "loss"], [["ok", "2.1"], ["dense", "2.0"]], "Two runs.")
    write_page(path, [RunSource(run, "Ok-Topk"), RunSource(dense)], [table])
    return path


# thinning


@given(VALUES, st.integers(4, 100))
def test_thinning_keeps_peaks(values: NDArray[np.float64], most: int) -> None:
    kept = thin(values, most)
    assert len(kept) <= most
    assert (np.diff(kept) > 0).all()
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    assert values[kept].max() == values.max()
    assert values[kept].min() == values.min()


@given(VALUES, st.integers(4, 40))
def test_no_value_is_far_from_one_that_stands_for_it(
    values: NDArray[np.float64], most: int
) -> None:
    """Within the length of a bin there is one that is as large, and one that is as small."""
    kept = thin(values, most)
    near = len(values) // ((most - 2) // 2) + 1
    for place, value in enumerate(values):
        shown = values[kept[abs(kept - place) <= near]]
        assert shown.min() <= value <= shown.max()


@given(VALUES, st.integers(1, 50))
def test_smooth_is_the_mean_of_the_last_values(values: NDArray[np.float64], width: int) -> None:
    slow = [values[max(0, end - width) : end].mean() for end in range(1, len(values) + 1)]
    np.testing.assert_allclose(smooth(values, width), slow, atol=1e-6 * max(1, abs(values).max()))


def test_a_band_is_mean_and_spread_over_runs() -> None:
    steps = np.arange(6.0)
    runs = [Points(steps, steps / scale, steps * scale) for scale in (1.0, 3.0)]
    found = band(runs, 50)
    assert found is not None
    np.testing.assert_allclose(found.mean.step, steps)
    np.testing.assert_allclose(found.mean.value, 2 * steps)
    np.testing.assert_allclose(found.spread, np.std([steps, 3 * steps], axis=0, ddof=1))
    alone = band(runs[:1], 3)
    assert alone is not None
    np.testing.assert_allclose(alone.mean.value, [0.5, 2.5, 4.5])  # two steps in each bin
    np.testing.assert_allclose(alone.spread, 0)
    assert band([Points(steps, steps, np.full(6, np.nan))], 50) is None


# in a browser


def overflowing(browser: Browser, width: int) -> Any:
    """What is wider than the screen, but for what scrolls by itself; and texts that plots cut off.

    A phone's browser makes `innerWidth` larger if the page is too wide, so it does not count.
    """
    return browser.run(
        """
        const wide = [...document.querySelectorAll("body *")].filter((each) =>
          !each.closest(".scroll, nav, .legend, .canvas") &&
          each.getBoundingClientRect().right > arguments[0] + 1);
        const cut = [...document.querySelectorAll(".canvas")].flatMap((canvas) => {
          const room = canvas.getBoundingClientRect();
          return [...canvas.querySelectorAll("svg text")].filter((text) => {
            const own = text.getBoundingClientRect();
            return own.width && (own.right > room.right + 2 || own.left < room.left - 2);
          });
        });
        if (document.documentElement.scrollWidth > arguments[0]) wide.push(document.body);
        return wide.concat(cut).map((each) => each.outerHTML.slice(0, 200));
        """,
        width,
    )


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("which", ["page", "compared"])
def test_it_opens_without_complaint_and_fits(
    browser: Browser, request: pytest.FixtureRequest, which: str, width: int, dark: bool
) -> None:
    path: Path = request.getfixturevalue(which)
    browser.open(path, width, dark=dark)
    assert browser.messages() == []
    assert [each for each in browser.requests() if not each.startswith("data:")] == [path.as_uri()]
    assert overflowing(browser, width) == []
    drawn = "return [...document.querySelectorAll('.canvas')].map((x) => !!x.querySelector('svg'))"
    assert all(browser.run(drawn))
    bright = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    assert (sum(browser.run(bright)) < 128 * 3) is dark
    text = (
        "return getComputedStyle(document.querySelector('#loss .xtick text')).fill.match(/\\d+/g)"
    )
    assert (sum(map(int, browser.run(text))) > 128 * 3) is dark


def test_every_section_and_every_plot_is_there(browser: Browser, page: Path) -> None:
    browser.open(page)
    names = browser.run("return [...document.querySelectorAll('main > section')].map((x) => x.id)")
    assert names == SECTIONS
    linked = browser.run(
        "return [...document.querySelectorAll('nav a')].map((x) => x.hash.slice(1))"
    )
    assert linked == SECTIONS
    drawn = browser.run(
        "return [...document.querySelectorAll('.canvas')].map((x) => x.dataset.plot)"
    )
    assert set(PLOTS) <= set(drawn)
    captions = browser.run(
        "return [...document.querySelectorAll('figcaption')].map((x) => x.innerText)"
    )
    assert len(captions) >= len(PLOTS)
    assert all(len(each) > 20 for each in captions)


def test_no_button_sends_data_away(browser: Browser, page: Path) -> None:
    browser.open(page)
    titles = browser.run(
        "return [...document.querySelectorAll('.modebar-btn')].map((x) => x.dataset.title)"
    )
    assert set(titles) == {"Download plot as a PNG", "Zoom in", "Zoom out", "Reset axes"}


AXIS = "return document.querySelector('[data-plot=loss]')._fullLayout.xaxis"


def test_the_switch_shows_seconds(browser: Browser, page: Path, run: Path) -> None:
    browser.open(page)
    assert browser.run(f"{AXIS}.title.text") == "step"
    assert browser.run(f"{AXIS}.range")[1] == pytest.approx(199, rel=0.1)
    browser.click("input[value=seconds]")
    assert browser.run(f"{AXIS}.title.text") == "seconds of training"
    (read,) = read_runs([RunSource(run)])
    assert browser.run(f"{AXIS}.range")[1] == pytest.approx(read.elapsed[-1], rel=0.1)
    shading = "return document.querySelector('[data-plot=loss]')._fullLayout.shapes[0].x1"
    assert browser.run(shading) == pytest.approx(read.elapsed[39])
    browser.click("input[value=step]")
    assert browser.run(f"{AXIS}.title.text") == "step"
    assert browser.run(shading) == 40
    assert browser.messages() == []


def test_the_legend_hides_a_run_everywhere(browser: Browser, compared: Path) -> None:
    shown = """
        return [...document.querySelectorAll(".canvas")].flatMap((place) => place._fullData)
          .filter((trace) => trace.meta && trace.meta.subject === 1 && trace.visible).length
    """
    browser.open(compared)
    before = browser.run(shown)
    assert before > 10
    browser.click("[data-subject='1']")
    assert browser.run(shown) == 0
    browser.click("[data-subject='1']")
    assert browser.run(shown) == before


def test_a_zoom_outlives_a_change_of_the_theme(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run(
        "return Plotly.relayout(document.querySelector('[data-plot=loss]'), {'xaxis.range': [50, "
        "60]})"
    )
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [dark]})
    browser.wait("return getComputedStyle(document.body).backgroundColor === 'rgb(18, 22, 27)'")
    assert browser.run(f"{AXIS}.range") == [50, 60]


def test_it_prints_on_white_paper(browser: Browser, page: Path) -> None:
    browser.open(page, dark=True)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    width = "return document.querySelector('[data-plot=loss]')._fullLayout.width"
    assert browser.run(width) == 660
    assert all(browser.run("return [...document.querySelectorAll('details')].map((x) => x.open)"))
    browser.run("dispatchEvent(new Event('afterprint'))")
    browser.wait(f"{width} > 1000")
    assert browser.messages() == []


def test_differences_are_highlighted(browser: Browser, compared: Path) -> None:
    browser.open(compared)
    differing = (
        "return [...document.querySelectorAll('#configuration tr.differs')].map((x) => x.innerText)"
    )
    rows = browser.run(differing)
    assert len(rows) == 2
    assert re.fullmatch(r"seed\s+2\s+1", rows[0])
    assert re.fullmatch(r"compressor\s+oktopk\s+dense", rows[1])
    assert "Two runs." in browser.run("return document.querySelector('#tables').innerText")


def test_hostile_names_are_only_text(browser: Browser, run: Path, tmp_path: Path) -> None:
    own = tmp_path / "run"
    shutil.copytree(run, own)
    config = own / "config.toml"
    config.write_text(config.read_text() + f"other = {json.dumps(HOSTILE)}\n")
    metrics = own / "metrics.jsonl"
    bad = json.dumps(HOSTILE)[1:-1]
    metrics.write_text(
        metrics.read_text()
        .replace('"bits_per_byte"', f'"{bad}"')
        .replace('"alltoall"', f'"{bad}"')
        .replace("def f(", bad)
    )
    summary = own / "summary.json"
    summary.write_text(summary.read_text().replace('"embedding"', f'"{bad}"'))
    path = tmp_path / "page.html"
    table = Table(HOSTILE, [HOSTILE], [[HOSTILE]], HOSTILE)
    write_page(path, [RunSource(own, HOSTILE), RunSource(run, HOSTILE + "2")], [table])
    browser.open(path)
    assert browser.messages() == []
    assert browser.run("return window.hacked") is None
    assert browser.run("return document.querySelectorAll('main img, main script').length") == 0
    texts = browser.run("return document.body.innerText")
    assert texts.count(HOSTILE) > 10
    names = """
        return [...document.querySelectorAll(".canvas")]
          .flatMap((place) => place._fullData.map((trace) => trace.name))
    """
    assert html.escape(HOSTILE, quote=False) in browser.run(names)
    ticks = "return [...document.querySelectorAll('#parts .ytick text')].map((x) => x.textContent)"
    assert any(each.startswith("<script>") for each in browser.run(ticks))


# what the file holds


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "action")]


def test_it_names_no_other_file(page: Path) -> None:
    parser = _Links()
    parser.feed(page.read_text())
    assert parser.found
    assert all(each == "data:," or each.startswith("#") for each in parser.found)
    assert "default-src 'none'" in page.read_text()


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "long", 5000, dense_steps=500, detail_every=50)
    path = tmp_path / "page.html"
    write_page(path, [RunSource(folder)])
    assert path.stat().st_size < LIMIT


def test_many_runs_stay_small_and_are_drawn_by_group(browser: Browser, tmp_path: Path) -> None:
    sources = []
    for density in range(1, 11):
        for seed in (1, 2, 3):
            folder = tmp_path / f"{density}-{seed}"
            make_run(folder, 60, dense_steps=20, detail_every=20, seed=seed, density=density / 100)
            sources.append(RunSource(folder, f"{density} % seed {seed}", f"{density} %"))
    path = tmp_path / "page.html"
    write_page(path, sources)
    assert path.stat().st_size < LIMIT
    browser.open(path, 390)
    assert browser.messages() == []
    assert overflowing(browser, 390) == []
    legend = browser.run(
        "return [...document.querySelectorAll('.legend button')].map((x) => x.innerText)"
    )
    assert legend == [f"{density} %" for density in range(1, 11)]


# run folders of all kinds


@pytest.mark.parametrize("name", ["summary.json", "config.toml", "environment.json"])
def test_a_run_without_a_file_is_shown(run: Path, tmp_path: Path, name: str) -> None:
    own = tmp_path / "run"
    shutil.copytree(run, own)
    (own / name).unlink()
    write_page(tmp_path / "page.html", [RunSource(own)])
    assert "Not recorded" in (tmp_path / "page.html").read_text()


def test_a_run_of_an_earlier_version_is_shown(browser: Browser, run: Path, tmp_path: Path) -> None:
    own = tmp_path / "run"
    shutil.copytree(run, own)
    kept = []
    for line in (own / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name in ("target", "offered", "applied", "overflow", "skipped", "stages", "busy"):
            record.pop(name, None)
        if record["kind"] != "detail":
            kept.append(json.dumps(record))
    (own / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    summary = json.loads((own / "summary.json").read_text())
    for name in ("kinds", "busy", "waited", "faults"):
        del summary[name]
    (own / "summary.json").write_text(json.dumps(summary))
    write_page(tmp_path / "page.html", [RunSource(own)])
    browser.open(tmp_path / "page.html")
    assert browser.messages() == []
    missing = browser.run(
        "return [...document.querySelectorAll('.nothing')].map((x) => x.innerText)"
    )
    assert len(missing) >= 10
    assert all(each.startswith("Not recorded") for each in missing)


def test_a_run_that_goes_on_is_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 30, dense_steps=40, finished=False)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')  # being written
    write_page(tmp_path / "page.html", [RunSource(folder)])
    assert "not finished" in (tmp_path / "page.html").read_text()


def test_a_run_with_one_step_is_shown(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 1, dense_steps=0, finished=False)
    write_page(tmp_path / "page.html", [RunSource(folder)])
    browser.open(tmp_path / "page.html")
    assert browser.messages() == []


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


Damage = Callable[[Path], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "no folder": (shutil.rmtree, "is not a run folder"),
    "no metrics": (lambda x: (x / "metrics.jsonl").unlink(), "metrics.jsonl is not there"),
    "no step": (lambda x: (x / "metrics.jsonl").write_text(""), "has no step yet"),
    "a line": (
        lambda x: (x / "metrics.jsonl").write_text("{}\n" + (x / "metrics.jsonl").read_text()),
        "line 1 of",
    ),
    "summary": (lambda x: (x / "summary.json").write_text("{"), "summary.json is damaged"),
    "half a summary": (lambda x: (x / "summary.json").write_text("{}"), "plan is missing"),
    "settings": (lambda x: (x / "config.toml").write_bytes(b"\xff"), "config.toml is damaged"),
    "facts": (lambda x: (x / "environment.json").write_text("[]"), "environment.json is damaged"),
    "a folder": (lambda x: to_folder(x / "config.toml"), "config.toml cannot be read"),
}


@pytest.mark.parametrize(("damage", "expected"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_one_line(
    run: Path, tmp_path: Path, damage: Damage, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "run"
    shutil.copytree(run, own)
    damage(own)
    assert cli.main(["report", str(own), "--output", str(tmp_path / "page.html")]) == 2
    printed = capsys.readouterr().err
    assert expected in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_labels_are_told_apart(run: Path, dense: Path) -> None:
    sources = [RunSource(run), RunSource(run), RunSource(dense), RunSource(run, "x")]
    labels = [each.label for each in read_runs(sources)]
    assert len(set(labels)) == 4
    assert labels[2:] == ["dense", "x"]


def test_runs_of_a_group_are_one_subject(run: Path, dense: Path) -> None:
    sources = [RunSource(run, "a", "g"), RunSource(dense), RunSource(run, "b", "g")]
    subjects = subjects_of(read_runs(sources))
    assert [(each.label, len(each.runs)) for each in subjects] == [("g", 2), ("dense", 1)]
    assert len({plot.key for section in sections_of(subjects) for plot in section.plots}) > 20


def test_the_card_of_the_training_loss_is_that_of_compare(run: Path, tmp_path: Path) -> None:
    short = make_run(tmp_path / "short", 1, dense_steps=0)
    for folder in (run, short):
        [subject] = subjects_of(read_runs([RunSource(folder)]))
        [card] = [each for each in facts.summary([subject]) if each.title == "Training loss"]
        result = read_trained(folder).result
        assert card.values[0].text == number(result.training_loss)
        assert card.note == (
            f"mean of the last {result.window} steps" if result.window > 1 else "the last step"
        )


def test_a_card_of_a_group_keeps_its_note(run: Path) -> None:
    sources = [RunSource(run, "a", "g"), RunSource(run, "b", "g")]
    notes = {each.title: each.note for each in facts.summary(subjects_of(read_runs(sources)))}
    assert notes["Compression"] == "fewer entries, dense steps included; mean of 2 runs"


# the commands


def test_the_command_writes_a_page(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "run"
    shutil.copytree(run, own)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "run"]) == 0
    assert capsys.readouterr().out == "run/report.html\n"
    assert cli.main(["report", "first=run", "run"]) == 0
    assert capsys.readouterr().out == "report.html\n"
    assert ">first<" in Path("report.html").read_text()
    assert cli.main(["report", "run", "--output", "x.html"]) == 0
    assert Path("x.html").stat().st_size == Path("run/report.html").stat().st_size


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "required: RUN"),
        (["RUN", "--output", "."], "is a folder: name a file"),
        (["RUN", "--output", "no/such/page.html"], "cannot write no/such/page.html"),
        (["RUN", "--output", "/dev/null"], "is not an ordinary file"),
        (["a=RUN"], ""),
        (["a=b"], "b is not a run folder"),
        (["a=compared"], "compared holds a comparison"),
    ],
)
def test_mistakes_are_one_line(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    own = tmp_path / "run"
    shutil.copytree(run, own)
    monkeypatch.chdir(tmp_path)
    Path("compared").mkdir()
    Path("compared/comparison.json").touch()
    code = cli.main(["report", *(each.replace("RUN", "run") for each in arguments)])
    printed = capsys.readouterr().err
    assert code == (2 if expected else 0)
    assert expected in printed
    assert printed.count("\n") == (1 if expected else 0)


def test_a_page_does_without_torch(run: Path, tmp_path: Path) -> None:
    program = """
import sys
from oktopk.cli import main
code = main(sys.argv[1:])
sys.exit(code or int("torch" in sys.modules))
"""
    command = ["report", str(run), "--output", str(tmp_path / "page.html")]
    subprocess.run([sys.executable, "-c", program, *command], timeout=60, check=True)


@pytest.mark.parametrize("package", ["plotly", "jinja2"])
def test_without_the_extra_a_line_says_how_to_get_it(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 2
    assert "pip install 'oktopk[report]'" in capsys.readouterr().err
    own = tmp_path / "run"
    shutil.copytree(run, own)
    Page(own).finished(outcome_of(own))
    assert "is not written: " in (printed := capsys.readouterr().out)
    assert "pip install 'oktopk[report]'" in printed
    assert not (own / "report.html").exists()


def test_training_ends_with_a_page_or_a_reason(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "run"
    shutil.copytree(run, own)
    Page(own).finished(outcome_of(own))
    assert capsys.readouterr().out == f"the page of this run is {own / 'report.html'}\n"
    assert (own / "report.html").stat().st_size < LIMIT
    (own / "metrics.jsonl").write_text("damaged\n\n")
    Page(own).finished(outcome_of(own))
    assert "the page of this run is not written: line 1 of" in capsys.readouterr().out
