"""The common part of callbacks for training frameworks: the model may or may not be in DDP."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..algorithms import Algorithm
from ..core.reducer import log
from ..ddp import Compression, attach


class Attaching:
    """Attaches compression when training starts; in a single process there is nothing to do."""

    algorithm: Algorithm
    options: dict[str, Any]
    _handle: Compression | None = None
    _alone = False

    @property
    def active(self) -> bool:
        """Whether gradients are compressed: never before training starts or in one process."""
        return self._handle is not None

    @property
    def handle(self) -> Compression:
        """What `oktopk.attach` returned: statistics, and changes while training goes on."""
        if self._handle is None and self._alone:
            raise RuntimeError("one process: nothing is compressed, and `active` is False")
        if self._handle is None:
            raise RuntimeError("compression is attached when training starts")
        return self._handle

    def _attach(self, model: nn.Module, scaler: Any, processes: int, fix: str) -> None:
        """Attach to a model in DDP, or find that this process is alone.

        Args:
            scaler: the framework's GradScaler, or None.
            processes: how many there are, as far as the framework knows.
            fix: what to do with several processes that have no DDP.
        """
        inner = getattr(model, "_orig_mod", model)
        if isinstance(inner, DistributedDataParallel):
            self._handle = attach(model, self.algorithm, **{"grad_scaler": scaler, **self.options})
            self._alone = False
        elif max(processes, _processes()) == 1:
            log.warning(
                "one process: nothing to compress. To train with several, start one for each "
                "device, with torchrun, say"
            )
            self._handle, self._alone = None, True
        else:
            raise ValueError(
                f"{type(self).__name__} needs a model in DDP, but it is a {type(inner).__name__}: "
                f"{fix}"
            )


def _processes() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
