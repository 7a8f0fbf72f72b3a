"""Transcripts as labels, and their error rates."""

from __future__ import annotations

from collections.abc import Sequence

import jiwer
import torch
from torch import Tensor

LABELS = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "
"""The 29 labels; the first one is CTC's blank."""
_NUMBER = {character: number for number, character in enumerate(LABELS)}


def encode(text: str) -> Tensor:
    """Labels of a transcript."""
    return torch.tensor([_NUMBER[character] for character in text], dtype=torch.long)


def needed_frames(labels: Tensor) -> int:
    """The fewest frames that CTC needs. A blank stands between two equal labels."""
    return len(labels) + int((labels[1:] == labels[:-1]).sum())


def greedy(log_probs: Tensor, lengths: Tensor) -> list[str]:
    """The likeliest label of each frame, repetitions and blanks taken out.

    Args:
        log_probs: (frames, batch, labels).
        lengths: how many frames of each count.
    """
    best = log_probs.argmax(dim=2).cpu()
    texts = []
    for column, length in zip(best.T, lengths.tolist(), strict=True):
        said = torch.unique_consecutive(column[:length]).tolist()
        texts.append(" ".join("".join(LABELS[label] for label in said if label).split()))
    return texts


def error_rates(references: Sequence[str], hypotheses: Sequence[str]) -> dict[str, float]:
    """Word and character error rate: substitutions, deletions and insertions, by reference length.

    Since insertions count, rates can exceed 1.
    """
    references, hypotheses = list(references), list(hypotheses)
    return {
        "wer": float(jiwer.wer(references, hypotheses)),
        "cer": float(jiwer.cer(references, hypotheses)),
    }
