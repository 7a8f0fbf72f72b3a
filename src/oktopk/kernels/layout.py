"""How a message is laid out, as the wire and the kernels that write whole messages know it."""

from __future__ import annotations

HEAD_WORDS = 5
"""64-bit words at the start: format, counts, bytes of positions, checksum, first index."""
CHECKSUM = 3
"""The word that holds the checksum. It is not part of the sum."""
COUNT_SHIFT = 24
"""The second word is the number of entries, shifted by this, and the number of added words."""
PLAIN, GAPS8, GAPS16, BITMAP, CONSECUTIVE = range(5)
"""Codes of positions; wire/positions.py explains them."""


def padded(nbytes: int) -> int:
    """Round up to a whole word, so that the next part is aligned."""
    return -(-nbytes // 8) * 8
