"""Writes shards under the names of their content, and commits versions."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import xxhash
from numpy.typing import NDArray

from scone.errors import CorruptArtifactError
from scone.storage import FileEntry, Folder, scratch_folder
from scone.table.layout import TableLayout, sample_rows
from scone.table.manifest import TableShard, TableVersion, check_consistent, list_versions, load_version, version_path

_INDEX = "index"


class ShardWriter:
    """Streams the rows of one shard, then publishes it: nothing is visible before `publish`.

    The rows go to a local scratch file, because the name of a shard is known only when its content is.

        with ShardWriter(folder, layout, first_row) as writer:
            writer.append(rows)
            shard = writer.publish()
    """

    def __init__(self, folder: Folder, layout: TableLayout, first_row: int) -> None:
        self.folder, self.layout, self.first_row = folder, layout, first_row
        self.num_rows = 0
        self._digest = xxhash.xxh3_128()

    def __enter__(self) -> ShardWriter:
        with ExitStack() as stack:
            self._path: Path = stack.enter_context(scratch_folder("shard")) / "rows.bin"
            self._file: IO[bytes] = stack.enter_context(open(self._path, "wb"))
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def append(self, rows: NDArray[np.float32]) -> None:
        """Add rows [n, width] float32, the next ranks in order.

        Raises:
            ValueError: The rows have another width than the layout.
            CorruptArtifactError: A value is NaN or infinite, also after rounding; the message names its rank.
        """
        if rows.ndim != 2 or rows.shape[1] != self.layout.width:
            raise ValueError(f"rows of shape {rows.shape} do not fit a table of width {self.layout.width}")
        stored = self.layout.encode(rows)
        finite = np.isfinite(self.layout.decode(stored)).all(axis=1)
        if not finite.all():
            rank = self.first_row + self.num_rows + int(np.flatnonzero(~finite)[0])
            raise CorruptArtifactError(
                f"the f-gram with rank {rank} has a vector with NaN or infinite values as {self.layout.dtype}; "
                "the model is not usable: check its training loss, or take an earlier checkpoint"
            )
        content = stored.tobytes()
        self._digest.update(content)
        self._file.write(content)
        self.num_rows += len(rows)

    def publish(self) -> TableShard:
        """Publish the shard and its sampled rows under the hashes of their bytes, and describe them."""
        self._file.flush()
        stride = self.layout.stride_bytes
        written = np.memmap(self._path, np.uint8, mode="r", shape=(self.num_rows, stride))
        samples = written[sample_rows(self.num_rows)].tobytes()
        rows_entry = self.folder.publish_file(self._path, f"shards/{self._digest.hexdigest()}.bin", self.num_rows)
        name = f"samples/{xxhash.xxh3_128_hexdigest(samples)}.bin"
        samples_entry = replace(self.folder.write_bytes(name, samples), rows=len(samples) // stride)
        return TableShard(self.first_row, rows_entry, samples_entry)


def read_samples(folder: Folder, layout: TableLayout, shard: TableShard) -> NDArray[np.float32]:
    """The sampled rows of a published shard [n, width], each read back from where its row id says.

    Raises:
        CorruptArtifactError: The shard holds other bytes there than its samples.
    """
    stride = layout.stride_bytes
    expected = folder.read_bytes(shard.samples.path)
    starts = (sample_rows(shard.num_rows) * stride).tolist()
    found = b"".join(folder.read_bytes(shard.rows.path, start, start + stride) for start in starts)
    if found != expected:
        raise CorruptArtifactError(
            f"{folder.locate(shard.rows.path)} holds other rows than {shard.samples.path}: it changed while it was "
            "written; run the stage again"
        )
    return layout.decode(np.frombuffer(found, layout.element).reshape(-1, layout.stride_elements))


def publish_index(folder: Folder, source: Folder, entry: FileEntry) -> FileEntry:
    """Copy the match index of an f-gram vocabulary into the table, under its checksum.

    Raises:
        CorruptArtifactError: The index is not what its manifest says.
    """
    return folder.publish_file(source.local_path(entry), f"{_INDEX}/{entry.xxh3_128}.bin", entry.rows)


def commit_version(folder: Folder, version: TableVersion) -> TableVersion:
    """Publish a version under the next free number and return it with that number.

    Committing what is already current changes nothing and returns the current version, so a job that was
    killed after its commit adds no second one. Of racing committers each gets a number of its own.

    Raises:
        CorruptArtifactError: A file of the version is missing or has another size, or its rows do not add up.
    """
    check_consistent(version, f"the version to commit at {folder}")
    for entry in version.files:
        folder.check_size(entry)
    committed = list_versions(folder)
    if committed:
        current = load_version(folder, committed[-1])
        if current.has_same_content(version):
            return current
    number = committed[-1] + 1 if committed else 1
    while True:
        numbered = replace(version, number=number)
        if folder.create_bytes(version_path(number), numbered.to_bytes()):
            return numbered
        number += 1
