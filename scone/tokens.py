"""The tokens artifact: whole documents as token ids, in Parquet shards per split.

    tokenizer.json            the tokenizer that made the ids
    train/NNNNN.parquet       columns doc_id, source (string), input_ids (list<uint32>); one row per document
    heldout/NNNNN.parquet     the same, from groups of documents that training never sees

Documents hold no end-of-text token; whoever joins them into a stream puts one after each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from scone.artifacts import Manifest, load_manifest
from scone.errors import CorruptArtifactError
from scone.storage import FileEntry, Folder

TOKENS_KIND = "tokens"
TOKENS_FORMAT = 1
TOKENIZER_FILE = "tokenizer.json"
SPLITS = ("train", "heldout")

_SCHEMA = pa.schema([("doc_id", pa.string()), ("source", pa.string()), ("input_ids", pa.list_(pa.uint32()))])


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents of one shard: document d is `token_ids[offsets[d]:offsets[d + 1]]`."""

    token_ids: npt.NDArray[np.uint32]
    """[N] uint32."""
    offsets: npt.NDArray[np.int64]
    """[D + 1] int64, from 0 to N."""
    sources: Sequence[str]
    """[D] what each document belongs to: a package, or a file."""
    doc_ids: Sequence[str] = ()
    """[D] where each document stands in its source; needed to write, not to count or to match."""

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TokenShard:
    """One file of a split; its documents follow those of the shard before it."""

    entry: FileEntry
    num_documents: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TokensInfo:
    """What a tokens artifact holds, from its manifest alone."""

    folder: Folder
    manifest: Manifest
    token_vocab_size: int
    end_of_text_id: int
    special_ids: tuple[int, ...]
    shards: dict[str, tuple[TokenShard, ...]]
    """By split ("train", "heldout"), in the order of the split's documents."""

    @property
    def tokenizer_fingerprint(self) -> str:
        return self.manifest.tokenizer_fingerprint

    def num_tokens(self, split: str) -> int:
        """Tokens of all documents of a split, without end-of-text tokens."""
        return sum(shard.num_tokens for shard in self.shards[split])

    def num_documents(self, split: str) -> int:
        return sum(shard.num_documents for shard in self.shards[split])


def load_tokens(folder: Folder) -> TokensInfo:
    """The description of a finished tokens artifact.

    Raises:
        MissingArtifactError: Nothing there, or the build never finished.
        IncompatibleArtifactError: Another kind or format of artifact.
        CorruptArtifactError: The manifest is incomplete, or a file has another size than it says.
    """
    manifest = load_manifest(folder, TOKENS_KIND, TOKENS_FORMAT)
    try:
        statistics = manifest.statistics
        shards = {split: _shards_of(manifest, split) for split in SPLITS}
        return TokensInfo(
            folder=folder,
            manifest=manifest,
            token_vocab_size=int(statistics["token_vocab_size"]),
            end_of_text_id=int(statistics["end_of_text_id"]),
            special_ids=tuple(int(token_id) for token_id in statistics["special_ids"]),
            shards=shards,
        )
    except KeyError as error:
        raise CorruptArtifactError(
            f"the manifest of {folder} does not say {error}, which every tokens artifact has; "
            'rebuild it with "scone tokenize"'
        ) from error


def read_documents(folder: Folder, entry: FileEntry) -> Documents:
    """All documents of one shard.

    Raises:
        CorruptArtifactError: The file is missing, truncated, unreadable or not a token shard.
    """
    folder.check_size(entry)
    where = folder.locate(entry.path)
    try:
        with folder.open_read(entry.path) as file:
            table = pq.read_table(file)
    except pa.ArrowException as error:
        raise CorruptArtifactError(
            f"{where} is not a readable Parquet file ({error}); restore or rebuild it"
        ) from error
    if table.schema.remove_metadata() != _SCHEMA or table.num_rows != entry.rows:
        raise CorruptArtifactError(
            f"{where} holds {table.num_rows:,} rows of {', '.join(table.column_names)}; its manifest says "
            f"{entry.rows:,} rows of {', '.join(_SCHEMA.names)}; restore or rebuild it"
        )
    ids = table["input_ids"].combine_chunks()
    if isinstance(ids, pa.ChunkedArray):
        ids = pa.concat_arrays(ids.chunks) if ids.num_chunks else pa.array([], type=_SCHEMA.field("input_ids").type)
    return Documents(
        token_ids=ids.flatten().to_numpy(),
        offsets=_offsets_of(ids),
        sources=table["source"].to_pylist(),
        doc_ids=table["doc_id"].to_pylist(),
    )


def write_documents(folder: Folder, path: str, documents: Documents) -> FileEntry:
    """Publish one shard.

    Raises:
        ValueError: The columns do not have the same number of documents, or offsets do not cover the ids.
    """
    _check(documents)
    ids = pa.ListArray.from_arrays(
        pa.array(documents.offsets, type=pa.int32()), pa.array(documents.token_ids, type=pa.uint32())
    )
    table = pa.table(
        [pa.array(documents.doc_ids, type=pa.string()), pa.array(documents.sources, type=pa.string()), ids],
        schema=_SCHEMA,
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", compression_level=3)
    entry = folder.write_bytes(path, sink.getvalue().to_pybytes())
    return FileEntry(entry.path, entry.num_bytes, entry.xxh3_128, documents.num_documents)


def concatenate_documents(pieces: Sequence[npt.ArrayLike]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Token ids of all pieces in a row [N] and the offsets of each [D + 1]."""
    offsets = np.zeros(len(pieces) + 1, dtype=np.int64)
    np.cumsum([np.size(piece) for piece in pieces], out=offsets[1:])
    token_ids = np.empty(int(offsets[-1]), dtype=np.uint32)
    for piece, start, stop in zip(pieces, offsets[:-1], offsets[1:], strict=True):
        token_ids[start:stop] = piece
    return token_ids, offsets


def shard_statistics(documents: Documents) -> dict[str, int]:
    """What the manifest says of a shard, under `statistics.shards[path]`."""
    return {"documents": documents.num_documents, "tokens": documents.num_tokens}


def _shards_of(manifest: Manifest, split: str) -> tuple[TokenShard, ...]:
    known: dict[str, Any] = manifest.statistics["shards"]
    shards = []
    for entry in manifest.files_below(f"{split}/"):
        numbers = known[entry.path]
        shards.append(TokenShard(entry, int(numbers["documents"]), int(numbers["tokens"])))
    return tuple(shards)


def _offsets_of(ids: Any) -> npt.NDArray[np.int64]:
    offsets: npt.NDArray[np.int64] = ids.offsets.to_numpy().astype(np.int64)
    offsets -= offsets[0]
    return offsets


def _check(documents: Documents) -> None:
    names = {"sources": len(documents.sources), "doc_ids": len(documents.doc_ids)}
    for name, found in names.items():
        if found != documents.num_documents:
            raise ValueError(f"documents have {found:,} {name}, their offsets say {documents.num_documents:,}")
    first, last = int(documents.offsets[0]), int(documents.offsets[-1])
    if first != 0 or last != documents.num_tokens:
        raise ValueError(f"offsets run from {first:,} to {last:,}, they must run from 0 to {documents.num_tokens:,}")
