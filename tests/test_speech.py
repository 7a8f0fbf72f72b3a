"""Model, features, batches and texts of the speech workload."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from oktopk.workloads.prefetch import prefetched
from oktopk.workloads.speech import spoken
from oktopk.workloads.speech.batches import Order, augmented, collate
from oktopk.workloads.speech.deepspeech import SHAPES, DeepSpeech, Recurrent, Spans, shape
from oktopk.workloads.speech.features import BINS, compute, logmel, open_corpus, spectrogram
from oktopk.workloads.speech.manifest import read
from oktopk.workloads.speech.transcripts import LABELS, encode, error_rates, greedy, needed_frames


def test_number_of_parameters() -> None:
    """As published; of the small one, as measured."""

    def count(name: str, bins: int) -> int:
        net = DeepSpeech(shape(name), bins, len(LABELS))
        return sum(parameter.numel() for parameter in net.parameters())

    assert count("lstman4", BINS["spectrogram"]) == 27_569_568
    assert count("lstman4-small", BINS["logmel"]) == 2_260_976


def test_sizes_can_be_chosen() -> None:
    small = shape("lstman4", width=8, depth=2, bidirectional=True)
    assert (small.width, small.depth, small.bidirectional) == (8, 2, True)
    assert shape("lstman4-small", bidirectional=False).bidirectional is False
    assert shape("lstman4") == SHAPES["lstman4"]


@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_is_an_lstm_on_packed_sequences(bidirectional: bool) -> None:
    torch.manual_seed(1)
    ours = Recurrent(6, 5, bidirectional)
    theirs = nn.LSTM(6, 5, bidirectional=bidirectional)
    own = {f"{name}_l0": value for name, value in _weights(ours.forth)}
    if ours.back is not None:
        own |= {f"{name}_l0_reverse": value for name, value in _weights(ours.back)}
    theirs.load_state_dict(own)
    x, lengths = torch.randn(9, 3, 6), torch.tensor([4, 9, 6])
    expected, _ = pad_packed_sequence(
        theirs(pack_padded_sequence(x, lengths, enforce_sorted=False))[0]
    )
    if bidirectional:
        expected = expected[:, :, :5] + expected[:, :, 5:]
    found = Spans(lengths, 9).apply(nn.Identity(), ours(x, Spans(lengths, 9)))
    torch.testing.assert_close(found, expected)


def _weights(layer: nn.LSTM) -> list[tuple[str, Tensor]]:
    return [(name.removesuffix("_l0"), value) for name, value in layer.state_dict().items()]


@pytest.mark.parametrize("name", ["lstman4", "lstman4-small"])
def test_an_utterance_does_not_notice_its_neighbours(name: str) -> None:
    """Padding leaks nowhere: alone or beside a longer one, the result is the same."""
    torch.manual_seed(1)
    net = DeepSpeech(shape(name, width=12, depth=2), 40, len(LABELS)).eval()
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(norm.bias)  # such as would turn padding into something
    short, long = torch.randn(40, 30), torch.randn(40, 57)
    both = torch.zeros(2, 40, 57)
    both[0, :, :30], both[1] = short, long
    together, lengths = net(both, torch.tensor([30, 57]))
    alone, length = net(short[None], torch.tensor([30]))
    assert lengths.tolist() == [length.item(), net.frames(torch.tensor(57)).item()]
    assert together.shape[0] == lengths.max()
    torch.testing.assert_close(together[: int(length), 0], alone[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together.exp().sum(2), torch.ones(together.shape[:2]))


def test_features_are_normalised_and_hear_pitch() -> None:
    time = torch.arange(16_000) / 16_000
    for make, bins in ((spectrogram, 161), (logmel, 80)):
        loudest = []
        for pitch in (300.0, 1000.0, 3000.0):
            features = make(torch.sin(2 * torch.pi * pitch * time))
            assert features.shape == (bins, 101)
            assert features.mean().abs() < 1e-4
            assert (features.std() - 1).abs() < 1e-3
            loudest.append(int(features.mean(1).argmax()))
        assert loudest == sorted(set(loudest))
        if bins == 161:
            assert loudest == [6, 20, 60]  # bins of 50 Hz
        assert make(torch.zeros(16_000)).isfinite().all()
        assert make(torch.randn(10)).isfinite().all()


def test_features_are_computed_once(tmp_path: Path) -> None:
    train, _ = spoken.prepare(tmp_path, progress=False, train=4, validation=1)
    utterances = read(train)
    path = compute(utterances, "logmel", tmp_path / "cache", progress=False)
    time = path.stat().st_mtime_ns
    assert compute(utterances, "logmel", tmp_path / "cache", progress=False) == path
    assert path.stat().st_mtime_ns == time
    assert compute(utterances, "spectrogram", tmp_path / "cache", progress=False) != path
    corpus = open_corpus(utterances, "logmel", tmp_path / "cache", progress=False)
    assert len(corpus.lengths) == 4
    for index, utterance in enumerate(utterances):
        assert abs(corpus.features(index).size(1) - utterance.seconds * 100) <= 2
    batch = collate(corpus, [encode(u.text) for u in utterances], [2, 0], None)
    assert torch.equal(batch.features[1, :, : int(batch.lengths[1])], corpus.features(0))
    assert batch.features[1, :, int(batch.lengths[1]) :].eq(0).all()
    assert batch.target_lengths.tolist() == [len(utterances[2].text), len(utterances[0].text)]
    half = path.read_bytes()[:1000]  # as after a power cut
    path.unlink()  # the old one is mapped
    path.write_bytes(half)
    again = open_corpus(utterances, "logmel", tmp_path / "cache", progress=False)
    assert torch.equal(again.frames, corpus.frames)
    utterances[0].audio.touch()
    assert compute(utterances, "logmel", tmp_path / "cache", progress=False) != path


@given(
    lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=120),
    batch_size=st.integers(1, 5),
    workers=st.integers(1, 4),
    epoch=st.integers(1, 4),
)
def test_order(lengths: list[int], batch_size: int, workers: int, epoch: int) -> None:
    order = Order(torch.tensor(lengths), batch_size, workers, seed=7)
    parts = [order.epoch(epoch, worker) for worker in range(workers)]
    assert {len(part) for part in parts} == {len(order)}
    assert all(len(batch) == batch_size for part in parts for batch in part)
    used = [index for part in parts for batch in part for index in batch]
    assert len(used) == len(set(used))
    assert len(lengths) - len(used) < batch_size * workers
    assert parts == [order.epoch(epoch, worker) for worker in range(workers)]
    if epoch == 1:
        for part in parts:
            longest = [max(lengths[index] for index in batch) for batch in part]
            assert longest == sorted(longest)


def test_order_changes_and_keeps_lengths_together() -> None:
    lengths = torch.arange(100, 900)
    order = Order(lengths, 4, 2, seed=1)
    second, third = order.epoch(2, 0), order.epoch(3, 0)
    assert second != third
    assert Order(lengths, 4, 2, seed=2).epoch(2, 0) != second
    spread = [max(batch) - min(batch) for batch in second]
    assert max(spread) < 250


def test_augmentation_masks_and_stretches() -> None:
    features = torch.ones(80, 200)
    changed = [augmented(features, torch.Generator().manual_seed(seed)) for seed in range(20)]
    again = [augmented(features, torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert all(map(torch.equal, changed, again))
    assert features.eq(1).all()
    frames = [one.size(1) for one in changed]
    assert 170 <= min(frames) < 190
    assert 210 < max(frames) <= 230
    assert all(0.2 < one.mean() <= 1 for one in changed)
    assert any(one.eq(0).any(0).all() and one.eq(0).any(1).all() for one in changed)


def test_prefetching_keeps_order_and_passes_errors_on() -> None:
    assert list(prefetched(lambda n: n[0], [[n] for n in range(20)])) == list(range(20))

    def fail(indices: object) -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(prefetched(fail, [[1]]))


@given(st.text(LABELS[1:], min_size=1, max_size=40))
def test_greedy_decodes_what_was_encoded(text: str) -> None:
    """A path through the frames with each label said, repeated, and a blank between equal ones."""
    labels = encode(text).tolist()
    path = []
    for previous, label in zip([0, *labels], labels, strict=False):
        path += ([0] if label == previous else []) + [label] * 2
    scores = nn.functional.one_hot(torch.tensor(path), len(LABELS)).float()
    padding = torch.zeros(3, len(LABELS))
    padding[:, 5] = 1
    log_probs = torch.cat([scores, padding])[:, None]
    assert greedy(log_probs, torch.tensor([len(path)])) == [" ".join(text.split())]
    assert needed_frames(encode(text)) == len(labels) + sum(
        a == b for a, b in itertools.pairwise(labels)
    )


def test_error_rates() -> None:
    assert error_rates(["YES", "GO ON"], ["YES", "GO ON"]) == {"wer": 0.0, "cer": 0.0}
    rates = error_rates(["A B C D"], ["A X C"])
    assert rates["wer"] == 0.5
    assert error_rates(["YES"], ["YES I SAID YES"])["wer"] == 3.0  # insertions count
    assert error_rates(["YES"], [""]) == {"wer": 1.0, "cer": 1.0}
