"""Counts n-grams of tokens that are in memory: windows, their walk and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scone.counting.coding import WindowCoding
from scone.counting.survivors import SurvivorCollector
from scone.counting.windows import UnitWindows, in_threads
from scone.fgrams import FGrams, rank_order

_SLICE_WINDOWS = 16384  # 128 or 256 KiB of keys: a slice is sorted in the cache
_PASS_WINDOWS = 1 << 26
_MAX_SECTION_BITS = 8


def count_ngrams(
    token_ids: np.ndarray,
    offsets: np.ndarray,
    *,
    max_fgram_length: int,
    token_vocab_size: int,
    special_ids: Sequence[int] = (),
    min_count: int = 1,
    num_threads: int = 1,
) -> FGrams:
    """All n-grams of 2 to K tokens that occur `min_count` times or more, in rank order.

    Takes up to 5 bytes per token, and 12 or 20 more for each of the 64 M windows that a thread works on at a time.

    Args:
        token_ids: uint32 [N]; fewer than 2^32.
        offsets: int64 [D + 1], document d is token_ids[offsets[d] : offsets[d + 1]]. No n-gram crosses its end.
        special_ids: Tokens that stand in no n-gram.

    Raises:
        ValueError: A token id is outside the vocabulary, K is not 2 to 8, or exact keys cannot hold the vocabulary.
    """
    num_slices = max(1, len(token_ids) // _SLICE_WINDOWS)
    slice_bits = (num_slices - 1).bit_length()
    sections = max(1, len(token_ids) * num_threads // (_PASS_WINDOWS // 4))
    section_bits = min(_MAX_SECTION_BITS, slice_bits, (sections - 1).bit_length())
    coding = WindowCoding.choose(max_fgram_length, token_vocab_size, special_ids, slice_bits, section_bits)
    unit = UnitWindows(token_ids, offsets, coding, special_ids, token_vocab_size, num_threads=num_threads)
    min_counts = np.full(max_fgram_length + 1, min_count, np.int64)

    def count(first: int, stop: int) -> FGrams:
        collector = SurvivorCollector(coding, min_counts, ())
        collector.add(first * coding.slices_per_section, unit.count(first, stop))
        return collector.finish().fgrams

    max_windows = min(_PASS_WINDOWS, -(-len(token_ids) // num_threads))
    fgrams = FGrams.concatenate(in_threads(count, unit.passes(max_windows), num_threads))
    return fgrams.take(rank_order(fgrams))
