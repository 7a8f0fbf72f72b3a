"""Model, text, windows, generation and training of the language workload.

torchrun --nproc-per-node 2 tests/test_language.py FOLDER does what the last tests look at.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from launch import Warm
from oktopk.common.errors import UserError
from oktopk.common.together import gather
from oktopk.train.config.recipes import recipe
from oktopk.train.metrics_file import read_metrics
from oktopk.train.trainer import Trainer
from oktopk.workloads import workload_for
from oktopk.workloads.language import text as texts
from oktopk.workloads.language.config import LanguageConfig
from oktopk.workloads.language.text import _files, read_text
from oktopk.workloads.language.transformer import Block, Shape, Transformer, generate
from oktopk.workloads.language.windows import Order, cut, split
from oktopk.workloads.language.workload import Language, next_line, spread

TINY = Shape(width=16, depth=2, heads=2, window=12)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of small operations wait for each other more than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_number_of_parameters() -> None:
    width, depth, window = 128, 4, 64
    net = Transformer(Shape(width, depth, 4, window))
    matrices = depth * 12 * width**2 + (256 + window) * width
    biases_and_norms = depth * (9 * width + 4 * width) + 2 * width
    assert sum(p.numel() for p in net.parameters()) == matrices + biases_and_norms


def test_weights_begin_as_in_gpt2() -> None:
    torch.manual_seed(1)
    net = Transformer(Shape(width=128, depth=8, heads=4, window=64))
    for name, parameter in net.named_parameters():
        if name.endswith("out.weight"):
            assert float(parameter.detach().std()) == pytest.approx(0.02 / 4, rel=0.05)
        elif parameter.ndim > 1:
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.05)
        else:
            assert set(parameter.tolist()) == {1.0 if name.endswith("norm.weight") else 0.0}
    text = torch.randint(256, (4, 65))
    loss = F.cross_entropy(net(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    assert float(loss.detach()) == pytest.approx(math.log(256), rel=0.02)


def test_block_is_the_one_of_torch() -> None:
    torch.manual_seed(1)
    ours = Block(16, 4)
    theirs = nn.TransformerEncoderLayer(
        16, 4, 64, 0.0, lambda x: F.gelu(x, approximate="tanh"), batch_first=True, norm_first=True
    )
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    names = {
        "attention_norm": "norm1",
        "attention.qkv.": "self_attn.in_proj_",
        "attention.out": "self_attn.out_proj",
        "mlp_norm": "norm2",
        "mlp.hidden": "linear1",
        "mlp.out": "linear2",
    }
    weights = dict[str, Tensor]()
    for name, value in ours.state_dict().items():
        own = next(own for own in names if name.startswith(own))
        weights[name.replace(own, names[own])] = value
    theirs.load_state_dict(weights)
    x = torch.randn(3, 9, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    torch.testing.assert_close(ours(x), theirs(x, mask, is_causal=True), atol=1e-4, rtol=1e-4)


def test_no_byte_sees_the_ones_after_it() -> None:
    torch.manual_seed(1)
    net = Transformer(TINY)
    text = torch.randint(256, (2, 12))
    other = text.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 256
    before, after = net(text), net(other)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-3)


def test_learns_and_continues_a_text() -> None:
    torch.manual_seed(1)
    phrase = b"the quick brown fox. "
    text = torch.frombuffer(bytearray(phrase * 20), dtype=torch.uint8)
    net = Transformer(TINY)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(150):
        windows = cut(text, torch.randint(len(text) - 12, (16,)), 12).long()
        loss = F.cross_entropy(net(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    said = generate(net, text[:10], 42, window=12, seed=1, temperature=0.1)
    assert said == (phrase * 3)[10:52]


def test_generation_depends_on_its_seed_alone() -> None:
    torch.manual_seed(1)
    net = Transformer(TINY)
    prompt = torch.tensor(list(b"x"), dtype=torch.uint8)
    state = torch.get_rng_state()
    first = generate(net, prompt, 30, 12, seed=3)
    torch.manual_seed(2)
    assert generate(net, prompt, 30, 12, seed=3) == first
    assert generate(net, prompt, 30, 12, seed=4) != first
    assert len(first) == 30
    torch.set_rng_state(state)
    generate(net, prompt, 2, 12, seed=3)
    assert torch.equal(torch.get_rng_state(), state)  # training goes on as without it


def test_the_library_of_python_is_the_default() -> None:
    text = bytes(read_text(None).tolist())
    assert 1_000_000 < len(text) <= 6_000_000
    text.decode()
    library = Path(os.__file__).read_bytes()
    assert library in text
    assert b"build_time_vars" not in text[:100_000]  # what describes this machine
    assert torch.equal(read_text(None), read_text(None))


def test_a_python_without_sources_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no sources of its library .* --data-dir"):
        texts._library(tmp_path)


def test_the_library_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.py").write_text("b = 1\n")
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "_sysconfigdata_x.py").write_text("s = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_text("c = 1\n")
    assert texts._library(tmp_path) == [b"a = 1\n", b"b = 1\n"]
    monkeypatch.setattr(texts, "_LARGEST_LIBRARY", 8)
    assert texts._library(tmp_path) == [b"a = 1\n"]


def test_text_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "some text"
    file.write_bytes("Füße\r\n\0".encode())
    assert bytes(read_text(file).tolist()) == "Füße\r\n\0".encode()


def test_a_folder_is_read_in_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, content in {
        "b.txt": b"second\n",
        "a/deep.md": b"first\n",
        "c/picture.png": b"\x89PNG\xff",
        ".hidden": b"hidden",
        ".git/config": b"hidden",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with caplog.at_level(logging.WARNING, "oktopk"):
        assert bytes(read_text(tmp_path).tolist()) == b"first\nsecond\n"
    assert "1 file" in caplog.text
    assert "c/picture.png" in caplog.text


def test_bad_text_is_told_with_what_helps(tmp_path: Path) -> None:
    def problem(name: str, content: bytes | None = None) -> str:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as caught:
            read_text(tmp_path / name)
        message = str(caught.value)
        assert "\n" not in message
        assert name in message
        return message

    assert "name a file" in problem("missing.txt")
    assert "is empty: name a file with text" in problem("empty.txt", b"")
    assert "byte 2 is 0xe9; convert it" in problem("latin.txt", b"ab\xe9 ")
    (tmp_path / "nothing").mkdir()
    assert "put files of text there" in problem("nothing")
    (tmp_path / "huge.txt").touch()
    os.truncate(tmp_path / "huge.txt", texts.LARGEST + 1)  # takes no room on the disk
    assert "name a smaller text" in problem("huge.txt")
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in problem("pipe")
    assert "name a file" in problem("huge.txt/x")


@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode), st.integers(1, 8))
def test_bad_bytes_are_found_in_parts(content: bytes, part: int) -> None:
    try:
        content.decode()
        expected = None
    except UnicodeDecodeError as error:
        expected = error.start
    with mock.patch.object(texts, "_PART", part):
        assert texts.bad_byte(content) == expected


def test_folders_that_cannot_be_read_are_not_left_out(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        _files(tmp_path / "gone")


def test_a_huge_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "LARGEST", 10)
    for name in ("a", "b"):
        (tmp_path / name).write_text("12345678")
    with pytest.raises(UserError, match="name a smaller text"):
        read_text(tmp_path)


def test_the_end_of_the_text_is_held_out() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    train, held_out = split(text, 8)
    assert torch.equal(torch.cat([train, held_out]), text)
    assert len(held_out) == 20
    train, held_out = split(text[:25], 8)  # a window for each of them at least
    assert (len(train), len(held_out)) == (16, 9)
    assert Order(len(train), 8, 1, 1, 1, seed=1).windows == 1
    with pytest.raises(UserError, match=r"24 bytes.*longer text.*--window smaller"):
        split(text[:24], 8)


def test_windows_overlap_by_one_target() -> None:
    text = torch.arange(10, dtype=torch.uint8)
    assert cut(text, torch.tensor([0, 6]), 3).tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]


@given(
    length=st.integers(100, 3000),
    window=st.integers(1, 9),
    batches=st.integers(1, 100),
    batch_size=st.integers(1, 3),
    workers=st.integers(1, 3),
    seed=st.integers(0, 1 << 40),
)
def test_each_window_once_in_a_pass(
    length: int, window: int, batches: int, batch_size: int, workers: int, seed: int
) -> None:
    order = Order(length, window, batches, batch_size, workers, seed)
    epochs = math.ceil(3 * order.batches_of_pass / batches)
    parts = []
    for epoch in range(1, epochs + 1):
        parts.append(torch.stack([order.epoch(epoch, worker) for worker in range(workers)], 1))
        assert parts[-1].shape == (batches, workers, batch_size)
    passes = torch.cat(parts)[: 3 * order.batches_of_pass].chunk(3)
    for each in passes:
        starts = each.flatten()
        assert len(starts) == len(starts.unique()) == order.batches_of_pass * batch_size * workers
        assert len((starts % window).unique()) == 1  # they do not overlap
        assert starts.min() >= 0
        assert starts.max() <= length - window - 1
        assert order.windows - len(starts) < batch_size * workers


def test_order_follows_from_seed_and_epoch() -> None:
    def epochs(seed: int) -> list[Tensor]:
        order = Order(10_010, 10, 30, 8, 2, seed)
        return [order.epoch(epoch, 1) for epoch in range(1, 9)]

    one, again, other = epochs(1), epochs(1), epochs(2)
    assert all(map(torch.equal, one, again))
    assert not any(map(torch.equal, one, other))
    both = torch.cat(one)
    assert not torch.equal(both[:62], both[62:124])  # the second pass is another
    assert int(both[0, 0]) % 10 != int(both[62, 0]) % 10  # and cuts elsewhere


def test_recipe() -> None:
    config = recipe("text")
    sizes = config.workload
    assert isinstance(sizes, LanguageConfig)
    assert workload_for({"dataset": "text"}) is LanguageConfig
    made = Transformer(Shape(sizes.width, sizes.depth, sizes.heads, sizes.window))
    assert 500_000 < sum(p.numel() for p in made.parameters()) < 3_000_000
    least = config.compression.dense_below
    assert all(p.numel() >= least for p in made.parameters() if p.ndim > 1)


def test_places_are_spread() -> None:
    assert spread(100, 4).tolist() == [0, 25, 50, 75]
    assert spread(3, 8).tolist() == [0, 1, 2]
    assert spread(5, 0).tolist() == spread(0, 5).tolist() == []


def test_prompts_begin_with_a_line() -> None:
    text = torch.tensor(list(b"end\nbegin\n"))
    assert bytes(next_line(text).tolist()) == b"begin\n"
    assert bytes(next_line(text[4:]).tolist()) == b"begin\n"  # nothing would be left
    assert bytes(next_line(text[:2]).tolist()) == b"en"


@pytest.fixture(scope="module")
def found(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `__main__` found on two workers."""
    folder = tmp_path_factory.mktemp("language")
    lines = (f"{number} is {'odd' if number % 2 else 'even'}, ümläut.\n" for number in range(400))
    (folder / "text.txt").write_text("".join(lines), encoding="utf-8")
    printed = warm.torchrun(Path(__file__), folder, timeout=120)
    return json.loads(printed.strip().splitlines()[-1]) | {"folder": folder}


def test_trains_with_sparse_gradients(found: Any) -> None:
    steps, epochs = read_metrics(found["folder"] / "whole")
    assert [step["phase"] for step in steps] == ["dense"] * 8 + ["sparse"] * 52
    assert all(step["sparsity"] > 0.9 for step in steps[8:])
    bits = [epoch["validation"]["bits_per_byte"] for epoch in epochs if epoch["validation"]]
    assert len(bits) == 3  # after the first epoch, the second and the last
    assert 4 > bits[0] > 2 * bits[1] > 2 * bits[2]
    for epoch in epochs:
        assert len(epoch["examples"]) == (2 if epoch["validation"] else 0)
        assert all(set(example) == {"prompt", "text"} for example in epoch["examples"])


def test_resumed_in_the_middle_of_an_epoch(found: Any) -> None:
    assert found["resumed"] == {"in the middle": True, "same": True}


def test_resumed_with_shorter_epochs(found: Any) -> None:
    assert found["shorter"] == {"batches": 0, "steps": 24}  # the epoch begins again


def test_workers_have_batches_of_their_own(found: Any) -> None:
    assert found["batches"] == {"distinct": True, "tail": True, "same epochs": False}


def test_validation_is_the_mean_of_all_bytes(found: Any) -> None:
    assert found["validation"]["loss"] == pytest.approx(found["validation"]["expected"], rel=1e-5)
    bits = found["validation"]["loss"] / math.log(2)
    assert found["validation"]["bits_per_byte"] == pytest.approx(bits)
    assert found["validation"]["again"]  # examples too, on all workers


def test_bad_text_ends_a_run_on_all_workers(found: Any) -> None:
    assert "No such file" in found["missing"]
    assert "--data-dir" in found["missing"]
    assert "but a step takes 2000" in found["short"]


class Run:
    """Trainings on this worker, one of two, in a folder that has a text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def trainer(self, name: str, steps: int, **values: Any) -> Trainer:
        tiny = {
            **{"data_dir": str(self.folder / "text.txt"), "run_dir": str(self.folder / name)},
            **{"width": 32, "depth": 1, "heads": 2, "window": 16, "batch_size": 4, "examples": 2},
            **{"epoch_windows": 200, "lr": 0.01, "warmup_steps": 8, "dense_below": 100},
            **{"density": 0.05, "tensorboard": False, "max_steps": steps, "validate_every": 2},
        }
        return Trainer(recipe("text", **tiny | values), local_rank=dist.get_rank())

    def resumed(self) -> dict[str, bool]:
        """60 steps at once, and in two parts."""
        whole = self.trainer("whole", 60, schedule="constant")
        whole.run()
        self.trainer("parts", 47, schedule="constant").run()
        parts = self.trainer("parts", 60, schedule="constant", resume="auto")
        middle = 0 < parts.batches_done < parts.workload.batches_per_epoch
        parts.run()
        weights = zip(whole.net.parameters(), parts.net.parameters(), strict=True)
        same = all(torch.equal(one, other) for one, other in weights)
        return {"in the middle": middle, "same": all(gather(same))}

    def shorter(self) -> dict[str, int]:
        """20 of an epoch's 25 steps, and then epochs of 10."""
        self.trainer("shorter", 20).run()
        trainer = self.trainer("shorter", 24, epoch_windows=80, resume="auto")
        batches = trainer.batches_done
        trainer.run()
        return {"batches": batches, "steps": trainer.step}

    def batches(self) -> dict[str, bool]:
        language = self.trainer("batches", 1).workload
        assert isinstance(language, Language)
        windows = torch.stack(list(language.batches(2)))
        tail = torch.stack(list(language.batches(2, done=3)))
        other = torch.stack(list(language.batches(3)))
        order = language.order
        starts = torch.cat([order.epoch(2, rank).flatten() for rank in range(2)])
        both = torch.cat(gather(windows)).flatten(0, 1)
        expected = cut(language.train, starts, 16)
        return {
            "distinct": torch.equal(both, expected) and len(starts.unique()) == len(starts),
            "tail": torch.equal(windows[3:], tail),
            "same epochs": torch.equal(windows, other),
        }

    def validation(self) -> dict[str, Any]:
        language = self.trainer("validation", 1).workload
        assert isinstance(language, Language)
        told: list[tuple[int, int]] = []
        made = language.validate(language.model, lambda *done: told.append(done))
        again = language.validate(language.model, lambda *_: None)
        assert language.model.training
        assert told[-1][0] == told[-1][1]
        text = language.held_out.long()
        total, starts = 0.0, range(0, len(text) - 16, 16)
        with torch.no_grad():
            for start in starts:
                chances = language.model(text[None, start : start + 16])[0].log_softmax(1)
                total -= float(chances[range(16), text[start + 1 : start + 17]].sum())
        same = all(each == made for each in gather(again))
        return {**made.metrics, "expected": total / (16 * len(starts)), "again": same}

    def problem(self, **values: Any) -> str:
        try:
            self.trainer("problem", 1, **values)
        except UserError as error:
            return str(error)
        return ""


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    run = Run(Path(sys.argv[1]))
    results = {
        "resumed": run.resumed(),
        "shorter": run.shorter(),
        "batches": run.batches(),
        "validation": run.validation(),
        "missing": run.problem(data_dir=str(run.folder / "nothing.txt")),
        "short": run.problem(batch_size=1000),
    }
    dist.barrier()
    if dist.get_rank() == 0:
        print("\n" + json.dumps(results))
    dist.destroy_process_group()
