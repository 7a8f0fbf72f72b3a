"""Compress: compression for Lightning's Trainer, saved and resumed with its checkpoints.

Lightning registers a hook of `DDPStrategy(ddp_comm_hook=...)` on CUDA only, and would save one
rank's state, though residuals differ on every rank. This callback attaches on any device, and
writes all ranks' states to a folder beside Lightning's checkpoints. Each checkpoint names its
state.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from .. import checkpoint as states
from ..algorithms import Algorithm
from ..core.reducer import log
from .common import Attaching

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    try:
        from pytorch_lightning import (  # type: ignore[assignment]
            Callback,
            LightningModule,
            Trainer,
        )
    except ImportError as error:
        raise ImportError(
            "oktopk.integrations.lightning needs Lightning: pip install lightning"
        ) from error

_KEY = "oktopk"
"""Where a checkpoint of Lightning has the name of its compression state."""


class Compress(Attaching, Callback):
    """Compresses the gradients of a model that Lightning trains with DDP.

    ```python
    compress = Compress(oktopk.OkTopk(density=0.02), folder="run/compression")
    trainer = Trainer(strategy="ddp", callbacks=[compress])
    trainer.fit(model, ckpt_path=...)  # a checkpoint's compression state is restored, too
    print(compress.handle.stats())
    ```

    A `fit` without `ckpt_path` begins with empty residuals. In a single process without DDP it
    logs a line and does nothing; `active` tells.

    Args:
        algorithm: what to reduce with.
        folder: where states are saved, for all ranks the same: whenever Lightning saves a
            checkpoint, as `step-N` of that global step. None saves none.
        keep: how many states are kept, at least 2; older ones are removed. None keeps all.
            Lightning may keep more checkpoints than that; those cannot be resumed with a state.
        options: see `oktopk.Options`. The GradScaler of Lightning's precision, if any, is passed
            for you.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        folder: str | os.PathLike[str] | None = None,
        keep: int | None = None,
        **options: Any,
    ) -> None:
        if keep is not None and keep < 2:
            # Lightning's own file comes later; until then its last one is the one to resume from.
            raise ValueError(f"keep is {keep}, but must be at least 2, or None to keep all")
        self.algorithm = algorithm
        self.folder = None if folder is None else Path(folder)
        self.keep = keep
        self.options = options
        self._resume: str | None = None
        """Name of the state to begin with."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._resume = None  # an earlier validate(ckpt_path=...) may have set it

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Note the state to load: the model is not in DDP yet."""
        self._resume = checkpoint.get(_KEY)
        if self._resume is None:
            log.warning("the checkpoint has no compression state: residuals begin empty")
        elif self.folder is None:
            log.warning(
                "the checkpoint has a compression state, %s, which Compress(folder=...) would "
                "restore; without a folder residuals begin empty",
                self._resume,
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        assert model is not None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._attach(model, scaler, trainer.world_size, 'pass Trainer(strategy="ddp")')
        if self.active and self.folder is not None and self._resume is not None:
            try:
                states.load(self.folder / self._resume, self.handle)
            except ValueError as error:
                raise ValueError(
                    f"compression cannot resume: {error}. Compress(folder=None) begins with empty "
                    "residuals"
                ) from error

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """All ranks come here, though only rank 0 will write Lightning's file."""
        if self.folder is None or not self.active:
            return
        name = f"step-{trainer.global_step}"
        states.save(self.folder / name, self.handle, any_model=True)
        checkpoint[_KEY] = name
        if trainer.is_global_zero and self.keep is not None:
            # By time: a run that went back may have later steps than its last.
            manifests = sorted(
                self.folder.glob(f"step-*/{states.MANIFEST}"), key=lambda path: path.stat().st_mtime
            )
            for old in manifests[: -self.keep]:
                shutil.rmtree(old.parent)
