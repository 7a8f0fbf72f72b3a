"""Entries of a sparse vector, and the bytes they travel as."""


class DamagedMessageError(RuntimeError):
    """A message is not what its sender wrote."""
