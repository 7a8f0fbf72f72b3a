"""What a person sees of a run: true, readable, and never a NaN."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from oktopk.common.format import byte_size, duration, number, percent, ratio
from oktopk.train.config.config import Config
from oktopk.train.console.live import View
from oktopk.train.records import BucketTiming, EpochRecord, Outcome, Plan, StepRecord

SECONDS = {"data": 0.01, "forward": 0.04, "backward": 0.1, "synchronise": 0.03, "update": 0.02}
SECONDS |= {"total": 0.2}
VALIDATION = {"loss": 3.2, "wer": 1.02, "cer": 0.61}
EXAMPLES = (
    {"reference": "ENTER SIX [two]", "hypothesis": "ENTER SICKS"},
    {"reference": "YES", "hypothesis": ""},
)


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "config": Config.of(recipe="an4", max_epochs=7),
        "folder": "runs/an4-1",
        "workers": 2,
        "device": "cpu",
        "parameters": 27_569_568,
        "samples": 948,
        "epochs": 7,
        "steps_per_epoch": 100,
        "steps": 700,
        "first_step": 0,
        "dense_steps": 128,
        "dense_bytes": 110_278_272,
    }
    return Plan(**values | changes)


def step(place: int, phase: str = "dense", per_epoch: int = 100) -> StepRecord:
    sparse = phase == "sparse"
    return StepRecord(
        place, place // per_epoch + 1, 3.2, 0.01, 1.5, 16, phase, 0.98 * sparse,
        50.0 if sparse else 1.0, 1_200_000 if sparse else 110_278_272, 0, SECONDS,
    )  # fmt: skip


def epoch(place: int, validation: dict[str, float], **changes: Any) -> EpochRecord:
    record = EpochRecord(
        place, 100 * place, 3.5, 0.01, "sparse", 0.98, 50.0, 120_000_000, 63.0, 85.2, 1.5,
        validation, EXAMPLES if validation else (),
    )  # fmt: skip
    return dataclasses.replace(record, **changes)


def outcome(plan: Plan, epochs: tuple[EpochRecord, ...], **changes: Any) -> Outcome:
    names = ("rnns.0.rnn.weight_ih_l0", "rnns.0.rnn.weight_hh_l0", "fc.weight")
    bucket = BucketTiming(names, 6_000_000, "oktopk", 0.98, 1.2e6, 0.03, 0.001, 0.002, 0.04, 0.001)
    values: dict[str, Any] = {
        "plan": plan,
        "epochs": epochs,
        "steps": plan.steps,
        "sparse_steps": 572,
        "sparsity": 0.9801,
        "compression_ratio": 5.2,
        "bytes_sent": 12_300_000,
        "dense_bytes": 1_200_000_000,
        "seconds": 1234.0,
        "step_seconds": SECONDS,
        "buckets": (bucket, dataclasses.replace(bucket, parameters=("fc.bias",))),
        "memory": {"peak_rss": 812.0},
    }
    return Outcome(**values | changes)


def view(width: int = 100, terminal: bool = False) -> tuple[View, io.StringIO]:
    file = io.StringIO()
    return View(Console(file=file, width=width, force_terminal=terminal)), file


def text_of(file: io.StringIO) -> str:
    """What was printed, with lines that were wrapped as one."""
    return " ".join(file.getvalue().split())


def test_the_plan_is_said_in_words() -> None:
    shown, file = view()
    shown.started(plan(weights_from="runs/old"))
    text = text_of(file)
    assert "2 workers on cpu, 27,569,568 parameters, 948 utterances" in text
    assert "7 epochs of 100 steps, 700 steps in all" in text
    assert (
        "steps 0 to 127 are dense (warm-up), sparsity begins at step 128 of 700 (epoch 2)" in text
    )
    assert "begins with the weights of runs/old" in text
    assert "WARNING" not in text
    assert "* max_epochs 7" in text  # not the default
    assert "* lr" not in text
    assert "None" not in text
    assert "pretrain" not in text  # not set


def test_a_run_that_never_gets_sparse_is_warned_of() -> None:
    shown, file = view(80)
    shown.started(plan(epochs=1, steps=40))
    assert (
        "WARNING: this run has 40 steps, but sparsity begins only after 128: no step will be "
        "sparse. `--warmup-steps 20` begins sooner, more `--max-epochs` go on longer"
    ) in text_of(file)
    shown.finished(outcome(plan(epochs=1, steps=40), (), sparse_steps=0, sparsity=0.0))
    assert "none: the run had 40 steps, and sparsity begins after 128" in text_of(file)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"config": Config.of(compression=False), "dense_steps": 700}, "are averaged densely"),
        ({"config": Config.of(compressor="dense"), "dense_steps": 700}, "are averaged densely"),
        ({"dense_steps": 0}, "every step is sparse"),
        ({"dense_steps": 1}, "step 0 is dense (warm-up), sparsity begins at step 1 of 700"),
        ({"first_step": 300, "weights_from": "runs/a"}, "resumed at step 300, from runs/a"),
        ({"first_step": 300}, "warm-up ended at step 128: every step from here is sparse"),
    ],
)
def test_when_sparsity_begins(changes: dict[str, Any], said: str) -> None:
    shown, file = view()
    shown.started(plan(**changes))
    assert said in text_of(file)
    assert "WARNING" not in file.getvalue()


def test_plain_lines_are_few_and_have_the_first_sparse_step() -> None:
    shown, file = view(40)
    shown.started(plan())
    for place in range(700):
        shown.stepped(step(place, "sparse" if place >= 128 else "dense"))
    lines = [line for line in file.getvalue().splitlines() if line.startswith("step ")]
    assert lines[0].startswith("step 0/700 epoch 1 loss 3.200 dense sparsity 0.0% ratio 1x")
    first_sparse = (
        "step 128/700 epoch 2 loss 3.200 sparse sparsity 98.0% ratio 50x sent 1.2 MB 80 samples/s"
    )
    assert first_sparse in lines  # whole, though the console is narrow
    assert 20 <= len(lines) <= 24
    assert "\x1b" not in file.getvalue()
    assert "\r" not in file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_whole_run(width: int, terminal: bool) -> None:
    shown, file = view(width, terminal)
    shown.started(plan())
    epochs = []
    for place in range(1, 8):
        shown.stepped(step(100 * place - 1, "sparse"))
        validation = VALIDATION if place in (1, 5, 7) else {}
        if validation:
            for done in range(4):
                shown.validating(done, 3)
        epochs.append(epoch(place, validation))
        shown.epoch_ended(epochs[-1])
    rows_end = len(file.getvalue())
    shown.finished(outcome(plan(), tuple(epochs)))
    shown.close()
    shown.close()

    text = file.getvalue()
    assert "nan" not in text.lower()
    assert "[]" not in text
    assert "stopped" not in text
    assert ("\x1b" in text) is terminal
    if terminal:
        assert "\x1b[?25h" in text  # the cursor is back
        return
    rows = [x for x in text[:rows_end].splitlines() if x.endswith("1m03s")]
    assert len(rows) == 7
    headings = [x for x in text[:rows_end].splitlines() if x.split()[:2] == ["epoch", "steps"]]
    assert len(headings) == 1
    assert {len(x) for x in rows + headings} == {len(rows[0])}
    assert len(rows[0]) <= 100
    assert " WER " in headings[0]
    assert " CER " in headings[0]
    assert rows[1].split()[3:6] == ["-", "-", "-"]
    assert max(map(len, text[rows_end:].splitlines())) <= width
    text = text_of(file)
    assert "reference: ENTER SIX [two]" in text
    assert "hypothesis: (nothing)" in text
    if width >= 80:
        assert "1.020 at the end, best 1.020 (epoch 1)" in text
        assert "WER counts inserted words too, so it can exceed 1" in text
        assert "98.0 % of entries not sent in 572 of 700 steps; asked for 98 %" in text
        assert "12.3 MB sent by rank 0, 1.2 GB had it been dense: 97.6x fewer" in text
        assert "batches were waited for 5.0 % of the time" in text
        assert "rnns.0.rnn.weight_ih_l0" in text
        assert "fc.weight" in text
        assert "peak RSS of a worker 812 MB" in text
    assert text.endswith("results are in runs/an4-1")


@pytest.mark.parametrize("names", [VALIDATION, {"loss": 1.0, "accuracy": 0.9, "perplexity": 12.0}])
def test_rows_fit_a_terminal_of_80_columns(names: dict[str, float]) -> None:
    shown, file = view(80, terminal=True)
    shown.started(plan())
    start = len(file.getvalue())
    shown.epoch_ended(epoch(1, names, bytes_sent=99_900_000, seconds=3599.0))
    rows = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()[start:]).splitlines()
    assert len(rows) == 2 + 2 * len(EXAMPLES)
    assert len(rows[0]) == len(rows[1]) <= 80
    assert all(name in rows[0].lower() for name in names)


def test_a_resumed_run_learns_later_what_is_validated() -> None:
    shown, file = view()
    shown.started(plan(first_step=100))
    shown.epoch_ended(epoch(2, {}))
    shown.epoch_ended(epoch(3, {"loss": 1.0, "accuracy": 0.5}))
    headings = [x for x in file.getvalue().splitlines() if x.startswith("epoch  steps")]
    assert "accuracy" not in headings[0]
    assert "accuracy" in headings[1]


def test_an_epoch_without_wer_and_a_run_without_anything() -> None:
    shown, file = view()
    shown.started(plan(workers=1))
    shown.finished(
        outcome(
            plan(workers=1), (), steps=0, sparse_steps=0, sparsity=0.0, bytes_sent=0,
            step_seconds={}, buckets=(), memory={},
        )
    )  # fmt: skip
    text = file.getvalue()
    assert "WER" not in text
    assert "nan" not in text.lower()
    assert "bucket" not in text[text.index("summary") :]


def test_many_epochs_are_summed_up_by_those_that_were_validated() -> None:
    shown, file = view()
    epochs = tuple(epoch(x, VALIDATION if x % 5 == 0 else {}) for x in range(1, 31))
    shown.started(plan())
    start = len(file.getvalue())
    shown.finished(outcome(plan(), epochs))
    rows = [x for x in file.getvalue()[start:].splitlines() if x.endswith("0.610")]
    assert [row.split()[0] for row in rows] == ["5", "10", "15", "20", "25", "30"]


def test_after_an_exception_the_display_is_closed_and_says_where_it_was() -> None:
    shown, file = view(80, terminal=True)
    shown.started(plan())
    shown.stepped(step(0))
    shown.close()
    shown.close()
    assert "\x1b[?25h" in file.getvalue()
    assert file.getvalue().count("stopped after step 1 of 700") == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_a_console_that_knows_only_ascii(terminal: bool) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    shown = View(Console(file=file, width=80, force_terminal=terminal))
    config = Config.of(data_dir="/corpora/gespräch/" + "ü" * 30)
    shown.started(plan(config=config))
    shown.stepped(step(0))
    shown.validating(1, 2)
    shown.epoch_ended(
        epoch(1, VALIDATION, examples=({"reference": "süß\x1b[2J", "hypothesis": "ß"},))
    )
    shown.finished(outcome(plan(folder="läufe/1"), (epoch(1, VALIDATION),)))
    shown.close()
    file.flush()
    assert b"s??" in raw.getvalue()
    assert b"\x1b[2J" not in raw.getvalue()


def test_bars_are_redrawn_at_most_four_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("oktopk.train.console.live.time.monotonic", lambda: now[0])
    shown, file = view(80, terminal=True)
    shown.started(plan(steps_per_epoch=700))
    for place in range(600):
        now[0] += 0.01
        shown.stepped(step(place, per_epoch=700))
    assert 20 <= file.getvalue().count("samples/s") <= 26
    shown.close()


def test_numbers_as_people_read_them() -> None:
    assert [byte_size(x) for x in (0, 999, 1200, 999_960, 110_278_272, 1.2e9, 5e15)] == [
        "0 B", "999 B", "1.2 kB", "1.0 MB", "110 MB", "1.2 GB", "5000 TB",
    ]  # fmt: skip
    assert [duration(x) for x in (0.04, 59.96, 123, 3600, 100_000)] == [
        "0.0s", "1m00s", "2m03s", "1h00m", "1d04h",
    ]  # fmt: skip
    assert [percent(x) for x in (0, 0.98, 0.99999, 1)] == ["0.0%", "98.0%", "99.999%", "100.0%"]
    assert [ratio(x) for x in (1, 50, 97.56, 999.7, 12345)] == [
        "1x", "50x", "97.6x", "1000x", "12345x",
    ]  # fmt: skip
    assert [number(x) for x in (0, 3.2144, 312.44, 0.00002)] == [
        "0.000",
        "3.214",
        "312.4",
        "2.0e-05",
    ]


@given(st.floats(min_value=0, max_value=1e300))
def test_no_number_is_too_wide_or_nan(value: float) -> None:
    if value < 999e12:
        assert len(byte_size(value)) <= 7
    if value < 8e6:
        assert len(duration(value)) <= 6
    assert len(number(value)) <= 8
    for show in (byte_size, duration, number, percent, ratio):
        assert "inf" not in show(value)
        assert show(math.nan) == "-"
