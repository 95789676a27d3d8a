"""The frequent n-grams of merged windows: walked once, kept only as far as a selection can want them.

The walk gives the whole histogram of counts, but of the n-grams themselves only those above a threshold, which rises
when more than enough have been found. What is kept is complete down to `complete_from`; the histograms of all
partitions then tell whether that was far enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scone.counting import kernels
from scone.counting.coding import WindowCoding
from scone.counting.windows import Windows
from scone.fgrams import FGrams
from scone.selection import CountHistogram

_BUFFER_ROWS = 1 << 19


@dataclass(frozen=True, slots=True)
class Quota:
    """At least the `size` most frequent n-grams of these lengths are kept, all of them if it is 0."""

    lengths: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Survivors:
    """The frequent n-grams of a range of slices."""

    fgrams: FGrams
    """In no order; of each length n those that occur complete_from[n] times or more."""
    histogram: CountHistogram
    """Of all that occur often enough, whether kept or not."""
    complete_from: np.ndarray
    """int64 [K + 1]."""


class SurvivorCollector:
    """Walks over windows, piece by piece."""

    def __init__(self, coding: WindowCoding, min_counts: np.ndarray, quotas: Sequence[Quota]) -> None:
        """`min_counts` int64 [K + 1]: the occurrences that an n-gram of each length needs."""
        self.coding = coding
        self._min_counts = np.asarray(min_counts, np.int64)
        self._complete_from = self._min_counts.copy()
        self._quotas = tuple(quota for quota in quotas if quota.size)
        self._dense = np.zeros((coding.max_fgram_length + 1, kernels.DENSE_COUNTS), np.int64)
        self._frequent: list[CountHistogram] = []  # of counts that have no place in _dense
        self._kept: list[FGrams] = []
        self._num_kept = 0
        # Twice the wanted ones and some, so that the threshold is not raised for every few.
        self._limit = 2 * sum(quota.size for quota in self._quotas) + _BUFFER_ROWS
        self._buffer = self._make_buffer(_BUFFER_ROWS)

    def add(self, first_slice: int, windows: Windows) -> None:
        """Find the n-grams of distinct windows in consecutive slices from `first_slice` on."""
        part, num_slices, starts = 0, len(windows.slice_rows), windows.starts
        columns = (windows.high, windows.low, windows.counts, starts)
        while part < num_slices:
            where = (part, first_slice, self.coding.shape, self._min_counts, self._complete_from, self._dense)
            buffer = self._buffer
            part, size = kernels.walk(*columns, *where, buffer.tokens, buffer.lengths, buffer.counts)
            if size:
                self._keep(buffer.take(slice(0, size)))
                buffer.tokens[:size] = 0
            elif part < num_slices:
                largest = int(windows.slice_rows[part])
                self._buffer = self._make_buffer((self.coding.max_fgram_length - 1) * largest)

    def add_counted(self, fgrams: FGrams) -> None:
        """Add n-grams that were counted otherwise and are in no walked window's count: the heavy ones."""
        fgrams = fgrams.take(fgrams.counts >= self._min_counts[fgrams.lengths])
        is_dense = fgrams.counts < kernels.DENSE_COUNTS
        np.add.at(self._dense, (fgrams.lengths[is_dense], fgrams.counts[is_dense]), 1)
        self._keep(fgrams)

    def finish(self) -> Survivors:
        """What was found so far."""
        self._drop_infrequent()
        fgrams = FGrams.concatenate([FGrams.empty(self.coding.max_fgram_length), *self._kept])
        lengths, counts = np.nonzero(self._dense)
        dense = CountHistogram.of_buckets(counts, lengths, self._dense[lengths, counts])
        return Survivors(fgrams, CountHistogram.merge([dense, *self._frequent]), self._complete_from.copy())

    def _keep(self, found: FGrams) -> None:
        self._frequent.append(CountHistogram.of(found.take(found.counts >= kernels.DENSE_COUNTS)))
        is_wanted = found.counts >= self._complete_from[found.lengths]
        # A copy in any case: the buffer is used again.
        kept = found.take(is_wanted) if not is_wanted.all() else FGrams.concatenate([found])
        self._kept.append(kept)
        self._num_kept += len(kept)
        if self._quotas and self._num_kept > self._limit:
            self._raise_thresholds()

    def _raise_thresholds(self) -> None:
        frequent = CountHistogram.merge(self._frequent)
        self._frequent = [frequent]
        for quota in self._quotas:
            lengths = list(quota.lengths)
            sizes = self._dense[lengths].sum(axis=0)
            above = int(frequent.sizes[np.isin(frequent.lengths, lengths)].sum())
            at_least = above + np.cumsum(sizes[::-1])[::-1]  # n-grams with this count or more
            enough = np.flatnonzero(at_least >= quota.size)
            threshold = int(enough[-1]) if len(enough) else 0
            self._complete_from[lengths] = np.maximum(self._complete_from[lengths], threshold)
        self._drop_infrequent()

    def _drop_infrequent(self) -> None:
        if not self._quotas:
            return
        self._kept = [part.take(part.counts >= self._complete_from[part.lengths]) for part in self._kept]
        self._num_kept = sum(map(len, self._kept))

    def _make_buffer(self, rows: int) -> FGrams:
        tokens = np.zeros((rows, self.coding.max_fgram_length), np.uint32)
        return FGrams(tokens, np.empty(rows, np.uint8), np.empty(rows, np.int64))
