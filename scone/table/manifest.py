"""What one version of a table holds, and where: `versions/NNNNNNNN.json`, created once and never changed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

from scone.errors import CorruptArtifactError, IncompatibleArtifactError, MissingArtifactError
from scone.storage import FileEntry, Folder, canonical_json, fingerprint
from scone.table.layout import MAX_SAMPLES_PER_SHARD, TableDtype, TableLayout

TABLE_KIND = "table"
TABLE_FORMAT = 1
VERSIONS = "versions"
_VERSION_NAME = re.compile(rf"{VERSIONS}/(\d{{8}})\.json")


@dataclass(frozen=True, slots=True)
class TableShard:
    """One file of consecutive rows, and the file with the exact bytes of its sampled rows."""

    first_row: int
    rows: FileEntry
    samples: FileEntry

    @property
    def num_rows(self) -> int:
        return self.rows.rows

    def to_dict(self) -> dict[str, Any]:
        return {"first_row": self.first_row, "rows": self.rows.to_dict(), "samples": self.samples.to_dict()}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> TableShard:
        return cls(value["first_row"], FileEntry.from_dict(value["rows"]), FileEntry.from_dict(value["samples"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableVersion:
    """One committed build of a table. Row k of the version is the vector of the f-gram with rank k."""

    number: int = 0
    """0 until the version is committed."""
    width: int
    dtype: TableDtype
    stride_bytes: int
    num_rows: int
    shards: tuple[TableShard, ...]
    index: FileEntry | None
    """The match index from f-gram to row id. It may hold more f-grams than there are rows."""
    model_fingerprint: str
    fgrams_fingerprint: str
    tokenizer_fingerprint: str
    statistics: dict[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> TableLayout:
        return TableLayout(self.width, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows as stored."""
        return sum(shard.rows.num_bytes for shard in self.shards)

    @property
    def files(self) -> list[FileEntry]:
        """Every file that the version needs beside its own manifest, each once."""
        entries = [entry for shard in self.shards for entry in (shard.rows, shard.samples)]
        entries += [self.index] if self.index else []
        return list({entry.path: entry for entry in entries}.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": TABLE_FORMAT,
            "number": self.number,
            "width": self.width,
            "dtype": self.dtype,
            "stride_bytes": self.stride_bytes,
            "num_rows": self.num_rows,
            "shards": [shard.to_dict() for shard in self.shards],
            "index": self.index.to_dict() if self.index else None,
            "model_fingerprint": self.model_fingerprint,
            "fgrams_fingerprint": self.fgrams_fingerprint,
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
            "statistics": self.statistics,
        }

    def to_bytes(self) -> bytes:
        """The file of this version: its content, and the checksum of that content around it."""
        body = self.to_dict()
        return canonical_json({"body": body, "xxh3_128": fingerprint(body)}, indent=1)

    def has_same_content(self, other: TableVersion) -> bool:
        """Whether the two differ in nothing but their numbers."""
        return replace(self, number=0) == replace(other, number=0)

    def check_compatible(
        self,
        where: object,
        *,
        width: int | None = None,
        dtype: TableDtype | None = None,
        model_fingerprint: str | None = None,
        fgrams_fingerprint: str | None = None,
        tokenizer_fingerprint: str | None = None,
    ) -> None:
        """Raises IncompatibleArtifactError where a given need is not what the version holds."""
        if width is not None and width != self.width:
            raise IncompatibleArtifactError(
                f"table at {where} holds rows of width {self.width}, the main model needs {width}; "
                'rebuild it with "scone precompute", or load the model it was made from'
            )
        if dtype is not None and dtype != self.dtype:
            raise IncompatibleArtifactError(
                f'table at {where} holds {self.dtype} rows, expected {dtype}; rebuild it with "scone precompute"'
            )
        needs = {"model": model_fingerprint, "f-grams": fgrams_fingerprint, "tokenizer": tokenizer_fingerprint}
        holds = {
            "model": self.model_fingerprint,
            "f-grams": self.fgrams_fingerprint,
            "tokenizer": self.tokenizer_fingerprint,
        }
        for name, wanted in needs.items():
            if wanted is not None and wanted != holds[name]:
                raise IncompatibleArtifactError(
                    f"table at {where} was made from {name} {holds[name][:12]}, in use is {wanted[:12]}; "
                    'rebuild the table with "scone precompute", or use what it was made from'
                )


def version_path(number: int) -> str:
    return f"{VERSIONS}/{number:08d}.json"


def list_versions(folder: Folder) -> list[int]:
    """Numbers of all committed versions, ascending."""
    found = (_VERSION_NAME.fullmatch(path) for path in folder.list_files(VERSIONS))
    return sorted(int(match[1]) for match in found if match)


def load_version(folder: Folder, number: int | None = None) -> TableVersion:
    """One version of the table in `folder`; without a number, the current one: the highest.

    Raises:
        MissingArtifactError: No such version is committed.
        IncompatibleArtifactError: It has a format that this code cannot read.
        CorruptArtifactError: Its file is truncated or altered, or what it says does not add up.
    """
    committed = list_versions(folder)
    if not committed:
        raise MissingArtifactError(f'no committed version of a table at {folder}; make one with "scone precompute"')
    chosen = committed[-1] if number is None else number
    if chosen not in committed:
        raise MissingArtifactError(
            f"table at {folder} has no version {chosen}; committed are {', '.join(map(str, committed))}"
        )
    where = folder.locate(version_path(chosen))
    version = parse_version(folder.read_bytes(version_path(chosen)), where)
    if version.number != chosen:
        raise CorruptArtifactError(f"{where} says it is version {version.number}; restore its own content")
    return version


def parse_version(content: bytes, where: str) -> TableVersion:
    """A version from the bytes of its file; raises as `load_version` does."""
    try:
        outer = json.loads(content)
        body, checksum = outer["body"], outer["xxh3_128"]
        found = body["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptArtifactError(
            f"{where} is not a table version ({type(error).__name__}: {error}); restore it, or use an earlier version"
        ) from error
    if fingerprint(body) != checksum:
        raise CorruptArtifactError(
            f"{where} has checksum {fingerprint(body)}, it says {checksum}: altered since it was committed; "
            "restore it, or use an earlier version"
        )
    if found != TABLE_FORMAT:
        raise IncompatibleArtifactError(
            f"{where} has table format {found}, this version of scone reads format {TABLE_FORMAT}; "
            'rebuild it with "scone precompute", or use the version that wrote it'
        )
    version = _from_body(body, where)
    check_consistent(version, where)
    return version


def check_consistent(version: TableVersion, where: object) -> None:
    """Raises CorruptArtifactError where rows, strides and sizes of a version contradict each other."""
    expected_stride = version.layout.stride_bytes
    if version.stride_bytes != expected_stride:
        raise CorruptArtifactError(
            f"{where} says rows lie {version.stride_bytes} bytes apart; {version.dtype} rows of width "
            f"{version.width} lie {expected_stride} apart; rebuild it"
        )
    next_row = 0
    for shard in version.shards:
        if shard.first_row != next_row or shard.num_rows < 1:
            raise CorruptArtifactError(
                f"{where}: shard {shard.rows.path} starts at row {shard.first_row:,} with {shard.num_rows:,} rows, "
                f"expected a start at row {next_row:,} and at least one row; rebuild it"
            )
        for entry, rows in ((shard.rows, shard.num_rows), (shard.samples, _num_samples(shard.num_rows))):
            if entry.rows != rows or entry.num_bytes != rows * version.stride_bytes:
                raise CorruptArtifactError(
                    f"{where}: {entry.path} has {entry.rows:,} rows in {entry.num_bytes:,} bytes, expected "
                    f"{rows:,} rows of {version.stride_bytes} bytes; rebuild it"
                )
        next_row += shard.num_rows
    if next_row != version.num_rows or next_row == 0:
        raise CorruptArtifactError(
            f"{where} says {version.num_rows:,} rows, its shards hold {next_row:,}: they do not add up; rebuild it"
        )


def _num_samples(num_rows: int) -> int:
    return min(num_rows, MAX_SAMPLES_PER_SHARD)


def _from_body(body: dict[str, Any], where: str) -> TableVersion:
    try:
        values = {key: value for key, value in body.items() if key != "format"}
        values["shards"] = tuple(TableShard.from_dict(shard) for shard in values["shards"])
        values["index"] = FileEntry.from_dict(values["index"]) if values["index"] else None
        return TableVersion(**values)
    except (KeyError, TypeError) as error:
        raise CorruptArtifactError(f"{where} lacks what a table version needs ({error}); rebuild it") from error
