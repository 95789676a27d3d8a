"""Small tables that one can check by eye: row k is k, k + 1/2, k + 1/4, …"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from scone.storage import Folder
from scone.table.layout import TableDtype, TableLayout
from scone.table.manifest import TableVersion
from scone.table.writer import ShardWriter, commit_version

BuildTable = Callable[..., TableVersion]


def make_rows(start: int, count: int, width: int) -> NDArray[np.float32]:
    return (np.arange(start, start + count)[:, None] + 0.5 ** np.arange(width)[None]).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "table")


@pytest.fixture
def build_table(folder: Folder) -> BuildTable:
    """Writes and commits a version with shards of the given numbers of rows."""

    def build(
        shard_rows: tuple[int, ...] = (100, 100, 37), width: int = 8, dtype: TableDtype = "fp32", model: str = "model"
    ) -> TableVersion:
        return commit_version(folder, draft_version(folder, shard_rows, width, dtype, model))

    return build


def draft_version(
    folder: Folder, shard_rows: tuple[int, ...], width: int, dtype: TableDtype, model: str = "model"
) -> TableVersion:
    layout, shards, first_row = TableLayout(width, dtype), [], 0
    for count in shard_rows:
        with ShardWriter(folder, layout, first_row) as writer:
            writer.append(make_rows(first_row, count, width))
            shards.append(writer.publish())
        first_row += count
    return TableVersion(
        width=width,
        dtype=dtype,
        stride_bytes=layout.stride_bytes,
        num_rows=first_row,
        shards=tuple(shards),
        index=None,
        model_fingerprint=model,
        fgrams_fingerprint="fgrams",
        tokenizer_fingerprint="tokenizer",
    )
