"""Which n-grams become f-grams: the exact top S of all partitions, from histograms of their counts.

All n-grams of one count and one length are a bucket. Rank order is count descending, then length, then token
ids ascending, so the ranking is a row of buckets, each ordered by token ids. Histograms of bucket sizes give
the cutoff and the rank at which every bucket begins; only the bucket at the cutoff is cut inside. A sub-gram
is never rarer and always shorter than what contains it, so whatever S is, what is kept is closed under
sub-grams, unless lengths have bounds of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from scone.errors import CorruptArtifactError
from scone.fgrams import FGrams, rank_order
from scone.storage import FileEntry, Folder

_LENGTH_BITS = 4
_NEVER = (1 << 63) - 1


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

    def select(self, num_fgrams: int, most_by_length: Mapping[int, int] | None = None) -> CountHistogram:
        """The buckets of the first `num_fgrams` of the ranking, cut inside where they end.

        `most_by_length` bounds the f-grams of some lengths; more frequent ones go first, and what a bound leaves out
        makes room for others.
        """
        kept = self.sizes.copy()
        for length, most in (most_by_length or {}).items():
            rows = self.lengths == length
            kept[rows] = _take_first(kept[rows], most)
        kept = _take_first(kept, num_fgrams)
        rows = kept > 0
        return CountHistogram(self.counts[rows], self.lengths[rows], kept[rows])

    def complete_from(self, counts: np.ndarray) -> CountHistogram:
        """The buckets of at least counts[n] occurrences for each length n."""
        rows = self.counts >= counts[self.lengths]
        return CountHistogram(self.counts[rows], self.lengths[rows], self.sizes[rows])

    def rows_of(self, ranges: Sequence[RankRange]) -> np.ndarray:
        """int64 [ranges, 2]: the rows of each range in the ranking of this histogram's n-grams.

        Of a range's last bucket only as many as the range keeps of it: no partition has more of the kept ones.
        """
        keys, ends = _bucket_keys(self.counts, self.lengths), np.concatenate([[0], np.cumsum(self.sizes)])
        first, last = (np.array([getattr(part, edge).key for part in ranges], np.int64) for edge in ("first", "last"))
        last_start = ends[np.searchsorted(keys, last)]
        stop = ends[np.searchsorted(keys, last, side="right")]
        last_sizes = np.array([part.last_size for part in ranges])
        return np.stack([ends[np.searchsorted(keys, first)], np.minimum(stop, last_start + last_sizes)], axis=1)

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


@dataclass(frozen=True, slots=True)
class Cutoff:
    """Where the selection ends, for each length n (index 0 to K)."""

    counts: tuple[int, ...]
    """All that occur more often are kept."""
    sizes: tuple[int, ...]
    """So many of those that occur just as often are kept, in rank order."""

    @classmethod
    def of(cls, selected: CountHistogram, max_fgram_length: int) -> Cutoff:
        counts, sizes = [], []
        for length in range(max_fgram_length + 1):
            rows = np.flatnonzero(selected.lengths == length)
            counts.append(int(selected.counts[rows[-1]]) if len(rows) else _NEVER)
            sizes.append(int(selected.sizes[rows[-1]]) if len(rows) else 0)
        return cls(tuple(counts), tuple(sizes))


def rank_ranges(selected: CountHistogram, rows_per_range: int) -> Iterator[RankRange]:
    """Cut a ranking into ranges of about `rows_per_range` f-grams, at bucket edges."""
    start, size = 0, 0
    for bucket, bucket_size in enumerate(selected.sizes.tolist()):
        size += bucket_size
        if size >= rows_per_range or bucket == len(selected.sizes) - 1:
            first, last = (Bucket(int(selected.counts[i]), int(selected.lengths[i])) for i in (start, bucket))
            yield RankRange(first, last, size, bucket_size)
            start, size = bucket + 1, 0


def rank_rows(pieces: Sequence[FGrams], cutoff: Cutoff) -> FGrams:
    """The selected ones of n-grams from several partitions, whose buckets are together, in rank order."""
    together = FGrams.concatenate(pieces)
    together = together.take(rank_order(together))
    cut_counts = np.array(cutoff.counts)[together.lengths]
    is_kept = together.counts > cut_counts
    is_cut = together.counts == cut_counts
    for length, size in enumerate(cutoff.sizes):
        is_kept[np.flatnonzero(is_cut & (together.lengths == length))[:size]] = True
    return together.take(is_kept)


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


def _take_first(sizes: np.ndarray, most: int) -> np.ndarray:
    """What is left of consecutive sizes when `most` are taken in all."""
    before = np.cumsum(sizes) - sizes
    taken: np.ndarray = np.clip(most - before, 0, sizes)
    return taken


def _bucket_keys(counts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64 that ascend in rank order."""
    keys: np.ndarray = lengths.astype(np.int64) - (counts.astype(np.int64) << _LENGTH_BITS)
    return keys
