"""Hugging Face Trainer: one callback, saved and resumed with Trainer's own checkpoints.

    torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py
    torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py --algorithm dense

Run it with `--checkpoint run --steps 50` and then with `--checkpoint run --steps 100`: training may
stop and go on, bit for bit as if it had not stopped.

The task: a small GPT-2, built here and not downloaded, learns the source of this file.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

import oktopk
from oktopk.integrations.transformers import CompressCallback

ALPHABET, CONTEXT, BATCH, LEARNING_RATE = 128, 48, 8, 5e-3


def main() -> None:
    args = parse_args()
    set_seed(0)
    folder = args.checkpoint or Path(tempfile.gettempdir())  # nothing is written there
    config = GPT2Config(
        vocab_size=ALPHABET,
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            str(folder),
            use_cpu=True,
            max_steps=args.steps,
            per_device_train_batch_size=BATCH,
            lr_scheduler_type="constant",  # the same for any number of steps
            save_strategy="steps" if args.checkpoint else "no",
            save_steps=args.steps,
            logging_steps=1,
            report_to="none",
            ddp_find_unused_parameters=False,
            disable_tqdm=True,
        ),
        train_dataset=text(),
        # AdamW for sparse gradients; torch's own takes steps that are too small with them.
        optimizer_cls_and_kwargs=(oktopk.AdamW, {"lr": LEARNING_RATE}),
    )
    trainer.remove_callback(PrinterCallback)

    # The callback. The first steps are dense, since gradients change fastest there. `dense_below`
    # is for this small model, whose tables of positions and letters have 3072 and 8192 elements.
    algorithm = oktopk.algorithm(args.algorithm, density=args.density, warmup_steps=4)
    compress = CompressCallback(trainer, algorithm, dense_below=1000)
    trainer.add_callback(compress)

    last = get_last_checkpoint(str(folder)) if args.checkpoint and folder.exists() else None
    trainer.train(resume_from_checkpoint=last)

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(f"first loss         {losses[0]:.4f}")
        print(f"last loss          {losses[-1]:.4f}")
    if not compress.active:  # a single process: there is nothing to compress
        return
    compress.handle.check_replicas()  # raises unless all ranks have the same model, to the bit
    if trainer.is_world_process_zero():
        totals = compress.handle.stats().totals
        print(f"compression ratio  {totals.compression_ratio:.1f}")
        print(f"sparsity           {totals.sparsity:.3f}")
        print(f"megabytes sent     {totals.bytes_sent / 1e6:.3f}")
    torch.distributed.destroy_process_group()


def text() -> list[dict[str, Tensor]]:
    """Pieces of this file; the model itself shifts labels by one letter."""
    letters = torch.tensor(list(Path(__file__).read_bytes()))
    pieces = letters.unfold(0, CONTEXT, 4)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--algorithm",
        default="oktopk",
        choices=oktopk.names(),
        help="how gradients are averaged; dense sends all of them (default: oktopk)",
    )
    parser.add_argument(
        "--density",
        type=float,
        default=0.02,
        help="share of a gradient that is applied in a step; the rest waits (default: 0.02)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=100,
        help="steps in all, those before a checkpoint included (default: 100)",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="go on from the last checkpoint in this folder, if it has one; write one at the end",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
