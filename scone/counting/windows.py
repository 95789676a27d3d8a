"""The windows of one unit of tokens: into slices, sorted, run-length coded.

Every position gives its window of K tokens, cut at the end of the document and before a special id. Every n-gram
is a prefix of the windows that start where it does, so the windows are all that is counted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from scone.counting import kernels
from scone.counting.coding import WindowCoding

NO_BIGRAM_FILTER = np.zeros(0, np.uint64)
_TRIAL_SLICES = 4  # of each way to sort, to find the faster one on this machine
_TRIAL_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Windows:
    """Distinct windows with their counts, sorted by key inside each of consecutive slices."""

    high: np.ndarray
    """uint64 [R], the leading words of the keys; empty where keys have one word."""
    low: np.ndarray
    """uint64 [R]."""
    counts: np.ndarray
    """uint32 or uint64 [R]."""
    slice_rows: np.ndarray
    """int64 [slices], the rows of each slice."""

    def __len__(self) -> int:
        return len(self.low)

    @property
    def num_bytes(self) -> int:
        return self.high.nbytes + self.low.nbytes + self.counts.nbytes

    @property
    def starts(self) -> np.ndarray:
        """int64 [slices + 1], the first row of each slice and the end."""
        return starts_of(self.slice_rows)

    def between(self, first: int, stop: int) -> Windows:
        """The windows of the slices [first, stop), without a copy."""
        starts = self.starts
        rows = slice(int(starts[first]), int(starts[stop]))
        return Windows(self.high[rows], self.low[rows], self.counts[rows], self.slice_rows[first:stop])


class UnitWindows:
    """The windows of whole documents, to be counted in passes over ranges of sections.

    Attributes:
        slice_totals: int64 [slices], windows in each slice before equal ones are joined.
        heavy_counts: int64 [heavy prefixes], their occurrences.
    """

    def __init__(
        self,
        token_ids: np.ndarray,
        offsets: np.ndarray,
        coding: WindowCoding,
        special_ids: Sequence[int],
        token_vocab_size: int,
        *,
        frequent_bigrams: np.ndarray = NO_BIGRAM_FILTER,
        num_threads: int = 1,
    ) -> None:
        """Takes a byte per token.

        Args:
            token_ids: uint32 [N]; fewer than 2^32.
            offsets: int64 [D + 1], document d is token_ids[offsets[d] : offsets[d + 1]].
            frequent_bigrams: A `BigramFilter`'s words: windows also end where a bigram is not in it.

        Raises:
            ValueError: A token id is outside the vocabulary.
        """
        if len(token_ids) and int(token_ids.max()) >= token_vocab_size:
            raise ValueError(f"token id {token_ids.max()} is outside the vocabulary of {token_vocab_size:,} tokens")
        self.coding = coding
        self._token_ids = np.ascontiguousarray(token_ids, np.uint32)
        self._heavy = coding.heavy_tables()
        self._reach = np.zeros(len(token_ids), np.uint8)
        is_special = np.zeros(token_vocab_size, np.bool_)
        is_special[list(special_ids)] = True
        offsets = np.asarray(offsets, np.int64)

        def measure(first: int, stop: int) -> None:
            documents = offsets[first : stop + 1]
            arguments = (is_special, coding.max_fgram_length, frequent_bigrams, self._reach)
            kernels.measure_reach(self._token_ids, documents, *arguments)

        def count_slices(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
            totals, heavy_counts = np.zeros(coding.num_slices, np.int64), np.zeros(len(coding.heavy), np.int64)
            arguments = (coding.shape, self._heavy, totals, heavy_counts)
            kernels.count_slices(self._token_ids, self._reach, start, stop, *arguments)
            return totals, heavy_counts

        edges = np.searchsorted(offsets, np.linspace(0, len(token_ids), num_threads + 1)[1:-1])
        in_threads(measure, itertools.pairwise([0, *edges.tolist(), len(offsets) - 1]), num_threads)
        shares = np.linspace(0, len(token_ids), num_threads + 1).astype(np.int64).tolist()
        parts = in_threads(count_slices, itertools.pairwise(shares), num_threads)
        self.slice_totals = sum(totals for totals, _ in parts)
        self.heavy_counts = sum(heavy_counts for _, heavy_counts in parts)

    def passes(self, max_windows: int) -> Iterator[tuple[int, int]]:
        """Ranges of sections, of at most `max_windows` windows each or of one section."""
        per_section = self.slice_totals.reshape(self.coding.num_sections, -1).sum(axis=1)
        first, size = 0, 0
        for section, windows in enumerate(per_section.tolist()):
            if section > first and size + windows > max_windows:
                yield first, section
                first, size = section, 0
            size += windows
        yield first, self.coding.num_sections

    def count(self, first_section: int, stop_section: int) -> Windows:
        """The distinct windows in a range of sections. Takes 12 or 20 bytes per window, plus those of a slice."""
        coding, per_section = self.coding, self.coding.slices_per_section
        first_slice = first_section * per_section
        starts = starts_of(self.slice_totals[first_slice : stop_section * per_section])
        low = np.empty(int(starts[-1]), np.uint64)
        high = np.empty(len(low) if coding.num_words > 1 else 0, np.uint64)
        where = (0, len(self._token_ids), coding.shape, self._heavy, first_slice, starts[:-1].astype(np.uint64))
        kernels.scatter(self._token_ids, self._reach, *where, high, low)
        sort_slices(high, low, starts, coding.key_bits)
        counts, slice_rows = np.empty(len(low), np.uint32), np.empty(len(starts) - 1, np.int64)
        size = kernels.encode_slices(high, low, starts, counts, slice_rows)
        return Windows(high[:size], low[:size], counts[:size], slice_rows)


def sort_slices(high: np.ndarray, low: np.ndarray, starts: np.ndarray, key_bits: int) -> None:
    """Sort the keys inside each slice."""
    scratch = np.empty(int(np.diff(starts).max(initial=0)), np.uint64)
    sort = _PairSort(high, low, scratch) if len(high) else _WordSort(low, scratch, key_bits)
    bounds = starts.tolist()
    for start, stop in itertools.pairwise(bounds):
        if stop - start > 1:
            sort(start, stop)


class _WordSort:
    """Sorts slices of one-word keys, after a few trials in the way that is faster on this machine.

    NumPy's vectorised sort took a quarter of the radix sort's time on one machine and twice of it on another.
    """

    def __init__(self, keys: np.ndarray, scratch: np.ndarray, key_bits: int) -> None:
        self._keys, self._scratch, self._key_bits = keys, scratch, key_bits
        self._ways: list[Callable[[np.ndarray], Any]] = [np.ndarray.sort, self._radix_sort]
        self._seconds = [0.0, 0.0]  # per row, summed over the trials
        self._trials = 2 * _TRIAL_SLICES
        if len(keys):
            self._radix_sort(keys[:1])  # loads the kernel before its trials

    def __call__(self, start: int, stop: int) -> None:
        part = self._keys[start:stop]
        if not self._trials or stop - start < _TRIAL_ROWS:
            self._ways[0](part)
            return
        self._trials -= 1
        way = self._trials % 2
        began = time.perf_counter()
        self._ways[way](part)
        self._seconds[way] += (time.perf_counter() - began) / (stop - start)
        if not self._trials and self._seconds[1] < self._seconds[0]:
            self._ways.reverse()

    def _radix_sort(self, part: np.ndarray) -> None:
        kernels.radix_sort(part, self._key_bits, self._scratch)


class _PairSort:
    """Sorts slices of two-word keys: by the leading words, then what shares one."""

    def __init__(self, high: np.ndarray, low: np.ndarray, scratch: np.ndarray) -> None:
        self._high, self._low, self._scratch = high, low, scratch

    def __call__(self, start: int, stop: int) -> None:
        order = np.argsort(self._high[start:stop])
        scratch = self._scratch[: stop - start]
        for words in (self._high, self._low):
            kernels.gather(order, words, start, scratch)
            words[start:stop] = scratch
        kernels.sort_ties(self._high[start:stop], self._low[start:stop])


def in_threads(function: Callable[..., Any], arguments: Any, num_threads: int) -> list[Any]:
    """Results of the calls, in their order. The kernels let threads run beside each other."""
    if num_threads == 1:
        return [function(*each) for each in arguments]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(lambda each: function(*each), arguments))


def starts_of(sizes: np.ndarray) -> np.ndarray:
    """int64 [N + 1]: where each piece of these sizes starts, and the end."""
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts
