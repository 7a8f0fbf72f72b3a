"""CompressCallback: compression for Hugging Face's Trainer, saved and resumed with its checkpoints.

Trainer tells its callbacks of the model, but not of the DDP around it; so this callback is made
with the trainer. Nor does it tell them which checkpoint it resumes from. It is found by its step,
and whether it is of the same run is seen by the log that both have.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import checkpoint as states
from ..algorithms import Algorithm
from ..ddp import Compression, attach

try:
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise ImportError(
        "oktopk.integrations.transformers needs Transformers and its Trainer: "
        "pip install transformers accelerate"
    ) from error

_FOLDER = "oktopk"
"""Beside the model and the optimizer, in each of Trainer's checkpoints."""


class CompressCallback(TrainerCallback):
    """Compresses the gradients of a model that Trainer trains with DDP.

    ```python
    trainer = Trainer(model, args, train_dataset=...)
    compress = CompressCallback(trainer, oktopk.OkTopk(density=0.02))
    trainer.add_callback(compress)
    trainer.train()
    print(compress.handle.stats())
    ```

    Whenever Trainer saves a checkpoint, all ranks' states are saved in it, and
    `trainer.train(resume_from_checkpoint=True)` restores them.

    Args:
        trainer: the trainer that it is added to.
        algorithm: what to reduce with.
        resume_from: the checkpoint that training is resumed from, if that is not in the trainer's
            `output_dir`. False begins with empty residuals, after a checkpoint that has none.
        options: see `oktopk.Options`. Trainer's GradScaler, if it has one, is passed for you.
    """

    def __init__(
        self,
        trainer: Trainer,
        algorithm: Algorithm,
        *,
        resume_from: str | os.PathLike[str] | bool | None = None,
        **options: Any,
    ) -> None:
        self.algorithm = algorithm
        self.resume_from = resume_from
        self.options = options
        self._trainer = trainer
        self._model: nn.Module | None = None
        self._handle: Compression | None = None

    @property
    def handle(self) -> Compression:
        """What `oktopk.attach` returned: statistics, and changes while training goes on."""
        if self._handle is None:
            raise RuntimeError("compression is attached when training starts, in trainer.train")
        return self._handle

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = self._trainer.model_wrapped
        if model is not self._model:  # a second train() goes on with the first one's DDP
            self._handle = self._attach(model)
            self._model = model
        if state.global_step > 0 and self.resume_from is not False:
            self._resume(args, state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """All ranks come here, when rank 0 has written Trainer's own files."""
        if args.save_only_model or state.is_hyper_param_search:  # nobody can resume from these
            return
        states.save(_checkpoint(args, state) / _FOLDER, self.handle, shared=_log(state))

    def _attach(self, model: nn.Module) -> Compression:
        inner = getattr(model, "_orig_mod", model)
        if not isinstance(inner, DistributedDataParallel):
            raise ValueError(
                f"CompressCallback needs a model in DDP, but Trainer trains a "
                f"{type(inner).__name__}: start one process for each device, with torchrun or "
                "accelerate launch"
            )
        scaler = self._trainer.accelerator.scaler
        return attach(model, self.algorithm, **{"grad_scaler": scaler, **self.options})

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        named = self.resume_from is not None and self.resume_from is not True
        folder = Path(str(self.resume_from)) if named else _checkpoint(args, state)
        problem = None
        try:
            if states.load(folder / _FOLDER, self.handle).shared != _log(state):
                problem = f"{folder} is a checkpoint of another run or another step"
        except ValueError as error:
            problem = str(error)
        if problem:
            raise ValueError(
                f"training resumes at step {state.global_step}, compression cannot: {problem}. "
                "With resume_from=..., CompressCallback takes the checkpoint in another folder; "
                "with resume_from=False it begins with empty residuals"
            )


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """Where Trainer keeps the checkpoint of this step."""
    return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _log(state: TrainerState) -> str:
    """The losses logged so far: as good as a name of the run, and of the step."""
    return json.dumps(state.log_history, sort_keys=True)
