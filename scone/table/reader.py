"""Looks rows up by id from memory-mapped shards: no copy of the table, no Python per row, any number of threads."""

from __future__ import annotations

import itertools
import mmap
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from scone.errors import CorruptArtifactError
from scone.storage import FileEntry, Folder
from scone.table.layout import TableDtype, sample_rows
from scone.table.manifest import TableShard, TableVersion, load_version

Verification = Literal["samples", "content", "size"]

# Rows with padding between them are gathered whole and cut afterwards: this many at a time, to stay in cache.
_PADDED_ROWS = 1024


class EmbeddingTable:
    """One version of a table, mapped read-only. `lookup` may be called from many threads at once."""

    def __init__(self, version: TableVersion, shards: list[NDArray]) -> None:
        """`shards` hold [rows, stride_elements] each, in order; use `open`."""
        self.version = version
        self.num_rows = version.num_rows
        self.width = version.width
        self.dtype: TableDtype = version.dtype
        self.element = version.layout.element
        """What `out` of a look-up is made of: uint16 (the bits of bfloat16) or float32."""
        self._shards = shards
        self._first_rows = np.array([shard.first_row for shard in version.shards], np.int64)
        self._is_padded = version.layout.stride_bytes != version.layout.row_bytes

    @classmethod
    def open(
        cls,
        folder: Folder,
        number: int | None = None,
        *,
        verify: Verification = "samples",
        width: int | None = None,
        dtype: TableDtype | None = None,
        model_fingerprint: str | None = None,
        fgrams_fingerprint: str | None = None,
        tokenizer_fingerprint: str | None = None,
    ) -> EmbeddingTable:
        """Map version `number` of the table in `folder`, or the current one. Remote shards are copied to the cache.

        Args:
            verify: "size" looks at sizes only, "samples" also compares the sampled rows, "content" also reads
                every shard and compares its checksum.

        Raises:
            MissingArtifactError: No such version.
            IncompatibleArtifactError: Another format, or not the width, type, model, f-grams or tokenizer given.
            CorruptArtifactError: A file is missing, truncated or altered, or the version does not add up.
        """
        version = load_version(folder, number)
        version.check_compatible(
            folder,
            width=width,
            dtype=dtype,
            model_fingerprint=model_fingerprint,
            fgrams_fingerprint=fgrams_fingerprint,
            tokenizer_fingerprint=tokenizer_fingerprint,
        )
        shards = []
        for shard in version.shards:
            if verify == "content":
                folder.check_content(shard.rows)
            rows = _map_rows(folder.local_path(shard.rows), shard.rows, version)
            if verify != "size":
                _check_samples(folder, shard, rows)
            shards.append(rows)
        return cls(version, shards)

    def lookup(self, ids: NDArray[np.integer], out: NDArray) -> None:
        """Copy the rows with these ids [n] into `out` [n, width], in the order of `ids`; ids may repeat.

        Raises:
            IndexError: An id is negative or not below `num_rows`. Positions without an f-gram (id -1) have no row.
            TypeError: `ids` are not integers, or `out` is not made of `element`.
            ValueError: `ids` is not one-dimensional, or `out` is not a contiguous, writable [n, width] array.
        """
        ids = self._check(ids, out)
        if len(ids) == 0:
            return
        # One pass finds negative ids too: as unsigned numbers they are huge.
        unsigned = ids.view(np.uint64)
        highest = int(unsigned.max())
        if highest >= self.num_rows:
            self._refuse(ids)
        if len(self._shards) == 1:
            self._gather(0, ids, out)
            return
        first, last = np.searchsorted(self._first_rows, (int(unsigned.min()), highest), side="right") - 1
        if first == last:
            self._gather(int(first), ids - self._first_rows[first], out)
        else:
            self._lookup_across_shards(ids, out)

    def copy_rows(self, first_row: int, out: NDArray) -> None:
        """Copy consecutive rows from `first_row` on into `out` [n, width] of `element`, n rows in all.

        Raises:
            IndexError: A row is outside the table.
        """
        if first_row < 0 or first_row + len(out) > self.num_rows:
            raise IndexError(
                f"rows {first_row:,} to {first_row + len(out):,} are outside the table's {self.num_rows:,} rows"
            )
        done = 0
        while done < len(out):
            shard = int(np.searchsorted(self._first_rows, first_row + done, side="right")) - 1
            start = first_row + done - int(self._first_rows[shard])
            rows = self._shards[shard][start : start + len(out) - done, : self.width]
            out[done : done + len(rows)] = rows
            done += len(rows)

    def _lookup_across_shards(self, ids: NDArray[np.int64], out: NDArray) -> None:
        shard_of = np.searchsorted(self._first_rows, ids, side="right") - 1
        if len(self._shards) <= np.iinfo(np.uint16).max:
            shard_of = shard_of.astype(np.uint16)  # numpy sorts these by radix
        order = np.argsort(shard_of, kind="stable")
        shard_of = shard_of[order]
        starts = [0, *(np.flatnonzero(shard_of[1:] != shard_of[:-1]) + 1).tolist(), len(ids)]
        for start, stop in itertools.pairwise(starts):
            shard, positions = int(shard_of[start]), order[start:stop]
            rows = np.empty((len(positions), self.width), self.element)
            self._gather(shard, ids[positions] - self._first_rows[shard], rows)
            out[positions] = rows

    def _gather(self, shard: int, local_ids: NDArray[np.int64], out: NDArray) -> None:
        # mode="clip" only skips numpy's own bounds check, which copies through a buffer and takes 3x the time;
        # all ids are known to be in bounds here.
        rows = self._shards[shard]
        if not self._is_padded:
            np.take(rows, local_ids, axis=0, out=out, mode="clip")
            return
        scratch = np.empty((min(len(local_ids), _PADDED_ROWS), rows.shape[1]), self.element)
        for start in range(0, len(local_ids), _PADDED_ROWS):
            some = local_ids[start : start + _PADDED_ROWS]
            np.take(rows, some, axis=0, out=scratch[: len(some)], mode="clip")
            out[start : start + len(some)] = scratch[: len(some), : self.width]

    def _check(self, ids: NDArray[np.integer], out: NDArray) -> NDArray[np.int64]:
        if ids.dtype.kind not in "iu":
            raise TypeError(f"ids must be integers, got {ids.dtype}")
        if out.dtype != self.element:
            raise TypeError(f"out must be {self.element} for a {self.dtype} table, got {out.dtype}")
        if ids.ndim != 1 or out.shape != (ids.shape[0], self.width):
            raise ValueError(
                f"ids of shape {ids.shape} need out of shape [n, {self.width}] with one row per id, got {out.shape}"
            )
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("out must be C-contiguous and writable")
        return np.ascontiguousarray(ids, np.int64)

    def _refuse(self, ids: NDArray[np.int64]) -> None:
        bad = ids[(ids < 0) | (ids >= self.num_rows)]
        raise IndexError(
            f"{len(bad)} of {len(ids)} ids are outside the table's {self.num_rows:,} rows, the first is {bad[0]}; "
            "positions without an f-gram (id -1) must be left out"
        )


def _map_rows(path: Path, entry: FileEntry, version: TableVersion) -> NDArray:
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), entry.num_bytes, prot=mmap.PROT_READ)
    return np.frombuffer(mapped, version.layout.element).reshape(entry.rows, version.layout.stride_elements)


def _check_samples(folder: Folder, shard: TableShard, rows: NDArray) -> None:
    folder.check_content(shard.samples)
    sampled = sample_rows(shard.num_rows)
    found = rows[sampled].view(np.uint8)
    expected = np.frombuffer(folder.read_bytes(shard.samples.path), np.uint8).reshape(found.shape)
    differs = np.flatnonzero((found != expected).any(axis=1))
    if len(differs):
        row = shard.first_row + int(sampled[differs[0]])
        raise CorruptArtifactError(
            f"{folder.locate(shard.rows.path)} holds other values for row {row:,} than its sampled rows say: "
            'altered or misplaced; restore it, or rebuild the table with "scone precompute"'
        )
