"""Utterances in batches: of similar length, and different ones for each worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..prefetch import generator
from .features import Corpus

_STRETCH = 0.15
_TIME_MASKS, _TIME_SHARE = 2, 0.1
_BAND_MASKS, _BAND_SHARE = 2, 0.25


@dataclass(frozen=True)
class Batch:
    """Padded utterances."""

    features: Tensor
    """(batch, bins, frames), zero behind each utterance's end."""
    lengths: Tensor
    """Frames of each utterance."""
    targets: Tensor
    """Labels of all utterances, one after another."""
    target_lengths: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        tensors = (self.features, self.lengths, self.targets, self.target_lengths)
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in tensors))


class Order:
    """Which utterances each worker has in each of its batches.

    1. Sort by length; after the first epoch with some noise, so that batches differ.
    2. Cut into batches, and give each worker one of `workers` neighbours. So all workers have the
       same number of batches, of similar length. Utterances that do not fill a batch for every
       worker are left out; because of the noise, they differ from epoch to epoch.
    3. The first epoch goes from short to long, the others in random order.

    The order depends on seed and epoch alone, so a resumed run needs nothing else.
    """

    def __init__(self, lengths: Tensor, batch_size: int, workers: int, seed: int) -> None:
        self.lengths = lengths.double()
        self.batch_size = batch_size
        self.workers = workers
        self.seed = seed

    def __len__(self) -> int:
        """Batches of a worker in an epoch."""
        return len(self.lengths) // (self.batch_size * self.workers)

    def epoch(self, epoch: int, worker: int) -> list[list[int]]:
        """The worker's batches; the first epoch is 1."""
        random = generator(self.seed, epoch)
        keys = self.lengths
        if epoch > 1:
            keys = keys * (0.9 + 0.2 * torch.rand(len(keys), generator=random, dtype=keys.dtype))
        together = self.batch_size * self.workers
        order = keys.argsort(stable=True)
        left_out = len(order) - len(self) * together
        if left_out:  # not always the longest
            gaps = torch.randperm(len(order), generator=random)[:left_out]
            keep = torch.ones(len(order), dtype=torch.bool)
            keep[gaps] = False
            order = order[keep]
        rows = order.reshape(len(self), self.workers, self.batch_size)
        if epoch > 1:
            rows = rows[torch.randperm(len(rows), generator=random)]
        batches: list[list[int]] = rows[:, worker].tolist()
        return batches


def collate(
    corpus: Corpus, labels: Sequence[Tensor], indices: Sequence[int], augment_seed: int | None
) -> Batch:
    """A batch of utterances, changed at random if there is a seed."""
    features = []
    for index in indices:
        one = corpus.features(index)
        if augment_seed is not None:
            one = augmented(one, generator(augment_seed, index))
        features.append(one)
    lengths = torch.tensor([one.size(1) for one in features])
    padded = torch.zeros(len(features), features[0].size(0), int(lengths.max()))
    for row, one in zip(padded, features, strict=True):
        row[:, : one.size(1)] = one
    targets = [labels[index] for index in indices]
    return Batch(
        padded,
        lengths,
        torch.cat(targets),
        torch.tensor([len(target) for target in targets]),
    )


def augmented(features: Tensor, random: torch.Generator) -> Tensor:
    """Stretched in time, with bands of time and frequency masked (SpecAugment)."""

    def uniform() -> float:
        return float(torch.rand((), generator=random))

    bins, frames = features.shape
    frames = max(1, round(frames * (1 + _STRETCH * (2 * uniform() - 1))))
    features = torch.nn.functional.interpolate(
        features[None], frames, mode="linear", align_corners=False
    )[0]
    for _ in range(_BAND_MASKS):
        width = int(uniform() * (_BAND_SHARE * bins + 1))
        start = int(uniform() * (bins - width))
        features[start : start + width] = 0.0
    for _ in range(_TIME_MASKS):
        width = int(uniform() * (_TIME_SHARE * frames + 1))
        start = int(uniform() * (frames - width))
        features[:, start : start + width] = 0.0
    return features
