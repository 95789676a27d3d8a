"""Which n-grams become f-grams: the exact top S of all partitions, from histograms of their counts.

All n-grams of one count and one length are a bucket. Rank order is count descending, then length, then token
ids ascending, so the ranking is a row of buckets, each ordered by token ids. Histograms of bucket sizes give
the cutoff and the rank at which every bucket begins; only the bucket at the cutoff is cut inside. A sub-gram
is never rarer and always shorter than what contains it, so whatever S is, what is kept is closed under
sub-grams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from scone.errors import CorruptArtifactError
from scone.fgrams import FGrams, rank_order
from scone.storage import FileEntry, Folder

_LENGTH_BITS = 4


@dataclass(frozen=True, slots=True)
class CountHistogram:
    """Sizes of the buckets of a set of n-grams, in rank order."""

    counts: np.ndarray
    """int64 [H], descending."""
    lengths: np.ndarray
    """int64 [H], ascending where counts are equal."""
    sizes: np.ndarray
    """int64 [H], n-grams in the bucket."""

    @property
    def total(self) -> int:
        return int(self.sizes.sum())

    @property
    def num_by_length(self) -> dict[int, int]:
        """n-grams per length."""
        return {int(n): int(self.sizes[self.lengths == n].sum()) for n in np.unique(self.lengths)}

    @classmethod
    def of(cls, fgrams: FGrams) -> CountHistogram:
        keys, sizes = np.unique(_bucket_keys(fgrams.counts, fgrams.lengths), return_counts=True)
        return cls._from_keys(keys, sizes)

    @classmethod
    def of_buckets(cls, counts: np.ndarray, lengths: np.ndarray, sizes: np.ndarray) -> CountHistogram:
        """From buckets in any order, each of them there once."""
        keys = _bucket_keys(counts, lengths)
        order = np.argsort(keys)
        return cls._from_keys(keys[order], sizes[order])

    @classmethod
    def merge(cls, histograms: Iterable[CountHistogram]) -> CountHistogram:
        """The histogram of all n-grams together; one further histogram is in memory at a time."""
        merged = cls(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
        for histogram in histograms:
            both = (merged, histogram)
            all_keys = np.concatenate([_bucket_keys(h.counts, h.lengths) for h in both])
            keys, buckets = np.unique(all_keys, return_inverse=True)
            sizes = np.zeros(len(keys), np.int64)
            np.add.at(sizes, buckets, np.concatenate([h.sizes for h in both]))
            merged = cls._from_keys(keys, sizes)
        return merged

    def first(self, num_fgrams: int) -> CountHistogram:
        """The buckets of the first `num_fgrams` of the ranking; the last one may be cut."""
        ends = np.cumsum(self.sizes)
        num_buckets = int(np.searchsorted(ends, min(num_fgrams, self.total))) + 1
        sizes = self.sizes[:num_buckets].copy()
        sizes[-1:] -= max(0, int(sizes.sum()) - num_fgrams)
        return CountHistogram(self.counts[:num_buckets], self.lengths[:num_buckets], sizes)

    def rows_between(self, first: Bucket, last: Bucket) -> tuple[int, int, int]:
        """Rows of the ranking from `first` to `last`, both included: (start, start of `last`, stop)."""
        keys, ends = _bucket_keys(self.counts, self.lengths), np.concatenate([[0], np.cumsum(self.sizes)])
        return (
            int(ends[np.searchsorted(keys, first.key)]),
            int(ends[np.searchsorted(keys, last.key)]),
            int(ends[np.searchsorted(keys, last.key, side="right")]),
        )

    @classmethod
    def _from_keys(cls, keys: np.ndarray, sizes: np.ndarray) -> CountHistogram:
        return cls(-(keys >> _LENGTH_BITS), keys & ((1 << _LENGTH_BITS) - 1), sizes.astype(np.int64))


@dataclass(frozen=True, slots=True)
class Bucket:
    """All n-grams of one count and one length."""

    count: int
    length: int

    @property
    def key(self) -> int:
        return self.length - (self.count << _LENGTH_BITS)


@dataclass(frozen=True, slots=True)
class RankRange:
    """Consecutive whole buckets of the ranking, of which the last may be cut: one ranked file."""

    first: Bucket
    last: Bucket
    size: int
    """f-grams in the range."""
    last_size: int
    """f-grams of its last bucket that are kept."""


def rank_ranges(selected: CountHistogram, rows_per_range: int) -> Iterator[RankRange]:
    """Cut a ranking into ranges of about `rows_per_range` f-grams, at bucket edges."""
    start, size = 0, 0
    for bucket, bucket_size in enumerate(selected.sizes.tolist()):
        size += bucket_size
        if size >= rows_per_range or bucket == len(selected.sizes) - 1:
            first, last = (Bucket(int(selected.counts[i]), int(selected.lengths[i])) for i in (start, bucket))
            yield RankRange(first, last, size, bucket_size)
            start, size = bucket + 1, 0


def rank_rows(pieces: Sequence[FGrams], size: int) -> FGrams:
    """The first `size` rows, in rank order, of n-grams from several partitions."""
    together = FGrams.concatenate(pieces)
    return together.take(rank_order(together)[:size])


def write_histogram(folder: Folder, path: str, histogram: CountHistogram) -> FileEntry:
    """Publish a histogram as a small Parquet file."""
    sink = pa.BufferOutputStream()
    columns = {"count": histogram.counts, "length": histogram.lengths, "size": histogram.sizes}
    pq.write_table(pa.table(columns), sink, compression="zstd")
    return folder.write_bytes(path, sink.getvalue().to_pybytes())


def read_histogram(folder: Folder, entry: FileEntry) -> CountHistogram:
    """Raises CorruptArtifactError where the file is missing, truncated or not a histogram."""
    folder.check_size(entry)
    try:
        with folder.open_read(entry.path) as file:
            table = pq.read_table(file)
        return CountHistogram(*(table[name].to_numpy() for name in ("count", "length", "size")))
    except (pa.ArrowException, KeyError) as error:
        raise CorruptArtifactError(
            f"{folder.locate(entry.path)} is not a count histogram ({error}); delete it and run the stage again"
        ) from error


def _bucket_keys(counts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64 that ascend in rank order."""
    keys: np.ndarray = lengths.astype(np.int64) - (counts.astype(np.int64) << _LENGTH_BITS)
    return keys
