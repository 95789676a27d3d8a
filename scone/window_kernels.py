"""The kernels of counting, compiled by numba when first used. `counting.py` says what they work on.

Kernels that touch keys are made per number of 64-bit words, a constant to the compiler: loops over words vanish.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

U = np.uint64
_LINE = 8  # rows that are written to a slice together; scattered single writes miss the cache and the TLB
_INSERTION_ROWS = 24  # below, an insertion sort beats clearing the counters of a radix sort
_WIDE_DIGIT, _NARROW_DIGIT, _WIDE_ROWS = 11, 8, 4096

_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
_INVERSES = tuple(pow(multiplier, -1, 1 << 64) for multiplier in _MULTIPLIERS)
_M1, _M2 = (U(value) for value in _MULTIPLIERS)
_I1, _I2 = (U(value) for value in _INVERSES)


@njit(nogil=True)
def mix(value: Any, bits: Any) -> Any:
    """An invertible mix of the low `bits` bits, so that leading bits are spread evenly."""
    mask = (U(1) << U(bits)) - U(1)
    value = (value * _M1) & mask
    value ^= value >> U((bits + 1) // 2)
    return (value * _M2) & mask


@njit(nogil=True)
def unmix(value: Any, bits: Any) -> Any:
    """Gives back what `mix` was given."""
    mask = (U(1) << U(bits)) - U(1)
    value = (value * _I2) & mask
    value ^= value >> U((bits + 1) // 2)
    return (value * _I1) & mask


@njit(nogil=True)
def measure_reach(token_ids: Any, offsets: Any, is_special: Any, max_length: Any, reach: Any) -> None:
    """reach[i]: tokens from i on, up to `max_length`, inside its document and before the next special id."""
    for document in range(len(offsets) - 1):
        run = 0
        for i in range(offsets[document + 1] - 1, offsets[document] - 1, -1):
            run = 0 if is_special[token_ids[i]] else min(run + 1, max_length)
            reach[i] = run


@njit(nogil=True)
def count_slices(token_ids: Any, reach: Any, token_bits: Any, slice_bits: Any, totals: Any) -> None:
    """Windows per slice, added to `totals`."""
    for i in range(len(token_ids)):
        if reach[i] >= 2:
            bigram = (U(token_ids[i]) << U(token_bits)) | U(token_ids[i + 1])
            totals[np.int64(mix(bigram, 2 * token_bits) >> U(2 * token_bits - slice_bits))] += 1


@dataclass(frozen=True, slots=True)
class MapKernels:
    """Kernels over keys uint64 [N, num_words]."""

    scatter: Any
    sort: Any
    encode_runs: Any


@dataclass(frozen=True, slots=True)
class ReduceKernels:
    """Kernels over rows uint64 [N, num_words + 1]: a key and its count."""

    place: Any
    sort: Any
    walk: Any


@functools.cache
def map_kernels(num_words: int) -> MapKernels:
    """Compiled on first call of each, for each number of words."""
    return MapKernels(_make_scatter(num_words), _make_sort(num_words, num_words), _make_encode_runs(num_words))


@functools.cache
def reduce_kernels(num_words: int) -> ReduceKernels:
    """Compiled on first call of each, for each number of words."""
    return ReduceKernels(_make_place(num_words), _make_sort(num_words, num_words + 1), _make_walk(num_words))


def _make_scatter(num_words: int) -> Any:
    @njit(nogil=True)
    def scatter(
        token_ids: Any,
        reach: Any,
        token_bits: Any,
        slice_bits: Any,
        max_length: Any,
        sentinel: Any,
        cursors: Any,
        keys: Any,
    ) -> None:
        """Write the key of every window of two tokens or more into its slice; `cursors` are the slices' starts."""
        num_slices = 1 << slice_bits
        residual_bits = U(2 * token_bits - slice_bits)
        residual_mask = (U(1) << residual_bits) - U(1)
        shift, carry_shift = U(token_bits), U(64 - token_bits)
        lines = np.empty((num_slices * _LINE, num_words), np.uint64)
        filled = np.zeros(num_slices, np.int64)
        key = np.zeros(num_words, np.uint64)
        for i in range(len(token_ids)):
            size = reach[i]
            if size < 2:
                continue
            mixed = mix((U(token_ids[i]) << shift) | U(token_ids[i + 1]), 2 * token_bits)
            for word in range(num_words):
                key[word] = U(0)
            key[num_words - 1] = mixed & residual_mask
            for j in range(2, max_length):
                token = U(token_ids[i + j]) if j < size else U(sentinel)
                for word in range(num_words - 1):
                    key[word] = (key[word] << shift) | (key[word + 1] >> carry_shift)
                key[num_words - 1] = (key[num_words - 1] << shift) | token
            target = np.int64(mixed >> residual_bits)
            line = filled[target]
            for word in range(num_words):
                lines[target * _LINE + line, word] = key[word]
            filled[target] += 1
            if line == _LINE - 1:
                for row in range(_LINE):
                    for word in range(num_words):
                        keys[cursors[target] + row, word] = lines[target * _LINE + row, word]
                cursors[target] += _LINE
                filled[target] = 0
        for part in range(num_slices):
            for row in range(filled[part]):
                for word in range(num_words):
                    keys[cursors[part] + row, word] = lines[part * _LINE + row, word]

    return scatter


def _make_sort(num_words: int, num_columns: int) -> Any:
    @njit(nogil=True)
    def is_before(rows: Any, a: Any, row: Any) -> Any:
        for word in range(num_words):
            if row[word] != rows[a, word]:
                return row[word] < rows[a, word]
        return False

    @njit(nogil=True)
    def sort_few(rows: Any, start: Any, stop: Any) -> None:
        row = np.empty(num_columns, np.uint64)
        for i in range(start + 1, stop):
            for column in range(num_columns):
                row[column] = rows[i, column]
            j = i
            while j > start and is_before(rows, j - 1, row):
                for column in range(num_columns):
                    rows[j, column] = rows[j - 1, column]
                j -= 1
            for column in range(num_columns):
                rows[j, column] = row[column]

    @njit(nogil=True)
    def pass_by_digit(source: Any, target: Any, word: Any, shift: Any, digit_bits: Any, ends: Any) -> Any:
        """One stable pass of a radix sort; False, and nothing moved, if all rows have the same digit."""
        mask = (U(1) << U(digit_bits)) - U(1)
        size = len(source)
        for value in range((1 << digit_bits) + 1):
            ends[value] = 0
        for i in range(size):
            ends[np.int64((source[i, word] >> U(shift)) & mask) + 1] += 1
        if ends[np.int64((source[0, word] >> U(shift)) & mask) + 1] == size:
            return False
        for value in range(1 << digit_bits):
            ends[value + 1] += ends[value]
        for i in range(size):
            digit = np.int64((source[i, word] >> U(shift)) & mask)
            for column in range(num_columns):
                target[ends[digit], column] = source[i, column]
            ends[digit] += 1
        return True

    @njit(nogil=True)
    def sort_slices(rows: Any, starts: Any, key_bits: Any, scratch: Any) -> None:
        """Sort the rows of each slice by key; `scratch` has room for the largest slice."""
        ends = np.empty((1 << _WIDE_DIGIT) + 1, np.int64)
        for part in range(len(starts) - 1):
            start, stop = starts[part], starts[part + 1]
            if stop - start <= _INSERTION_ROWS:
                sort_few(rows, start, stop)
                continue
            digit_bits = _WIDE_DIGIT if stop - start >= _WIDE_ROWS else _NARROW_DIGIT
            source, target = rows[start:stop], scratch[: stop - start]
            is_in_scratch = False
            for word in range(num_words - 1, -1, -1):
                word_bits = min(64, key_bits - 64 * (num_words - 1 - word))
                for shift in range(0, word_bits, digit_bits):
                    if pass_by_digit(source, target, word, shift, digit_bits, ends):
                        source, target = target, source
                        is_in_scratch = not is_in_scratch
            if is_in_scratch:
                for i in range(stop - start):
                    for column in range(num_columns):
                        rows[start + i, column] = scratch[i, column]

    return sort_slices


def _make_encode_runs(num_words: int) -> Any:
    @njit(nogil=True)
    def encode_runs(keys: Any, starts: Any, counts: Any, slice_rows: Any) -> Any:
        """Move the distinct keys to the front; their number. `slice_rows` becomes the distinct keys per slice."""
        out = 0
        for part in range(len(starts) - 1):
            first = out
            i = starts[part]
            while i < starts[part + 1]:
                j = i + 1
                while j < starts[part + 1]:
                    is_equal = True
                    for word in range(num_words):
                        is_equal = is_equal and keys[j, word] == keys[i, word]
                    if not is_equal:
                        break
                    j += 1
                for word in range(num_words):
                    keys[out, word] = keys[i, word]
                counts[out] = j - i
                out += 1
                i = j
            slice_rows[part] = out - first
        return out

    return encode_runs


def _make_place(num_words: int) -> Any:
    @njit(nogil=True)
    def place(keys: Any, counts: Any, slice_rows: Any, cursors: Any, rows: Any) -> None:
        """Append a section's keys and counts to their slices in `rows`; moves `cursors`."""
        i = 0
        for part in range(len(slice_rows)):
            for _ in range(slice_rows[part]):
                for word in range(num_words):
                    rows[cursors[part], word] = keys[i, word]
                rows[cursors[part], num_words] = counts[i]
                cursors[part] += 1
                i += 1

    return place


def _make_walk(num_words: int) -> Any:
    @njit(nogil=True)
    def field(rows: Any, row: Any, offset: Any, bits: Any) -> Any:
        """`bits` bits of a key, `offset` bits from its right end."""
        word = num_words - 1 - offset // 64
        inside = offset % 64
        value = rows[row, word] >> U(inside)
        if inside + bits > 64:
            value |= rows[row, word - 1] << U(64 - inside)
        return value & ((U(1) << U(bits)) - U(1))

    @njit(nogil=True)
    def shared_tokens(rows: Any, row: Any, token_bits: Any, max_length: Any) -> Any:
        """Leading tokens that a row shares with the one before it; 0 stands for fewer than two."""
        for word in range(num_words):
            difference = rows[row, word] ^ rows[row - 1, word]
            if difference != U(0):
                bits_below = 64 * (num_words - 1 - word)
                for n in range(max_length - 1, 1, -1):
                    shift = token_bits * (max_length - n) - bits_below
                    if shift >= 64 or (shift > 0 and difference >> U(shift) == U(0)):
                        return n
                return 0
        return max_length

    @njit(nogil=True)
    def decode(rows: Any, row: Any, part: Any, length: Any, coding: Any, tokens: Any) -> None:
        token_bits, slice_bits, max_length, _ = coding
        residual_bits = 2 * token_bits - slice_bits
        residual = field(rows, row, token_bits * (max_length - 2), residual_bits)
        bigram = unmix((U(part) << U(residual_bits)) | residual, 2 * token_bits)
        tokens[0] = bigram >> U(token_bits)
        tokens[1] = bigram & ((U(1) << U(token_bits)) - U(1))
        for n in range(3, length + 1):
            tokens[n - 1] = field(rows, row, token_bits * (max_length - n), token_bits)

    @njit(nogil=True)
    def walk(
        rows: Any,
        starts: Any,
        first_slice: Any,
        coding: Any,
        min_count: Any,
        tokens: Any,
        lengths: Any,
        counts: Any,
        is_filling: Any,
    ) -> Any:
        """Number of n-grams with `min_count` or more, which are also written if `is_filling`.

        Every n-gram is a prefix of the windows that start where it does, and the windows are sorted: one pass
        keeps, for each n, where the current run of equal n-token prefixes began.
        """
        token_bits, _, max_length, sentinel = coding
        run_row = np.zeros(max_length + 1, np.int64)
        run_total = np.zeros(max_length + 1, np.int64)
        out, total = 0, np.int64(0)
        for part in range(len(starts) - 1):
            start, stop = starts[part], starts[part + 1]
            for n in range(max_length + 1):
                run_row[n] = start
                run_total[n] = total
            for i in range(start, stop):
                total += np.int64(rows[i, num_words])
                shared = shared_tokens(rows, i + 1, token_bits, max_length) if i + 1 < stop else 0
                for n in range(max(2, shared + 1), max_length + 1):
                    count = total - run_total[n]
                    row = run_row[n]
                    if count >= min_count and (
                        n == 2 or field(rows, row, token_bits * (max_length - n), token_bits) != U(sentinel)
                    ):
                        if is_filling:
                            decode(rows, row, first_slice + part, n, coding, tokens[out])
                            lengths[out] = n
                            counts[out] = count
                        out += 1
                    run_row[n] = i + 1
                    run_total[n] = total
        return out

    return walk
