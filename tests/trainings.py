"""Small trainings on two real workers, for test_train.py; started as by torchrun, prints JSON.

torchrun --nproc-per-node 2 tests/trainings.py CORPUS FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import oktopk
from oktopk.common.errors import UserError
from oktopk.common.together import gather
from oktopk.train.config.recipes import recipe
from oktopk.train.trainer import Trainer

CORPUS, FOLDER = (Path(argument) for argument in sys.argv[1:])
TINY: dict[str, Any] = {
    "dataset": "manifest",
    "train_manifest": str(CORPUS / "spoken_train_manifest.csv"),
    "val_manifest": str(CORPUS / "spoken_val_manifest.csv"),
    "width": 24,
    "depth": 1,
    "batch_size": 2,
    "dense_below": 100,
    "tensorboard": False,
}


def train(name: str, **values: Any) -> Trainer:
    config = recipe("spoken", **TINY | {"run_dir": str(FOLDER / name)} | values)
    trainer = Trainer(config, local_rank=dist.get_rank())
    trainer.run()
    trainer.handle.check_replicas()
    return trainer


def with_every_compressor() -> dict[str, Any]:
    """Six steps each, of which the last four are sparse."""
    results = {}
    for name in ("dense", "oktopk", "topka", "topkdsa", "gtopk", "gaussiank"):
        trainer = train(name, compressor=name, warmup_steps=2, max_steps=6)
        results[name] = {
            "sparsities": trainer.sparsities,
            "compression_ratios": trainer.compression_ratios,
            "communication_sizes": trainer.communication_sizes,
        }
    return results


def with_everything() -> dict[str, Any]:
    """Accumulation, autocast, clipping before and after, momentum correction, whole model."""
    trainer = train(
        "everything",
        optimizer="sgd",
        lr=0.001,
        momentum_correction=True,
        nsteps_update=2,
        autocast="bf16",
        norm_clip=5.0,
        scope="model",
        warmup_steps=1,
        max_epochs=2,
    )
    return {"steps": trainer.step, "sparsities": trainer.sparsities}


def stopped_and_resumed() -> dict[str, bool]:
    """Ten steps at once, and ten with breaks in the middle of an epoch and at its end."""

    def run(name: str, steps: int, resume: str = "", detail_every: int = 4) -> Trainer:
        values = {"schedule": "anneal", "warmup_steps": 3, "density": 0.05, "refresh_interval": 2}
        return train(name, max_steps=steps, resume=resume, detail_every=detail_every, **values)

    whole = run("whole", 10)
    run("parts", 4)
    run("parts", 6, "auto")
    parts = run("parts", 10, str(FOLDER / "parts"))
    states = [
        (trainer.net.state_dict(), trainer.optimizer.state_dict(), trainer.handle.state_dict())
        for trainer in (whole, parts)
    ]
    return {
        "same": all(gather(_equal(*states))),
        "sums": whole.meters.of_run.loss == parts.meters.of_run.loss
        and parts.meters.of_run.steps == 10,
        "blind": _equal(states[0][0], run("blind", 10, detail_every=0).net.state_dict()),
    }


def occupied() -> str:
    """The complaint about a folder that has a run already."""
    try:
        train("parts")
    except UserError as error:
        return str(error)
    return ""


def pretrained() -> bool:
    """Weights of a run, of its checkpoint and of a file are the same weights."""
    file = FOLDER / "weights.pt"
    shared = oktopk.checkpoint.read_shared(FOLDER / "whole" / "checkpoint")
    if dist.get_rank() == 0:
        torch.save({"state_dict": {f"module.{k}": v for k, v in shared["model"].items()}}, file)
    dist.barrier()
    same = True
    for path in (FOLDER / "whole", FOLDER / "whole" / "checkpoint", file):
        run_dir = str(FOLDER / f"from-{path.name}")
        config = recipe("spoken", **TINY | {"pretrain": str(path), "run_dir": run_dir})
        trainer = Trainer(config, local_rank=dist.get_rank())
        same = same and _equal(trainer.net.state_dict(), shared["model"])
    return same


def _equal(one: Any, other: Any) -> bool:
    """Bitwise, through dictionaries and lists."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results = {
        "compressors": with_every_compressor(),
        "everything": with_everything(),
        "resume": stopped_and_resumed(),
        "occupied": occupied(),
        "pretrain": pretrained(),
    }
    dist.barrier()
    if dist.get_rank() == 0:
        print("\n" + json.dumps(results))
    dist.destroy_process_group()
