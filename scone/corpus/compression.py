"""Compressed streams that notice when they end too early."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from typing import IO, Any

import zstandard

from scone.errors import CorpusError

_READ_BYTES = 1 << 20


@contextlib.contextmanager
def open_decompressed(file: IO[bytes], location: str, source: str) -> Iterator[Any]:
    """A buffered binary stream of the content of `file`, decompressed as the suffix of `location` says.

    Raises:
        CorpusError: The compressed data is damaged or ends too early.
    """
    suffix = location.lower().rpartition(".")[2]
    try:
        if suffix == "gz":
            with gzip.GzipFile(fileobj=file, mode="rb") as stream:
                yield io.BufferedReader(stream, _READ_BYTES)
        elif suffix == "zst":
            yield io.BufferedReader(_ZstandardStream(file), _READ_BYTES)
        else:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise CorpusError(f"{source} is damaged or cut off: {error}; restore or download it again") from error


class _ZstandardStream(io.RawIOBase):
    """All frames of a file. zstandard's own reader ends in silence where a file is cut off."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._ready:
            block = self._file.read(_READ_BYTES)
            if not block:
                if self._frame is not None:
                    raise EOFError("compressed file ended before the end-of-stream marker was reached")
                return 0
            self._ready = self._decompress(block)
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self, block: bytes) -> bytes:
        pieces = []
        while block:
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            pieces.append(self._frame.decompress(block))
            block = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        return b"".join(pieces)
