"""The kernel of the ranking, compiled by numba when first used."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

NUM_COUNTS = 1 << 16  # counts below have a place each
_LENGTHS = 8


@njit(nogil=True, cache=True)
def order_by_count(by_tokens: Any, leading: Any, tokens: Any, lengths: Any, counts: Any, out: Any) -> None:
    """Bring rows into rank order: counts (below NUM_COUNTS) descending, then lengths, then tokens.

    `by_tokens` orders them by `leading`, which equals the order by tokens except that rows may share it.
    """
    ends = np.zeros(NUM_COUNTS * _LENGTHS + 1, np.int64)
    for row in range(len(counts)):
        ends[(NUM_COUNTS - 1 - counts[row]) * _LENGTHS + lengths[row]] += 1
    for bucket in range(1, len(ends)):
        ends[bucket] += ends[bucket - 1]
    for row in by_tokens:
        bucket = (NUM_COUNTS - 1 - counts[row]) * _LENGTHS + lengths[row] - 1
        out[ends[bucket]] = row
        ends[bucket] += 1
    first = 0
    for place in range(1, len(out) + 1):
        if place < len(out):
            row, before = out[place], out[place - 1]
            if leading[row] == leading[before] and counts[row] == counts[before] and lengths[row] == lengths[before]:
                continue
        if place - first > 1:
            _sort_by_tokens(tokens, out[first:place])
        first = place


@njit(nogil=True, cache=True)
def _sort_by_tokens(tokens: Any, rows: Any) -> None:
    """A shell sort: such runs are short."""
    gap = 1
    while gap < len(rows) // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, len(rows)):
            row, j = rows[i], i
            while j >= gap and _is_before(tokens, row, rows[j - gap]):
                rows[j] = rows[j - gap]
                j -= gap
            rows[j] = row
        gap //= 3


@njit(nogil=True, cache=True)
def _is_before(tokens: Any, row: Any, other: Any) -> Any:
    for i in range(tokens.shape[1]):
        if tokens[row, i] != tokens[other, i]:
            return tokens[row, i] < tokens[other, i]
    return False
