"""Auto: what it measures, how ranks decide alike, and what becomes of a decision.

No test asserts which of both is faster, but where an emulated link leaves no doubt.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import oktopk
from gradients import PATTERNS
from models import SMALL, attached, logged, net, run, sgd
from oktopk.cli import main
from oktopk.core.chooser import Chooser
from oktopk.core.transport import Transport
from oktopk.lab.bench import files
from oktopk.lab.network import unavailable
from oktopk.train.config.recipes import recipe
from ranks import Rank, Ranks

NUMEL = 20_000
AUTO = oktopk.Auto(density=0.05, rounds=1)
"""Six dense steps, eight sparse ones, and a decision."""
DECIDED = 15
"""Steps after which it has decided."""


def gradient(rank: Rank, step: int) -> torch.Tensor:
    return PATTERNS["drifting"](rank.rank, rank.size, NUMEL, step).float()


def reduce_for(rank: Rank, algorithm: oktopk.Algorithm = AUTO, **options: Any) -> Any:
    return oktopk.SparseAllreduce(algorithm, NUMEL, rank.group, **options)


def choice(reduce: Any) -> str:
    return str(reduce.state_dict()["chooser"]["reason"])


def kind_of(reason: str) -> str:
    return "sparse" if reason.startswith("sparse") else "dense"


# --- the decision ----------------------------------------------------------------------------


def decided(
    rank: Rank, auto: oktopk.Auto, dense: float, sparse: float, exchange: float, differ: bool
) -> tuple[str, str]:
    """What follows from times of a round. On one rank steps are as given. If times differ, others
    have shorter ones, by which they would decide otherwise, and longer exchanges."""
    other = differ and rank.rank != 1
    seconds = {"dense": [dense / (rank.rank + 3 if other else 1)] * 4}
    seconds["sparse"] = [sparse / (2 if other else 1)] * 6
    seconds["exchange"] = [exchange * (2 if other else 1)] * 6
    saved = {"sparse": True, "wire": "int8", "count": 8, "seconds": seconds}
    chooser = Chooser(auto, 1_000_000, saved)
    running = chooser.begin(20, Transport(rank.group))
    return chooser.reason, str(running)


@pytest.mark.parametrize(
    ("dense", "sparse", "exchange", "options", "says", "runs"),
    [
        (1.39, 0.09, 0.05, {}, "sparse, int8: a dense step takes 1,390 ms here, Ok-Topk 90 ms", ""),
        (1.39, 0.09, 0.0001, {}, "sparse, bfloat16: ", "wire='bfloat16'"),
        (1.39, 0.09, 0.0001, {"wire": "int4"}, "sparse, int4: ", "wire='int4'"),
        (1.39, 0.09, 0.05, {"ramp": (0.5,)}, "sparse", "OkTopk(density=0.02, warmup_steps=20, "),
        (0.2, 0.9, 0.05, {}, "dense: Ok-Topk takes 900 ms here, a dense step 200 ms", "Dense("),
        (0.2, 0.19, 0.05, {"rounds": 1}, "sparse", "OkTopk("),
        (0.2, 0.195, 0.05, {"rounds": 1}, "dense", "Dense("),
        (0.2, 0.19, 0.05, {}, "", "Dense("),  # too close
        (0.02, 0.002, 0.0, {}, "", "Dense("),  # too short
    ],
)
@pytest.mark.parametrize("differ", [False, True])
def test_times_decide_on_all_ranks_alike(
    ranks: Ranks,
    dense: float,
    sparse: float,
    exchange: float,
    options: dict[str, Any],
    says: str,
    runs: str,
    differ: bool,
) -> None:
    auto = oktopk.Auto(**options)
    answers = ranks.run(3, decided, auto, dense, sparse, exchange, differ)
    assert len(set(answers)) == 1
    reason, running = answers[0]
    assert reason.startswith(says)
    assert bool(reason) == bool(says)
    assert runs in running


def few_ranks(rank: Rank, density: float) -> tuple[str, str]:
    reduce = reduce_for(rank, oktopk.Auto(density=density))
    reduce(gradient(rank, 0))
    return choice(reduce), reduce.last.phase


def test_where_there_is_nothing_to_choose_it_is_dense_at_once(ranks: Ranks) -> None:
    assert ranks.run(1, few_ranks, 0.05) == [("dense: there is only one rank", "dense")]
    assert ranks.run(2, few_ranks, 1.0) == [("dense: all elements are to be applied", "dense")] * 2


# --- one vector ------------------------------------------------------------------------------


def measured(rank: Rank, delayed: int, nan: int) -> tuple[list[str], str, list[str]]:
    """Steps with one rank that is slow, and one gradient with a NaN."""
    reduce, phases = reduce_for(rank, nonfinite="skip"), []
    logging.getLogger("oktopk").setLevel(logging.INFO)
    with logged() as lines:
        for step in range(DECIDED + 5):
            if rank.rank == delayed:
                time.sleep(0.005 * (step % 3))
            given = gradient(rank, step)
            if step == nan:
                given[rank.rank] = torch.nan
            before = reduce.residual.clone()
            average = reduce(given)
            phases.append("skipped" if reduce.last.skipped else reduce.last.phase)
            if step != nan:
                owed = before + given - reduce.residual
                torch.distributed.all_reduce(owed, group=rank.group)
                torch.testing.assert_close(owed, average * rank.size, rtol=1e-3, atol=1e-3)
    return phases, choice(reduce), lines


@pytest.mark.parametrize("nan", [-1, 3, 9])
def test_ranks_decide_alike_after_dense_and_sparse_steps(ranks: Ranks, nan: int) -> None:
    answers = ranks.run(3, measured, 1, nan)
    phases, reason, lines = answers[0]
    assert all(answer[:2] == (phases, reason) for answer in answers)
    taken = [phase for phase in phases if phase != "skipped"]
    assert len(phases) - len(taken) == (nan >= 0)
    assert taken[:14] == ["dense"] * 6 + ["sparse"] * 8
    assert set(taken[14:]) == {kind_of(reason)}
    assert [line for line in lines if line.startswith("auto")] == [f"auto: {reason}"]
    assert not [line for line in answers[1][2] if line.startswith("auto")]


def taken_back(rank: Rank, at: int) -> None:
    """A step that is taken back does not count, and leaves no trace."""
    reduce = reduce_for(rank)
    for step in range(at):
        reduce(gradient(rank, step))
    before = reduce.state_dict()
    reduce(gradient(rank, 99))
    reduce.discard()
    after = reduce.state_dict()
    for name in ("residual", "velocity"):
        assert torch.equal(before.pop(name), after.pop(name))
    assert before == after


@pytest.mark.parametrize("at", [2, 9, DECIDED])
def test_a_step_that_is_taken_back_does_not_count(ranks: Ranks, at: int) -> None:
    ranks.run(2, taken_back, at)


def changed(rank: Rank) -> list[str]:
    """Other algorithms in between."""
    reduce, found = reduce_for(rank), []
    for algorithm in (AUTO, oktopk.OkTopk(0.05), oktopk.Dense(), AUTO):
        reduce.change(algorithm)
        for step in range(DECIDED):
            reduce(gradient(rank, step))
        chooser = reduce.state_dict()["chooser"]
        found.append(chooser["reason"] if chooser else reduce.last.phase)
    return found


def test_it_can_be_exchanged_and_measures_anew(ranks: Ranks) -> None:
    answers = ranks.run(2, changed)
    assert answers[0] == answers[1]
    first, sparse, dense, second = answers[0]
    assert first
    assert second
    assert (sparse, dense) == ("sparse", "dense")


# --- models ----------------------------------------------------------------------------------


def made(rank: Rank, how: str, adam: bool) -> tuple[Any, Any, Any]:
    """Model, handle and optimizer."""

    def optimizer(model: Any) -> Any:
        return oktopk.AdamW(model.parameters(), lr=1e-3) if adam else sgd(model)

    if how == "ddp":
        model, handle = attached(rank, AUTO)
        return model, handle, optimizer(model)
    plain = net()
    wrapper = oktopk.DistributedOptimizer(
        optimizer(plain), plain.named_parameters(), AUTO, group=rank.own_group, **SMALL
    )
    return plain, wrapper, wrapper


def trained(rank: Rank, how: str, adam: bool) -> tuple[str, list[str]]:
    phases: list[str] = []
    model, handle, optimizer = made(rank, how, adam)
    handle.subscribe(lambda stats: phases.append(stats.phase))
    run(rank, model, optimizer, range(DECIDED + 5))
    handle.check_replicas()
    summary = handle.stats()
    kinds = {bucket.algorithm for bucket in summary.buckets[:-1]}
    assert len(kinds) == 1  # the whole model
    assert kinds == {"OkTopk" if summary.choice.startswith("sparse") else "Dense"}
    assert handle.algorithm == AUTO
    assert summary.choice in str(summary)
    handle.set_algorithm(handle.algorithm)  # anew
    assert handle.stats().choice == ""
    handle.set_algorithm(oktopk.OkTopk(0.05))
    run(rank, model, optimizer, range(20, 22))
    handle.detach()
    run(rank, model, optimizer, range(22, 24))
    assert handle.stats().choice == ""
    handle.check_replicas()
    handle.close()
    return summary.choice, phases


@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adamw"])
@pytest.mark.parametrize("how", ["ddp", "wrapper"])
def test_a_model_is_decided_as_a_whole(ranks: Ranks, how: str, adam: bool) -> None:
    answers = ranks.run(3, trained, how, adam)
    assert len({reason for reason, _ in answers}) == 1
    reason, phases = answers[0]
    assert all(other == phases for _, other in answers)
    assert phases[:14] == ["dense"] * 6 + ["sparse"] * 8
    assert (
        phases[14:]
        == [reason[: len("sparse")].rstrip(":").strip()] * 6 + ["sparse"] * 2 + ["dense"] * 2
    )


def broken_off(rank: Rank) -> tuple[list[str], str]:
    """A NaN raises on all ranks in the middle of measuring, and is caught."""
    model, handle = attached(rank, AUTO)
    phases: list[str] = []
    handle.subscribe(lambda stats: phases.append(stats.phase))
    optimizer = sgd(model)
    for step in range(DECIDED + 3):
        if step in (4, 10):
            with pytest.raises(oktopk.NonFiniteGradientError):
                (model(torch.full((8, 32), torch.nan if rank.rank == 1 else 1.0)).sum()).backward()
        run(rank, model, optimizer, range(step, step + 1))
    handle.check_replicas()
    return phases, handle.stats().choice


def test_a_step_that_fails_while_measuring_does_no_harm(ranks: Ranks) -> None:
    answers = ranks.run(3, broken_off)
    assert len({str(answer) for answer in answers}) == 1
    phases, reason = answers[0]
    assert phases[:14] == ["dense"] * 6 + ["sparse"] * 8
    assert reason


# --- states ----------------------------------------------------------------------------------


def resumed(rank: Rank, folder: str, steps: int, auto: oktopk.Auto = AUTO) -> tuple[Any, ...]:
    """Load what `saved` has saved, and go on."""
    model, handle = attached(rank, auto)
    oktopk.checkpoint.load(folder, handle)
    phases: list[str] = []
    handle.subscribe(lambda stats: phases.append(stats.phase))
    before = handle.stats().choice
    run(rank, model, sgd(model), range(steps))
    handle.check_replicas()
    return before, phases, handle.stats().choice


def saved(rank: Rank, folder: str, steps: int) -> str:
    model, handle = attached(rank, AUTO)
    run(rank, model, sgd(model), range(steps))
    oktopk.checkpoint.save(folder, handle)
    return handle.stats().choice


def test_a_decision_is_kept(ranks: Ranks, tmp_path: Path) -> None:
    reason = ranks.run(3, saved, str(tmp_path), DECIDED)[0]
    answers = ranks.run(3, resumed, str(tmp_path), 3)
    assert answers == [(reason, [kind_of(reason)] * 3, reason)] * 3


def test_a_sparse_decision_is_kept(ranks: Ranks, tmp_path: Path) -> None:
    """Whatever this machine would decide."""
    ranks.run(2, force, str(tmp_path))
    answers = ranks.run(2, resumed, str(tmp_path), 3)
    assert answers == [("sparse, int8: forced", ["sparse"] * 3, "sparse, int8: forced")] * 2
    other = oktopk.Auto(density=0.05, rounds=1, wire="bfloat16")
    assert ranks.run(2, resumed, str(tmp_path), 3, other)[0][1] == ["sparse"] * 3


def force(rank: Rank, folder: str) -> None:
    model, handle = attached(rank, AUTO)
    run(rank, model, sgd(model), range(9))
    state = handle.state_dict()
    seconds: dict[str, list[float]] = {name: [] for name in ("dense", "sparse", "exchange")}
    state["chooser"] |= {"reason": "sparse, int8: forced", "seconds": seconds}
    handle.load_state_dict(state)
    oktopk.checkpoint.save(folder, handle)


@pytest.mark.parametrize("steps", [4, 9])
def test_measuring_goes_on_where_it_was(ranks: Ranks, tmp_path: Path, steps: int) -> None:
    assert ranks.run(3, saved, str(tmp_path), steps) == [""] * 3
    answers = ranks.run(3, resumed, str(tmp_path), DECIDED - steps)
    assert len({str(answer) for answer in answers}) == 1
    before, phases, after = answers[0]
    assert not before
    assert phases[:-1] == (["dense"] * 6 + ["sparse"] * 8)[steps:]
    assert after


def test_another_number_of_ranks_measures_anew(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, force, str(tmp_path))
    answers = ranks.run(3, resumed, str(tmp_path), DECIDED)
    assert len({str(answer) for answer in answers}) == 1
    before, phases, after = answers[0]
    assert (before, phases[:14]) == ("", ["dense"] * 6 + ["sparse"] * 8)
    assert after


def disagreeing(rank: Rank) -> str:
    model, handle = attached(rank, AUTO)
    run(rank, model, sgd(model), range(9))
    state = handle.state_dict()
    if rank.rank == 1:
        state["chooser"]["seconds"]["dense"].pop()
    with pytest.raises(ValueError, match="ranks disagree") as error:
        handle.load_state_dict(state)
    return str(error.value)


def test_states_that_differ_are_refused_on_all_ranks(ranks: Ranks) -> None:
    ranks.run(2, disagreeing)


def damaged(rank: Rank, change: dict[str, Any], says: str) -> None:
    reduce = reduce_for(rank)
    for step in range(10):
        reduce(gradient(rank, step))
    state = reduce.state_dict()
    if rank.rank == 1:
        state["chooser"] |= change
    with pytest.raises(ValueError, match=says if rank.rank == 1 else "ERROR"):
        reduce.load_state_dict(state)
    reduce(gradient(rank, 10))  # nothing has changed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"wire": "int5"}, r'\["wire"\] is "int5", but must be a wire format'),
        ({"count": -1}, r'\["count"\] is -1, but must be a whole number'),
        ({"seconds": {"dense": [], "sparse": [], "exchange": []}}, "lacks times"),
        (
            {"sparse": False, "seconds": {"dense": [], "sparse": [], "exchange": []}},
            "lacks times",
        ),
        ({"more": 1}, "does not belong there"),
    ],
)
def test_damage_is_an_error_on_all_ranks(ranks: Ranks, change: dict[str, Any], says: str) -> None:
    ranks.run(2, damaged, change, says)


# --- the command line ------------------------------------------------------------------------


def test_the_trainer_knows_it() -> None:
    def made(**values: Any) -> oktopk.Algorithm:
        return recipe("lstman4", compressor="auto", **values).compression.algorithm()

    assert made() == oktopk.Auto(density=0.02, warmup_steps=128)
    assert made(wire="bfloat16").wire == "bfloat16"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rounds": 0}, "rounds is 0, but must be a whole number, at least 1"),
        ({"wire": "int5"}, "wire is 'int5', but must be one of .*int8.*, auto"),
    ],
)
def test_mistakes_are_explained(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        oktopk.Auto(**options)
    with pytest.raises(ValueError, match="wire is 'auto', but must be one of"):
        oktopk.OkTopk(wire="auto")


@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "")
def test_on_a_slow_link_it_is_sparse(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    line = "bench raw --hosts 2 --rate 20mbit --numel 1000000 --steps 3 --seconds 1 --contenders"
    assert main([*line.split(), "auto:rounds=1", "--json", str(path)]) == 0
    dense, auto = files.load(path)[0].results
    assert auto.applied == pytest.approx(20_000, rel=0.1)
    assert auto.speedup is not None
    assert auto.speedup > 5
    assert any(note.startswith("auto: sparse, int8: a dense step takes ") for note in auto.notes)
    assert not dense.notes
