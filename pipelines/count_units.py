"""What the workers of the count stage do. `count.py` says how the groups of units follow each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from pipelines.units import Unit
from scone.artifacts import WORK, UnitRecord
from scone.fgrams import FGrams, rank_order, read_fgrams, write_fgrams
from scone.selection import Cutoff, rank_rows, write_histogram
from scone.storage import FileEntry, Folder, scratch_folder
from scone.tokens import Documents, read_documents
from scone.vocabulary import MATCH_INDEX_FILE, RANKED_FOLDER

if TYPE_CHECKING:
    from scone.counting import Codec, CountObject, Quota, WindowCoding

_INDEX_PIECE_ROWS = 1 << 18
PROCESS_BYTES = 320 << 20
"""A worker's Python, NumPy, Arrow and compiled kernels (measured: 250 to 300 MiB)."""
TOKEN_BYTES = 16
"""Per token of a map unit: its shards as read, joined, and the reach of each window."""
SURVIVOR_BYTES = 100
"""Per n-gram that a reduce unit keeps: found, sorted, and on its way into its file."""


@dataclass(frozen=True, slots=True)
class TokensToCount:
    """The token ids that are counted."""

    folders: tuple[Folder, ...]
    token_vocab_size: int
    special_ids: tuple[int, ...]

    def read(self, unit: Unit) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of a unit's shards, uint32 [N], and the offsets of their documents, int64 [D + 1]."""
        shards = ((self.folders[shard["tokens"]], FileEntry.from_dict(shard["entry"])) for shard in unit.spec["shards"])
        return _join([read_documents(folder, entry) for folder, entry in shards])


@dataclass(frozen=True, slots=True)
class CountedUnit:
    """A unit's count object."""

    folder: Folder
    entry: FileEntry
    codec: Codec


@dataclass(frozen=True, slots=True)
class SampleWork:
    """Finds the prefixes that so many windows begin with that they need slices of their own."""

    tokens: TokensToCount
    max_fgram_length: int
    share: float
    """Of the positions; a prefix with more is heavy."""

    def __call__(self, folder: Folder, unit: Unit) -> UnitRecord:
        from scone.counting import count_ngrams

        token_ids, offsets = self.tokens.read(unit)
        fgrams = count_ngrams(
            token_ids,
            offsets,
            max_fgram_length=self.max_fgram_length,
            token_vocab_size=self.tokens.token_vocab_size,
            special_ids=self.tokens.special_ids,
            min_count=max(2, int(self.share * len(token_ids))),
        )
        prefixes = [tokens[:n].tolist() for tokens, n in zip(fgrams.tokens, fgrams.lengths, strict=True)]
        heavy = sorted(prefix for prefix in prefixes if len(prefix) < self.max_fgram_length)
        return UnitRecord(unit.id, statistics={"heavy": heavy})


@dataclass(frozen=True, slots=True)
class MapWork:
    """Counts the windows of a unit's token shards into one count object."""

    tokens: TokensToCount
    coding: WindowCoding
    codec: Codec
    max_memory_bytes: int
    path: str
    """Where count objects go, below the folder."""

    def __call__(self, folder: Folder, unit: Unit) -> UnitRecord:
        from scone.counting import UnitWindows, write_count_object

        token_ids, offsets = self.tokens.read(unit)
        windows = UnitWindows(token_ids, offsets, self.coding, self.tokens.special_ids, self.tokens.token_vocab_size)
        free = self.max_memory_bytes - PROCESS_BYTES - TOKEN_BYTES * len(token_ids)
        passes = windows.passes(max(1, free // (8 * self.coding.num_words + 4)))
        counted = (windows.count(first, stop) for first, stop in passes)
        entry = write_count_object(
            folder, f"{self.path}/{unit.id}.bin", counted, windows.heavy_counts, self.coding, self.codec
        )
        return UnitRecord(unit.id, (entry,), {"tokens": len(token_ids), "documents": len(offsets) - 1})


@dataclass(frozen=True, slots=True)
class ReduceWork:
    """Merges one partition of all count objects into its frequent n-grams and the histogram of their counts."""

    objects: tuple[CountedUnit, ...]
    coding: WindowCoding
    num_partitions: int
    min_counts: tuple[int, ...]
    """Occurrences that an n-gram of each length needs to be in the histogram."""
    quotas: tuple[Quota, ...]
    """How many are kept at least, in the hope that no more of this partition are selected."""
    max_memory_bytes: int

    def __call__(self, folder: Folder, unit: Unit) -> UnitRecord:
        from scone.counting import CountObject, SurvivorCollector, WindowMerge

        partition, per_section = int(unit.spec["partition"]), self.coding.slices_per_section
        first, stop = (self.coding.num_sections * edge // self.num_partitions for edge in (partition, partition + 1))
        objects = [CountObject(unit.folder, unit.entry, self.coding, unit.codec) for unit in self.objects]
        collector = SurvivorCollector(self.coding, np.array(self.min_counts), self.quotas)
        free = self.max_memory_bytes - PROCESS_BYTES - SURVIVOR_BYTES * 2 * sum(quota.size for quota in self.quotas)
        with scratch_folder("count-reduce") as scratch:
            merge = WindowMerge((stop - first) * per_section, memory_bytes=max(free, 0), scratch=scratch)
            shuffled_bytes = 0
            for count_object in objects:
                windows, num_bytes = count_object.read(first, stop)
                shuffled_bytes += num_bytes
                merge.add(windows)
            for first_slice, windows in merge.merged():
                collector.add(first * per_section + first_slice, windows)
            spilled_bytes = merge.spilled_bytes
        if partition == 0 and self.coding.heavy:
            collector.add_counted(self._heavy(objects))
        survivors = collector.finish()
        fgrams = survivors.fgrams.take(rank_order(survivors.fgrams))
        path = f"{WORK}/reduce/{unit.spec.get('name', unit.id)}"
        files = (
            write_fgrams(folder, f"{path}.parquet", fgrams),
            write_histogram(folder, f"{path}-histogram.parquet", survivors.histogram),
        )
        statistics = {
            "survivors": survivors.histogram.total,
            "complete_from": survivors.complete_from.tolist(),
            "shuffled_bytes": shuffled_bytes,
            "spilled_bytes": spilled_bytes,
        }
        return UnitRecord(unit.id, files, statistics)

    def _heavy(self, objects: Sequence[CountObject]) -> FGrams:
        """The heavy prefixes, which no partition's windows tell the counts of."""
        heavy = self.coding.heavy
        tokens = np.zeros((len(heavy), self.coding.max_fgram_length), np.uint32)
        for row, prefix in enumerate(heavy):
            tokens[row, : len(prefix)] = prefix
        counts = np.zeros(len(heavy), np.int64)
        for count_object in objects:
            counts += count_object.heavy_counts()
        return FGrams(tokens, np.array([len(prefix) for prefix in heavy], np.uint8), counts)


@dataclass(frozen=True, slots=True)
class RankWork:
    """Brings a range of the ranking together from all partitions into one ranked file."""

    survivors: tuple[FileEntry, ...]
    """n-grams of each partition, in rank order."""
    max_fgram_length: int
    cutoff: Cutoff

    def __call__(self, folder: Folder, unit: Unit) -> UnitRecord:
        pieces = [FGrams.empty(self.max_fgram_length)]
        for entry, (start, stop) in zip(self.survivors, unit.spec["rows"], strict=True):
            if start < stop:
                pieces.append(read_fgrams(folder, entry, self.max_fgram_length, start, stop))
        ranked = rank_rows(pieces, self.cutoff)
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
            for start, stop in pairwise([*range(0, entry.rows, _INDEX_PIECE_ROWS), entry.rows]):
                yield read_fgrams(folder, entry, self.max_fgram_length, start, stop)


def _join(shards: Sequence[Documents]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of all documents, and their offsets."""
    offsets = [np.zeros(1, np.int64)]
    num_tokens = 0
    for documents in shards:
        offsets.append(documents.offsets[1:] + num_tokens)
        num_tokens += documents.num_tokens
    return np.concatenate([documents.token_ids for documents in shards]), np.concatenate(offsets)
