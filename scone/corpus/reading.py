"""Documents of Parquet, JSON-lines and plain text files, one by one, with errors that name the line or row."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Iterator
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from scone.corpus import local_docs
from scone.corpus.compression import open_decompressed
from scone.corpus.document import Document, Part, ReadSettings
from scone.errors import CorpusError
from scone.storage import Folder

_BATCH_ROWS = 1024
_BOM = b"\xef\xbb\xbf"
_BLOCK_BYTES = 8 << 20
_MAX_WHOLE_FILE_BYTES = 1 << 30  # a document is held in memory, and tokenized in one go


def read_part(part: Part, settings: ReadSettings) -> Iterator[Document]:
    """The documents of a part in their order, those without any text included.

    Raises:
        CorpusError: The file is gone, not UTF-8, not what its suffix says, or lacks the text column.
        StoreError: Storage refuses to read.
    """
    if part.format == "local-docs":
        yield from local_docs.read_package(part)
        return
    folder, _, name = part.location.rpartition("/")
    reader = {"parquet": _read_parquet, "jsonl": _read_jsonl, "text": _read_text}[part.format]
    try:
        with Folder(folder).open_read(name) as file:
            yield from reader(file, part, settings)
    except FileNotFoundError as error:
        raise CorpusError(f"{part.source} has disappeared since it was listed; restore it and run again") from error


def _read_parquet(file: IO[bytes], part: Part, settings: ReadSettings) -> Iterator[Document]:
    try:
        parquet = pq.ParquetFile(file)
        _check_columns(part, settings, parquet.schema_arrow)
        groups = list(range(part.start, part.stop)) if part.stop else list(range(parquet.num_row_groups))
        row = sum(parquet.metadata.row_group(group).num_rows for group in range(part.start))
        columns = [settings.text_column] + ([settings.group_column] if settings.group_column else [])
        for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=groups, columns=columns):
            texts = _texts_of(batch[settings.text_column], part, row)
            groups_of = batch[settings.group_column].to_pylist() if settings.group_column else [None] * len(texts)
            for text, group in zip(texts, groups_of, strict=True):
                yield _document(part, settings, f"{part.source}#{row}", text, group)
                row += 1
    except pa.ArrowException as error:
        raise CorpusError(f"{part.source} is not a readable Parquet file: {error}") from error


def _check_columns(part: Part, settings: ReadSettings, schema: pa.Schema) -> None:
    for setting, column in (("text_column", settings.text_column), ("group_column", settings.group_column)):
        if column and column not in schema.names:
            raise CorpusError(
                f"{part.source} has no column {column!r}; {_columns_found(schema.names, column, setting)}"
            )
    kind = schema.field(settings.text_column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise CorpusError(
            f"{part.source}: column {settings.text_column!r} holds {kind}, expected strings; "
            "name another with tokenize.text_column"
        )


def _columns_found(found: list[str], wanted: str, setting: str) -> str:
    nearest = difflib.get_close_matches(wanted, found, n=1)
    hint = f"did you mean tokenize.{setting} = {nearest[0]!r}?" if nearest else f"set tokenize.{setting}"
    return f"found {', '.join(found) or 'none'}; {hint}"


def _texts_of(column: pa.Array, part: Part, first_row: int) -> list[str | None]:
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        for index in range(len(column)):
            try:
                column[index].as_py()
            except UnicodeDecodeError as error:
                raise CorpusError(f"{part.source}, row {first_row + index:,}: text is not UTF-8 ({error})") from error
        raise


def _read_jsonl(file: IO[bytes], part: Part, settings: ReadSettings) -> Iterator[Document]:
    """Lines that begin in [start, stop) of the file; the line that spans a bound belongs to where it begins."""
    position = 0
    with open_decompressed(file, part.location, part.source) as lines:
        if part.start:
            lines.seek(part.start - 1)
            position = part.start - 1 + len(lines.readline())
        while not part.stop or position < part.stop:
            line = lines.readline()
            if not line:
                break
            where = position
            position += len(line)
            content = line.removeprefix(_BOM) if where == 0 else line
            if content.strip():
                yield _document_of_line(content, where, part, settings)


def _document_of_line(line: bytes, position: int, part: Part, settings: ReadSettings) -> Document:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise CorpusError(f"{_line_of(part, position)}: not UTF-8 ({error})") from error
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{_line_of(part, position)}: not a JSON line ({error})") from error
    if not isinstance(value, dict):
        raise CorpusError(f"{_line_of(part, position)}: a JSON object is expected, found {type(value).__name__}")
    for setting, key in (("text_column", settings.text_column), ("group_column", settings.group_column)):
        if key and key not in value:
            found = _columns_found(list(value), key, setting)
            raise CorpusError(f"{_line_of(part, position)}: no key {key!r}; {found}")
    text = value[settings.text_column]
    if text is not None and not isinstance(text, str):
        raise CorpusError(
            f"{_line_of(part, position)}: {settings.text_column!r} holds {type(text).__name__}, expected a string"
        )
    if text is not None and not _is_encodable(text):
        raise CorpusError(f"{_line_of(part, position)}: {settings.text_column!r} holds half of a surrogate pair")
    group = value[settings.group_column] if settings.group_column else None
    return _document(part, settings, f"{part.source}@{position}", text, group)


def _line_of(part: Part, position: int) -> str:
    """`file:line` of a byte position; reads the file up to there, which only an error has to pay for."""
    folder, _, name = part.location.rpartition("/")
    line = 1
    with Folder(folder).open_read(name) as file, open_decompressed(file, part.location, part.source) as content:
        left = position
        while left > 0 and (block := content.read(min(left, _BLOCK_BYTES))):
            line += block.count(b"\n")
            left -= len(block)
    return f"{part.source}:{line}"


def _read_text(file: IO[bytes], part: Part, settings: ReadSettings) -> Iterator[Document]:
    if not settings.text_separator and part.num_bytes > _MAX_WHOLE_FILE_BYTES:
        raise CorpusError(
            f"{part.source} holds {part.num_bytes:,} bytes, too many for one document; "
            "set tokenize.text_separator to what divides it"
        )
    with open_decompressed(file, part.location, part.source) as content:
        if not settings.text_separator:
            yield _document(part, settings, part.source, _decode(content.read(), 0, part), None)
            return
        separator = settings.text_separator.encode()
        position, rest = 0, b""
        while block := content.read(_BLOCK_BYTES):
            *pieces, rest = (rest + block).split(separator)
            for piece in pieces:
                yield _document(part, settings, f"{part.source}@{position}", _decode(piece, position, part), None)
                position += len(piece) + len(separator)
        yield _document(part, settings, f"{part.source}@{position}", _decode(rest, position, part), None)


def _decode(content: bytes, position: int, part: Part) -> str:
    try:
        return (content.removeprefix(_BOM) if position == 0 else content).decode()
    except UnicodeDecodeError as error:
        raise CorpusError(f"{_line_of(part, position + error.start)}: not UTF-8 ({error})") from error


def _is_encodable(text: str) -> bool:
    with contextlib.suppress(UnicodeEncodeError):
        text.encode()
        return True
    return False


def _document(part: Part, settings: ReadSettings, doc_id: str, text: str | None, group: Any) -> Document:
    name = part.source if settings.group_by_source else ""
    if settings.group_column:
        name = "" if group is None else str(group)
    return Document(doc_id, part.source, name, text or "")
