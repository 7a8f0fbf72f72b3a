"""CompressCallback: compression for Hugging Face's Trainer, saved and resumed with its checkpoints.

Trainer tells its callbacks of the model, but not of the DDP around it; so this callback is made
with the trainer. Nor does it tell them which checkpoint it resumes from, so this one records the
arguments of `train`. The log in both shows whether they belong to the same run.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from .. import checkpoint as states
from ..algorithms import Algorithm
from .common import Attaching

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


class CompressCallback(Attaching, TrainerCallback):
    """Compresses the gradients of a model that Trainer trains with DDP.

    ```python
    trainer = Trainer(model, args, train_dataset=...)
    compress = CompressCallback(trainer, oktopk.OkTopk(density=0.02))
    trainer.add_callback(compress)
    trainer.train()
    print(compress.handle.stats())
    ```

    Whenever Trainer saves a checkpoint, all ranks' states are saved in it, and
    `trainer.train(resume_from_checkpoint=...)` restores them, with True or a path. In a single
    process without DDP it logs a line and does nothing; `active` tells.

    Args:
        trainer: the trainer that it is added to.
        algorithm: what to reduce with.
        resume_from: another checkpoint to take the compression state from than the one that
            training resumes from. False begins with empty residuals, after a checkpoint that has
            none.
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
        self._asked: Any = None
        """The checkpoint that `train` was called with."""
        self._listen(trainer)

    def _listen(self, trainer: Trainer) -> None:
        """Note what `train` is told to resume from."""
        train = trainer.train

        @functools.wraps(train)
        def noting(*args: Any, **kwargs: Any) -> Any:
            self._asked = args[0] if args else kwargs.get("resume_from_checkpoint")
            return train(*args, **kwargs)

        trainer.train = noting  # type: ignore[method-assign]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = self._trainer.model_wrapped
        if model is not self._model:  # a second train() goes on with the first one's DDP
            scaler = self._trainer.accelerator.scaler
            fix = "start one process for each device, with torchrun or accelerate launch"
            self._attach(model, scaler, args.world_size, fix)
            self._model = model
        if self.active and state.global_step > 0 and self.resume_from is not False:
            self._resume(self._folder(args, state), state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """All ranks come here, when rank 0 has written Trainer's own files."""
        if args.save_only_model or state.is_hyper_param_search:  # nobody can resume from these
            return
        if self.active:
            folder = _checkpoint(args, state) / _FOLDER
            states.save(folder, self.handle, shared=_log(state), any_model=True)

    def _folder(self, args: TrainingArguments, state: TrainerState) -> Path:
        """The checkpoint that Trainer resumes from, unless `resume_from` names another one."""
        asked = args.resume_from_checkpoint if self._asked is None else self._asked
        for path in (self.resume_from, asked):
            if isinstance(path, str | os.PathLike):
                return Path(path)
        return _checkpoint(args, state)

    def _resume(self, folder: Path, state: TrainerState) -> None:
        problem = None
        try:
            if states.load(folder / _FOLDER, self.handle).shared != _log(state):
                problem = f"{folder} is a checkpoint of another run or another step"
        except ValueError as error:
            problem = str(error)
            if not (folder / _FOLDER).exists():
                problem = (
                    f"{folder} has no compression state, it was saved without CompressCallback"
                )
        if problem:
            raise ValueError(
                f"training resumes at step {state.global_step}, compression cannot: {problem}. "
                "With resume_from=..., CompressCallback takes the state in another checkpoint; "
                "with resume_from=False it begins with empty residuals"
            )


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """Where Trainer keeps the checkpoint of this step."""
    return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _log(state: TrainerState) -> str:
    """The losses logged so far: as good as a name of the run, and of the step."""
    return json.dumps(state.log_history, sort_keys=True)
