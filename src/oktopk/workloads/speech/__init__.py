"""LSTM speech recognition: corpora, features, model, loss and error rates."""

from .config import SpeechConfig as WORKLOAD

__all__ = ["WORKLOAD"]
