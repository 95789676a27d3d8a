"""What the workers of the count stage do: map, reduce, rank, index. `count.py` says how they follow each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipelines.units import Unit
from scone.artifacts import WORK, UnitRecord
from scone.fgrams import FGrams, rank_order, read_fgrams, write_fgrams
from scone.selection import Bucket, CountHistogram, RankRange, rank_rows, read_histogram, write_histogram
from scone.storage import FileEntry, Folder, scratch_folder
from scone.tokens import Documents, read_documents
from scone.vocabulary import MATCH_INDEX_FILE, RANKED_FOLDER

if TYPE_CHECKING:
    from scone.counting import WindowCoding

_INDEX_PIECE_ROWS = 1 << 18


@dataclass(frozen=True, slots=True)
class MapWork:
    """Counts the windows of a unit's token shards into one count object."""

    tokens_folder: Folder
    token_vocab_size: int
    special_ids: tuple[int, ...]
    coding: WindowCoding
    num_partitions: int

    def __call__(self, folder: Folder, unit: Unit) -> UnitRecord:
        from scone.count_object import write_count_object
        from scone.counting import count_windows

        shards = [read_documents(self.tokens_folder, FileEntry.from_dict(shard)) for shard in unit.spec["shards"]]
        token_ids, offsets = _join(shards)
        windows = count_windows(token_ids, offsets, self.coding, self.special_ids, self.token_vocab_size)
        path = f"{WORK}/map/{unit.id}.bin"
        entry = write_count_object(folder, path, windows, self.coding, self.num_partitions)
        return UnitRecord(unit.id, (entry,), {"tokens": len(token_ids), "documents": len(offsets) - 1})


@dataclass(frozen=True, slots=True)
class ReduceWork:
    """Merges one partition of all count objects into its frequent n-grams and their count histogram."""

    objects: tuple[FileEntry, ...]
    coding: WindowCoding
    num_partitions: int
    min_count: int

    def __call__(self, folder: Folder, unit: Unit) -> UnitRecord:
        from scone.count_object import CountObject
        from scone.counting import PartitionMerge, partition_slices

        partition = int(unit.spec["partition"])
        bounds = partition_slices(self.coding.num_slices, self.num_partitions)
        slice_rows = np.zeros(int(bounds[partition + 1] - bounds[partition]), np.int64)
        for entry in self.objects:
            slice_rows += CountObject(folder, entry, self.coding, self.num_partitions).slice_rows(partition)
        merge = PartitionMerge(self.coding, int(bounds[partition]), slice_rows)
        for entry in self.objects:
            merge.add(CountObject(folder, entry, self.coding, self.num_partitions).read(partition))
        survivors = merge.survivors(self.min_count)
        survivors = survivors.take(rank_order(survivors))
        path = f"{WORK}/reduce/{unit.id}"
        files = (
            write_fgrams(folder, f"{path}.parquet", survivors),
            write_histogram(folder, f"{path}-histogram.parquet", CountHistogram.of(survivors)),
        )
        return UnitRecord(unit.id, files, {"survivors": len(survivors)})


@dataclass(frozen=True, slots=True)
class RankWork:
    """Brings a range of the ranking together from all partitions into one ranked file."""

    survivors: tuple[tuple[FileEntry, FileEntry], ...]
    """(n-grams in rank order, their histogram) of each partition."""
    max_fgram_length: int

    def __call__(self, folder: Folder, unit: Unit) -> UnitRecord:
        spec = dict(unit.spec)
        part = RankRange(Bucket(**spec.pop("first")), Bucket(**spec.pop("last")), **spec)
        pieces = []
        for fgrams, histogram in self.survivors:
            start, last_start, stop = read_histogram(folder, histogram).rows_between(part.first, part.last)
            # No partition has more of the last bucket among the kept ones than are kept in all.
            stop = min(stop, last_start + part.last_size)
            pieces.append(read_fgrams(folder, fgrams, self.max_fgram_length, start, stop))
        ranked = rank_rows(pieces, part.size)
        return UnitRecord(unit.id, (write_fgrams(folder, f"{RANKED_FOLDER}/{unit.id}.parquet", ranked),))


@dataclass(frozen=True, slots=True)
class IndexWork:
    """Builds the match index from the ranked files; holds the table and a piece of the ranking in memory."""

    ranked: tuple[FileEntry, ...]
    num_fgrams: int
    max_fgram_length: int
    token_vocab_size: int
    special_ids: tuple[int, ...]

    def __call__(self, folder: Folder, unit: Unit) -> UnitRecord:
        from scone.matching import MatchIndex

        index = MatchIndex.build_in_pieces(
            ((fgrams.tokens, fgrams.lengths) for fgrams in self._pieces(folder)),
            num_fgrams=self.num_fgrams,
            max_fgram_length=self.max_fgram_length,
            token_vocab_size=self.token_vocab_size,
            special_ids=self.special_ids,
        )
        with scratch_folder("match-index") as scratch:
            index.save(scratch / MATCH_INDEX_FILE)
            entry = folder.publish_file(scratch / MATCH_INDEX_FILE, MATCH_INDEX_FILE)
        return UnitRecord(unit.id, (entry,))

    def _pieces(self, folder: Folder) -> Iterator[FGrams]:
        for entry in self.ranked:
            for start in range(0, entry.rows, _INDEX_PIECE_ROWS):
                stop = min(start + _INDEX_PIECE_ROWS, entry.rows)
                yield read_fgrams(folder, entry, self.max_fgram_length, start, stop)


def _join(shards: Sequence[Documents]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of all documents, and their offsets."""
    offsets = [np.zeros(1, np.int64)]
    num_tokens = 0
    for documents in shards:
        offsets.append(documents.offsets[1:] + num_tokens)
        num_tokens += documents.num_tokens
    return np.concatenate([documents.token_ids for documents in shards]), np.concatenate(offsets)
