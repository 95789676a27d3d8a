"""The units of the tokenize stage: scan documents, train a tokenizer, write token shards. Each runs in a worker.

_work/scan/U.bin           one record per document of unit U: hash, size, side
_work/texts/U.parquet      documents that are costly to read again (local-docs only)
_work/samples/U.parquet    the unit's share of text to train a tokenizer on
_work/decisions.bin        one byte per document of the corpus: dropped, train or held out
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from pipelines.units import Unit
from scone.artifacts import WORK, UnitRecord
from scone.corpus import Document, Part, ReadSettings, read_part
from scone.corpus.split import HELDOUT, TRAIN, hash_group, hash_text, is_heldout_by_hash, match_patterns
from scone.errors import CorpusError
from scone.storage import FileEntry, Folder
from scone.tokenizer import TokenizerFile, train_tokenizer
from scone.tokens import (
    SPLITS,
    TOKENIZER_FILE,
    Documents,
    concatenate_documents,
    shard_statistics,
    write_documents,
)

SCAN = f"{WORK}/scan"
TEXTS = f"{WORK}/texts"
SAMPLES = f"{WORK}/samples"
DECISIONS = f"{WORK}/decisions.bin"

# Sides that a scan sees. Groups named after their source are decided later, when all their sizes are known.
SIDE_TRAIN, SIDE_HELDOUT, SIDE_OF_SOURCE, SIDE_EMPTY = range(4)
SCAN_DTYPE = np.dtype([("low", "<u8"), ("high", "<u8"), ("bytes", "<u4"), ("part", "<u4"), ("side", "<u4")])

_SPLIT_OF = {TRAIN: "train", HELDOUT: "heldout"}
_BATCH_BYTES = 4 << 20
_SAMPLE_CHARACTERS = 1 << 14  # of one document, so that a single long one does not make the vocabulary
_TEXTS_SCHEMA = pa.schema([(name, pa.string()) for name in ("doc_id", "source", "group", "text")])


@dataclass(frozen=True, slots=True)
class ScanWork:
    """Reads a unit's documents once: hashes for duplicates and the split, sizes, and what must be kept of them."""

    settings: ReadSettings
    heldout_fraction: float
    heldout_patterns: tuple[str, ...]
    sample_bytes: int
    """Text to keep for training a tokenizer; 0 if one is given."""

    def __call__(self, folder: Folder, unit: Unit) -> UnitRecord:
        parts = [Part.from_dict(part) for part in unit.spec["parts"]]
        rows: list[tuple[int, int, int, int, int]] = []
        kept: list[Document] = []
        sample = _Sample(self.sample_bytes)
        for number, part in enumerate(parts):
            for document in read_part(part, self.settings):
                low, high = hash_text(document.text)
                side = self._side(document, low)
                sample.offer(low, len(rows), document.text, may_train=side in (SIDE_TRAIN, SIDE_OF_SOURCE))
                rows.append((low, high, len(document.text.encode()), number, side))
                if part.is_costly_to_read:
                    kept.append(document)
        records = np.array(rows, dtype=SCAN_DTYPE)
        files = [folder.write_bytes(f"{SCAN}/{unit.id}.bin", records.tobytes())]
        if parts[0].is_costly_to_read:
            files.append(_write_texts(folder, unit.id, kept))
        if self.sample_bytes:
            files.append(sample.write(folder, unit.id))
        return UnitRecord(unit.id, tuple(files), {"documents": len(rows), "parts": _describe_parts(parts, records)})

    def _side(self, document: Document, low: int) -> int:
        if not document.text.strip():
            return SIDE_EMPTY
        if self.heldout_patterns:
            return SIDE_HELDOUT if _matches(document.group or document.source, self.heldout_patterns) else SIDE_TRAIN
        if document.group == document.source:
            return SIDE_OF_SOURCE
        group = hash_group(document.group) if document.group else low
        return SIDE_HELDOUT if is_heldout_by_hash(group, self.heldout_fraction) else SIDE_TRAIN


@lru_cache(maxsize=100_000)
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    try:
        return any(match_patterns([name], [pattern]) for pattern in patterns)
    except CorpusError:
        return False


class _Sample:
    """The texts with the lowest hashes, up to a number of bytes: a fair sample that needs no second reading."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._texts: list[tuple[int, int, str]] = []

    def offer(self, low: int, index: int, text: str, may_train: bool) -> None:
        if not self._max_bytes or not may_train:
            return
        if self._bytes >= self._max_bytes and -low < self._texts[0][0]:
            return
        sample = text[:_SAMPLE_CHARACTERS]
        heapq.heappush(self._texts, (-low, index, sample))
        self._bytes += len(sample)
        while self._bytes - len(self._texts[0][2]) >= self._max_bytes:
            self._bytes -= len(heapq.heappop(self._texts)[2])

    def write(self, folder: Folder, unit_id: str) -> FileEntry:
        rows = sorted(self._texts, key=lambda row: row[1])
        table = pa.table(
            {
                "index": pa.array([row[1] for row in rows], pa.int64()),
                "low": pa.array([-row[0] for row in rows], pa.uint64()),
                "text": pa.array([row[2] for row in rows], pa.string()),
            }
        )
        return _write_table(folder, f"{SAMPLES}/{unit_id}.parquet", table)


@dataclass(frozen=True, slots=True)
class TrainTokenizerWork:
    """Trains the tokenizer on samples of documents that stay in training, and publishes `tokenizer.json`."""

    vocab_size: int
    sample_bytes: int

    def __call__(self, folder: Folder, unit: Unit) -> UnitRecord:
        candidates: list[tuple[int, str]] = []
        for scanned in unit.spec["units"]:
            table = _read_table(folder, f"{SAMPLES}/{scanned['id']}.parquet")
            decisions = read_decisions(folder, scanned["start"], scanned["documents"])
            keep = decisions[table["index"].to_numpy()] == TRAIN
            kept = table.filter(pa.array(keep))
            candidates += zip(kept["low"].to_pylist(), kept["text"].to_pylist(), strict=True)
        candidates.sort()
        texts, size = [], 0
        for _, text in candidates:
            if size >= self.sample_bytes:
                break
            texts.append(text)
            size += len(text.encode())
        made = train_tokenizer(texts, self.vocab_size)
        entry = folder.write_bytes(TOKENIZER_FILE, made.content)
        return UnitRecord(unit.id, (entry,), {"sample_documents": len(texts), "sample_bytes": size})


@dataclass(frozen=True, slots=True)
class TokenizeWork:
    """Makes a unit's kept documents into one token shard per split."""

    settings: ReadSettings
    tokenizer_fingerprint: str
    end_of_text_token: str

    def __call__(self, folder: Folder, unit: Unit) -> UnitRecord:
        tokenizer = _load_tokenizer(folder.uri, self.tokenizer_fingerprint, self.end_of_text_token)
        decisions = read_decisions(folder, unit.spec["start"], unit.spec["documents"])
        builders = {split: _ShardBuilder() for split in SPLITS}
        for batch in _batches(self._documents(folder, unit), decisions):
            encoded = tokenizer.encode([document.text for _, document in batch])
            for (split, document), ids in zip(batch, encoded, strict=True):
                builders[split].add(document, ids)
        files: list[FileEntry] = []
        statistics: dict[str, Any] = {"shards": {}, "sources": {}}
        for split, builder in builders.items():
            if builder.documents:
                shard = builder.build()
                entry = write_documents(folder, f"{split}/{unit.id}.parquet", shard)
                files.append(entry)
                statistics["shards"][entry.path] = shard_statistics(shard)
            statistics[split] = builder.totals()
            statistics["sources"][split] = builder.tokens_by_source
        return UnitRecord(unit.id, tuple(files), statistics)

    def _documents(self, folder: Folder, unit: Unit) -> Iterator[Document]:
        """The documents as they were scanned, kept or read again."""
        parts = [Part.from_dict(part) for part in unit.spec["parts"]]
        if parts[0].is_costly_to_read:
            yield from _read_texts(folder, unit.id)
            return
        scanned = np.frombuffer(folder.read_bytes(f"{SCAN}/{unit.id}.bin"), dtype=SCAN_DTYPE)
        index = 0
        for part in parts:
            for document in read_part(part, self.settings):
                if index == len(scanned) or hash_text(document.text)[0] != scanned["low"][index]:
                    raise _changed(part)
                yield document
                index += 1
        if index != len(scanned):
            raise _changed(parts[-1])


class _ShardBuilder:
    """Documents of one split of one unit."""

    def __init__(self) -> None:
        self.documents: list[Document] = []
        self.tokens_by_source: dict[str, dict[str, int]] = {}
        self._ids: list[npt.NDArray[np.uint32]] = []
        self._bytes = 0

    def add(self, document: Document, ids: list[int]) -> None:
        self.documents.append(replace(document, text=""))
        self._ids.append(np.array(ids, dtype=np.uint32))
        self._bytes += len(document.text.encode())
        numbers = self.tokens_by_source.setdefault(document.source, {"documents": 0, "tokens": 0})
        numbers["documents"] += 1
        numbers["tokens"] += len(ids)

    def build(self) -> Documents:
        token_ids, offsets = concatenate_documents(self._ids)
        sources = [document.source for document in self.documents]
        return Documents(token_ids, offsets, sources, [document.doc_id for document in self.documents])

    def totals(self) -> dict[str, int]:
        return {"documents": len(self.documents), "tokens": sum(map(len, self._ids)), "bytes": self._bytes}


def read_scan(folder: Folder, unit_id: str) -> npt.NDArray[np.void]:
    """The records of a unit's documents, [D] of SCAN_DTYPE."""
    return np.frombuffer(folder.read_bytes(f"{SCAN}/{unit_id}.bin"), dtype=SCAN_DTYPE)


def read_decisions(folder: Folder, start: int, num_documents: int) -> npt.NDArray[np.uint8]:
    """Decisions on the documents [start, start + num_documents) of the corpus, [num_documents] uint8."""
    if not num_documents:
        return np.empty(0, dtype=np.uint8)
    return np.frombuffer(folder.read_bytes(DECISIONS, start, start + num_documents), dtype=np.uint8)


def _describe_parts(parts: list[Part], records: npt.NDArray[np.void]) -> list[dict[str, Any]]:
    """Documents, bytes and digest of each part's texts, in order of the parts."""
    described = []
    for number, part in enumerate(parts):
        mine = records[records["part"] == number]
        hashes = np.stack([mine["low"], mine["high"]], axis=1)
        described.append(
            {
                "source": part.source,
                "documents": len(mine),
                "empty": int((mine["side"] == SIDE_EMPTY).sum()),
                "bytes": int(mine["bytes"].sum(dtype=np.int64)),
                "is_group": bool((mine["side"] == SIDE_OF_SOURCE).any()),
                "digest": xxhash.xxh3_128_hexdigest(np.ascontiguousarray(hashes).tobytes()),
            }
        )
    return described


def _batches(documents: Iterator[Document], decisions: npt.NDArray[np.uint8]) -> Iterator[list[tuple[str, Document]]]:
    """Kept documents with their split, some MB of text at a time."""
    batch: list[tuple[str, Document]] = []
    size = 0
    for document, decision in zip(documents, decisions, strict=True):
        split = _SPLIT_OF.get(int(decision))
        if split is None:
            continue
        batch.append((split, document))
        size += len(document.text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@lru_cache(maxsize=2)
def _load_tokenizer(folder_uri: str, fingerprint: str, end_of_text_token: str) -> TokenizerFile:
    """One per worker process and tokenizer: a large vocabulary takes seconds to load."""
    return TokenizerFile(Folder(folder_uri).read_bytes(TOKENIZER_FILE), end_of_text_token)


def _write_texts(folder: Folder, unit_id: str, documents: list[Document]) -> FileEntry:
    columns = {name: [getattr(document, name) for document in documents] for name in _TEXTS_SCHEMA.names}
    return _write_table(folder, f"{TEXTS}/{unit_id}.parquet", pa.table(columns, schema=_TEXTS_SCHEMA))


def _read_texts(folder: Folder, unit_id: str) -> Iterator[Document]:
    for row in _read_table(folder, f"{TEXTS}/{unit_id}.parquet").to_pylist():
        yield Document(**row)


def _write_table(folder: Folder, path: str, table: pa.Table) -> FileEntry:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return folder.write_bytes(path, sink.getvalue().to_pybytes())


def _read_table(folder: Folder, path: str) -> pa.Table:
    with folder.open_read(path) as file:
        return pq.read_table(file)


def _changed(part: Part) -> CorpusError:
    return CorpusError(
        f"{part.source} has changed since it was scanned; delete the tokens folder and run again on a corpus at rest"
    )
