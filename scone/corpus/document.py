"""What a document is, and what a part of a corpus is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Format = Literal["parquet", "jsonl", "text", "local-docs"]


@dataclass(frozen=True, slots=True)
class Document:
    """One text that stays whole from here to the training sequences."""

    doc_id: str
    """Where it stands in its source: a row, a byte offset, a line of a package's file."""
    source: str
    """The file or package it comes from."""
    group: str
    """Documents of one group never stand on both sides of the split; "" if the document is its own group."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of one source that is read in one go, on any host. Plain values, so that it travels as JSON."""

    source: str
    """The file as the user named it, or the package."""
    format: Format
    location: str
    """Full path or URI of the file; name of the package for `local-docs`."""
    num_bytes: int
    """Bytes to read: for plans and progress."""
    start: int = 0
    stop: int = 0
    """Half-open range of row groups (Parquet), bytes (JSON lines) or files (local-docs); (0, 0) is all."""
    version: str = ""
    """Of the package, which must be the same on every host."""

    @property
    def is_costly_to_read(self) -> bool:
        """Whether documents should be kept after the first reading rather than read again."""
        return self.format == "local-docs"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Part:
        return cls(**value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSettings:
    """How files are made into documents."""

    text_column: str = "text"
    """Column of Parquet files, key of JSON lines."""
    group_column: str = ""
    """Column or key whose value is the document's group."""
    text_separator: str = ""
    """Divides a plain text file into documents; "" makes each file one document."""
    group_by_source: bool = False
    """Make each file a group."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
