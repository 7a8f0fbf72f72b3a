"""Forked children inherit no threads: compression begins anew in them, or says why it cannot."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import oktopk
from launch import Warm
from models import SMALL, attached, loss_of, net, run, sgd
from ranks import Rank, Ranks

OKTOPK = oktopk.OkTopk(density=0.05)

ALONE = """
import multiprocessing
import os
import signal
import sys
import time

import torch

import oktopk


def wrapped():
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 100)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, oktopk.DistributedOptimizer(
        inner, model.named_parameters(), oktopk.OkTopk(density=0.1)
    )


def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(4, 100)).square().sum().backward()
    optimizer.step()
    return float(sum(p.detach().double().sum() for p in model.parameters()))


def child(pair, answers):
    signal.alarm(20)
    anew = wrapped()
    answers.put((pair[1].stats().totals.steps, train(*pair), [train(*anew), train(*anew)]))


def seconds_to_end():
    began = time.monotonic()
    number = os.fork()
    if number == 0:
        sys.exit(3)  # with all that Python does at the end
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 3
    return time.monotonic() - began


alone = min(seconds_to_end() for _ in range(3))
pair = wrapped()
first = train(*pair)
fork = multiprocessing.get_context("fork")
answers = fork.SimpleQueue()
children = [fork.Process(target=child, args=(pair, answers)) for _ in range(2)]
for process in children:
    process.start()
told = [answers.get() for _ in children]
second = train(*pair)
assert told == [(1, second, [first, second])] * 2, (told, first, second)
print("threads cost", min(seconds_to_end() for _ in range(3)) - alone)
for process in children:
    process.join()
    assert process.exitcode == 0
"""


def test_children_of_a_process_without_ranks_train(warm: Warm, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ALONE)
    printed = warm.alone(script, timeout=30)
    assert float(printed.split()[-1]) < 1.5  # to wait for the missing thread takes 2


def in_child(function: Callable[[], object]) -> str:
    """What a function raises in a forked child; "no answer" if it takes long."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "nothing"
        try:
            function()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(there, answer.encode())
        os._exit(0)
    ready, _, _ = select.select([here], [], [], 15)
    answer = os.read(here, 1 << 16).decode() if ready else "no answer"
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(here)
    os.close(there)
    return answer


def forked(rank: Rank) -> tuple[int, list[str]]:
    """What becomes of compression in children of a rank, which itself goes on."""
    model, handle = attached(rank, OKTOPK)
    optimizer = sgd(model)
    run(rank, model, optimizer, range(2))
    plain = net()

    def wrap() -> None:
        oktopk.DistributedOptimizer(
            sgd(plain), plain.named_parameters(), OKTOPK, group=rank.own_group, **SMALL
        )

    answers = [
        in_child(handle.stats),
        in_child(lambda: loss_of(model, 2, rank.rank).backward()),
        in_child(handle.check_replicas),
        in_child(wrap),
    ]
    run(rank, model, optimizer, range(2, 4))
    handle.check_replicas()
    return os.getpid(), answers


def test_children_of_a_rank_are_told_to_attach_anew(ranks: Ranks) -> None:
    began = time.monotonic()
    for pid, answers in ranks.run(2, forked):
        for answer in answers:
            assert answer.startswith("RuntimeError: ")
            assert f"in another process (pid {pid})" in answer
            assert "attach it in the process that trains" in answer
    assert time.monotonic() - began < 30
