"""Exact counting, from tokens to n-grams, against collections.Counter."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scone.counting import Quota, SurvivorCollector, UnitWindows, WindowCoding, WindowMerge, Windows, count_ngrams
from scone.fgrams import FGrams, rank_order

SPECIAL = 3
PLENTY_BYTES = 1 << 30
Ngram = tuple[int, ...]
Document = list[int]


def brute_force(documents: list[Document], max_length: int, special_ids: set[int], min_count: int) -> dict[Ngram, int]:
    counts: Counter[Ngram] = Counter()
    for document in documents:
        for n in range(2, max_length + 1):
            windows = (tuple(document[i : i + n]) for i in range(len(document) - n + 1))
            counts.update(window for window in windows if not special_ids & set(window))
    return {ngram: count for ngram, count in counts.items() if count >= min_count}


def to_dict(fgrams: FGrams) -> dict[Ngram, int]:
    rows = zip(fgrams.tokens.tolist(), fgrams.lengths.tolist(), fgrams.counts.tolist(), strict=True)
    found = {tuple(tokens[:length]): count for tokens, length, count in rows}
    assert len(found) == len(fgrams)
    return found


def from_counts(counts: dict[Ngram, int], max_length: int) -> FGrams:
    tokens = np.zeros((len(counts), max_length), np.uint32)
    for row, ngram in enumerate(counts):
        tokens[row, : len(ngram)] = ngram
    lengths = np.array([len(ngram) for ngram in counts], np.uint8)
    return FGrams(tokens, lengths, np.array(list(counts.values()), np.int64))


def unit_of(documents: list[Document], coding: WindowCoding, special_ids: list[int], vocab_size: int) -> UnitWindows:
    tokens = np.array([token for document in documents for token in document], np.uint32)
    return UnitWindows(tokens, np.cumsum([0, *map(len, documents)]), coding, special_ids, vocab_size)


def count(
    units: list[UnitWindows],
    coding: WindowCoding,
    min_count: int,
    *,
    pass_windows: int = 1 << 20,
    merge_bytes: int = PLENTY_BYTES,
) -> dict[Ngram, int]:
    """The whole way: the windows of each unit in passes, merged section by section, walked."""
    collector = SurvivorCollector(coding, np.full(coding.max_fgram_length + 1, min_count), ())
    passes = [[unit.count(*sections) for sections in unit.passes(pass_windows)] for unit in units]
    per_section = coding.slices_per_section
    for section in range(coding.num_sections):
        with TemporaryDirectory() as scratch:
            merge = WindowMerge(per_section, memory_bytes=merge_bytes, scratch=Path(scratch))
            for parts in passes:
                windows, skipped = parts[0], 0
                for windows in parts:
                    if section * per_section - skipped < len(windows.slice_rows):
                        break
                    skipped += len(windows.slice_rows)
                first = section * per_section - skipped
                merge.add(windows.between(first, first + per_section))
            for first_slice, windows in merge.merged():
                collector.add(section * per_section + first_slice, windows)
    if coding.heavy:
        totals = sum(unit.heavy_counts for unit in units).tolist()
        collector.add_counted(from_counts(dict(zip(coding.heavy, totals, strict=True)), coding.max_fgram_length))
    survivors = collector.finish()
    assert survivors.histogram.total == len(survivors.fgrams)
    return to_dict(survivors.fgrams)


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[Document], int, int, list[int]]:
    """(documents, K, token_vocab_size, special ids)."""
    max_length = draw(st.integers(2, 8))
    vocab_size = draw(st.sampled_from([4, 7, 32_000, 1 << 16, 70_000, 1 << 17, 1 << 18]))
    special_ids = draw(st.sampled_from([[SPECIAL], [SPECIAL, vocab_size - 2], []]))
    if vocab_size == 1 << 18 and max_length == 8:
        special_ids = special_ids or [SPECIAL]
    alphabet = [*range(4), vocab_size - 2, vocab_size - 1]
    documents = draw(st.lists(st.lists(st.sampled_from(alphabet), max_size=40), max_size=8))
    return documents, max_length, vocab_size, special_ids


def heaviest(documents: list[Document], max_length: int, special_ids: list[int], min_count: int) -> list[Ngram]:
    return [
        ngram for ngram in brute_force(documents, max_length, set(special_ids), min_count) if len(ngram) < max_length
    ]


@settings(deadline=None, max_examples=150)  # the first call compiles the kernels
@given(corpora(), st.integers(0, 3), st.integers(0, 3), st.integers(1, 3), st.integers(1, 4), st.data())
def test_counts_are_those_of_a_counter(
    corpus: tuple, slice_bits: int, section_bits: int, min_count: int, num_units: int, data: st.DataObject
) -> None:
    documents, max_length, vocab_size, special_ids = corpus
    coding = WindowCoding.choose(max_length, vocab_size, special_ids, slice_bits, section_bits)
    if data.draw(st.booleans(), label="has heavy prefixes"):
        coding = coding.with_heavy(heaviest(documents, max_length, special_ids, data.draw(st.integers(1, 6))))
    units = [unit_of(documents[i::num_units], coding, special_ids, vocab_size) for i in range(num_units)]
    limits = {
        "pass_windows": data.draw(st.sampled_from([1, 5, 1 << 20]), label="windows of a pass"),
        "merge_bytes": data.draw(st.sampled_from([0, 300, PLENTY_BYTES]), label="bytes of a merge"),
    }
    expected = brute_force(documents, max_length, set(special_ids), min_count)
    assert count(units, coding, min_count, **limits) == expected


@settings(deadline=None, max_examples=50)
@given(corpora(), st.integers(1, 3), st.integers(1, 3))
def test_counts_in_memory_are_in_rank_order(corpus: tuple, min_count: int, num_threads: int) -> None:
    documents, max_length, vocab_size, special_ids = corpus
    fgrams = count_ngrams(
        np.array([token for document in documents for token in document], np.uint32),
        np.cumsum([0, *map(len, documents)]),
        max_fgram_length=max_length,
        token_vocab_size=vocab_size,
        special_ids=special_ids,
        min_count=min_count,
        num_threads=num_threads,
    )
    expected = brute_force(documents, max_length, set(special_ids), min_count)
    ranking = sorted(expected.items(), key=lambda row: (-row[1], len(row[0]), row[0]))
    assert list(to_dict(fgrams).items()) == ranking


def zipf_documents(vocab_size: int, num_tokens: int = 60_000) -> list[Document]:
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.zipf(1.3, num_tokens), vocab_size - 1) - 1
    return [tokens[i : i + 500].tolist() for i in range(0, len(tokens), 500)]


@pytest.mark.parametrize(
    ("max_length", "vocab_size", "slice_bits"), [(5, 32_000, 11), (5, 120_000, 2), (8, 1 << 18, 2)]
)
@pytest.mark.parametrize("heavy_count", [0, 300])
def test_large_slices_are_counted_exactly(max_length: int, vocab_size: int, slice_bits: int, heavy_count: int) -> None:
    # Thousands of windows in one slice reach the radix sort, which small examples never do.
    documents, special_ids = zipf_documents(vocab_size), [vocab_size - 1]
    coding = WindowCoding.choose(max_length, vocab_size, special_ids, slice_bits, 1)
    if heavy_count:
        coding = coding.with_heavy(heaviest(documents, max_length, special_ids, heavy_count))
        assert len(coding.heavy[-1]) > 2
    units = [unit_of(documents[i::2], coding, special_ids, vocab_size) for i in range(2)]
    expected = brute_force(documents, max_length, set(special_ids), 2)
    assert count(units, coding, 2, pass_windows=20_000, merge_bytes=500_000) == expected


def test_heavy_prefixes_make_slices_even() -> None:
    documents = zipf_documents(1000)
    coding = WindowCoding.choose(5, 1000, [], 7)
    plain = unit_of(documents, coding, [], 1000).slice_totals
    coding = coding.with_heavy(heaviest(documents, 5, [], 120))
    even = unit_of(documents, coding, [], 1000).slice_totals
    assert plain.sum() == even.sum()
    assert even.reshape(coding.num_classes, -1).sum(axis=0).max() < plain.max() / 3


def test_all_ngrams_of_a_repeated_token_are_counted_beyond_16_bits() -> None:
    documents = [[1] * 100_000]
    coding = WindowCoding.choose(3, 4, [], 0)
    found = count([unit_of(documents, coding, [], 4)], coding, 2)
    assert found == {(1, 1): 99_999, (1, 1, 1): 99_998}


def test_counts_of_a_text_one_can_read() -> None:
    documents = [[0, 1, 2, 0, 1], [0, 1, SPECIAL, 1, 2]]
    coding = WindowCoding.choose(3, 4, [SPECIAL], 0)
    assert count([unit_of(documents, coding, [SPECIAL], 4)], coding, 2) == {(0, 1): 3, (1, 2): 2}


def test_counts_of_a_merge_do_not_overflow_32_bits(tmp_path: Path) -> None:
    coding = WindowCoding.choose(2, 4, [SPECIAL], 0)
    windows = unit_of([[1, 1]], coding, [SPECIAL], 4).count(0, 1)
    merge = WindowMerge(coding.num_slices, memory_bytes=PLENTY_BYTES, scratch=tmp_path)
    for _ in range(3):
        largest = np.full(len(windows), 0xFFFFFFFF, np.uint32)
        merge.add(Windows(windows.high, windows.low, largest, windows.slice_rows))
    ((first, merged),) = merge.merged()
    assert (first, merged.counts.tolist()) == (0, [3 * 0xFFFFFFFF])


def test_a_merge_without_room_goes_to_disk_and_gives_the_same(tmp_path: Path) -> None:
    coding = WindowCoding.choose(4, 32_000, [], 6)
    units = [unit_of(zipf_documents(32_000)[i::6], coding, [], 32_000).count(0, 1) for i in range(6)]
    merged = []
    for memory_bytes in (PLENTY_BYTES, 200_000):
        merge = WindowMerge(coding.num_slices, memory_bytes=memory_bytes, scratch=tmp_path)
        for unit in units:
            merge.add(unit)
        pieces = [windows for _, windows in merge.merged()]
        merged.append([np.concatenate([getattr(p, name) for p in pieces]) for name in ("low", "counts", "slice_rows")])
        assert (merge.spilled_bytes > 0) == (memory_bytes != PLENTY_BYTES)
    assert all(np.array_equal(*both) for both in zip(*merged, strict=True))


def test_a_merge_refuses_another_range_of_slices(tmp_path: Path) -> None:
    coding = WindowCoding.choose(2, 4, [SPECIAL], 1)
    windows = unit_of([[1, 1]], coding, [SPECIAL], 4).count(0, 1)
    with pytest.raises(ValueError, match="a merge of 1 slices got 2"):
        WindowMerge(1, memory_bytes=0, scratch=tmp_path).add(windows)


@settings(deadline=None, max_examples=50)
@given(corpora(), st.integers(1, 30))
def test_survivors_are_complete_down_to_what_they_say(corpus: tuple, size: int) -> None:
    documents, max_length, vocab_size, special_ids = corpus
    coding = WindowCoding.choose(max_length, vocab_size, special_ids, 2)
    collector = SurvivorCollector(coding, np.ones(max_length + 1), [Quota(tuple(range(2, max_length + 1)), size)])
    collector._limit = size  # else small examples keep everything
    unit = unit_of(documents, coding, special_ids, vocab_size)
    for section in range(coding.num_sections):
        collector.add(section * coding.slices_per_section, unit.count(section, section + 1))
    survivors = collector.finish()
    expected = brute_force(documents, max_length, set(special_ids), 1)
    least = survivors.complete_from
    assert to_dict(survivors.fgrams) == {ngram: n for ngram, n in expected.items() if n >= least[len(ngram)]}
    assert len(survivors.fgrams) >= min(size, len(expected))
    of_all = Counter((n, len(ngram)) for ngram, n in expected.items())
    histogram = survivors.histogram
    buckets = zip(histogram.counts.tolist(), histogram.lengths.tolist(), strict=True)
    assert dict(zip(buckets, histogram.sizes.tolist(), strict=True)) == of_all


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3), st.integers(0, 3), st.integers(0, 5))
def test_rank_order_of_many_rows_is_that_of_few(spread: int, num_large: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, max_length = 10_000, 6
    lengths = rng.integers(2, max_length + 1, size).astype(np.uint8)
    tokens = rng.integers(0, 10**spread, (size, max_length)).astype(np.uint32)
    tokens[np.arange(max_length) >= lengths[:, None]] = 0
    counts = rng.integers(1, 4, size)
    counts[: 10 * num_large] = rng.integers(1 << 16, 1 << 40, 10 * num_large)
    fgrams = FGrams(tokens, lengths, counts)
    expected = fgrams.take(np.lexsort((*tokens.T[::-1], lengths, -counts)))
    found = fgrams.take(rank_order(fgrams))
    assert np.array_equal(found.tokens, expected.tokens)
    assert np.array_equal(found.counts, expected.counts)


@pytest.mark.parametrize(
    ("max_length", "vocab_size", "num_words"),
    [(5, 32_000, 1), (5, 1 << 15, 1), (4, 50_257, 1), (5, 1 << 17, 2), (8, 32_000, 2), (8, 1 << 18, 2)],
)
def test_keys_take_one_word_where_they_fit(max_length: int, vocab_size: int, num_words: int) -> None:
    coding = WindowCoding.choose(max_length, vocab_size, [0], 6)
    assert coding.num_words == num_words
    assert 2 * coding.token_bits >= coding.slice_bits >= 6
    assert WindowCoding.from_dict(coding.to_dict()) == coding


def test_what_does_not_fit_exact_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="max_fgram_length must be 2 to 8, got 9"):
        WindowCoding.choose(9, 100, [], 0)
    with pytest.raises(ValueError, match="up to 262,144 token ids, the tokenizer has 262,145"):
        WindowCoding.choose(5, (1 << 18) + 1, [], 0)
    with pytest.raises(ValueError, match="8 tokens out of 262,144 without a special id do not fit exact keys"):
        WindowCoding.choose(8, 1 << 18, [], 0)


def test_heavy_prefixes_that_cannot_be_are_refused() -> None:
    coding = WindowCoding.choose(4, 100, [], 0)
    with pytest.raises(ValueError, match=r"a heavy prefix has 2 to 3 tokens, got \[1, 2, 3, 4\]"):
        coding.with_heavy([(1, 2, 3, 4)])
    with pytest.raises(ValueError, match=r"\[1, 2, 3\] cannot be heavy where \[1, 2\] is not"):
        coding.with_heavy([(1, 2, 3)])


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    coding = WindowCoding.choose(2, 4, [SPECIAL], 0)
    with pytest.raises(ValueError, match="token id 4 is outside the vocabulary of 4 tokens"):
        unit_of([[1, 4]], coding, [SPECIAL], 4)
