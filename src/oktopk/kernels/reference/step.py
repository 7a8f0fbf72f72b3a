"""The three phases of a fixed-size step: the specification.

All shapes are fixed, and masks take the place of lengths. So nothing here waits for the device.
`plan.py` says where things lie in messages and records.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .. import numbers
from ..control import SHORT, TREND, TREND_LIMIT
from ..layout import BITMAP, PLAIN
from ..numbers import magnitude
from ..plan import (
    ALL_FINITE,
    APPLIED,
    CHECKSUM,
    COUNT,
    DAMAGED,
    DAMAGED_SHIFT,
    FINITE,
    FLAGS,
    LOCAL,
    LOCAL_LIMIT,
    LOCAL_TREND,
    OFFERED,
    OVERFLOW,
    POINT,
    REGIONS,
    TOTAL,
    TOTAL_LIMIT,
    TOTAL_TREND,
    WHAT,
    WRONG,
    Plan,
    Record,
    Vectors,
    parts_of,
)
from .codes import mixed


class Step:
    """Memory of one step, and its phases. Nothing in it is needed by the next step.

    These follow each other:

        begin, prepare, exchange `send` for `received`,
        combine, exchange `reply` for `gathered`,
        apply, read

    In `read` the host waits for the device, and nowhere else.

    Args:
        dtype: of the residual: float32 or float64.
    """

    def __init__(self, plan: Plan, dtype: torch.dtype, device: torch.device) -> None:
        def new(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        size, most, index = plan.size, plan.most, numbers.index_dtype(plan.numel)
        self.plan, self.dtype, self.device = plan, dtype, device
        self.send = new(torch.uint8, size, plan.stride)
        """A message in each row: row j goes to rank j. This rank's own is not used."""
        self.received = torch.zeros_like(self.send)
        """The messages of all ranks for this one."""
        self.reply = new(torch.uint8, plan.stride)
        """One message: this owner's selection."""
        self.gathered = torch.zeros_like(self.send)
        """The replies of all owners."""
        self.before = new(torch.int64, plan.words)
        """The record of the last step. Only thresholds, trends and boundaries are read."""
        self.after = torch.zeros_like(self.before)
        """The record of this one."""
        self._indices = new(index, size, most)
        """Row j: the entries that this rank offers of region j. Behind the last there are zeros."""
        self._sent = new(dtype, size, most)
        """Their values, as the owners read them: rounded, but for the row of this rank."""
        self._counts = new(torch.int64, size + 1)
        """Entries in each row, and in `_mine`."""
        self._mine = new(index, most)
        """The elements that this owner has selected."""
        self._errors = new(dtype, most)
        """Their values as all ranks read them, minus the exact sums."""
        self._stops = torch.tensor([0, *accumulate(plan.parts)]).to(device, non_blocking=True)
        """A constant: where the parts of the vector begin, and where the last one ends."""

    def begin(self, state: list[int]) -> None:
        """Hand over the state from before the step: thresholds, trends and boundaries."""
        state_words = self.before[LOCAL : LOCAL + len(state)]
        state_words.copy_(torch.tensor(state), non_blocking=True)

    def read(self) -> Record:
        """What has happened, and the state for the next step."""
        return Record.of(self.after.tolist(), self.plan.size)

    def prepare(self, vectors: Vectors, least: int, point: int) -> None:
        """Phase 1: a message for each owner.

        1. values = residual + factor * gradient. With momentum, the velocity is what is added:
           momentum * velocity + factor * gradient.
        2. Candidates are the values that reach the carried threshold; if they are fewer than
           `least`, all values but zeros. The k largest candidates are the offer; equal ones go by
           index.
        3. The threshold for the next step is a forecast from the one that would have found `aim`
           candidates.
        4. The offer is split by region. Of each region the `most` largest entries have room; the
           others stay in the residual.
        5. They are written as messages, and `_sent` gets the values that their owners will read.
           The entries of this rank's own region are not rounded, and not written.

        Args:
            least: candidates below which the local threshold is wrong.
            point: this rank's program point.
        """
        plan, before, after, values = self.plan, self.before, self.after, vectors.values
        self._accumulate(vectors)
        bits = magnitude(values).long()
        finite = (bits < numbers.infinity(values.dtype)).all()
        carried = torch.ones_like(before[0]) if plan.everything else before[LOCAL].clamp(min=1)
        threshold = torch.where((bits >= carried).sum() < least, 1, carried)
        candidates = torch.where(bits >= threshold, bits, 0)
        kept, limit = _largest(candidates, plan.k)
        right = _right(candidates, threshold, plan.aim, values.dtype)
        carried, trend = before[LOCAL], before[LOCAL_TREND]
        after[LOCAL], after[LOCAL_TREND] = _forecast(right, carried, trend, values.dtype)
        after[LOCAL_LIMIT] = torch.where(limit > 0, limit, threshold)
        after[OFFERED] = kept.sum()

        index = torch.arange(plan.numel, device=values.device)
        index, offered, magnitudes = _compact(kept, plan.k, index, values, bits)
        there = torch.arange(plan.k, device=values.device) < after[OFFERED]
        boundaries = self._boundaries()
        region = torch.searchsorted(boundaries[1:-1].contiguous(), index, right=True)
        region = torch.where(there, region, plan.size)
        kept = there & (_place_by_size(magnitudes, region, plan.size + 1) < plan.most)
        after[OVERFLOW] = after[OFFERED] - kept.sum()
        for owner in range(plan.size):
            mask = kept & (region == owner)
            self._counts[owner] = count = mask.sum()
            row, entries = _compact(mask, plan.most, index, offered)
            entries = _repeat_last(entries, count)
            self._indices[owner] = row
            if owner == plan.rank:
                self._sent[owner] = entries
            else:
                message = self.send[owner, : plan.room]
                offsets = row - boundaries[owner]
                self._sent[owner] = _write(plan, offsets, entries, count, finite * FINITE, message)
                _seal(message, point)
        after[ALL_FINITE] = finite
        # To assign a Python number would wait for the device.
        after[DAMAGED].fill_(0)
        self._points()[plan.rank].fill_(point)

    def combine(self) -> None:
        """Phase 2: this owner's part of the sums, in one message for all.

        1. All messages are read and checked. Of a damaged one no entry is used, and it is reported.
           A program point counts if the checksum is right.
        2. The entries of each element are added in the order of ranks.
        3. The sums that reach the global threshold are selected. If these are fewer than `fewest`,
           the threshold is wrong, and the `share` largest sums are selected instead. No more than
           `most` are: the largest.
        4. They are written as a message, and `_errors` gets what rounding changes.
        """
        plan, after, points = self.plan, self.after, self._points()
        low, high = self._boundaries()[plan.rank], self._boundaries()[plan.rank + 1]
        sums = torch.zeros(plan.span + 1, dtype=self.dtype, device=self.device)
        damaged = torch.zeros_like(low)
        for source in range(plan.size):
            if source == plan.rank:
                index, entries = self._indices[source].long(), self._sent[source]
                count = self._counts[source]
            else:
                message = self.received[source, : plan.room]
                index, entries, count, flags, right = _read(plan, message, low, high)
                # The first damaged message is reported.
                damaged = torch.where(right | (damaged > 0), damaged, 1 + source)
                after[ALL_FINITE] &= torch.where(right, flags & FINITE, 1)
                words = message.view(torch.int64)
                sealed = mixed(words).sum() == words[CHECKSUM]
                points[source] = torch.where(sealed, words[POINT], points[plan.rank])
            there = torch.arange(plan.most, device=self.device) < count
            # Places that are not there meet behind the last element, where nobody reads.
            sums[torch.where(there, index - low, plan.span)] += torch.where(there, entries, 0)
        after[DAMAGED] = torch.where(damaged > 0, damaged + plan.size * plan.rank, 0)
        sums = sums[:-1]
        bits = magnitude(sums).long()
        after[ALL_FINITE] &= (bits < numbers.infinity(sums.dtype)).all()
        threshold = self._total()
        wrong = ((bits >= threshold).sum() < plan.fewest) & (threshold > 1)
        bits = torch.where(wrong | (bits >= threshold), bits, 0)
        kept, _ = _largest(bits, torch.where(wrong, min(plan.share, plan.most), plan.most))
        self._counts[-1] = count = kept.sum()
        place = torch.arange(plan.span, device=self.device)
        offsets, exact = _compact(kept, plan.most, place, sums)
        exact = _repeat_last(exact, count)
        flags = after[ALL_FINITE] * FINITE | wrong * WRONG | damaged << DAMAGED_SHIFT
        message = self.reply[: plan.room]
        self._mine.copy_(offsets + low)
        self._errors.copy_(_write(plan, offsets, exact, count, flags, message) - exact)
        _seal(message, points[plan.rank])

    def apply(self, vectors: Vectors) -> None:
        """Phase 3: averages, the new residual and the state for the next step.

        1. All replies are read and checked. If one is damaged, or values are not finite anywhere,
           `out` stays as it is, and the record says so.
        2. The k largest sums are applied: their averages, times `scale`, are written to `out`, and
           zeros everywhere else.
        3. Applied entries leave the residual of the ranks that offered them, and their velocity
           ends. The errors of rounding stay with the rank that rounded. Where averages are rounded
           to 16 bits, each rank keeps the errors of its share.
        4. The indices of the applied entries, cut into parts of equal count, are the next regions.
        """
        plan, after, size, device = self.plan, self.after, self.plan.size, self.device
        index, sums, there, wrong = self._read_replies()
        bits = torch.where(there, magnitude(sums).long(), 0)
        kept, limit = _largest(bits, plan.k)
        found = (bits > 0).sum()
        # A carried threshold that was wrong for an owner is forgotten.
        none = numbers.infinity(self.dtype)
        smallest = torch.where(bits > 0, bits, none).min()
        smallest = torch.where(smallest < none, smallest, 1)
        threshold = torch.where(wrong, smallest, self._total())
        right = _right(bits, threshold, plan.wanted, self.dtype)
        carried, trend = self.before[TOTAL], self.before[TOTAL_TREND]
        carried = torch.where(wrong, none, carried)
        after[TOTAL], after[TOTAL_TREND] = _forecast(right, carried, trend, self.dtype)
        after[TOTAL_LIMIT] = torch.where(found > plan.k, limit, threshold)
        after[APPLIED] = count = kept.sum()
        index, sums = _compact(kept, plan.k, index, sums)
        there = torch.arange(plan.k, device=device) < count
        index = torch.where(there, index, plan.numel)

        regions = after[REGIONS : REGIONS + size + 1]
        regions.copy_(self._boundaries())
        if not plan.everything:
            cuts = torch.arange(1, size, device=device) * count // size
            inner = index[cuts.clamp(max=plan.k - 1)]
            regions[1:-1] = torch.where(count > 0, inner, regions[1:-1])
        after[REGIONS + 1 + 2 * size :] = torch.searchsorted(index, self._stops).diff()

        self._clear(vectors, index)
        averages = sums / sums.new_full((), size)  # a GPU multiplies by the inverse of a number
        if vectors.scale != 1.0:
            averages = averages * vectors.scale
        kind = vectors.out[0].dtype
        if kind != self.dtype:
            largest = torch.finfo(kind).max
            averages = averages.clamp(-largest, largest).to(kind)
            errors = sums - averages.to(self.dtype) * (size / vectors.scale)
            place = torch.arange(plan.k, device=device)
            share = (place >= count * plan.rank // size) & (place < count * (plan.rank + 1) // size)
            _add_at(vectors.values, index, errors, share & there)
        fine = (after[DAMAGED] == 0) & (after[ALL_FINITE] > 0)
        dense = torch.zeros(plan.numel + 1, dtype=kind, device=device)
        dense[index] = averages
        for part, averaged in zip(vectors.out, parts_of(plan, dense[:-1]), strict=True):
            part.copy_(torch.where(fine, averaged, part))

    def _accumulate(self, vectors: Vectors) -> None:
        plan, values = self.plan, vectors.values
        added = values if vectors.velocity_after is None else vectors.velocity_after
        for part, piece in zip(vectors.gradient, parts_of(plan, added), strict=True):
            torch.mul(part.to(self.dtype), vectors.factor, out=piece)
        if vectors.velocity is not None:
            added += vectors.velocity * vectors.momentum
        torch.add(vectors.residual, added, out=values)

    def _read_replies(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Indices and sums of all owners, one row behind the other, which of them are there, and
        whether the threshold was wrong for any owner."""
        plan, after, boundaries = self.plan, self.after, self._boundaries()
        damaged, wrong = after[DAMAGED].clone(), torch.zeros_like(after[0]).bool()
        rows, size = [], plan.size
        for owner in range(size):
            message = self.gathered[owner, : plan.room]
            *row, flags, right = _read(plan, message, boundaries[owner], boundaries[owner + 1])
            told = torch.where(right, flags >> DAMAGED_SHIFT, 0)
            told = torch.where((told > 0) & (told <= size), told + size * owner, 0)
            told = torch.where(right, told, 1 + owner + size * plan.rank)
            damaged = torch.where(damaged > 0, damaged, told)
            after[ALL_FINITE] &= torch.where(right, flags & FINITE, 1)
            wrong |= right & ((flags & WRONG) > 0)
            rows.append(row)
        after[DAMAGED] = damaged
        index, sums = (torch.cat([row[column] for row in rows]) for column in (0, 1))
        count = torch.stack([row[2] for row in rows])
        there = torch.arange(plan.most, device=self.device) < count[:, None]
        return index, sums, there.flatten(), wrong

    def _clear(self, vectors: Vectors, applied: Tensor) -> None:
        """The entries that this rank offered and all ranks apply leave the residual."""
        plan, values, velocity = self.plan, vectors.values, vectors.velocity_after
        # Rows have zeros behind their last entry, and those must not count.
        inside = torch.arange(plan.most, device=self.device) < self._counts[:-1, None]
        taken = inside & _is_in(self._indices, applied)
        _add_at(values, self._indices, -self._sent, taken)
        if velocity is not None:
            _add_at(velocity, self._indices, -velocity[self._indices.long()], taken)
        inside = torch.arange(plan.most, device=self.device) < self._counts[-1]
        _add_at(values, self._mine, -self._errors, inside & _is_in(self._mine, applied))

    def _boundaries(self) -> Tensor:
        """Of the regions of this step."""
        return self.before[REGIONS : REGIONS + self.plan.size + 1]

    def _points(self) -> Tensor:
        """The program points of all ranks, in the record of this step."""
        start = REGIONS + self.plan.size + 1
        return self.after[start : start + self.plan.size]

    def _total(self) -> Tensor:
        """The carried threshold of sums; 1 selects all but zeros."""
        total = self.before[TOTAL]
        return torch.ones_like(total) if self.plan.everything else total.clamp(min=1)


def _largest(bits: Tensor, limit: int | Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitudes, no more than `limit`; equal ones by index, and no zeros.

    Returns:
        Which they are.
        The magnitude of the smallest of them, if there are as many as `limit`, else 0.
    """
    ordered = bits.sort(descending=True).values
    if isinstance(limit, int):
        limit = torch.full_like(ordered[0], limit)
    smallest = ordered.gather(0, (limit - 1).clamp(max=bits.numel() - 1).view(1))[0]
    smallest = torch.where(limit <= bits.numel(), smallest, 0)
    equal = bits == smallest
    ties = limit - (bits > smallest).sum()
    kept = (bits > smallest) | (equal & (equal.cumsum(0) <= ties))
    return kept & (bits > 0), smallest


def _right(bits: Tensor, threshold: Tensor, wanted: int, dtype: torch.dtype) -> Tensor:
    """The threshold that would have found about `wanted` magnitudes.

    Args:
        bits: all magnitudes that reach `threshold`, and zeros.
    """
    shift, found = numbers.leading_shift(dtype), (bits > 0).sum()
    digits = bits >> shift
    digit = bits.sort(descending=True).values[min(wanted, bits.numel()) - 1] >> shift
    inside = ((digits == digit) & (bits > 0)).sum().clamp(min=1)
    above = (digits > digit).sum()
    about = (digit << shift) + (1 << shift) // inside * (inside - (wanted - above))
    logarithm = magnitude(found.clamp(min=1).to(dtype).view(1))[0].long()
    few = numbers.logarithm(wanted, dtype) - logarithm
    return torch.where(found < wanted, (threshold - (few * SHORT >> 8)).clamp(min=1), about)


def _forecast(
    right: Tensor, carried: Tensor, trend: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`control.forecast`."""
    infinity, octave = numbers.infinity(dtype), numbers.OCTAVE[dtype]
    most = octave * TREND_LIMIT >> 8
    known = (right >= 1) & (right < infinity) & (carried >= 1) & (carried < infinity)
    surprise = (right - carried).clamp(-most, most)
    trend = (trend + (surprise * TREND >> 8)).clamp(-most, most)
    value = (right + trend).clamp(1, infinity - 1)
    return torch.where(known, value, right), torch.where(known, trend, 0)


def _compact(mask: Tensor, size: int, *columns: Tensor) -> list[Tensor]:
    """The rows of a table that a mask has, no more than `size`; behind them there are zeros."""
    place = torch.where(mask, mask.cumsum(0) - 1, size).clamp(max=size)
    return [column.new_zeros(size + 1).scatter_(0, place, column)[:size] for column in columns]


def _place_by_size(magnitudes: Tensor, group: Tensor, groups: int) -> Tensor:
    """The place of each magnitude within its group, the largest first; equal ones by index."""
    order = magnitudes.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]
    sizes = torch.zeros(groups, dtype=torch.int64, device=group.device)
    sizes.scatter_add_(0, group, torch.ones_like(group))
    starts = sizes.cumsum(0) - sizes
    count = torch.arange(group.numel(), device=group.device)
    return torch.empty_like(group).scatter_(0, order, count - starts[group[order]])


def _repeat_last(values: Tensor, count: Tensor) -> Tensor:
    """Values with the last of `count` repeated behind it."""
    last = values.gather(0, (count - 1).clamp(min=0).view(1))
    return torch.where(torch.arange(values.numel(), device=values.device) < count, values, last)


def _is_in(indices: Tensor, applied: Tensor) -> Tensor:
    """Which indices are among those applied: sorted, `numel` behind the last."""
    indices = indices.long()
    place = torch.searchsorted(applied, indices).clamp(max=applied.numel() - 1)
    return applied[place] == indices


def _add_at(dense: Tensor, indices: Tensor, values: Tensor, mask: Tensor) -> None:
    """dense[indices] += values, where the mask says so."""
    added = torch.where(mask, values, -0.0).flatten()  # to add 0.0 would change -0.0
    dense.index_add_(0, torch.where(mask, indices, 0).flatten().long(), added)


def _write(
    plan: Plan, offsets: Tensor, values: Tensor, count: Tensor, flags: Tensor, message: Tensor
) -> Tensor:
    """Write a message, but for its checksum; returns the values that its readers will get."""
    there = torch.arange(plan.most, device=message.device) < count
    message.zero_()
    nbytes = plan.codec.nbytes(plan.most)
    sent = plan.codec.write(values, message[plan.values_at : plan.values_at + nbytes])
    room = message[plan.positions_at :]
    offsets = torch.where(there, offsets, 0)
    if plan.code == PLAIN:
        kind = numbers.index_dtype(plan.numel)
        room[: plan.most * kind.itemsize].view(kind).copy_(offsets)
    elif plan.code == BITMAP:
        _set_bits(room, offsets, there)
    else:
        low, at = plan.low_bits, plan.bitmap
        place = (offsets >> low) + torch.arange(plan.most, device=message.device)
        _set_bits(room[:at], place, there)
        for shift in range(0, low - 7, 8):
            room[at : at + plan.most] = (offsets >> shift) & 0xFF
            at += plan.most
        if low % 8:
            nibbles = (offsets >> (low - 4)) & 0xF
            pairs = torch.nn.functional.pad(nibbles, (0, plan.most % 2)).view(-1, 2)
            room[at : at + pairs.shape[0]] = pairs[:, 0] | pairs[:, 1] << 4
    words = message.view(torch.int64)
    words[WHAT].fill_(plan.what)
    words[COUNT], words[FLAGS] = count, flags
    return sent


def _seal(message: Tensor, point: int | Tensor) -> None:
    words = message.view(torch.int64)
    words[POINT].fill_(point)
    words[CHECKSUM] = mixed(words).sum()


def _read(plan: Plan, message: Tensor, low: Tensor, high: Tensor) -> Sequence[Tensor]:
    """The entries of a message, whatever its bytes. A wrong one has none.

    Returns:
        Their indices, from `low` on and below `high`, and `low` behind the last.
        Their values, and zeros behind the last.
        How many there are, the flags, and whether the message is right.
    """
    words, device = message.view(torch.int64), message.device
    count, flags = words[COUNT], words[FLAGS]
    right = (words[WHAT] == plan.what) & (count >= 0) & (count <= plan.most)
    right &= mixed(words).sum() == words[CHECKSUM]
    slot = torch.arange(plan.most, device=device)
    there = slot < count
    nbytes = plan.codec.nbytes(plan.most)
    values = plan.codec.read(message[plan.values_at : plan.values_at + nbytes], plan.most)
    if not plan.codec.always_finite:
        fine = values.isfinite() | ~there | ((flags & FINITE) == 0)
        right &= fine.all()
    room = message[plan.positions_at :]
    if plan.code == PLAIN:
        kind = numbers.index_dtype(plan.numel)
        offsets = room[: plan.most * kind.itemsize].view(kind).long()
    else:
        coded = room[: plan.bitmap].long()[:, None]
        bits = ((coded >> torch.arange(8, device=device)) & 1).flatten()
        rank = bits.cumsum(0) - 1
        right &= rank[-1] + 1 == count
        place = torch.where((bits > 0) & (rank < plan.most), rank, plan.most)
        number = torch.arange(bits.numel(), device=device)
        offsets = number.new_zeros(plan.most + 1).scatter_(0, place, number)[:-1]
        if plan.code != BITMAP:
            offsets = (offsets - slot).clamp(min=0) << plan.low_bits
            offsets |= _low_bits(plan, room)
    rising = (offsets[1:] > offsets[:-1]) | ~there[1:]
    inside = ((offsets >= 0) & (offsets < high - low)) | ~there
    right &= rising.all() & inside.all()
    there &= right
    return (
        torch.where(there, offsets + low, low),
        torch.where(there, values, 0),
        torch.where(right, count, 0),
        flags,
        right,
    )


def _low_bits(plan: Plan, room: Tensor) -> Tensor:
    """The low bits of all offsets, behind the bitmap of the high ones."""
    at, lows = plan.bitmap, torch.zeros(plan.most, dtype=torch.int64, device=room.device)
    for shift in range(0, plan.low_bits - 7, 8):
        lows |= room[at : at + plan.most].long() << shift
        at += plan.most
    if plan.low_bits % 8:
        pairs = room[at : at + -(-plan.most // 2)].long()
        nibbles = torch.stack([pairs & 0xF, pairs >> 4], 1).flatten()[: plan.most]
        lows |= nibbles << (plan.low_bits - 4)
    return lows


def _set_bits(room: Tensor, places: Tensor, mask: Tensor) -> None:
    """Set these bits, and clear all others."""
    bits = torch.zeros(8 * room.numel() + 1, dtype=torch.int64, device=room.device)
    bits.scatter_(0, torch.where(mask, places, 8 * room.numel()), 1)
    weights = 2 ** torch.arange(8, device=room.device)
    room.copy_((bits[:-1].view(-1, 8) * weights).sum(1))
