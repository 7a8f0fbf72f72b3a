"""checkpoint_with: compression in the checkpoints that Accelerate saves and loads.

`accelerator.register_for_checkpointing` would not do: it saves the main process's state only,
though residuals differ on every rank.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .. import checkpoint as states
from ..handle import Handle

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(
        "oktopk.integrations.accelerate needs Accelerate: pip install accelerate"
    ) from error

_names: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""By accelerator, the folders that are in use in its checkpoints."""


def checkpoint_with(accelerator: Accelerator, handle: Handle, name: str = "oktopk") -> None:
    """Save and load all ranks' compression states with `accelerator.save_state` and `load_state`.

    ```python
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    handle = oktopk.attach(model, oktopk.OkTopk(density=0.02))
    checkpoint_with(accelerator, handle)
    accelerator.save_state("run/checkpoint")
    ```

    To go on with empty residuals from a checkpoint that has no compression state, call it after
    `load_state`.

    Args:
        accelerator: what saves and loads.
        handle: from `attach`.
        name: of a folder in each checkpoint; a second model needs another one.
    """
    used = _names.setdefault(accelerator, set())
    if name in used:
        raise ValueError(
            f"this accelerator's checkpoints have a folder {name!r} already: pass another `name` "
            "for another model"
        )
    used.add(name)

    def save(models: list[nn.Module], weights: list[dict[str, Tensor]], output_dir: str) -> None:
        states.save(Path(output_dir) / name, handle, any_model=True)

    def load(models: list[nn.Module], input_dir: str) -> None:
        try:
            states.load(Path(input_dir) / name, handle)
        except ValueError as error:
            if (Path(input_dir) / name).exists():
                raise
            raise ValueError(
                f"{input_dir} has no compression state, it was saved without checkpoint_with: to "
                "go on with empty residuals, call checkpoint_with after load_state"
            ) from error

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
