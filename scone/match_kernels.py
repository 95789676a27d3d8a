"""The kernels of the match index, compiled by numba when first used. `matching.py` says what they work on.

`numbers` is (capacity, token_bits, key_bits, high_bits, remainder_bits) of the table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]  # comes with numba, has no stubs
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

STARTS, INVALID = 1, 2  # flags of a position: a document starts here; the token matches nothing
MISSING, REPEATED, TOO_FAR = 1, 2, 3  # problems of a row to insert
_BLOCK = 256  # positions in flight: their slots are prefetched together

U = np.uint64


@intrinsic
def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index]; worth 1.3x in CPU time on tables larger than the cache."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte_pointer = ir.IntType(8).as_pointer()
        pointer = builder.bitcast(builder.gep(data, [arguments[1]]), byte_pointer)
        number = ir.IntType(32)
        prototype = ir.FunctionType(ir.VoidType(), [byte_pointer, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, prototype, "llvm.prefetch.p0")
        builder.call(function, [pointer, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate


@njit(nogil=True)
def _locate(prefix: Any, token: Any, numbers: Any) -> Any:
    """(place in the table, remainder moved over the distance field) of a key."""
    capacity, token_bits, key_bits, high_bits, remainder_bits = numbers
    mask = (U(1) << U(key_bits)) - U(1)
    half = U((key_bits + 1) // 2)
    key = (U(prefix) << U(token_bits)) | U(token)
    key = (key * U(0x9E3779B97F4A7C15)) & mask
    key ^= key >> half
    key = (key * U(0xD6E8FEB86659FD93)) & mask
    key ^= key >> half
    key = (key * U(0xA0761D6478BD642F)) & mask
    place = ((key >> U(key_bits - high_bits)) * U(capacity)) >> U(high_bits)
    remainder = key & ((U(1) << U(remainder_bits)) - U(1))
    return np.int64(place), remainder << U(32 - remainder_bits)


@njit(nogil=True)
def _probe(slots: Any, place: Any, remainder: Any, remainder_bits: Any) -> Any:
    """Rank of the key, or -1."""
    distance_mask = (U(1) << U(32 - remainder_bits)) - U(1)
    wanted = remainder + U(1)
    while True:
        slot = slots[place]
        found = slot >> U(32)
        if found == wanted:
            return np.int64(slot & U(0xFFFFFFFF))
        if (found & distance_mask) < (wanted & distance_mask):
            return np.int64(-1)
        wanted += U(1)
        place += 1
        if place == len(slots):
            place = 0


@njit(nogil=True)
def _insert(slots: Any, place: Any, remainder: Any, remainder_bits: Any, rank: Any) -> Any:
    """False if an entry would lie too far from its place."""
    distance_mask = (U(1) << U(32 - remainder_bits)) - U(1)
    entry = ((remainder + U(1)) << U(32)) | U(rank)
    while True:
        resident = slots[place]
        if resident == U(0):
            slots[place] = entry
            return True
        if ((resident >> U(32)) & distance_mask) < ((entry >> U(32)) & distance_mask):
            slots[place] = entry
            entry = resident
        if (entry >> U(32)) & distance_mask == distance_mask:
            return False
        entry += U(1) << U(32)
        place += 1
        if place == len(slots):
            place = 0


@njit(nogil=True)
def _find_id(slots: Any, numbers: Any, vocab_size: Any, ngram: Any) -> Any:
    """Id of an n-gram (a token is its own), or -1."""
    found = np.int64(ngram[0])
    for position in range(1, len(ngram)):
        place, remainder = _locate(found, ngram[position], numbers)
        rank = _probe(slots, place, remainder, numbers[4])
        if rank < 0:
            return np.int64(-1)
        found = vocab_size + rank
    return found


@njit(nogil=True)
def insert_rows(slots: Any, numbers: Any, vocab_size: Any, first_rank: Any, tokens: Any, lengths: Any) -> Any:
    """(row, problem) of the first row that cannot be inserted, else (0, 0)."""
    for row in range(len(lengths)):
        last = np.int64(lengths[row]) - 1
        prefix = _find_id(slots, numbers, vocab_size, tokens[row, :last])
        if prefix < 0 or _find_id(slots, numbers, vocab_size, tokens[row, 1 : last + 1]) < 0:
            return row, MISSING
        place, remainder = _locate(prefix, tokens[row, last], numbers)
        if _probe(slots, place, remainder, numbers[4]) >= 0:
            return row, REPEATED
        if not _insert(slots, place, remainder, numbers[4], first_rank + row):
            return row, TOO_FAR
    return 0, 0


@njit(nogil=True)
def match_positions(
    slots: Any,
    numbers: Any,
    vocab_size: Any,
    max_length: Any,
    limit: Any,
    token_ids: Any,
    flags: Any,
    length: Any,
    fgram_id: Any,
) -> None:
    """Level by level over blocks of positions, so that a block's slots load together."""
    shorter = np.empty(_BLOCK + 1, np.int64)  # [j + 1]: id of the (n-1)-gram that ends at position j of the block
    longer = np.empty(_BLOCK + 1, np.int64)
    carry = np.full(max_length + 1, -1, np.int64)  # [n]: id of the n-gram that ends before the block
    places = np.empty(_BLOCK, np.int64)
    remainders = np.empty(_BLOCK, np.uint64)
    for start in range(0, len(token_ids), _BLOCK):
        size = min(_BLOCK, len(token_ids) - start)
        shorter[0] = carry[1]
        for j in range(size):
            shorter[j + 1] = -1 if flags[start + j] & INVALID else np.int64(token_ids[start + j])
        carry[1] = shorter[size]
        for n in range(2, max_length + 1):
            for j in range(size):
                places[j] = -1
                if shorter[j] >= 0 and shorter[j + 1] >= 0 and not flags[start + j] & STARTS:
                    places[j], remainders[j] = _locate(shorter[j], token_ids[start + j], numbers)
                    _prefetch(slots, places[j])
            longer[0] = carry[n]
            for j in range(size):
                longer[j + 1] = -1
                if places[j] >= 0:
                    rank = _probe(slots, places[j], remainders[j], numbers[4])
                    if 0 <= rank < limit:
                        longer[j + 1] = vocab_size + rank
                        length[start + j] = n
                        fgram_id[start + j] = rank
            carry[n] = longer[size]
            shorter, longer = longer, shorter


@njit(nogil=True)
def match_step(slots: Any, numbers: Any, vocab_size: Any, limit: Any, state: Any, token: Any) -> Any:
    """state[n - 1]: id of the n-gram that ends at the last token, or -1."""
    max_length = len(state)
    for n in range(2, max_length + 1):  # all keys are known before any probe: load their slots together
        if state[n - 2] >= 0:
            _prefetch(slots, _locate(state[n - 2], token, numbers)[0])
    length, fgram_id = 0, np.int64(-1)
    prefix = state[0]
    state[0] = token
    for n in range(2, max_length + 1):
        next_prefix = state[n - 1]
        state[n - 1] = -1
        if prefix >= 0 and state[n - 2] >= 0:
            place, remainder = _locate(prefix, token, numbers)
            rank = _probe(slots, place, remainder, numbers[4])
            if 0 <= rank < limit:
                state[n - 1] = vocab_size + rank
                length, fgram_id = n, rank
        prefix = next_prefix
    return length, fgram_id
