"""The top S from histograms, against sorting everything."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scone.errors import CorruptArtifactError
from scone.fgrams import FGrams, rank_order
from scone.selection import (
    CountHistogram,
    Cutoff,
    RankRange,
    rank_ranges,
    rank_rows,
    read_histogram,
    write_histogram,
)
from scone.storage import Folder

MAX_LENGTH = 4
Ngram = tuple[int, ...]


def fgrams_of(counts: dict[Ngram, int]) -> FGrams:
    tokens = np.zeros((len(counts), MAX_LENGTH), np.uint32)
    for row, ngram in enumerate(counts):
        tokens[row, : len(ngram)] = ngram
    lengths = np.array([len(ngram) for ngram in counts], np.uint8)
    fgrams = FGrams(tokens, lengths, np.array(list(counts.values()), np.int64))
    return fgrams.take(rank_order(fgrams))


def ngrams_of(fgrams: FGrams) -> list[Ngram]:
    return [tuple(tokens[:n]) for tokens, n in zip(fgrams.tokens.tolist(), fgrams.lengths.tolist(), strict=True)]


def read_ranges(partitions: list[FGrams], ranges: list[RankRange], cutoff: Cutoff) -> list[FGrams]:
    """What the ranked files hold, read from each partition by its own histogram."""
    rows = [CountHistogram.of(fgrams).rows_of(ranges) for fgrams in partitions]
    return [
        rank_rows(
            [fgrams.take(slice(*part_rows[i])) for fgrams, part_rows in zip(partitions, rows, strict=True)], cutoff
        )
        for i in range(len(ranges))
    ]


def count_ngrams(tokens: list[int]) -> dict[Ngram, int]:
    lengths = range(2, MAX_LENGTH + 1)
    return Counter(tuple(tokens[i : i + n]) for n in lengths for i in range(len(tokens) - n + 1))


texts = st.lists(st.integers(0, 3), min_size=2, max_size=60)


bounds = st.dictionaries(st.integers(2, MAX_LENGTH), st.integers(1, 8), max_size=2)


@given(texts, st.integers(1, 4), st.integers(1, 200), st.integers(1, 20), bounds)
def test_selection_is_the_head_of_the_sorted_whole(
    tokens: list[int], num_partitions: int, num_fgrams: int, rows_per_range: int, most_by_length: dict[int, int]
) -> None:
    counts = count_ngrams(tokens)
    by_partition: list[dict[Ngram, int]] = [{} for _ in range(num_partitions)]
    for ngram, count in counts.items():
        by_partition[sum(ngram[:2]) % num_partitions][ngram] = count
    partitions = [fgrams_of(part) for part in by_partition]

    histogram = CountHistogram.merge(CountHistogram.of(part) for part in partitions)
    assert histogram.total == len(counts)
    selected = histogram.select(num_fgrams, most_by_length)
    ranges = list(rank_ranges(selected, rows_per_range))
    files = read_ranges(partitions, ranges, Cutoff.of(selected, MAX_LENGTH))

    left, expected = Counter(most_by_length), []
    for ngram in sorted(counts, key=lambda ngram: (-counts[ngram], len(ngram), ngram)):
        if len(ngram) not in most_by_length or left[len(ngram)]:
            left[len(ngram)] -= 1
            expected.append(ngram)
    expected = expected[:num_fgrams]
    assert [ngram for part in files for ngram in ngrams_of(part)] == expected
    assert [len(part) for part in files] == [part.size for part in ranges]
    assert selected.total == len(expected)
    assert selected.num_by_length == dict(sorted(Counter(map(len, expected)).items()))


@given(texts)
def test_every_prefix_of_the_ranking_is_closed_under_sub_grams(tokens: list[int]) -> None:
    kept: set[Ngram] = set()
    for ngram in ngrams_of(fgrams_of(count_ngrams(tokens))):
        kept.add(ngram)
        assert len(ngram) == 2 or {ngram[:-1], ngram[1:]} <= kept


def test_ties_at_the_cutoff_go_to_the_shorter_then_to_smaller_token_ids() -> None:
    fgrams = fgrams_of({(5, 5): 3, (5, 5, 5): 2, (9, 1): 2, (1, 9): 2, (1, 2): 1})
    selected = CountHistogram.of(fgrams).select(2)
    (part,) = rank_ranges(selected, 100)
    assert (part.size, part.last_size, part.last.count, part.last.length) == (2, 1, 2, 2)
    (ranked,) = read_ranges([fgrams], [part], Cutoff.of(selected, MAX_LENGTH))
    assert ngrams_of(ranked) == [(5, 5), (1, 9)]


def test_ranges_end_at_bucket_edges() -> None:
    fgrams = fgrams_of({(1, 1): 5, (1, 2): 4, (1, 3): 4, (1, 4): 4, (1, 5): 3})
    parts = list(rank_ranges(CountHistogram.of(fgrams), 2))
    assert [part.size for part in parts] == [4, 1]


def test_no_ngrams_give_no_ranges() -> None:
    empty = CountHistogram.merge([CountHistogram.of(FGrams.empty(MAX_LENGTH))])
    assert empty.total == 0
    assert list(rank_ranges(empty.select(10), 5)) == []


def test_histograms_read_back(tmp_path: Path) -> None:
    histogram = CountHistogram.of(fgrams_of({(1, 1): 1 << 40, (1, 2): 4, (1, 3): 4, (1, 4, 5): 4}))
    entry = write_histogram(Folder(tmp_path), "h.parquet", histogram)
    found = read_histogram(Folder(tmp_path), entry)
    assert found.counts.tolist() == [1 << 40, 4, 4]
    assert found.lengths.tolist() == [2, 2, 3]
    assert found.sizes.tolist() == [1, 2, 1]
    (tmp_path / "bad.parquet").write_bytes(b"x" * 64)
    with pytest.raises(CorruptArtifactError, match=r"bad\.parquet is not a count histogram"):
        read_histogram(Folder(tmp_path), Folder(tmp_path).describe_file("bad.parquet"))
