"""Folders on local disk or in object storage, with atomic writes. All storage of the project goes through here.

A file becomes visible in one step or not at all: locally a temporary file in the same folder is synced and
renamed (or linked, to create it only once); in object storage a single PUT or a completed multipart upload
does the same. A temporary name belongs to one writer alone, so two attempts at the same file never mix.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import fsspec
import xxhash

from scone.errors import CorruptArtifactError, StoreError

_READ_BYTES = 8 << 20
_TEMPORARY_PREFIX = ".tmp-"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of an artifact: `path` is relative to the artifact's folder, `rows` is 0 where it has none."""

    path: str
    num_bytes: int
    xxh3_128: str
    rows: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"path": self.path, "bytes": self.num_bytes, "xxh3_128": self.xxh3_128, "rows": self.rows}

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> FileEntry:
        return cls(entry["path"], entry["bytes"], entry["xxh3_128"], entry["rows"])


class Folder:
    """A folder named by a local path or a URI (`s3://bucket/prefix`, `gs://`, `hf://`, …).

    Pickles as its URI, so it travels to Ray workers. Paths given to its methods are relative to it.

    Raises (all methods): StoreError where storage refuses; FileNotFoundError where a file to read is absent.
    """

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        text = os.fspath(uri)
        self.is_local = "://" not in text or text.startswith("file://")
        self.uri = str(Path(text.removeprefix("file://")).absolute()) if self.is_local else text.rstrip("/")

    def __repr__(self) -> str:
        return f"Folder({self.uri!r})"

    def __str__(self) -> str:
        return self.uri

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder) and other.uri == self.uri

    def __hash__(self) -> int:
        return hash(self.uri)

    def __truediv__(self, name: str) -> Folder:
        return Folder(f"{self.uri}/{name}")

    def locate(self, path: str) -> str:
        """The full path or URI of a file, for messages and for libraries that open URIs themselves."""
        return f"{self.uri}/{path}" if path else self.uri

    def exists(self, path: str) -> bool:
        with self._errors("look for", path):
            return bool(self._filesystem().exists(self.locate(path)))

    def size_bytes(self, path: str) -> int:
        with self._errors("read", path):
            return int(self._filesystem().size(self.locate(path)))

    def list_files(self, path: str = "") -> list[str]:
        """Relative paths of all finished files below `path`, sorted; empty where nothing is there."""
        return list(self.file_sizes(path))

    def file_sizes(self, path: str = "") -> dict[str, int]:
        """Bytes of all finished files below `path`, by relative path in order; a file's own where `path` is one."""
        with self._errors("list", path):
            if self.is_local:
                return _local_sizes(self.uri, self.locate(path))
            root = self._filesystem()._strip_protocol(self.uri)
            found = self._filesystem().find(self.locate(path), detail=True)
        # Some S3 servers and clients keep an empty object "folder/" for a folder.
        folders = {name for name, info in found.items() if str(info.get("Key", "")).endswith("/")}
        files = ((name, info) for name, info in sorted(found.items()) if name not in folders)
        return {name[len(root) :].lstrip("/"): int(info["size"]) for name, info in files if info["type"] == "file"}

    def read_bytes(self, path: str, start: int | None = None, stop: int | None = None) -> bytes:
        """The bytes of a file, or of its half-open range [start, stop)."""
        with self._errors("read", path):
            return bytes(self._filesystem().cat_file(self.locate(path), start=start, end=stop))

    def read_json(self, path: str) -> Any:
        """Raises CorruptArtifactError where the file is not JSON."""
        content = self.read_bytes(path)
        try:
            return json.loads(content)
        except ValueError as error:
            raise CorruptArtifactError(
                f"{self.locate(path)} is not valid JSON ({error}); restore or rebuild it"
            ) from error

    @contextlib.contextmanager
    def open_read(self, path: str) -> Iterator[IO[bytes]]:
        """A seekable binary file."""
        with self._errors("read", path), self._filesystem().open(self.locate(path), "rb") as file:
            yield file

    def write_bytes(self, path: str, content: bytes) -> FileEntry:
        """Publish a whole file, replacing what was there."""
        with self.open_write(path) as file:
            file.write(content)
        return FileEntry(path, len(content), xxhash.xxh3_128_hexdigest(content))

    def write_json(self, path: str, value: Any) -> FileEntry:
        return self.write_bytes(path, canonical_json(value, indent=2))

    def create_bytes(self, path: str, content: bytes) -> bool:
        """Publish a file only if none is there (link(2), or `If-None-Match: *`); False if one is."""
        if not self.is_local:
            with self._errors("write", path):
                try:
                    self._filesystem().pipe_file(self.locate(path), content, mode="create")
                except FileExistsError:
                    return False
                except OSError as error:
                    if _is_precondition_failure(error):
                        return False
                    raise
            return True
        with self._errors("write", path), self._temporary(path) as temporary:
            with open(temporary, "wb") as file:
                file.write(content)
                _sync(file)
            try:
                os.link(temporary, self.locate(path))
            except FileExistsError:
                return False
            _sync_folder(os.path.dirname(self.locate(path)))
        return True

    @contextlib.contextmanager
    def open_write(self, path: str) -> Iterator[IO[bytes]]:
        """A binary file that becomes visible when the block ends, and not at all if the block raises."""
        with self._errors("write", path):
            if self.is_local:
                with self._temporary(path) as temporary:
                    with open(temporary, "wb") as file:
                        yield file
                        _sync(file)
                    os.replace(temporary, self.locate(path))
                    _sync_folder(os.path.dirname(self.locate(path)))
                return
            file = self._filesystem().open(self.locate(path), "wb")
            try:
                yield file
            except BaseException:
                file.discard()
                file.closed = True
                raise
            file.close()

    def publish_file(self, source: Path, path: str, rows: int = 0) -> FileEntry:
        """Copy a finished local file in, atomically; the source stays."""
        digest = xxhash.xxh3_128()
        num_bytes = 0
        with open(source, "rb") as reader, self.open_write(path) as writer:
            while block := reader.read(_READ_BYTES):
                digest.update(block)
                num_bytes += len(block)
                writer.write(block)
        return FileEntry(path, num_bytes, digest.hexdigest(), rows)

    def describe_file(self, path: str, rows: int = 0) -> FileEntry:
        """Size and checksum of a file as it stands; reads it whole."""
        digest = xxhash.xxh3_128()
        num_bytes = 0
        with self.open_read(path) as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
                num_bytes += len(block)
        return FileEntry(path, num_bytes, digest.hexdigest(), rows)

    def delete(self, path: str) -> None:
        """Remove a file, or a folder with all below it; nothing there is fine."""
        with self._errors("delete", path), contextlib.suppress(FileNotFoundError):
            self._filesystem().rm(self.locate(path), recursive=True)

    def local_path(self, entry: FileEntry) -> Path:
        """A local file with the content of `entry`, for mapping into memory.

        A local folder hands out its own file, after a check of its size. A remote one is copied once into
        the cache folder (`SCONE_CACHE`, default `~/.cache/scone`), under its checksum, which is checked.

        Raises:
            CorruptArtifactError: The file is missing, or its size or content is not what `entry` says.
        """
        if self.is_local:
            self.check_size(entry)
            return Path(self.locate(entry.path))
        target = cache_folder() / "files" / entry.xxh3_128
        if target.exists() and target.stat().st_size == entry.num_bytes:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{_TEMPORARY_PREFIX}{uuid.uuid4().hex}")
        try:
            digest = xxhash.xxh3_128()
            with self.open_read(entry.path) as reader, open(temporary, "wb") as writer:
                while block := reader.read(_READ_BYTES):
                    digest.update(block)
                    writer.write(block)
            if digest.hexdigest() != entry.xxh3_128:
                raise CorruptArtifactError(_altered(self.locate(entry.path), digest.hexdigest(), entry.xxh3_128))
            os.replace(temporary, target)
        except FileNotFoundError as error:
            raise CorruptArtifactError(_missing(self.locate(entry.path))) from error
        finally:
            temporary.unlink(missing_ok=True)
        return target

    def check_size(self, entry: FileEntry) -> None:
        """Raises CorruptArtifactError where the file is missing or has another size."""
        try:
            found = self.size_bytes(entry.path)
        except FileNotFoundError as error:
            raise CorruptArtifactError(_missing(self.locate(entry.path))) from error
        if found != entry.num_bytes:
            raise CorruptArtifactError(
                f"{self.locate(entry.path)} holds {found:,} bytes, its manifest says {entry.num_bytes:,}: "
                "truncated or overwritten; restore it, or delete the artifact's folder and run its stage again"
            )

    def check_content(self, entry: FileEntry) -> None:
        """Raises CorruptArtifactError where the file is missing, or its size or checksum differs."""
        self.check_size(entry)
        found = self.describe_file(entry.path)
        if found.xxh3_128 != entry.xxh3_128:
            raise CorruptArtifactError(_altered(self.locate(entry.path), found.xxh3_128, entry.xxh3_128))

    def _filesystem(self) -> Any:
        if self.is_local:
            return fsspec.filesystem("file", auto_mkdir=True)
        # S3-compatible servers reject the checksums that newer botocore adds to every request.
        os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
        os.environ.setdefault("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_required")
        options = {"use_listings_cache": False} if self.uri.startswith(("s3://", "s3a://")) else {}
        return fsspec.core.url_to_fs(self.uri, **options)[0]

    @contextlib.contextmanager
    def _temporary(self, path: str) -> Iterator[str]:
        folder, _, name = self.locate(path).rpartition("/")
        os.makedirs(folder, exist_ok=True)
        temporary = f"{folder}/{_TEMPORARY_PREFIX}{uuid.uuid4().hex}-{name}"
        try:
            yield temporary
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)

    @contextlib.contextmanager
    def _errors(self, verb: str, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreError(f"cannot {verb} {self.locate(path)}: {_explain(error)}") from error


def canonical_json(value: Any, indent: int | None = None) -> bytes:
    """The one byte form of a JSON value: sorted keys, UTF-8, no NaN."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, indent=indent).encode()


def fingerprint(value: Any) -> str:
    """xxh3-128 of the canonical JSON of `value`, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(canonical_json(value))


def cache_folder() -> Path:
    """Where local copies of remote files live: `SCONE_CACHE`, else `~/.cache/scone`."""
    return Path(os.environ.get("SCONE_CACHE", Path.home() / ".cache" / "scone"))


@contextlib.contextmanager
def scratch_folder(name: str) -> Iterator[Path]:
    """A local folder for intermediate files (below `SCONE_SCRATCH` or the system's), removed at the end."""
    root = os.environ.get("SCONE_SCRATCH")
    folder = Path(tempfile.mkdtemp(prefix=f"scone-{name}-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _local_sizes(root: str, start: str) -> dict[str, int]:
    """Bytes of the finished files below `start`, by path relative to `root`.

    fsspec's own walk passes over a whole folder when a temporary file vanishes while it looks.
    """
    if os.path.isfile(start):
        return {os.path.relpath(start, root) if start != root else "": os.path.getsize(start)}
    sizes = {}
    for folder, _, names in os.walk(start, onerror=_raise_unless_gone):
        for name in names:
            if not name.startswith(_TEMPORARY_PREFIX):
                path = f"{folder}/{name}"
                with contextlib.suppress(FileNotFoundError):
                    sizes[os.path.relpath(path, root)] = os.path.getsize(path)
    return dict(sorted(sizes.items()))


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _explain(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "the disk is full; free some space and run the command again, it resumes"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{os.strerror(error.errno)}; choose another --output or change its permissions"
    return str(error) or type(error).__name__


def _is_precondition_failure(error: BaseException) -> bool:
    """Whether S3 refused a create-once because the object is there (412), or is being created right now (409)."""
    response = getattr(error.__cause__ or error, "response", None) or {}
    code = response.get("Error", {}).get("Code", "")
    return code in ("PreconditionFailed", "ConditionalRequestConflict") or "pre-conditions" in str(error)


def _missing(where: str) -> str:
    return (
        f"{where} is missing although its manifest names it; restore it, or delete the folder and run its stage again"
    )


def _altered(where: str, found: str, expected: str) -> str:
    return (
        f"{where} has checksum {found}, its manifest says {expected}: altered since it was written; "
        "restore it, or delete the artifact's folder and run its stage again"
    )


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
