"""How a message is laid out, as the wire and the kernels that write whole messages know it."""

from __future__ import annotations

HEAD_WORDS = 5
"""64-bit words at the start: format, counts, bytes of positions, checksum, first index."""
CHECKSUM = 3
"""The word that holds the checksum. It is not part of the sum."""
COUNT_SHIFT = 24
"""The second word is the number of entries, shifted by this, and the number of added words."""
PLAIN, CONSECUTIVE, BITMAP, ELIAS_FANO = range(4)
"""Codes of positions; wire/positions.py explains them. Code ELIAS_FANO + j has LOW_BITS[j]."""
LOW_BITS = (4, 8, 12, 16)
"""Bits of an offset that Elias-Fano may store as they are: whole nibbles."""


def padded(nbytes: int) -> int:
    """Round up to a whole word, so that the next part is aligned."""
    return -(-nbytes // 8) * 8


def low_bytes(count: int, bits: int) -> int:
    """Bytes of the low bits of `count` entries: whole bytes of all, then nibbles of all."""
    return bits // 8 * count + bits % 8 // 4 * -(-count // 2)


def shortest(count: int, span: int) -> tuple[int, int]:
    """The shortest code, and its bytes, for any `count` entries within `span` elements.

    It takes no fewer bytes than any code of fewer entries, or of entries within fewer elements.
    """
    best, code, least = BITMAP, ELIAS_FANO, -(-span // 8)
    for bits in LOW_BITS:
        highs = count + ((span - 1) >> bits)
        nbytes = 8 * -(-highs // 64) + bits // 8 * count + bits % 8 // 4 * -(-count // 2)
        if nbytes < least:
            best, least = code, nbytes
        code += 1
    return best, least
