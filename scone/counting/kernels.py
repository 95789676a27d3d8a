"""The kernels of counting, compiled by numba when first used and then kept on disk.

`shape` is `WindowCoding.shape`, `heavy` what `WindowCoding.heavy_tables` gives. A key is the 64-bit word `low`, or
two words, of which `high` has the leading 64 bits. Where keys have one word, `high` is empty.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]  # comes with numba, has no stubs
from numba import njit
from numba.core import types
from numba.extending import intrinsic

U = np.uint64
DENSE_COUNTS = 1 << 16  # counts below have a place each in a histogram
_INSERTION_ROWS = 24
_MOST_MOVES = 48

_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
_INVERSES = tuple(pow(multiplier, -1, 1 << 64) for multiplier in _MULTIPLIERS)
_M1, _M2 = (U(value) for value in _MULTIPLIERS)
_I1, _I2 = (U(value) for value in _INVERSES)


@intrinsic
def _leading_zeros(typing_context: Any, value: Any) -> Any:
    """Leading zero bits of a uint64, 64 for 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@njit(nogil=True, cache=True)
def mix(value: Any, bits: Any) -> Any:
    """An invertible mix of the low `bits` bits, so that leading bits are spread evenly."""
    mask = (U(1) << U(bits)) - U(1)
    value = (value * _M1) & mask
    value ^= value >> U((bits + 1) // 2)
    return (value * _M2) & mask


@njit(nogil=True, cache=True)
def unmix(value: Any, bits: Any) -> Any:
    """Gives back what `mix` was given."""
    mask = (U(1) << U(bits)) - U(1)
    value = (value * _I2) & mask
    value ^= value >> U((bits + 1) // 2)
    return (value * _I1) & mask


@njit(nogil=True, cache=True)
def hash_bigram(first: Any, second: Any) -> Any:
    """64 mixed bits of a bigram, for the filter."""
    value = ((U(first) << U(32)) | U(second)) * _M1
    value ^= value >> U(32)
    return value * _M2


@njit(nogil=True, cache=True)
def _is_frequent(bits: Any, first: Any, second: Any) -> Any:
    place = hash_bigram(first, second) & U(64 * len(bits) - 1)
    return (bits[np.int64(place >> U(6))] >> (place & U(63))) & U(1) != U(0)


@njit(nogil=True, cache=True)
def measure_reach(
    token_ids: Any, offsets: Any, is_special: Any, max_length: Any, frequent_bigrams: Any, reach: Any
) -> None:
    """reach[i]: tokens from i on, up to `max_length`, inside its document, before the next special id.

    If `frequent_bigrams` is a filter (see `bigram_filter.py`), also before the next infrequent bigram.
    """
    has_filter = len(frequent_bigrams) > 0
    for document in range(len(offsets) - 1):
        run = 0
        for i in range(offsets[document + 1] - 1, offsets[document] - 1, -1):
            if is_special[token_ids[i]]:
                run = 0
            elif has_filter and run > 0 and not _is_frequent(frequent_bigrams, token_ids[i], token_ids[i + 1]):
                run = 1
            else:
                run = min(run + 1, max_length)
            reach[i] = run


@njit(nogil=True, cache=True)
def _heavy_key(parent: Any, token: Any) -> Any:
    return ((U(parent) << U(19)) | U(token)) + U(1)


@njit(nogil=True, cache=True)
def _heavy_place(key: Any, size: Any) -> Any:
    return np.int64((key * _M1) >> U(32)) & (size - 1)


@njit(nogil=True, cache=True)
def add_heavy(keys: Any, numbers: Any, parent: Any, token: Any, number: Any) -> None:
    """Put a heavy prefix into the table that `find_heavy` reads."""
    key = _heavy_key(parent, token)
    place = _heavy_place(key, len(keys))
    while keys[place] != U(0):
        place = (place + 1) & (len(keys) - 1)
    keys[place], numbers[place] = key, number


@njit(nogil=True, cache=True)
def add_to_filter(filter_words: Any, first: Any, second: Any, token_bits: Any) -> None:
    """Mark a heavy bigram in the filter that `_may_be_heavy` reads."""
    mixed = mix((U(first) << U(token_bits)) | U(second), 2 * token_bits)
    place = mixed >> U(max(0, 2 * token_bits - 16))
    filter_words[np.int64(place >> U(6))] |= U(1) << (place & U(63))


@njit(nogil=True, cache=True)
def find_heavy(heavy: Any, parent: Any, token: Any) -> Any:
    """Number of the heavy prefix that is `token` after `parent`, or -1; see `WindowCoding.heavy_tables`."""
    keys, numbers, _ = heavy
    key = _heavy_key(parent, token)
    place = _heavy_place(key, len(keys))
    while keys[place] != U(0):
        if keys[place] == key:
            return np.int64(numbers[place])
        place = (place + 1) & (len(keys) - 1)
    return np.int64(-1)


@njit(nogil=True, cache=True)
def _may_be_heavy(heavy: Any, mixed: Any, bits: Any) -> Any:
    """False for most bigrams that are not heavy; bit = the mixed bigram's leading bits."""
    filter_bits = heavy[2]
    place = mixed >> U(max(0, bits - 16))
    return (filter_bits[np.int64(place >> U(6))] >> (place & U(63))) & U(1) != U(0)


@njit(nogil=True, cache=True)
def _class_of(token_ids: Any, i: Any, size: Any, sentinel: Any, max_length: Any, heavy: Any, heavy_counts: Any) -> Any:
    """Length of the shortest prefix of window i that is not heavy, K if all are; counts the heavy ones."""
    parent = np.int64(token_ids[i])
    for length in range(2, max_length):
        token = token_ids[i + length - 1] if length <= size else sentinel
        number = find_heavy(heavy, parent, token)
        if number < 0:
            return length
        if len(heavy_counts):
            heavy_counts[number] += 1
        parent = (1 << 18) + number
    return max_length


@njit(nogil=True, cache=True)
def _fold(value: Any, token: Any) -> Any:
    return (value ^ U(token)) * _M2 + U(1)


@njit(nogil=True, cache=True)
def _push(high: Any, low: Any, value: Any, bits: Any) -> Any:
    """`value` of `bits` bits (1 to 63) appended to a 128-bit key."""
    return (high << U(bits)) | (low >> U(64 - bits)), (low << U(bits)) | U(value)


@njit(nogil=True, cache=True)
def _mixed_pair(token_ids: Any, i: Any, size: Any, length: Any, shape: Any) -> Any:
    """The last two tokens of a window's prefix of `length` tokens, mixed, and moved by the tokens before them."""
    token_bits, sentinel = shape[0], shape[4]
    folded = U(0)
    for j in range(length - 2):
        folded = _fold(folded, token_ids[i + j] if j < size else sentinel)
    first = token_ids[i + length - 2] if length - 2 < size else sentinel
    second = token_ids[i + length - 1] if length - 1 < size else sentinel
    mixed = mix((U(first) << U(token_bits)) | U(second), 2 * token_bits)
    return (mixed + folded) & ((U(1) << U(2 * token_bits)) - U(1))


@njit(nogil=True, cache=True)
def _slice_of(place: Any, length: Any, shape: Any) -> Any:
    """Number of the slice at `place` (slice_bits bits) for windows whose shortest light prefix is `length` long."""
    inner_bits = shape[1] - shape[2]
    section, inner = place >> inner_bits, place & ((1 << inner_bits) - 1)
    return (((section * shape[5]) + length - 2) << inner_bits) | inner


@njit(nogil=True, cache=True)
def count_slices(
    token_ids: Any, reach: Any, start: Any, stop: Any, shape: Any, heavy: Any, totals: Any, heavy_counts: Any
) -> None:
    """Windows that start in [start, stop), per slice, added to `totals`; heavy prefixes, added to `heavy_counts`."""
    token_bits, slice_bits, _, max_length, sentinel, num_classes = shape
    for i in range(start, stop):
        size = reach[i]
        if size < 2:
            continue
        mixed = mix((U(token_ids[i]) << U(token_bits)) | U(token_ids[i + 1]), 2 * token_bits)
        length = 2
        if num_classes > 1:
            if _may_be_heavy(heavy, mixed, 2 * token_bits):
                length = _class_of(token_ids, i, size, sentinel, max_length, heavy, heavy_counts)
                if length > 2:
                    mixed = _mixed_pair(token_ids, i, size, length, shape)
            totals[_slice_of(np.int64(mixed >> U(2 * token_bits - slice_bits)), length, shape)] += 1
        else:
            totals[np.int64(mixed >> U(2 * token_bits - slice_bits))] += 1


@njit(nogil=True, cache=True)
def scatter(
    token_ids: Any,
    reach: Any,
    start: Any,
    stop: Any,
    shape: Any,
    heavy: Any,
    first_slice: Any,
    cursors: Any,
    high: Any,
    low: Any,
) -> None:
    """Write the keys of the windows that start in [start, stop) into their slices.

    `cursors` (uint64) are the places of the next key of slices [first_slice, first_slice + len(cursors)); windows of
    other slices are passed over. Unsigned indices spare the tests for negative ones, 2x here.
    """
    token_bits, slice_bits, _, max_length, _, num_classes = shape
    num_slices, is_wide = U(len(cursors)), len(high) > 0
    first = U(first_slice)
    residual_bits = 2 * token_bits - slice_bits
    residual_shift, token_shift = U(residual_bits), U(token_bits)
    residual_mask = (U(1) << residual_shift) - U(1)
    rest_bits = (max_length - 2) * token_bits
    rest_shift = U(rest_bits & 63)
    low_mask = (U(1) << rest_shift) - U(1) if rest_bits < 64 else ~U(0)
    high_mask = (U(1) << rest_shift) - U(1) if rest_bits > 64 else U(0)
    tail = U(max_length - 1)
    full = max_length
    rest_high, rest_low = U(0), U(0)  # the last K - 2 tokens of the window
    for i in range(start + 1, min(start + max_length - 1, len(token_ids))):
        rest_high, rest_low = _push(rest_high, rest_low, token_ids[i], token_bits)
    num_tokens = U(len(token_ids))
    for i in range(U(start), U(stop)):
        token = U(token_ids[i + tail]) if i + tail < num_tokens else U(0)
        if is_wide:
            rest_high = ((rest_high << token_shift) | (rest_low >> (U(64) - token_shift))) & high_mask
        rest_low = ((rest_low << token_shift) | token) & low_mask
        size = reach[i]
        if size < 2:
            continue
        mixed = mix((U(token_ids[i]) << token_shift) | U(token_ids[i + U(1)]), 2 * token_bits)
        target = mixed >> residual_shift
        length = 2
        if num_classes > 1:
            if _may_be_heavy(heavy, mixed, 2 * token_bits):
                length, mixed = _heavy_class(token_ids, i, size, shape, heavy, mixed)
                target = mixed >> residual_shift
            target = U(_slice_of(np.int64(target), length, shape))
        target -= first
        if target >= num_slices:  # also those before the first, which wrapped around
            continue
        residual = mixed & residual_mask
        if length > 2 or size < full:
            key_high, key_low = _short_key(token_ids, i, size, length, residual, shape)
        elif rest_bits < 64:
            key_low = rest_low | (residual << rest_shift)
            key_high = residual >> (U(64) - rest_shift) if rest_bits > 0 else U(0)
        else:
            key_low = rest_low
            key_high = rest_high | (residual << rest_shift)
        cursor = cursors[target]
        low[cursor] = key_low
        if is_wide:
            high[cursor] = key_high
        cursors[target] = cursor + U(1)


@njit(nogil=True, cache=True)
def _heavy_class(token_ids: Any, i: Any, size: Any, shape: Any, heavy: Any, mixed: Any) -> Any:
    """Length of the shortest light prefix of window i, and its mixed last pair (`mixed` for a length of 2)."""
    length = _class_of(token_ids, i, size, shape[4], shape[3], heavy, np.zeros(0, np.int64))
    if length > 2:
        mixed = _mixed_pair(token_ids, i, size, length, shape)
    return length, mixed


@njit(nogil=True, cache=True)
def _short_key(token_ids: Any, i: Any, size: Any, length: Any, residual: Any, shape: Any) -> Any:
    """The key of a window that is cut short or whose shortest light prefix is longer than two tokens."""
    token_bits, slice_bits, _, max_length, sentinel, _ = shape
    residual_bits = 2 * token_bits - slice_bits
    key_high, key_low = U(0), U(0)
    for j in range(length - 2):
        token = token_ids[i + U(j)] if j < size else sentinel
        key_high, key_low = _push(key_high, key_low, token, token_bits)
    if residual_bits > 0:
        key_high, key_low = _push(key_high, key_low, residual, residual_bits)
    for j in range(length, max_length):
        token = token_ids[i + U(j)] if j < size else sentinel
        key_high, key_low = _push(key_high, key_low, token, token_bits)
    return key_high, key_low


@njit(nogil=True, cache=True)
def radix_sort(keys: Any, key_bits: Any, scratch: Any) -> None:
    """Sort one-word keys; `scratch` has room for them."""
    digit_bits = 11
    size = len(keys)
    if size <= _INSERTION_ROWS:
        for i in range(1, size):
            key, j = keys[i], i
            while j > 0 and keys[j - 1] > key:
                keys[j] = keys[j - 1]
                j -= 1
            keys[j] = key
        return
    ends = np.empty((1 << digit_bits) + 1, np.int64)
    mask = U((1 << digit_bits) - 1)
    source, target = keys, scratch[:size]
    is_in_scratch = False
    for shift in range(0, key_bits, digit_bits):
        ends[:] = 0
        for i in range(size):
            ends[np.int64((source[i] >> U(shift)) & mask) + 1] += 1
        for value in range(1 << digit_bits):
            ends[value + 1] += ends[value]
        for i in range(size):
            digit = np.int64((source[i] >> U(shift)) & mask)
            target[ends[digit]] = source[i]
            ends[digit] += 1
        source, target = target, source
        is_in_scratch = not is_in_scratch
    if is_in_scratch:
        keys[:] = source


@njit(nogil=True, cache=True)
def gather(order: Any, rows: Any, start: Any, out: Any) -> None:
    """out[i] = rows[start + order[i]]"""
    for i in range(U(len(order))):
        out[i] = rows[U(start) + U(order[i])]


@njit(nogil=True, cache=True)
def sort_ties(high: Any, low: Any) -> None:
    """Sort by `low` what shares the `high` that the rows are sorted by.

    An insertion sort, which most rows pass with one comparison; a run that moves too much is left to a shell sort.
    """
    size = len(low)
    i = 1
    while i < size:
        if high[i] != high[i - 1] or low[i] >= low[i - 1]:
            i += 1
            continue
        key, j = low[i], i
        limit = i - _MOST_MOVES
        while j > 0 and j > limit and high[j - 1] == high[i] and low[j - 1] > key:
            low[j] = low[j - 1]
            j -= 1
        low[j] = key
        if j == limit:
            first, stop = j, i + 1
            while first > 0 and high[first - 1] == high[i]:
                first -= 1
            while stop < size and high[stop] == high[i]:
                stop += 1
            _shell_sort(low[first:stop])
            i = stop
        i += 1


@njit(nogil=True, cache=True)
def _shell_sort(keys: Any) -> None:
    size = len(keys)
    gap = 1
    while gap < size // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, size):
            key, j = keys[i], i
            while j >= gap and keys[j - gap] > key:
                keys[j] = keys[j - gap]
                j -= gap
            keys[j] = key
        gap //= 3


@njit(nogil=True, cache=True)
def encode_runs(high: Any, low: Any, size: Any, out: Any, out_high: Any, out_low: Any, out_counts: Any) -> Any:
    """Write the distinct ones of `size` sorted rows to the out arrays from `out` on, with their counts; the next `out`.

    The out arrays may be the rows themselves. Without branches on the keys, which no predictor would guess.
    """
    if size == 0:
        return out
    is_wide = len(high) > 0
    first, position = U(out), U(out)
    last = U(size - 1)
    if is_wide:
        for i in range(last):
            key_high, key_low = high[i], low[i]
            out_high[position] = key_high
            out_low[position] = key_low
            out_counts[position] = i + U(1)
            position += U((key_low != low[i + U(1)]) | (key_high != high[i + U(1)]))
        out_high[position] = high[last]
    else:
        for i in range(last):
            key_low = low[i]
            out_low[position] = key_low
            out_counts[position] = i + U(1)
            position += U(key_low != low[i + U(1)])
    out_low[position] = low[last]
    out_counts[position] = size
    for row in range(position, first, -1):
        out_counts[row] -= out_counts[row - U(1)]
    return np.int64(position) + 1


@njit(nogil=True, cache=True)
def encode_slices(high: Any, low: Any, starts: Any, counts: Any, slice_rows: Any) -> Any:
    """Run-length code sorted slices in place, one after the other without gaps; `slice_rows` gets the rows of each.

    Returns the rows of all.
    """
    out = 0
    for part in range(len(slice_rows)):
        start, end = starts[part], starts[part + 1]
        part_high = high[start:end] if len(high) > 0 else high
        after = encode_runs(part_high, low[start:end], end - start, out, high, low, counts)
        slice_rows[part] = after - out
        out = after
    return out


@njit(nogil=True, cache=True)
def merge_slices(
    a_high: Any,
    a_low: Any,
    a_counts: Any,
    a_starts: Any,
    b_high: Any,
    b_low: Any,
    b_counts: Any,
    b_starts: Any,
    out_high: Any,
    out_low: Any,
    out_counts: Any,
    out_rows: Any,
) -> Any:
    """Merge two sets of sorted, distinct rows slice by slice; counts of equal keys are added. Returns the rows written.

    `out_rows` gets the rows of each slice. Steps in both inputs are computed, not branched on: which key is the
    smaller one cannot be predicted.
    """
    is_wide = len(out_high) > 0
    out = U(0)
    for part in range(len(out_rows)):
        first = out
        i, a_end = U(a_starts[part]), U(a_starts[part + 1])
        j, b_end = U(b_starts[part]), U(b_starts[part + 1])
        while i < a_end and j < b_end:
            a_key, b_key = a_low[i], b_low[j]
            takes_a, takes_b = a_key <= b_key, b_key <= a_key
            if is_wide:
                a_first, b_first = a_high[i], b_high[j]
                takes_a = (a_first < b_first) | ((a_first == b_first) & takes_a)
                takes_b = (b_first < a_first) | ((a_first == b_first) & takes_b)
                out_high[out] = a_first if takes_a else b_first
            out_low[out] = a_key if takes_a else b_key
            out_counts[out] = a_counts[i] * takes_a + b_counts[j] * takes_b
            i += U(takes_a)
            j += U(takes_b)
            out += U(1)
        while i < a_end:
            if is_wide:
                out_high[out] = a_high[i]
            out_low[out], out_counts[out] = a_low[i], a_counts[i]
            i += U(1)
            out += U(1)
        while j < b_end:
            if is_wide:
                out_high[out] = b_high[j]
            out_low[out], out_counts[out] = b_low[j], b_counts[j]
            j += U(1)
            out += U(1)
        out_rows[part] = out - first
    return np.int64(out)


@njit(nogil=True, cache=True)
def _field(high: Any, low: Any, offset: Any, bits: Any) -> Any:
    """`bits` bits (up to 63) of a key, `offset` bits from its right end."""
    if offset >= 64:
        value = high >> U(offset - 64)
    else:
        value = low >> U(offset)
        if offset + bits > 64:
            value |= high << U(64 - offset)
    return value & ((U(1) << U(bits)) - U(1))


@njit(nogil=True, cache=True)
def _decode(high: Any, low: Any, part: Any, length: Any, shape: Any, tokens: Any) -> None:
    """The first `length` tokens of the window with this key in slice `part`."""
    token_bits, slice_bits, section_bits, max_length, _, num_classes = shape
    inner_bits = slice_bits - section_bits
    group = part >> inner_bits
    light_length = group % num_classes + 2
    place = ((group // num_classes) << inner_bits) | (part & ((1 << inner_bits) - 1))
    residual_bits = 2 * token_bits - slice_bits
    mixed = U(place)
    if residual_bits > 0:
        residual = _field(high, low, token_bits * (max_length - light_length), residual_bits)
        mixed = (mixed << U(residual_bits)) | residual
    folded = U(0)
    pair_offset = token_bits * (max_length - light_length) + residual_bits
    for j in range(light_length - 2):
        token = _field(high, low, pair_offset + token_bits * (light_length - 3 - j), token_bits)
        folded = _fold(folded, token)
        tokens[j] = token
    pair = unmix((mixed - folded) & ((U(1) << U(2 * token_bits)) - U(1)), 2 * token_bits)
    tokens[light_length - 2] = pair >> U(token_bits)
    tokens[light_length - 1] = pair & ((U(1) << U(token_bits)) - U(1))
    for n in range(light_length + 1, length + 1):
        tokens[n - 1] = _field(high, low, token_bits * (max_length - n), token_bits)


@njit(nogil=True, cache=True)
def walk(
    high: Any,
    low: Any,
    row_counts: Any,
    starts: Any,
    first: Any,
    first_slice: Any,
    shape: Any,
    min_counts: Any,
    wanted_counts: Any,
    dense: Any,
    tokens: Any,
    lengths: Any,
    counts: Any,
) -> Any:
    """Find the n-grams that occur min_counts[n] times or more in slices of sorted, distinct rows, from `first` on.

    Every n-gram is a prefix of the windows that start where it does: one pass keeps, for each n, where the current
    run of equal n-token prefixes began.

    dense[n, count] is their histogram. Those that occur wanted_counts[n] times or more, or too often to have a place
    there, are written to `tokens` [_, K], `lengths` and `counts`. Stops before the first slice whose n-grams might
    not find room. Returns (next slice, n-grams written).
    """
    token_bits, slice_bits, section_bits, max_length, sentinel, num_classes = shape
    is_wide = len(high) > 0
    inner_bits = slice_bits - section_bits
    key_bits = max_length * token_bits - slice_bits
    lowest = min_counts[2:].min()
    least_written = min(DENSE_COUNTS, wanted_counts[2:].min())
    # shared_tokens[z]: leading tokens shared by keys whose first difference is at bit z of 128
    shared_tokens = np.zeros(129, np.int64)
    for zeros in range(129):
        same_bits = zeros - (128 - key_bits)
        for n in range(2, max_length + 1):
            if same_bits >= key_bits - token_bits * (max_length - n):
                shared_tokens[zeros] = n
    run_row = np.zeros(max_length + 1, np.int64)
    run_total = np.zeros(max_length + 1, np.int64)
    decoded = np.zeros(max_length, np.uint32)
    out = 0
    for part in range(first, len(starts) - 1):
        start, end = starts[part], starts[part + 1]
        if start == end:
            continue
        most = (max_length - 1) * (end - start)
        if out + most > len(counts):
            mass = np.int64(0)
            for i in range(start, end):
                mass += np.int64(row_counts[i])
            most = min(most, (max_length - 1) * (mass // least_written))
            if out + most > len(counts):
                return part, out
        light_length = ((first_slice + part) >> inner_bits) % num_classes + 2
        total = np.int64(0)
        for n in range(max_length + 1):
            run_row[n] = start
            run_total[n] = 0
        for i in range(start, end):
            total += np.int64(row_counts[i])
            shared = light_length - 1
            if i + 1 < end:
                if is_wide and high[i] != high[i + 1]:
                    shared = shared_tokens[np.int64(_leading_zeros(high[i] ^ high[i + 1]))]
                else:
                    shared = shared_tokens[64 + np.int64(_leading_zeros(low[i] ^ low[i + 1]))]
                shared = max(shared, light_length - 1)
            for n in range(shared + 1, max_length + 1):
                count = total - run_total[n]
                if count < lowest:
                    break
                row = run_row[n]
                row_high = high[row] if is_wide else U(0)
                if n > light_length:
                    if _field(row_high, low[row], token_bits * (max_length - n), token_bits) == U(sentinel):
                        break
                elif n > 2:
                    _decode(row_high, low[row], first_slice + part, n, shape, decoded)
                    if decoded[n - 1] == sentinel:
                        break
                if count < min_counts[n]:
                    continue
                if count < DENSE_COUNTS:
                    dense[n, count] += 1
                    if count < wanted_counts[n]:
                        continue
                _decode(row_high, low[row], first_slice + part, n, shape, tokens[out])
                lengths[out] = n
                counts[out] = count
                out += 1
            for n in range(shared + 1, max_length + 1):
                run_row[n] = i + 1
                run_total[n] = total
    return len(starts) - 1, out
