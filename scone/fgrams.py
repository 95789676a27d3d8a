"""Rows of f-grams with their counts, and their Parquet form: columns tokens (list<uint32>), count (int64)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from scone.errors import CorruptArtifactError
from scone.storage import FileEntry, Folder

_SCHEMA = pa.schema([("tokens", pa.list_(pa.uint32())), ("count", pa.int64())])
# A range of rows is read by whole row groups; 16 Ki rows of five tokens are about 256 KiB.
_ROW_GROUP_ROWS = 1 << 14
_FEW_ROWS = 1 << 13  # up to here a plain sort is faster


@dataclass(frozen=True, slots=True)
class FGrams:
    """R n-grams with their counts."""

    tokens: np.ndarray
    """uint32 [R, K], left-aligned, zero-padded."""
    lengths: np.ndarray
    """uint8 [R]."""
    counts: np.ndarray
    """int64 [R]."""

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: np.ndarray | slice) -> FGrams:
        """The rows of a mask, of indices or of a slice."""
        return FGrams(self.tokens[rows], self.lengths[rows], self.counts[rows])

    @classmethod
    def empty(cls, max_fgram_length: int) -> FGrams:
        return cls(np.zeros((0, max_fgram_length), np.uint32), np.zeros(0, np.uint8), np.zeros(0, np.int64))

    @classmethod
    def concatenate(cls, pieces: Sequence[FGrams]) -> FGrams:
        """All rows of `pieces` (at least one), in order."""
        return cls(
            np.concatenate([piece.tokens for piece in pieces]),
            np.concatenate([piece.lengths for piece in pieces]),
            np.concatenate([piece.counts for piece in pieces]),
        )


def rank_order(fgrams: FGrams) -> np.ndarray:
    """Row indices int64 [R] in rank order: count descending, then length, then token ids ascending.

    Zero padding never decides: rows are compared by tokens only where their lengths are equal.
    """
    if len(fgrams) < _FEW_ROWS:
        return _order_few(fgrams)
    from scone.rank_kernels import NUM_COUNTS, order_by_count  # readers that never rank need no numba

    is_large = fgrams.counts >= NUM_COUNTS
    large = np.flatnonzero(is_large)
    large = large[_order_few(fgrams.take(large))]
    rest = np.flatnonzero(~is_large) if len(large) else slice(None)
    part = fgrams.take(rest)
    token_bits = max(1, int(part.tokens.max(initial=0)).bit_length())
    leading = np.zeros(len(part), np.uint64)
    for tokens in part.tokens.T[: 64 // token_bits]:
        leading = (leading << np.uint64(token_bits)) | tokens
    order = np.empty(len(part), np.int64)
    order_by_count(np.argsort(leading), leading, part.tokens, part.lengths, part.counts, order)
    return np.concatenate([large, rest[order]]) if isinstance(rest, np.ndarray) else order


def _order_few(fgrams: FGrams) -> np.ndarray:
    return np.lexsort((*fgrams.tokens.T[::-1], fgrams.lengths, -fgrams.counts))


def write_fgrams(folder: Folder, path: str, fgrams: FGrams) -> FileEntry:
    """Publish the rows as one Parquet file."""
    inside = np.arange(fgrams.tokens.shape[1]) < fgrams.lengths[:, None]
    offsets = np.zeros(len(fgrams) + 1, np.int32)
    np.cumsum(fgrams.lengths, out=offsets[1:])
    tokens = pa.ListArray.from_arrays(pa.array(offsets), pa.array(fgrams.tokens[inside]))
    table = pa.table([tokens, pa.array(fgrams.counts)], schema=_SCHEMA)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", compression_level=3, row_group_size=_ROW_GROUP_ROWS)
    entry = folder.write_bytes(path, sink.getvalue().to_pybytes())
    return FileEntry(entry.path, entry.num_bytes, entry.xxh3_128, len(fgrams))


def read_fgrams(folder: Folder, entry: FileEntry, max_fgram_length: int, start: int = 0, stop: int = -1) -> FGrams:
    """Rows [start, stop) of one file, all from `start` if `stop` is -1; only their row groups are read.

    Raises:
        CorruptArtifactError: The file is missing, truncated, unreadable, or holds other rows than its entry says.
    """
    folder.check_size(entry)
    where = folder.locate(entry.path)
    stop = entry.rows if stop < 0 else stop
    try:
        with folder.open_read(entry.path) as file, pq.ParquetFile(file) as parquet:
            if parquet.metadata.num_rows != entry.rows or parquet.schema_arrow.remove_metadata() != _SCHEMA:
                raise CorruptArtifactError(
                    f"{where} holds {parquet.metadata.num_rows:,} rows of {', '.join(parquet.schema_arrow.names)}; its "
                    f"manifest says {entry.rows:,} rows of {', '.join(_SCHEMA.names)}; restore or rebuild it"
                )
            groups = range(start // _ROW_GROUP_ROWS, -(-stop // _ROW_GROUP_ROWS))
            table = parquet.read_row_groups(list(groups))
    except pa.ArrowException as error:
        raise CorruptArtifactError(
            f"{where} is not a readable Parquet file ({error}); restore or rebuild it"
        ) from error
    first = groups.start * _ROW_GROUP_ROWS
    return _from_table(table.slice(start - first, stop - start), max_fgram_length, where)


def _from_table(table: pa.Table, max_fgram_length: int, where: str) -> FGrams:
    pieces = table["tokens"].chunks
    lists = pa.concat_arrays(pieces) if pieces else pa.array([], _SCHEMA.field("tokens").type)
    lengths = np.diff(lists.offsets.to_numpy())
    if len(lengths) and not 2 <= lengths.min() <= lengths.max() <= max_fgram_length:
        raise CorruptArtifactError(
            f"{where} has n-grams of {lengths.min()} to {lengths.max()} tokens, expected 2 to {max_fgram_length}; "
            "restore or rebuild it"
        )
    tokens = np.zeros((len(lengths), max_fgram_length), np.uint32)
    tokens[np.arange(max_fgram_length) < lengths[:, None]] = lists.flatten().to_numpy()
    return FGrams(tokens, lengths.astype(np.uint8), table["count"].to_numpy())
