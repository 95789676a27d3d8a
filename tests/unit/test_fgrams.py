"""Rows of f-grams, their order and their files."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scone.errors import CorruptArtifactError
from scone.fgrams import FGrams, rank_order, read_fgrams, write_fgrams
from scone.storage import FileEntry, Folder

Row = tuple[tuple[int, ...], int]


def fgrams_of(rows: list[Row], max_length: int) -> FGrams:
    tokens = np.zeros((len(rows), max_length), np.uint32)
    for i, (ngram, _) in enumerate(rows):
        tokens[i, : len(ngram)] = ngram
    lengths = np.array([len(ngram) for ngram, _ in rows], np.uint8)
    return FGrams(tokens, lengths, np.array([count for _, count in rows], np.int64))


def rows_of(fgrams: FGrams) -> list[Row]:
    parts = zip(fgrams.tokens.tolist(), fgrams.lengths.tolist(), fgrams.counts.tolist(), strict=True)
    return [(tuple(tokens[:length]), count) for tokens, length, count in parts]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 300), min_size=2, max_size=4).map(tuple), st.integers(1, 4)),
        unique_by=lambda row: row[0],
    )
)
def test_rank_order_is_count_then_length_then_tokens(rows: list[Row]) -> None:
    fgrams = fgrams_of(rows, 4)
    expected = sorted(rows, key=lambda row: (-row[1], len(row[0]), row[0]))
    assert rows_of(fgrams.take(rank_order(fgrams))) == expected


def test_any_range_of_a_file_reads_back(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    num_rows = 150_000  # three row groups
    lengths = np.resize(np.array([2, 3, 5], np.uint8), num_rows)
    tokens = np.arange(num_rows * 5, dtype=np.uint32).reshape(-1, 5) * (np.arange(5) < lengths[:, None]).astype(
        np.uint32
    )
    fgrams = FGrams(tokens, lengths, np.arange(num_rows))
    entry = write_fgrams(folder, "a.parquet", fgrams)
    assert entry.rows == num_rows
    for start, stop in ((0, num_rows), (65_535, 65_537), (140_000, 150_000), (7, 7)):
        read = read_fgrams(folder, entry, 5, start, stop)
        assert np.array_equal(read.tokens, tokens[start:stop])
        assert np.array_equal(read.lengths, lengths[start:stop])
        assert np.array_equal(read.counts, fgrams.counts[start:stop])


def test_no_rows_are_a_file_too(tmp_path: Path) -> None:
    entry = write_fgrams(Folder(tmp_path), "a.parquet", FGrams.empty(5))
    assert len(read_fgrams(Folder(tmp_path), entry, 5)) == 0


def test_files_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    entry = write_fgrams(folder, "a.parquet", fgrams_of([((1, 2, 3), 5)], 3))
    with pytest.raises(CorruptArtifactError, match="n-grams of 3 to 3 tokens, expected 2 to 2"):
        read_fgrams(folder, entry, 2)
    with pytest.raises(CorruptArtifactError, match="holds 1 rows of tokens, count; its manifest says 2 rows"):
        read_fgrams(folder, FileEntry(entry.path, entry.num_bytes, entry.xxh3_128, 2), 3)
    (tmp_path / "b.parquet").write_bytes(b"x" * 100)
    with pytest.raises(CorruptArtifactError, match="not a readable Parquet file"):
        read_fgrams(folder, FileEntry("b.parquet", 100, "", 1), 3)
    pq.write_table(pa.table({"word": ["a"]}), tmp_path / "c.parquet")
    with pytest.raises(CorruptArtifactError, match="holds 1 rows of word"):
        read_fgrams(folder, folder.describe_file("c.parquet", rows=1), 3)
