"""The speech workload: data, model, loss and validation of LSTM speech recognition."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...common.cache import cache_dir, expanded
from ...common.errors import UserError
from ...common.together import first_on_one, gather
from ..base import Context, Validation
from ..checks import check_agreement, check_step, make_model
from ..prefetch import prefetched
from . import an4, manifest, spoken
from .batches import Batch, Order, collate
from .config import SpeechConfig
from .deepspeech import DeepSpeech, shape
from .features import BINS, Corpus, open_corpus
from .transcripts import LABELS, encode, error_rates, greedy, needed_frames

log = logging.getLogger("oktopk")


class Speech:
    """A `Workload`. All workers make one together."""

    def __init__(self, config: SpeechConfig, context: Context) -> None:
        self.config, self.context = config, context
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        progress = self.rank == 0 and sys.stderr.isatty()
        self.train, self.val = first_on_one(context.local_rank, lambda: corpora(config, progress))
        parts = (self.train, self.val)
        check_agreement(
            [([u.text for u in part.utterances], part.lengths.tolist()) for part in parts]
        )
        self.labels = [encode(utterance.text) for utterance in self.train.utterances]
        self.val_labels = [encode(utterance.text) for utterance in self.val.utterances]
        self.order = Order(self.train.lengths, context.batch_size, self.size, context.seed)
        check_step(context, self.samples, config.sample)
        sizes = shape(config.dnn, config.width, config.depth, config.bidirectional)
        self.model = make_model(
            lambda: DeepSpeech(sizes, BINS[config.features], len(LABELS)),
            context,
            {"--width": sizes.width, "--depth": sizes.depth},
        )
        self._warn_of_short_ones()

    @property
    def samples(self) -> int:
        """Utterances of the training set."""
        return len(self.labels)

    @property
    def batches_per_epoch(self) -> int:
        """Of each worker."""
        return len(self.order)

    def batches(self, epoch: int, done: int = 0) -> Generator[Batch, None, None]:
        """This worker's batches of an epoch, without the first `done`."""
        # The first epoch shows plain speech, which is easier to learn from.
        augment = self.config.augment and epoch > 1
        seed = self.context.seed * 1_000_003 + epoch if augment else None

        def make(indices: Sequence[int]) -> Batch:
            return collate(self.train, self.labels, indices, seed).to(self.context.device)

        return prefetched(make, self.order.epoch(epoch, self.rank)[done:])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean over utterances of CTC's negative log-likelihood, summed over each utterance."""
        log_probs, lengths = model(batch.features, batch.lengths)
        return self._losses(batch, log_probs, lengths).mean()

    def validate(self, model: nn.Module, progress: Callable[[int, int], None]) -> Validation:
        """Loss and error rates on the validation set, by all workers together."""
        lengths = self.val.lengths
        mine = lengths.argsort(stable=True)[self.rank :: self.size].tolist()
        loss, said = 0.0, dict[int, str]()
        model.eval()
        with torch.no_grad():
            for start in range(0, len(mine), 8):
                indices = mine[start : start + 8]
                batch = collate(self.val, self.val_labels, indices, None).to(self.context.device)
                log_probs, frames = model(batch.features, batch.lengths)
                loss += float(self._losses(batch, log_probs, frames).sum())
                said.update(zip(indices, greedy(log_probs, frames), strict=True))
                progress(min(start + 8, len(mine)), len(mine))
        model.train()
        parts = gather((loss, said))
        hypotheses = {index: text for _, part in parts for index, text in part.items()}
        texts = [utterance.text for utterance in self.val.utterances]
        rates = error_rates(texts, [hypotheses[index] for index in range(len(texts))])
        # Spread over the whole set, not just its beginning.
        count = min(self.config.examples, len(texts))
        shown = [index * len(texts) // count for index in range(count)]
        examples = tuple({"reference": texts[i], "hypothesis": hypotheses[i]} for i in shown)
        return Validation({"loss": sum(loss for loss, _ in parts) / len(texts), **rates}, examples)

    def _losses(self, batch: Batch, log_probs: Tensor, lengths: Tensor) -> Tensor:
        """Of each utterance; zero where it has too few frames for its transcript."""
        return nn.functional.ctc_loss(
            log_probs,
            batch.targets,
            lengths,
            batch.target_lengths,
            reduction="none",
            zero_infinity=True,
        )

    def _warn_of_short_ones(self) -> None:
        needed = torch.tensor([needed_frames(labels) for labels in self.labels])
        short = int((self.model.frames(self.train.lengths) < needed).sum())
        if short and self.rank == 0:
            log.warning(
                "%d of %d training utterances are too short for their transcripts: nothing can be "
                "learned from them",
                short,
                len(needed),
            )


def corpora(config: SpeechConfig, progress: bool) -> tuple[Corpus, Corpus]:
    """Training and validation set. They are made if they are not there."""
    train, val = (manifest.read(path) for path in _manifests(config, progress))
    folder = cache_dir() / "features"
    try:
        return (
            open_corpus(train, config.features, folder, progress=progress),
            open_corpus(val, config.features, folder, progress=progress),
        )
    except OSError as error:
        raise UserError(
            f"features cannot be kept in {folder} ({error.strerror or error}): set OKTOPK_CACHE to "
            "a folder that is yours"
        ) from None


def _manifests(config: SpeechConfig, progress: bool) -> tuple[Path, Path]:
    folder = expanded(config.data_dir) if config.data_dir else None
    if config.dataset == "manifest":
        return expanded(config.train_manifest), expanded(config.val_manifest)
    if config.dataset == "spoken":
        return spoken.prepare(folder, progress=progress)
    return an4.prepare(folder or cache_dir(), progress=progress)
