"""Exact counts of all n-grams of 2 to K tokens in one scan.

Every position gives its window of K tokens, cut at the end of the document and before a special id. Windows go
into slices by an invertible mix of their first two tokens, are sorted and run-length coded (`count_windows`,
one unit of tokens). The windows of all units are merged slice by slice, and one walk over them counts the
n-grams of every length at once, because every n-gram is a prefix of the windows that start where it does
(`PartitionMerge`).

A key is the window itself, without hashing: the slice tells the leading bits of the mixed bigram, the key holds
its other bits and the further tokens, in one 64-bit word or two. A token id that no window can hold marks
positions past the end. A slice is sized for the cache; a partition, the piece of work of a merge, is a range of
slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scone.fgrams import FGrams
from scone.window_kernels import count_slices, map_kernels, measure_reach, reduce_kernels

MAX_FGRAM_LENGTH = 8
MAX_TOKEN_VOCAB_SIZE = 1 << 18

_WORD_BITS = 64
_MAX_WORDS = 2
# One word instead of two halves the bytes, which pays for up to this many slices; more slices only if they must be.
_PREFERRED_SLICE_BITS = 13
_MAX_SLICE_BITS = 16


@dataclass(frozen=True, slots=True)
class WindowCoding:
    """How a window becomes a slice number and a key."""

    max_fgram_length: int
    token_bits: int
    sentinel: int
    """Stands for a position past the end of a window."""
    slice_bits: int

    @classmethod
    def choose(
        cls, max_fgram_length: int, token_vocab_size: int, special_ids: Sequence[int], slice_bits: int
    ) -> WindowCoding:
        """The coding with at least 2^`slice_bits` slices, and more of them where that saves or allows the key.

        Raises:
            ValueError: K is not 2 to 8, or the vocabulary is too large for exact keys.
        """
        if not 2 <= max_fgram_length <= MAX_FGRAM_LENGTH:
            raise ValueError(f"max_fgram_length must be 2 to {MAX_FGRAM_LENGTH}, got {max_fgram_length}")
        if not 1 <= token_vocab_size <= MAX_TOKEN_VOCAB_SIZE:
            raise ValueError(
                f"counting takes up to {MAX_TOKEN_VOCAB_SIZE:,} token ids, the tokenizer has {token_vocab_size:,}"
            )
        token_bits = max(1, (token_vocab_size - 1).bit_length())
        sentinel = token_vocab_size
        if token_vocab_size == 1 << token_bits:
            # No spare id in these bits: special ids stand in no window, so one of them can serve.
            sentinel = special_ids[0] if special_ids else sentinel
            token_bits += 0 if special_ids else 1
        window_bits = max_fgram_length * token_bits
        for num_words, most in ((1, _PREFERRED_SLICE_BITS), (_MAX_WORDS, _MAX_SLICE_BITS)):
            needed = max(slice_bits, window_bits - num_words * _WORD_BITS)
            if needed <= max(slice_bits, most):
                return cls(max_fgram_length, token_bits, sentinel, min(needed, 2 * token_bits))
        raise ValueError(
            f"windows of {max_fgram_length} tokens out of {token_vocab_size:,} without a special id do not fit "
            "exact keys; name a special id or lower max_fgram_length"
        )

    @property
    def num_slices(self) -> int:
        return 1 << self.slice_bits

    @property
    def key_bits(self) -> int:
        return max(1, self.max_fgram_length * self.token_bits - self.slice_bits)

    @property
    def num_words(self) -> int:
        return -(-self.key_bits // _WORD_BITS)


@dataclass(frozen=True, slots=True)
class Windows:
    """Distinct windows with their counts, sorted by key inside each of consecutive slices."""

    keys: np.ndarray
    """uint64 [R, num_words]."""
    counts: np.ndarray
    """uint32 [R]."""
    slice_rows: np.ndarray
    """int64 [slices], the rows of each slice."""


def count_windows(
    token_ids: np.ndarray, offsets: np.ndarray, coding: WindowCoding, special_ids: Sequence[int], token_vocab_size: int
) -> Windows:
    """The windows of whole documents, over all slices.

    Args:
        token_ids: uint32 [N]; fewer than 2^32.
        offsets: int64 [D + 1], document d is token_ids[offsets[d] : offsets[d + 1]].

    Raises:
        ValueError: A token id is outside the vocabulary.
    """
    if len(token_ids) and int(token_ids.max()) >= token_vocab_size:
        raise ValueError(f"token id {token_ids.max()} is outside the vocabulary of {token_vocab_size:,} tokens")
    token_ids = np.ascontiguousarray(token_ids, np.uint32)
    is_special = np.zeros(token_vocab_size, np.bool_)
    is_special[list(special_ids)] = True
    reach = np.zeros(len(token_ids), np.uint8)
    measure_reach(token_ids, np.asarray(offsets, np.int64), is_special, coding.max_fgram_length, reach)
    totals = np.zeros(coding.num_slices, np.int64)
    count_slices(token_ids, reach, coding.token_bits, coding.slice_bits, totals)
    starts = _starts(totals)
    keys = np.empty((int(starts[-1]), coding.num_words), np.uint64)
    kernels = map_kernels(coding.num_words)
    shape = (coding.token_bits, coding.slice_bits, coding.max_fgram_length, coding.sentinel)
    kernels.scatter(token_ids, reach, *shape, starts[:-1].copy(), keys)
    scratch = np.empty((int(totals.max()), coding.num_words), np.uint64)
    kernels.sort(keys, starts, coding.key_bits, scratch)
    counts = np.empty(len(keys), np.uint32)
    num_distinct = kernels.encode_runs(keys, starts, counts, totals)
    return Windows(keys[:num_distinct], counts[:num_distinct], totals)


class PartitionMerge:
    """Merges the windows of all units in one range of slices, in 64-bit counters."""

    def __init__(self, coding: WindowCoding, first_slice: int, slice_rows: np.ndarray) -> None:
        """Takes memory for all rows: `slice_rows` int64 [slices] is their number per slice over all units."""
        self.coding = coding
        self.first_slice = first_slice
        self._starts = _starts(slice_rows)
        self._cursors = self._starts[:-1].copy()
        self._rows = np.empty((int(self._starts[-1]), coding.num_words + 1), np.uint64)

    def add(self, windows: Windows) -> None:
        """Add the windows of one unit in this range of slices.

        Raises:
            ValueError: More rows than were announced for a slice.
        """
        if (self._cursors + windows.slice_rows > self._starts[1:]).any():
            raise ValueError("a unit has more windows in a slice than were announced for the merge")
        place = reduce_kernels(self.coding.num_words).place
        place(windows.keys, windows.counts, windows.slice_rows, self._cursors, self._rows)

    def survivors(self, min_count: int) -> FGrams:
        """All n-grams of 2 to K tokens that occur `min_count` times or more, in no particular order.

        Raises:
            ValueError: Fewer rows were added than announced.
        """
        if (self._cursors != self._starts[1:]).any():
            raise ValueError("the merge got fewer windows than were announced for it")
        coding, kernels = self.coding, reduce_kernels(self.coding.num_words)
        largest = int(np.diff(self._starts).max(initial=0))
        kernels.sort(self._rows, self._starts, coding.key_bits, np.empty((largest, self._rows.shape[1]), np.uint64))
        numbers = (coding.token_bits, coding.slice_bits, coding.max_fgram_length, coding.sentinel)
        found = FGrams.empty(coding.max_fgram_length)
        for is_filling in (False, True):
            arrays = (found.tokens, found.lengths, found.counts)
            size = kernels.walk(self._rows, self._starts, self.first_slice, numbers, min_count, *arrays, is_filling)
            if not is_filling:
                tokens = np.zeros((size, coding.max_fgram_length), np.uint32)
                found = FGrams(tokens, np.empty(size, np.uint8), np.empty(size, np.int64))
        return found


def partition_slices(num_slices: int, num_partitions: int) -> np.ndarray:
    """int64 [P + 1]: partition p is the slices [bounds[p], bounds[p + 1])."""
    return np.arange(num_partitions + 1, dtype=np.int64) * num_slices // num_partitions


def _starts(sizes: np.ndarray) -> np.ndarray:
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts
