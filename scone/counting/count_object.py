"""The count object: the windows of one unit of tokens in one file, in sections.

    section 0 … section S-1    rows per slice (int64), then keys (uint64 by word), then counts: a byte each, and as
                               uint32 those that are 255 or more, whose byte is 255; compressed with `codec`
    heavy counts               int64 by heavy prefix
    directory                  per section, and at last the heavy counts: start (int64), rows (int64), xxh3-64 (uint64)
    trailer                    magic, format, codec, sections, heavy prefixes, xxh3-64 of the directory

All little endian. A merge reads the directory's entries of its sections and then those sections, two ranges of
bytes, so that a unit needs one object however many partitions there are.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable
from typing import Literal

import numpy as np
import xxhash
import zstandard

from scone.counting.coding import WindowCoding
from scone.counting.windows import Windows
from scone.errors import CorruptArtifactError
from scone.storage import FileEntry, Folder

Codec = Literal["none", "zstd"]

_MAGIC = b"SCONECNT"
_FORMAT = 2
_TRAILER = struct.Struct("<8sHHIIQ")
_ENTRY = np.dtype([("start", "<i8"), ("rows", "<i8"), ("xxh3_64", "<u8")])
_CODECS: tuple[Codec, ...] = ("none", "zstd")
_LEVEL = 1
_ESCAPE = 255


def write_count_object(
    folder: Folder,
    path: str,
    passes: Iterable[Windows],
    heavy_counts: np.ndarray,
    coding: WindowCoding,
    codec: Codec,
) -> FileEntry:
    """Publish the windows of one unit.

    Args:
        passes: Windows in consecutive ranges of sections, together all of them; one is in memory at a time.
        heavy_counts: int64 [heavy prefixes].
    """
    directory = np.zeros(coding.num_sections + 1, _ENTRY)
    digest = xxhash.xxh3_128()
    position = section = 0
    with folder.open_write(path) as file:

        def write(content: bytes) -> None:
            nonlocal position
            digest.update(content)
            file.write(content)
            position += len(content)

        def write_section(content: bytes, rows: int) -> None:
            nonlocal section
            directory[section] = (position, rows, xxhash.xxh3_64_intdigest(content))
            write(content)
            section += 1

        for windows in passes:
            for start in range(0, len(windows.slice_rows), coding.slices_per_section):
                part = windows.between(start, start + coding.slices_per_section)
                write_section(_encode(part, codec), len(part))
        write_section(heavy_counts.astype("<i8").tobytes(), len(heavy_counts))
        content = directory.tobytes()
        numbers = (_FORMAT, _CODECS.index(codec), coding.num_sections, len(heavy_counts))
        write(content + _TRAILER.pack(_MAGIC, *numbers, xxhash.xxh3_64_intdigest(content)))
    if section != len(directory):
        raise ValueError(f"{section - 1:,} sections were counted, the coding has {coding.num_sections:,}")
    return FileEntry(path, position, digest.hexdigest(), int(directory["rows"][:-1].sum()))


class CountObject:
    """Reads sections of a count object by ranges of bytes."""

    def __init__(self, folder: Folder, entry: FileEntry, coding: WindowCoding, codec: Codec) -> None:
        """Reads nothing yet. Raises CorruptArtifactError where the file is too small for this coding."""
        self._folder, self._entry, self._coding, self._codec = folder, entry, coding, codec
        self._num_entries = coding.num_sections + 1
        self._directory_start = entry.num_bytes - _TRAILER.size - self._num_entries * _ENTRY.itemsize
        if self._directory_start < 0:
            raise self._corrupt("it is too short for a count object of this plan")

    def verify(self) -> None:
        """Read the whole directory and compare it with the coding.

        Raises:
            CorruptArtifactError: Altered, or of another coding.
        """
        content = self._read(self._directory_start, self._entry.num_bytes)
        directory, trailer = content[: -_TRAILER.size], content[-_TRAILER.size :]
        numbers = (_FORMAT, _CODECS.index(self._codec), self._coding.num_sections, len(self._coding.heavy))
        if trailer != _TRAILER.pack(_MAGIC, *numbers, xxhash.xxh3_64_intdigest(directory)):
            raise self._corrupt("its directory is not that of this plan")

    def read(self, first_section: int, stop_section: int) -> tuple[Windows, int]:
        """The windows of a range of sections, and the bytes read for them.

        Raises:
            CorruptArtifactError: The file is missing, truncated or altered.
        """
        coding = self._coding
        contents = self._contents(first_section, stop_section)
        num_bytes = sum(len(content) for content, _ in contents)
        parts = [
            self._decode(content, rows, section) for section, (content, rows) in enumerate(contents, first_section)
        ]
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        high = columns.pop(1) if coding.num_words > 1 else np.zeros(0, np.uint64)
        return Windows(high, columns[1], columns[2], columns[0]), num_bytes

    def heavy_counts(self) -> np.ndarray:
        """int64 [heavy prefixes]. Raises CorruptArtifactError where they were altered."""
        ((content, rows),) = self._contents(self._num_entries - 1, self._num_entries)
        if rows != len(self._coding.heavy) or len(content) != 8 * rows:
            raise self._corrupt("its heavy prefixes are not those of this plan")
        return np.frombuffer(content, "<i8")

    def _contents(self, first: int, stop: int) -> list[tuple[bytes, int]]:
        """(bytes, rows) of consecutive entries of the directory."""
        start = self._directory_start + first * _ENTRY.itemsize
        # The entry after the last one tells where it ends.
        num_entries = stop - first + (1 if stop < self._num_entries else 0)
        entries = np.frombuffer(self._read(start, start + num_entries * _ENTRY.itemsize), _ENTRY)
        edges = [*entries["start"].tolist(), self._directory_start][: stop - first + 1]
        if any(start > stop for start, stop in itertools.pairwise([0, *edges, self._directory_start])):
            raise self._corrupt("its directory is not that of this plan")
        content = self._read(edges[0], edges[-1])
        pieces = []
        for number, (start, stop) in enumerate(itertools.pairwise(edges)):
            piece = content[start - edges[0] : stop - edges[0]]
            if xxhash.xxh3_64_intdigest(piece) != int(entries["xxh3_64"][number]):
                raise self._corrupt(f"section {first + number} has another checksum than its directory says")
            pieces.append((piece, int(entries["rows"][number])))
        return pieces

    def _decode(self, content: bytes, rows: int, section: int) -> list[np.ndarray]:
        """[rows per slice, words …, counts] of one section."""
        coding = self._coding
        if self._codec == "zstd":
            content = zstandard.ZstdDecompressor().decompress(content)
        words_start = 8 * coding.slices_per_section
        counts_start = words_start + 8 * rows * coding.num_words
        if len(content) < counts_start + rows:
            raise self._corrupt(f"section {section} has fewer rows than its directory says")
        slice_rows = np.frombuffer(content, "<i8", coding.slices_per_section)
        words = np.frombuffer(content, "<u8", rows * coding.num_words, words_start).reshape(coding.num_words, rows)
        counts = np.frombuffer(content, "u1", rows, counts_start).astype(np.uint32)
        counts[counts == _ESCAPE] = np.frombuffer(content, "<u4", -1, counts_start + rows)
        return [slice_rows, *words, counts]

    def _read(self, start: int, stop: int) -> bytes:
        try:
            content = self._folder.read_bytes(self._entry.path, start, stop)
        except FileNotFoundError as error:
            raise self._corrupt("it is missing") from error
        if len(content) != stop - start:
            raise self._corrupt(f"it is shorter than the {self._entry.num_bytes:,} bytes that were written")
        return content

    def _corrupt(self, problem: str) -> CorruptArtifactError:
        where = self._folder.locate(self._entry.path)
        return CorruptArtifactError(f"{where}: {problem}; delete it and run the stage again, it resumes")


def _encode(windows: Windows, codec: Codec) -> bytes:
    columns = (
        windows.slice_rows.astype("<i8", copy=False),
        *([windows.high.astype("<u8", copy=False)] if len(windows.high) else []),
        windows.low.astype("<u8", copy=False),
        np.minimum(windows.counts, _ESCAPE).astype("u1"),
        windows.counts[windows.counts >= _ESCAPE].astype("<u4"),
    )
    content = b"".join(column.data for column in columns)
    return zstandard.ZstdCompressor(_LEVEL).compress(content) if codec == "zstd" else content
