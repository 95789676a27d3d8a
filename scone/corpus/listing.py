"""From what the user names (paths, globs, folders, URIs, `local-docs:`) to the parts that are read."""

from __future__ import annotations

import difflib
import fnmatch
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from scone.corpus import local_docs
from scone.corpus.document import Format, Part
from scone.errors import ConfigError, CorpusError
from scone.storage import Folder

logger = logging.getLogger(__name__)

_FORMATS: dict[str, Format] = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
}
COMPRESSIONS = (".gz", ".zst")
_FOOTER_THREADS = 16


def list_parts(specs: Iterable[str]) -> list[Part]:
    """One part per file or package that `specs` name, each once, in the order of the specs and then of the names.

    Raises:
        CorpusError: Nothing matches, a file has an unsupported suffix or no content, a package is not installed.
        ConfigError: The kind of storage needs a library that is not installed.
        StoreError: Storage refuses.
    """
    parts: dict[str, Part] = {}
    for spec in specs:
        if spec.startswith(local_docs.PREFIX):
            found: Iterable[Part] = local_docs.list_packages(spec)
        else:
            found = _list_files(spec)
        for part in found:
            parts.setdefault(f"{part.format}:{part.location}", part)
    if not parts:
        raise CorpusError("the corpus names no source: set tokenize.corpus to files, globs, folders or local-docs:")
    return list(parts.values())


def group_parts(parts: Sequence[Part], unit_bytes: int) -> list[list[Part]]:
    """Parts cut to at most about `unit_bytes` and gathered, in order, into lists of at least half of that.

    Parts that are kept after reading never share a list with others.
    """
    groups: list[list[Part]] = []
    for part in _split_all(parts, unit_bytes):
        last = groups[-1] if groups else []
        size = sum(other.num_bytes for other in last)
        fits = bool(last) and size + part.num_bytes <= unit_bytes
        if fits and last[0].is_costly_to_read == part.is_costly_to_read:
            last.append(part)
        else:
            groups.append([part])
    return groups


def format_of(path: str) -> Format | None:
    """The format that a file's name says, compression aside; None if it is not a supported one."""
    name = path.rpartition("/")[2].lower()
    suffix = Path(name).suffix
    if suffix in COMPRESSIONS:
        found = _FORMATS.get(Path(name.removesuffix(suffix)).suffix)
        return None if found == "parquet" else found
    return _FORMATS.get(suffix)


def _list_files(spec: str) -> Iterator[Part]:
    root, pattern = _split_glob(spec)
    sizes = _sizes_below(root, pattern, spec)
    is_folder = not pattern and list(sizes) != [""]
    names = [name for name in sizes if not pattern or _matches(name, pattern)]
    if is_folder:
        supported = [name for name in names if format_of(name) and not _is_hidden(name)]
        if len(supported) < len(names):
            logger.info("%s: passed over %d files of other kinds", spec, len(names) - len(supported))
        names = supported
    if not names:
        raise CorpusError(_no_match(spec, root, sizes))
    for name in names:
        source = f"{spec.rstrip('/')}/{name}" if is_folder else _rename(spec, pattern, name)
        format = format_of(source)
        if format is None:
            kinds = ", ".join(_FORMATS)
            raise CorpusError(
                f"{source} has an unsupported suffix; scone reads {kinds}, all but .parquet also with "
                f"{' or '.join(COMPRESSIONS)}"
            )
        if sizes[name] == 0:
            raise CorpusError(f"{source} is empty (0 bytes), perhaps a failed download; restore it or leave it out")
        location = root.locate(name) if name else root.uri
        yield Part(source=source, format=format, location=location, num_bytes=sizes[name])


def _split_glob(spec: str) -> tuple[Folder, str]:
    """The folder above the first wildcard, and the pattern below it ("" without wildcards)."""
    expanded = str(Path(spec).expanduser()) if spec.startswith("~") else spec
    match = re.search(r"[*?\[]", expanded)
    if not match:
        return Folder(expanded), ""
    root, _, _ = expanded[: match.start()].rpartition("/")
    if not root:
        root = "/" if expanded.startswith("/") else "."
        return Folder(root), expanded.lstrip("/")
    return Folder(root), expanded[len(root) + 1 :]


def _sizes_below(root: Folder, pattern: str, spec: str) -> dict[str, int]:
    """Sizes by path relative to `root`; for a file itself, its size under ""."""
    try:
        sizes = root.file_sizes()
    except (ImportError, ValueError) as error:
        raise ConfigError(f"cannot open {spec}: {error}; install the library for that kind of storage") from error
    if not pattern and not sizes:
        return {}
    return sizes


def _matches(name: str, pattern: str) -> bool:
    """Glob matching by path segment; `**` stands for any number of folders."""
    return _match_segments(name.split("/"), pattern.split("/"))


def _match_segments(names: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_match_segments(names[skip:], patterns[1:]) for skip in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], patterns[0]) and _match_segments(names[1:], patterns[1:])


def _rename(spec: str, pattern: str, name: str) -> str:
    return f"{spec.removesuffix(pattern)}{name}" if pattern else spec


def _is_hidden(name: str) -> bool:
    return any(segment.startswith((".", "_")) for segment in name.split("/"))


def _no_match(spec: str, root: Folder, sizes: dict[str, int]) -> str:
    if sizes:
        nearest = difflib.get_close_matches(spec, [root.locate(name) for name in list(sizes)[:1000]], n=1, cutoff=0.5)
        there = f", did you mean {nearest[0]}?" if nearest else f" among the {len(sizes):,} files below {root}"
        return f"no document file matches {spec}{there}"
    return f"nothing at {spec}; check the path or the glob" + ("" if "://" in spec else f" ({root})")


def _split_all(parts: Sequence[Part], unit_bytes: int) -> Iterator[Part]:
    """Large parts cut; the footers of large Parquet files are read side by side."""
    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        for pieces in pool.map(lambda part: _split(part, unit_bytes), parts):
            yield from pieces


def _split(part: Part, unit_bytes: int) -> list[Part]:
    if part.num_bytes <= unit_bytes:
        return [part]
    if part.format == "local-docs":
        return local_docs.split_package(part, unit_bytes)
    if part.format == "parquet":
        return _split_row_groups(part, unit_bytes)
    if part.format == "jsonl" and not part.location.lower().endswith(COMPRESSIONS):
        bounds = [*range(0, part.num_bytes, unit_bytes), part.num_bytes]
        return [replace(part, start=start, stop=stop, num_bytes=stop - start) for start, stop in pairwise(bounds)]
    return [part]


def _split_row_groups(part: Part, unit_bytes: int) -> list[Part]:
    folder, _, name = part.location.rpartition("/")
    try:
        with Folder(folder).open_read(name) as file:
            metadata = pq.ParquetFile(file).metadata
    except pa.ArrowException as error:
        raise CorpusError(f"{part.source} is not a readable Parquet file: {error}") from error
    sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    scale = part.num_bytes / max(1, sum(sizes))
    pieces: list[Part] = []
    start, size = 0, 0.0
    for group, group_bytes in enumerate(sizes):
        size += group_bytes * scale
        if size >= unit_bytes or group == len(sizes) - 1:
            pieces.append(replace(part, start=start, stop=group + 1, num_bytes=int(size)))
            start, size = group + 1, 0.0
    return pieces
