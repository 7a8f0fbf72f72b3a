"""Simulated ranks: the same bits and bytes as real ones, the contract at P = 64, and links."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import oktopk
from gradients import PATTERNS
from oktopk.cli import main
from oktopk.core.reduction import Reduction
from oktopk.cost import Link, Nodes
from oktopk.cost.contention import Network, fair, finish
from oktopk.cost.schedule import Schedule
from oktopk.lab.simulate import gloo
from oktopk.lab.simulate.gradients import SHAPES, Noise, Recorded, Source
from oktopk.lab.simulate.recorder import Recorder
from oktopk.lab.simulate.simulation import simulate
from oktopk.lab.simulate.transport import InProcess
from oktopk.lab.simulate.world import StuckError, World
from ranks import Rank, Ranks
from test_contract import (
    LONG,
    ROWS,
    Case,
    Steps,
    check_agreement,
    check_bytes,
    check_counts,
    check_steady,
)

STEPS = 6
BITS = ("average", "residual", "bytes_sent", "bytes_received", "messages", "selected_local")


class Pattern(Source):
    """Gradients of `gradients.py`."""

    def __init__(self, name: str, numel: int) -> None:
        self.name, self.numel = name, numel

    def write(self, rank: int, size: int, step: int, out: Tensor) -> None:
        out.copy_(PATTERNS[self.name](rank, size, self.numel, step))


def bits(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().data).hexdigest()


def real(rank: Rank, name: str, numel: int, warmup: int) -> list[dict[str, Any]]:
    """What a real rank computes and counts in each step."""
    algorithm = oktopk.algorithm(name, density=0.02, warmup_steps=warmup)
    reduce = oktopk.SparseAllreduce(algorithm, numel, rank.group)
    source, gradient, found = Pattern("drifting", numel), torch.empty(numel), []
    for step in range(STEPS):
        source.write(rank.rank, rank.size, step, gradient)
        average = reduce(gradient)
        assert reduce.last is not None
        hashes = {"average": bits(average), "residual": bits(reduce.residual)}
        found.append(reduce.last.as_dict() | hashes)
    return found


def imagined(size: int, name: str, numel: int, warmup: int) -> list[list[dict[str, Any]]]:
    """The same of simulated ranks."""
    found: list[list[dict[str, Any]]] = [[] for _ in range(size)]

    def watch(rank: int, step: int, reduction: Reduction, average: Tensor) -> None:
        assert reduction.last is not None
        hashes = {"average": bits(average), "residual": bits(reduction.residual)}
        found[rank].append(reduction.last.as_dict() | hashes)

    algorithm = oktopk.algorithm(name, density=0.02, warmup_steps=warmup)
    simulate(algorithm, Pattern("drifting", numel), size, STEPS, watch=watch)
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("name", oktopk.names())
def test_simulated_ranks_equal_real_ones(ranks: Ranks, name: str, size: int) -> None:
    """Bit for bit, over several steps with error feedback, after a dense one through Gloo's ring;
    and byte for byte."""
    numel = 70_001
    for there, here in zip(
        ranks.run(size, real, name, numel, 1), imagined(size, name, numel, 1), strict=True
    ):
        for step, (one, other) in enumerate(zip(there, here, strict=True)):
            assert {key: one[key] for key in BITS} == {key: other[key] for key in BITS}, step


def summed(rank: Rank, numel: int) -> str:
    return bits(ring(rank.rank, numel, lambda t: torch.distributed.all_reduce(t, group=rank.group)))


def ring(rank: int, numel: int, sum_up: Callable[[Tensor], None]) -> Tensor:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    sum_up(tensor)
    return tensor


@pytest.mark.parametrize("numel", [1, 7, 4096, 1_000_003, 2_800_001])
@pytest.mark.parametrize("size", [3, 5, 8])
def test_the_ring_adds_in_gloos_order(ranks: Ranks, size: int, numel: int) -> None:
    """Also where chunks are empty, and where segments are limited in size."""
    world = World(size, Recorder(size))
    here = world.run(lambda rank: ring(rank, numel, InProcess(world, rank)._sum))
    assert {bits(tensor) for tensor in here} == set(ranks.run(size, summed, numel))


THRESHOLDS = ("oktopk", "oktopk-variable", "gtopk")
"""Algorithms whose counts could leave k in the long run."""


@pytest.mark.parametrize("name", ROWS)
def test_the_contract_of_64_ranks(exhaustive: bool, name: str) -> None:
    """Conservation, agreement, count and bytes, where no machine has as many ranks."""
    slow = name == "oktopk-variable"  # it decodes thousands of messages in each step
    steps = LONG if name in THRESHOLDS and (exhaustive or not slow) else 4
    keep_promises(64, name, Case("drifting", 6007, 0.02, "float32", steps, "int8"))
    if name in THRESHOLDS or exhaustive:
        keep_promises(64, name, Case("disjoint", 3001, 0.5, "float32", 3, "int8"))
    keep_promises(64, name, Case("outlier", 101, 0.02, "float32", 3, "int8"))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", THRESHOLDS)
def test_the_contract_of_many_ranks_with_few_elements(name: str, pattern: str) -> None:
    """k < P, n < P and k = n."""
    for numel, density in ((5, 0.5), (1009, 0.001), (331, 1.0)):
        keep_promises(33, name, Case(pattern, numel, density, "float32", 4, "plain"))


def keep_promises(size: int, name: str, case: Case) -> None:
    """The checks of test_contract.py."""
    numel, source = case.numel, Pattern(case.pattern, case.numel)
    before = [torch.zeros(numel, dtype=torch.float64) for _ in range(size)]
    owed = torch.zeros(case.steps, numel, dtype=torch.float64)
    kept, scale = torch.zeros_like(owed), torch.zeros_like(owed)
    averages: dict[int, Tensor] = {}
    history: list[list[dict[str, Any]]] = [[] for _ in range(case.steps)]

    def watch(rank: int, step: int, reduction: Reduction, average: Tensor) -> None:
        gradient = torch.empty(numel)
        source.write(rank, size, step, gradient)
        here, residual = before[rank] + gradient, reduction.residual.double()
        owed[step] += here
        kept[step] += residual
        scale[step] += here.abs() + residual.abs()
        before[rank] = residual
        averages.setdefault(step, average.double())
        assert reduction.last is not None
        more = {
            "where": f"{name} {case} P={size} step {step}",
            "candidates": int((here != 0).sum()),
            "bits": bits(average),
            "applied": int((average != 0).sum()),
        }
        history[step].append(reduction.last.as_dict() | more)

    algorithm = oktopk.algorithm(name, density=case.density, wire=case.wire)
    simulate(algorithm, source, size, case.steps, watch=watch)
    for step, average in averages.items():
        lost = (owed[step] - kept[step] - size * average).abs()
        assert bool((lost <= 1e-5 * scale[step]).all()), f"{name} {case} step {step}"
    steps: Steps = [tuple(records) for records in history]
    check_agreement(steps)
    check_counts(ROWS[name], steps)
    check_steady(ROWS[name], case, steps)
    if algorithm.target(numel) >= 4 * size:  # below, heads of messages are most of the bytes
        check_bytes(name, case, size, steps)


@pytest.mark.parametrize("name", oktopk.names())
def test_the_record_has_every_byte(name: str) -> None:
    """The messages of the record are those that are counted, up to the rounding of a ring."""
    result = simulate(oktopk.algorithm(name, density=0.05), Noise("skewed", 80_000), 6, 3, record=2)
    counted = np.array([[s.bytes_sent for s in step] for step in result.stats[-2:]]).sum(0)
    dense = name in ("dense", "auto")  # `auto` begins with dense steps
    assert result.schedule.sent().sum() == pytest.approx(counted.sum(), abs=64 if dense else 0)
    if not dense:
        assert result.schedule.sent().tolist() == counted.tolist()
    assert result.schedule.received().sum() == result.schedule.sent().sum()


def test_a_run_is_the_same_every_time() -> None:
    def once() -> Schedule:
        return simulate(oktopk.OkTopkVariable(), Noise("apart", 9000), 5, 4, record=4).schedule

    one, other = once(), once()
    for mine, theirs in zip(one.programs, other.programs, strict=True):
        assert np.array_equal(mine, theirs)
    assert np.array_equal(one.nbytes, other.nbytes)


@pytest.mark.parametrize("shape", SHAPES)
def test_synthetic_gradients(shape: str) -> None:
    """They differ between ranks, have something in common, drift, and have heavy tails."""
    source, numel = Noise(shape, 20_000, seed=3), 20_000
    a, b, later = torch.empty(numel), torch.empty(numel), torch.empty(numel)
    source.write(0, 4, 0, a)
    source.write(1, 4, 0, b)
    source.write(0, 4, 10, later)
    assert not torch.equal(a, b)
    common = torch.corrcoef(torch.stack([a.sign(), b.sign()]))[0, 1]
    assert 0.1 < float(common) < 0.5
    assert not torch.equal(a, later)
    assert float((a**4).mean() / (a**2).mean() ** 2) > 10  # 3 for a normal distribution
    again = torch.empty(numel)
    Noise(shape, numel, seed=3).write(0, 4, 10, again)
    assert torch.equal(again, later)


# Errors


def stuck(task: Callable[[InProcess], object], size: int = 3) -> str:
    world = World(size, Recorder(size))
    with pytest.raises(StuckError) as caught:
        world.run(lambda rank: task(InProcess(world, rank)))
    return str(caught.value)


def test_an_error_of_one_rank_ends_all() -> None:
    world = World(40, Recorder(40))

    def task(rank: int) -> None:
        transport = InProcess(world, rank)
        transport.trade_numbers([[rank]] * 40)
        if rank == 17:
            raise ZeroDivisionError("of rank 17")
        transport.all_reduce(torch.ones(200_000))

    with pytest.raises(ZeroDivisionError, match="of rank 17"):
        world.run(task)


def test_ranks_that_wait_for_ever_are_an_error() -> None:
    def one_is_missing(transport: InProcess) -> None:
        if transport.rank:
            transport.trade_numbers([[1]] * 3)

    assert "2 of 3 simulated ranks wait for ever (2 in an all-to-all)" in stuck(one_is_missing)

    def nobody_sends(transport: InProcess) -> None:
        if transport.rank == 0:
            transport.receive(2, 100)

    assert "rank 0 for rank 2" in stuck(nobody_sends)


def test_ranks_that_do_something_else_are_an_error() -> None:
    def differ(transport: InProcess) -> None:
        transport.trade_numbers([[1] * (1 + (transport.rank == 2))] * 3)

    assert "do not do the same" in stuck(differ)

    def lie(transport: InProcess) -> None:
        message = torch.zeros(10, dtype=torch.uint8)
        list(transport.exchange([message] * 3, [10 + transport.rank] * 3, 2))

    assert "has 10 bytes, the other 1" in stuck(lie)


# Links


def schedule_of(size: int, *messages: tuple[int, int, int]) -> Schedule:
    """All messages at once."""
    recorder, numbers = Recorder(size), []
    for source, target, nbytes in messages:
        number = recorder.message(source, source, target, nbytes)
        recorder.start(source, number)
        recorder.start(target, number)
        numbers.append((source, target, number))
    for source, target, number in numbers:
        recorder.wait(source, number)
        recorder.wait(target, number)
    return recorder.schedule()


EXACT = 0.0
"""A message arrives when nothing of it is left."""


def seconds(schedule: Schedule, rate: float = 100.0, latency: float = 0.0, **more: Any) -> Any:
    network = Network(schedule.size, Link(rate, latency), grain=EXACT, **more)
    return pytest.approx(finish(schedule, network).tolist())


def test_a_message_takes_latency_and_bytes() -> None:
    assert seconds(schedule_of(2, (0, 1, 300)), latency=0.5) == [3.5, 3.5]


def test_a_rank_sends_and_receives_at_once() -> None:
    assert seconds(schedule_of(2, (0, 1, 300), (1, 0, 300))) == [3.0, 3.0]


def test_many_senders_share_the_receivers_link() -> None:
    """Incast: 3 senders, 100 bytes each, at a third of the rate. Then the smaller ones are done."""
    assert seconds(schedule_of(4, (1, 0, 100), (2, 0, 100), (3, 0, 100))) == [3, 3, 3, 3]
    # 50 + 50 + 50 take 1.5 s, then the rest of 100 has the link alone: 0.5 s.
    assert seconds(schedule_of(4, (1, 0, 50), (2, 0, 50), (3, 0, 100))) == [2.0, 1.5, 1.5, 2.0]


def test_a_message_that_is_slowed_down_leaves_its_rate_to_others() -> None:
    """Rank 0 gets 4 messages at 25 B/s. Rank 1 sends one of them, and another with 75 B/s."""
    messages = [(1, 0, 100), (2, 0, 100), (3, 0, 100), (4, 0, 100), (1, 5, 150)]
    found = seconds(schedule_of(6, *messages))
    assert found == [4, 4, 4, 4, 4, 2]


def test_fair_rates() -> None:
    """Each link of 12: one with 3 messages, two of which take another one with 4 messages."""
    links = np.array([[0, 4], [0, 1], [0, 1], [1, 4], [1, 4]])
    rates = np.array([12.0, 12.0, 0, 0, np.inf])
    assert fair(links, rates).tolist() == pytest.approx([6, 3, 3, 3, 3])


def test_rotated_rounds_are_as_fast_as_the_link() -> None:
    """Each rank sends 5 messages of 100 bytes and receives 5, in any order: 5 seconds."""
    assert seconds(gloo.all_to_all(6, 100)) == [5.0] * 6


def test_gloos_ring() -> None:
    """2(P-1) chunks of n/P, in halves, of which two are on their way: the latency counts once in
    two halves."""
    schedule = gloo.allreduce(4, 800, 4)
    assert schedule.sent().tolist() == [1200] * 4
    assert seconds(schedule) == [12.0] * 4
    latency = seconds(schedule, latency=0.25, rate=1e12)
    assert latency == [6 * 0.25] * 4


def test_nodes_share_their_link() -> None:
    """Two nodes of two ranks. Inside 1000 B/s, between them 100 B/s."""
    nodes = Nodes(2, Link(1000.0, 0.0))
    assert seconds(schedule_of(4, (0, 1, 500)), nodes=nodes) == [0.5, 0.5, 0, 0]
    assert seconds(schedule_of(4, (0, 2, 500)), nodes=nodes) == [5, 0, 5, 0]
    # Both ranks of a node send to the other node: they share its link.
    both = schedule_of(4, (0, 2, 500), (1, 3, 500), (2, 3, 500))
    assert seconds(both, nodes=nodes) == [10, 10, 10, 10]


def test_calls_take_time() -> None:
    """A rank needs a second for each message that it sends, one after the other."""
    schedule = schedule_of(3, (0, 1, 100), (0, 2, 100))
    assert seconds(schedule, rate=1e9, call=1.0) == [2, 1, 2]


def test_a_chain_waits() -> None:
    """Rank 1 sends on when it has received."""
    recorder = Recorder(3)
    for source in (0, 1):
        number = recorder.message(source, source, source + 1, 100)
        for rank in (source, source + 1):
            recorder.start(rank, number)
            recorder.wait(rank, number)
    assert seconds(recorder.schedule(), latency=0.5) == [1.5, 3.0, 3.0]


def test_a_grain_changes_little() -> None:
    schedule = simulate(oktopk.TopkDSA(), Noise("skewed", 20_000), 16, 3).schedule
    link = Link(1e6, 1e-4)
    coarse = finish(schedule, Network(16, link)).max()
    fine = finish(schedule, Network(16, link, grain=EXACT)).max()
    assert fine * 0.98 <= coarse <= fine * 1.005


def test_a_schedule_that_never_ends_is_an_error() -> None:
    recorder = Recorder(2)
    recorder.start(0, number := recorder.message(0, 0, 1, 100))
    recorder.wait(0, number)
    with pytest.raises(ValueError, match="never ends"):
        finish(recorder.schedule(), Network(2, Link(1.0, 0.0)))


# The command


def simulated(*flags: str) -> int:
    return main(["plan", "--simulate", "--nworkers", "2", "5", *flags])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, picture = tmp_path / "results.json", tmp_path / "picture.svg"
    flags = ["--numel", "20,000", "--json", str(results), "--plot", str(picture)]
    assert simulated("--algorithms", "dense", "topka:wire=plain", "oktopk", *flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("20,000 elements, density 0.02, gradients noise, 1gbit")
    assert [line.split()[:2] for line in lines[-6:]] == [
        [name, size] for name in ("dense", "topka:wire=plain", "oktopk") for size in ("2", "5")
    ]
    kept = json.loads(results.read_text())
    assert [cell["size"] for cell in kept["cells"]] == [2, 2, 2, 5, 5, 5]
    by_name = {(cell["algorithm"], cell["size"]): cell for cell in kept["cells"]}
    topka, dense = by_name["topka:wire=plain", 5], by_name["dense", 5]
    # To each other rank: 4-byte indexes and values of k entries, a head, and three numbers.
    assert topka["bytes_mean"] == (8 * 400 + 40 + 3 * 8) * 4
    assert topka["words"] == pytest.approx(topka["bytes_mean"] / 4 / (400 * 4 / 5))
    assert dense["bytes_mean"] == 2 * 80_000 * 4 / 5
    assert dense["seconds"] > topka["seconds"] > 2 * 50e-6
    assert "<svg" in picture.read_text()


def test_nodes_and_calls_cost_time(capsys: pytest.CaptureFixture[str]) -> None:
    def milliseconds(*flags: str) -> float:
        few = ("--algorithms", "topka", "--numel", "30000", "--steps", "2", *flags)
        assert simulated(*few) == 0
        return float(capsys.readouterr().out.split()[-1])

    alone = milliseconds("--call", "0")
    assert milliseconds("--call", "1ms") > alone + 4
    # 6 messages of three ranks share a link, instead of 4 of one.
    assert milliseconds("--call", "0", "--ranks-per-node", "3") > alone
    assert milliseconds("--call", "0", "--bandwidth", "10gbit") < alone


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nworkers", "1"], "--nworkers: 1 is not a whole number of at least 2"),
        (["--algorithms", "oktop"], "did you mean oktopk?"),
        (["--algorithms", "fp16"], "only algorithms of this library can be simulated"),
        (["--algorithms", "auto"], "simulate what it chooses from, dense and oktopk"),
        (["--algorithms", "topka:wire=int5"], "wire is 'int5'"),
        (["--gradients", "nose"], "must be noise, skewed, apart or a file *.pt"),
        (["--gradients", "missing.pt"], "--gradients missing.pt: No such file"),
        (["--gradients", "missing.pt", "--numel", "3"], "--numel is of synthetic gradients"),
        (["--bandwidth", "fast"], "'fast' is no rate"),
        (["--latency", "-1s"], "expected one argument"),
        (["--call", "soon"], "'soon' is no delay"),
        (["--plot", "picture.gif"], "must end in .svg or .png"),
        (["--json", "."], "is a folder"),
        (["--numel", "1_000_000_000_000"], "take a smaller --numel"),
        (["--steps", "1"], "--steps: 1 is not a whole number of at least 2"),
        (["--density", "0"], "--density: 0 is not above 0 and at most 1"),
    ],
)
def test_mistakes_of_the_command(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulated(*flags) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def save(path: Path, content: object) -> str:
    torch.save(content, path)
    return str(path)


def test_recorded_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks take them in turn, whatever their shapes are."""
    rows = torch.randn(6, 5000)
    of_rows = save(tmp_path / "rows.pt", rows)
    listed = save(tmp_path / "list.pt", [row.view(50, 100) for row in rows])
    source, out = Recorded(Path(of_rows)), torch.empty(5000)
    source.write(1, 4, 1, out)
    assert torch.equal(out, rows[5])
    source.write(2, 4, 1, out)
    assert torch.equal(out, rows[0])
    tables = []
    for path in (of_rows, listed):
        assert simulated("--gradients", path) == 0
        tables.append(capsys.readouterr().out.split("\n\n")[1])
    assert tables[0] == tables[1]
    assert simulated("--gradients", of_rows, "--nworkers", "7", "--algorithms", "oktopk") == 0
    assert "the file has 6 gradients, so some of 7 ranks have the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([torch.ones(3), torch.ones(4)], "these have 3 to 4"),
        ([], "must hold a list of tensors"),
        ({"a": torch.ones(3)}, "must hold a list of tensors"),
        ([torch.ones(3), "text"], "must hold a list of tensors"),
        (torch.tensor(1.0), "must hold a list of tensors"),
        ([torch.ones(2, 2).to_sparse()], "must hold a list of tensors"),
        ([torch.ones(3, device="meta")], "must hold a list of tensors"),
        ([torch.ones(0)], "at least one"),
        ([torch.tensor([1.0, math.nan])], "without NaN"),
        ([torch.ones(3, dtype=torch.int64)], "must be real numbers"),
        ([print], "is not a file that torch.save wrote, or holds more than tensors"),
    ],
)
def test_a_wrong_file(
    content: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulated("--gradients", save(tmp_path / "wrong.pt", content)) == 2
    assert said in (error := capsys.readouterr().err)
    assert error.count("\n") == 1


def test_a_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(save(tmp_path / "damaged.pt", torch.randn(4, 1000)))
    path.write_bytes(path.read_bytes()[:2000])
    assert simulated("--gradients", str(path)) == 2
    assert "is not a file that torch.save wrote" in (error := capsys.readouterr().err)
    assert error.count("\n") == 1


def record(rank: Rank, hook: str, folder: str) -> None:
    """The page's way to record gradients, on a real model."""
    model = DistributedDataParallel(
        torch.nn.Linear(30, 10), process_group=rank.group, bucket_cap_mb=1000
    )
    space: dict[str, Any] = {}
    exec(hook, space)
    model.register_comm_hook(rank.group, space["record"])
    for step in range(41):
        generator = torch.Generator().manual_seed(10 * step + rank.rank)
        model(torch.randn(4, 30, generator=generator)).square().mean().backward()
    torch.save(space["gradients"], f"{folder}/gradients-{rank.rank}.pt")


def test_the_documented_hook_records(
    ranks: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = Path(__file__).parents[1] / "docs" / "laboratory" / "simulate.md"
    blocks = page.read_text().split("```python\n")[1:]
    hook, merge = (block.split("```")[0] for block in blocks[:2])
    ranks.run(2, record, hook.split("model.register")[0], str(tmp_path))
    space: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    exec(merge.replace("range(8)", "range(2)"), space)
    recorded = torch.load(tmp_path / "recorded.pt", weights_only=True)
    assert len(recorded) == 10
    assert not torch.equal(recorded[0], recorded[1])
    assert simulated("--gradients", str(tmp_path / "recorded.pt")) == 0
    assert "310 elements" in capsys.readouterr().out
