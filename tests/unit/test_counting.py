"""Exact counting against collections.Counter."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scone.counting import PartitionMerge, WindowCoding, Windows, count_windows, partition_slices
from scone.fgrams import FGrams

SPECIAL = 3
Ngram = tuple[int, ...]


def brute_force(documents: list[list[int]], max_length: int, special_ids: set[int], min_count: int) -> dict[Ngram, int]:
    counts: Counter[Ngram] = Counter()
    for document in documents:
        for n in range(2, max_length + 1):
            windows = (tuple(document[i : i + n]) for i in range(len(document) - n + 1))
            counts.update(window for window in windows if not special_ids & set(window))
    return {ngram: count for ngram, count in counts.items() if count >= min_count}


def to_dict(fgrams: FGrams) -> dict[Ngram, int]:
    rows = zip(fgrams.tokens.tolist(), fgrams.lengths.tolist(), fgrams.counts.tolist(), strict=True)
    return {tuple(tokens[:length]): count for tokens, length, count in rows}


def windows_of(documents: list[list[int]], coding: WindowCoding, special_ids: list[int], vocab_size: int) -> Windows:
    tokens = np.array([token for document in documents for token in document], np.uint32)
    return count_windows(tokens, np.cumsum([0, *map(len, documents)]), coding, special_ids, vocab_size)


def section(windows: Windows, first: int, stop: int) -> Windows:
    """The part of a unit's windows in the slices [first, stop)."""
    ends = np.cumsum([0, *windows.slice_rows])
    rows = slice(ends[first], ends[stop])
    return Windows(windows.keys[rows], windows.counts[rows], windows.slice_rows[first:stop])


def count(
    units: list[list[list[int]]],
    coding: WindowCoding,
    special_ids: list[int],
    vocab_size: int,
    num_partitions: int,
    min_count: int,
) -> dict[Ngram, int]:
    """The whole way: windows of each unit, merged partition by partition."""
    per_unit = [windows_of(documents, coding, special_ids, vocab_size) for documents in units]
    bounds = partition_slices(coding.num_slices, num_partitions)
    found: dict[Ngram, int] = {}
    for first, stop in itertools.pairwise(bounds.tolist()):
        sections = [section(windows, first, stop) for windows in per_unit]
        merge = PartitionMerge(coding, first, sum(s.slice_rows for s in sections))
        for windows in sections:
            merge.add(windows)
        survivors = to_dict(merge.survivors(min_count))
        assert not found.keys() & survivors.keys()
        found |= survivors
    return found


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[list[int]], int, int, list[int]]:
    """(documents, K, token_vocab_size, special ids)."""
    max_length = draw(st.integers(2, 8))
    vocab_size = draw(st.sampled_from([4, 7, 32_000, 1 << 16, 70_000, 1 << 17, 1 << 18]))
    special_ids = draw(st.sampled_from([[SPECIAL], [SPECIAL, vocab_size - 2], []]))
    if vocab_size == 1 << 18 and max_length == 8:
        special_ids = special_ids or [SPECIAL]
    alphabet = [*range(4), vocab_size - 2, vocab_size - 1]
    documents = draw(st.lists(st.lists(st.sampled_from(alphabet), max_size=40), max_size=8))
    return documents, max_length, vocab_size, special_ids


@settings(deadline=None, max_examples=150)  # the first call compiles the kernels
@given(corpora(), st.integers(0, 3), st.integers(1, 3), st.integers(1, 4), st.data())
def test_counts_are_those_of_a_counter(
    corpus: tuple, slice_bits: int, min_count: int, num_units: int, data: st.DataObject
) -> None:
    documents, max_length, vocab_size, special_ids = corpus
    coding = WindowCoding.choose(max_length, vocab_size, special_ids, slice_bits)
    num_partitions = data.draw(st.integers(1, min(5, coding.num_slices)))
    units = [documents[i::num_units] for i in range(num_units)]
    found = count(units, coding, special_ids, vocab_size, num_partitions, min_count)
    assert found == brute_force(documents, max_length, set(special_ids), min_count)


@pytest.mark.parametrize(
    ("max_length", "vocab_size", "slice_bits"), [(5, 32_000, 11), (5, 120_000, 2), (8, 1 << 18, 2)]
)
def test_large_slices_are_sorted_exactly(max_length: int, vocab_size: int, slice_bits: int) -> None:
    # Thousands of windows in one slice reach the radix sort, which small examples never do.
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.zipf(1.3, 60_000), vocab_size - 1) - 1
    documents = [tokens[i : i + 500].tolist() for i in range(0, len(tokens), 500)]
    special_ids = [vocab_size - 1]
    coding = WindowCoding.choose(max_length, vocab_size, special_ids, slice_bits)
    found = count([documents], coding, special_ids, vocab_size, 2, 2)
    assert found == brute_force(documents, max_length, set(special_ids), 2)


def test_counts_of_a_text_one_can_read() -> None:
    documents = [[0, 1, 2, 0, 1], [0, 1, SPECIAL, 1, 2]]
    coding = WindowCoding.choose(3, 4, [SPECIAL], 0)
    found = count([documents], coding, [SPECIAL], 4, 1, 2)
    assert found == {(0, 1): 3, (1, 2): 2}


def test_counts_of_a_merge_do_not_overflow_32_bits() -> None:
    coding = WindowCoding.choose(2, 4, [SPECIAL], 0)
    windows = windows_of([[1, 1]], coding, [SPECIAL], 4)
    merge = PartitionMerge(coding, 0, 3 * windows.slice_rows)
    for _ in range(3):
        merge.add(Windows(windows.keys, np.array([0xFFFFFFFF], np.uint32), windows.slice_rows))
    assert to_dict(merge.survivors(5)) == {(1, 1): 3 * 0xFFFFFFFF}


@pytest.mark.parametrize(
    ("max_length", "vocab_size", "num_words"),
    [(5, 32_000, 1), (5, 1 << 15, 1), (4, 50_257, 1), (5, 1 << 17, 2), (8, 32_000, 2), (8, 1 << 18, 2)],
)
def test_keys_take_one_word_where_they_fit(max_length: int, vocab_size: int, num_words: int) -> None:
    coding = WindowCoding.choose(max_length, vocab_size, [0], 6)
    assert coding.num_words == num_words
    assert 2 * coding.token_bits >= coding.slice_bits >= 6


def test_partitions_cover_all_slices_once() -> None:
    assert partition_slices(8, 3).tolist() == [0, 2, 5, 8]


def test_what_does_not_fit_exact_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="max_fgram_length must be 2 to 8, got 9"):
        WindowCoding.choose(9, 100, [], 0)
    with pytest.raises(ValueError, match="up to 262,144 token ids, the tokenizer has 262,145"):
        WindowCoding.choose(5, (1 << 18) + 1, [], 0)
    with pytest.raises(ValueError, match="8 tokens out of 262,144 without a special id do not fit exact keys"):
        WindowCoding.choose(8, 1 << 18, [], 0)


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    coding = WindowCoding.choose(2, 4, [SPECIAL], 0)
    with pytest.raises(ValueError, match="token id 4 is outside the vocabulary of 4 tokens"):
        windows_of([[1, 4]], coding, [SPECIAL], 4)


def test_a_merge_takes_exactly_what_was_announced() -> None:
    coding = WindowCoding.choose(2, 4, [SPECIAL], 0)
    windows = windows_of([[1, 1]], coding, [SPECIAL], 4)
    with pytest.raises(ValueError, match="more windows in a slice than were announced"):
        PartitionMerge(coding, 0, np.zeros(1, np.int64)).add(windows)
    with pytest.raises(ValueError, match="fewer windows than were announced"):
        PartitionMerge(coding, 0, np.array([2])).survivors(1)
