"""Language modelling: a transformer that learns to continue a text, byte by byte."""

from .config import LanguageConfig as WORKLOAD

__all__ = ["WORKLOAD"]
