"""Looks rows up by id from memory-mapped shards: no copy of the table, no Python per row, any number of threads."""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from scone.errors import CorruptArtifactError
from scone.storage import Folder
from scone.table.layout import TableDtype, sample_rows
from scone.table.manifest import TableShard, TableVersion, load_version
from scone.table.mapping import map_shards

Verification = Literal["samples", "content", "size"]

# Rows with padding between them are gathered whole and cut afterwards: this many at a time, to stay in cache.
_PADDED_ROWS = 1024


class EmbeddingTable:
    """One version of a table, mapped read-only. `lookup` may be called from many threads at once."""

    def __init__(self, version: TableVersion, blocks: list[NDArray]) -> None:
        """`blocks` [rows, stride_elements] hold all rows in order; use `open`."""
        self.version = version
        self.num_rows = version.num_rows
        self.width = version.width
        self.dtype: TableDtype = version.dtype
        self.element = version.layout.element
        """What `out` of a look-up is made of: uint16 (the bits of bfloat16) or float32."""
        self._blocks = blocks
        self._first_rows = np.cumsum([0, *(len(block) for block in blocks[:-1])], dtype=np.int64)
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
        if verify == "content":
            for shard in version.shards:
                folder.check_content(shard.rows)
        files = [(folder.local_path(shard.rows), shard.rows) for shard in version.shards]
        table = cls(version, map_shards(files, version.layout))
        if verify != "size":
            for shard in version.shards:
                table._check_samples(folder, shard)
        return table

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
        if len(self._blocks) == 1:
            self._gather(0, ids, out)
            return
        first, last = np.searchsorted(self._first_rows, (int(unsigned.min()), highest), side="right") - 1
        if first == last:
            self._gather(int(first), ids - self._first_rows[first], out)
        else:
            self._lookup_across_blocks(ids, out)

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
            block = int(np.searchsorted(self._first_rows, first_row + done, side="right")) - 1
            start = first_row + done - int(self._first_rows[block])
            rows = self._blocks[block][start : start + len(out) - done, : self.width]
            out[done : done + len(rows)] = rows
            done += len(rows)

    def _lookup_across_blocks(self, ids: NDArray[np.int64], out: NDArray) -> None:
        block_of = np.searchsorted(self._first_rows, ids, side="right") - 1
        if len(self._blocks) <= np.iinfo(np.uint16).max:
            block_of = block_of.astype(np.uint16)  # numpy sorts these by radix
        order = np.argsort(block_of, kind="stable")
        block_of = block_of[order]
        starts = [0, *(np.flatnonzero(block_of[1:] != block_of[:-1]) + 1).tolist(), len(ids)]
        for start, stop in itertools.pairwise(starts):
            block, positions = int(block_of[start]), order[start:stop]
            rows = np.empty((len(positions), self.width), self.element)
            self._gather(block, ids[positions] - self._first_rows[block], rows)
            out[positions] = rows

    def _gather(self, block: int, local_ids: NDArray[np.int64], out: NDArray) -> None:
        # mode="clip" only skips numpy's own bounds check, which copies through a buffer and takes 3x the time;
        # all ids are known to be in bounds here.
        rows = self._blocks[block]
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

    def _check_samples(self, folder: Folder, shard: TableShard) -> None:
        folder.check_content(shard.samples)
        sampled = shard.first_row + sample_rows(shard.num_rows)
        found = np.empty((len(sampled), self.width), self.element)
        self.lookup(sampled, found)
        stored = np.frombuffer(folder.read_bytes(shard.samples.path), self.element)
        expected = np.ascontiguousarray(stored.reshape(len(sampled), -1)[:, : self.width])
        differs = np.flatnonzero((found.view(np.uint8) != expected.view(np.uint8)).any(axis=1))
        if len(differs):
            raise CorruptArtifactError(
                f"{folder.locate(shard.rows.path)} holds other values for row {sampled[differs[0]]:,} than its sampled "
                'rows say: altered or misplaced; restore it, or rebuild the table with "scone precompute"'
            )
