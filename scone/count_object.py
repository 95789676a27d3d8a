"""The count object: the windows of one unit of tokens in one file, with a section per partition.

    section 0 … section P-1    keys (uint64), then counts (uint32), of a partition's rows
    footer                     rows per slice (int64), start of each section and of the footer (int64),
                               xxh3-64 of each section (uint64)
    trailer                    magic, format, words per key, slices, partitions, xxh3-64 of the footer

All little endian. A merge reads the footer and its own section, so a unit needs one object however many
partitions there are.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from scone.counting import WindowCoding, Windows, partition_slices
from scone.errors import CorruptArtifactError
from scone.storage import FileEntry, Folder

_MAGIC = b"SCONECNT"
_FORMAT = 1
_TRAILER = struct.Struct("<8sIIIIQ")


@dataclass(frozen=True, slots=True)
class _Footer:
    slice_rows: np.ndarray  # int64 [slices]
    section_starts: np.ndarray  # int64 [P + 1]
    section_checksums: np.ndarray  # uint64 [P]

    def to_bytes(self) -> bytes:
        parts = (self.slice_rows, self.section_starts, self.section_checksums)
        return b"".join(part.astype(part.dtype.newbyteorder("<"), copy=False).tobytes() for part in parts)

    @classmethod
    def from_bytes(cls, content: bytes, num_slices: int, num_partitions: int) -> _Footer:
        numbers = np.frombuffer(content, "<i8")
        slice_rows, starts, checksums = np.split(numbers, [num_slices, num_slices + num_partitions + 1])
        return cls(slice_rows, starts, checksums.view("<u8"))

    @staticmethod
    def num_bytes(num_slices: int, num_partitions: int) -> int:
        return 8 * (num_slices + 2 * num_partitions + 1)


def write_count_object(
    folder: Folder, path: str, windows: Windows, coding: WindowCoding, num_partitions: int
) -> FileEntry:
    """Publish the windows of one unit; `windows` cover all slices."""
    bounds = partition_slices(coding.num_slices, num_partitions)
    slice_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(windows.slice_rows)])
    checksums = np.zeros(num_partitions, np.uint64)
    starts = np.zeros(num_partitions + 1, np.int64)
    digest = xxhash.xxh3_128()
    with folder.open_write(path) as file:
        for partition in range(num_partitions):
            rows = slice(slice_starts[bounds[partition]], slice_starts[bounds[partition + 1]])
            section = io.BytesIO()
            section.write(windows.keys[rows].astype("<u8", copy=False).tobytes())
            section.write(windows.counts[rows].astype("<u4", copy=False).tobytes())
            content = section.getvalue()
            checksums[partition] = xxhash.xxh3_64_intdigest(content)
            starts[partition + 1] = starts[partition] + len(content)
            digest.update(content)
            file.write(content)
        footer = _Footer(windows.slice_rows, starts, checksums).to_bytes()
        shape = (coding.num_words, coding.num_slices, num_partitions)
        trailer = _TRAILER.pack(_MAGIC, _FORMAT, *shape, xxhash.xxh3_64_intdigest(footer))
        digest.update(footer + trailer)
        file.write(footer + trailer)
    num_bytes = int(starts[-1]) + len(footer) + len(trailer)
    return FileEntry(path, num_bytes, digest.hexdigest(), len(windows.keys))


class CountObject:
    """Reads one partition's windows from a count object, by ranges of bytes."""

    def __init__(self, folder: Folder, entry: FileEntry, coding: WindowCoding, num_partitions: int) -> None:
        """Reads and checks the footer.

        Raises:
            CorruptArtifactError: Missing, truncated, altered, or not the count object of this plan.
        """
        self._folder, self._entry, self._coding, self._num_partitions = folder, entry, coding, num_partitions
        footer_bytes = _Footer.num_bytes(coding.num_slices, num_partitions)
        folder.check_size(entry)
        start = entry.num_bytes - footer_bytes - _TRAILER.size
        tail = folder.read_bytes(entry.path, max(0, start), entry.num_bytes)
        footer, trailer = tail[:footer_bytes], tail[footer_bytes:]
        shape = (coding.num_words, coding.num_slices, num_partitions)
        expected = _TRAILER.pack(_MAGIC, _FORMAT, *shape, xxhash.xxh3_64_intdigest(footer))
        if start < 0 or trailer != expected:
            raise self._corrupt("its footer is not that of this plan")
        self._footer = _Footer.from_bytes(footer, coding.num_slices, num_partitions)

    def slice_rows(self, partition: int) -> np.ndarray:
        """int64 [slices of the partition], rows of each."""
        bounds = partition_slices(self._coding.num_slices, self._num_partitions)
        return self._footer.slice_rows[bounds[partition] : bounds[partition + 1]]

    def read(self, partition: int) -> Windows:
        """The windows of one partition. Raises CorruptArtifactError where they were altered."""
        start, stop = self._footer.section_starts[partition : partition + 2].tolist()
        content = self._folder.read_bytes(self._entry.path, start, stop)
        if xxhash.xxh3_64_intdigest(content) != int(self._footer.section_checksums[partition]):
            raise self._corrupt(f"section {partition} has another checksum than its footer says")
        slice_rows = self.slice_rows(partition)
        num_rows, num_words = int(slice_rows.sum()), self._coding.num_words
        keys = np.frombuffer(content, "<u8", num_rows * num_words).reshape(num_rows, num_words)
        counts = np.frombuffer(content, "<u4", num_rows, 8 * num_rows * num_words)
        return Windows(keys, counts, slice_rows)

    def _corrupt(self, problem: str) -> CorruptArtifactError:
        where = self._folder.locate(self._entry.path)
        return CorruptArtifactError(f"{where}: {problem}; delete it and run the stage again, it resumes")
