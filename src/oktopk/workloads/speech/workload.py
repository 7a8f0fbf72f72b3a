"""The speech workload: data, model, loss and validation of LSTM speech recognition."""

from __future__ import annotations

import logging
import sys
import zlib
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...algorithms import Dense
from ...common import host as room
from ...common.cache import cache_dir, expanded
from ...common.errors import UserError
from ...common.format import byte_size, count, plural
from ...train.config.config import Config
from ...train.records import Example
from ...train.together import attempt, first_on_one, gather
from . import an4, manifest, spoken
from .batches import Batch, Order, collate, prefetched
from .deepspeech import DeepSpeech, shape
from .features import BINS, Corpus, open_corpus
from .transcripts import LABELS, encode, error_rates, greedy, needed_frames

log = logging.getLogger("oktopk")


class Speech:
    """What Trainer needs to know of the workload. All workers make one together."""

    def __init__(self, config: Config, device: torch.device, local_rank: int) -> None:
        self.config = config
        self.device = device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        progress = self.rank == 0 and sys.stderr.isatty()
        self.train, self.val = first_on_one(local_rank, lambda: corpora(config, progress))
        self._check_agreement()
        self.labels = [encode(utterance.text) for utterance in self.train.utterances]
        self.val_labels = [encode(utterance.text) for utterance in self.val.utterances]
        self.order = Order(self.train.lengths, config.batch_size, self.size, config.seed)
        if len(self.order) < config.nsteps_update:
            needed = config.batch_size * self.size * config.nsteps_update
            raise UserError(
                f"the training set has {len(self.labels)} utterances, but a step takes {needed} "
                f"(--batch-size {config.batch_size}, {self.size} workers, --nsteps-update "
                f"{config.nsteps_update}): make one of these smaller"
            )
        attempt(self._check_memory)
        self.model = attempt(self._make_model)
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
        # The first epoch is for learning what speech is at all.
        augment = self.config.augment and epoch > 1
        seed = self.config.seed * 1_000_003 + epoch if augment else None

        def make(indices: Sequence[int]) -> Batch:
            return collate(self.train, self.labels, indices, seed).to(self.device)

        return prefetched(make, self.order.epoch(epoch, self.rank)[done:])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean over utterances of CTC's negative log-likelihood, summed over each utterance."""
        log_probs, lengths = model(batch.features, batch.lengths)
        return self._losses(batch, log_probs, lengths).mean()

    def validate(
        self, model: nn.Module, progress: Callable[[int, int], None]
    ) -> tuple[dict[str, float], tuple[Example, ...]]:
        """Loss and error rates on the validation set, by all workers together."""
        lengths = self.val.lengths
        mine = lengths.argsort(stable=True)[self.rank :: self.size].tolist()
        loss, said = 0.0, dict[int, str]()
        model.eval()
        with torch.no_grad():
            for start in range(0, len(mine), 8):
                indices = mine[start : start + 8]
                batch = collate(self.val, self.val_labels, indices, None).to(self.device)
                log_probs, frames = model(batch.features, batch.lengths)
                loss += float(self._losses(batch, log_probs, frames).sum())
                said.update(zip(indices, greedy(log_probs, frames), strict=True))
                progress(min(start + 8, len(mine)), len(mine))
        model.train()
        parts = gather((loss, said))
        hypotheses = {index: text for _, part in parts for index, text in part.items()}
        texts = [utterance.text for utterance in self.val.utterances]
        rates = error_rates(texts, [hypotheses[index] for index in range(len(texts))])
        # Utterances that speak of the whole set, not just of its beginning.
        count = min(self.config.examples, len(texts))
        shown = [index * len(texts) // count for index in range(count)]
        examples = tuple(Example(texts[index], hypotheses[index]) for index in shown)
        return {"loss": sum(loss for loss, _ in parts) / len(texts), **rates}, examples

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

    def _make_model(self) -> DeepSpeech:
        config = self.config
        sizes = shape(config.dnn, config.width, config.depth, config.bidirectional)
        return DeepSpeech(sizes, BINS[config.features], len(LABELS))

    def _check_memory(self) -> bool:
        """UserError if the model cannot be trained here: the system would end a worker."""
        with torch.device("meta"):  # without memory
            model = self._make_model()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        needed = 4 * parameters * copies(self.config)
        workers, left = self._memory()
        if left is not None and workers * needed > left:
            sizes = model.shape
            raise UserError(
                f"--width {sizes.width} and --depth {sizes.depth} make {count(parameters)} "
                f"parameters: to train them takes at least {byte_size(needed)} for each worker, "
                f"and {plural(workers, 'worker')} have {byte_size(left)}: make --width or --depth "
                "smaller"
            )
        return True

    def _memory(self) -> tuple[int, int | None]:
        """How many workers share the memory that this one uses, and how much is left of it."""
        machines = gather(room.machine())
        if self.device.type == "cuda":
            return 1, torch.cuda.mem_get_info(self.device)[0]
        return machines.count(room.machine()), room.left()

    def _check_agreement(self) -> None:
        """Workers that read different corpora would take different numbers of steps."""
        parts = (self.train, self.val)
        facts = [([u.text for u in part.utterances], part.lengths.tolist()) for part in parts]
        number = zlib.crc32(repr(facts).encode())
        if len(set(gather(number))) > 1:
            raise UserError("workers have different corpora: all machines need the same recordings")

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


def copies(config: Config) -> int:
    """Tensors of the model's size that training holds for certain: weights, gradients, residuals,
    and the optimizer's."""
    sparse = not isinstance(config.make_algorithm(), Dense)
    return 2 + sparse + (1 if config.optimizer == "sgd" else 2)


def corpora(config: Config, progress: bool) -> tuple[Corpus, Corpus]:
    """Training and validation set, made if need be."""
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


def _manifests(config: Config, progress: bool) -> tuple[Path, Path]:
    folder = expanded(config.data_dir) if config.data_dir else None
    if config.dataset == "manifest":
        return expanded(config.train_manifest), expanded(config.val_manifest)
    if config.dataset == "spoken":
        return spoken.prepare(folder, progress=progress)
    return an4.prepare(folder or cache_dir(), progress=progress)
