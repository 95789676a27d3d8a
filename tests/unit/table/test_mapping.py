import gc
import os
from pathlib import Path

import numpy as np
import pytest

from scone.errors import StoreError
from scone.storage import FileEntry, Folder
from scone.table.layout import TableLayout
from scone.table.mapping import map_shards

from .conftest import make_rows

LAYOUT = TableLayout(8, "fp32")  # rows of 32 bytes, 128 to a page


def write_shards(folder: Folder, *row_counts: int) -> list[tuple[Path, FileEntry]]:
    files, first = [], 0
    for number, count in enumerate(row_counts):
        entry = folder.write_bytes(f"{number}.bin", make_rows(first, count, 8).tobytes())
        files.append((Path(folder.locate(entry.path)), entry))
        first += count
    return files


@pytest.mark.parametrize(
    ("row_counts", "block_rows"),
    [((128, 256, 37), [421]), ((100, 128), [100, 128]), ((128, 100, 128, 128), [228, 256]), ((37,), [37])],
)
def test_shards_of_whole_pages_join_what_follows(
    tmp_path: Path, row_counts: tuple[int, ...], block_rows: list[int]
) -> None:
    blocks = map_shards(write_shards(Folder(tmp_path), *row_counts), LAYOUT)
    assert [len(block) for block in blocks] == block_rows
    np.testing.assert_array_equal(np.concatenate(blocks), make_rows(0, sum(row_counts), 8))


def test_rows_cannot_be_written_through_the_mapping(tmp_path: Path) -> None:
    (block,) = map_shards(write_shards(Folder(tmp_path), 128, 5), LAYOUT)
    assert not block.flags.writeable


def test_files_stay_mapped_while_rows_are_read_and_not_longer(tmp_path: Path) -> None:
    (block,) = map_shards(write_shards(Folder(tmp_path), 128, 128), LAYOUT)
    part = block[200:]
    del block
    gc.collect()
    np.testing.assert_array_equal(part, make_rows(200, 56, 8))
    assert _mapped_files(tmp_path) == {"0.bin", "1.bin"}
    del part
    gc.collect()
    assert _mapped_files(tmp_path) == set()


def test_what_cannot_be_mapped_is_named(tmp_path: Path) -> None:
    entry = FileEntry("pipe", 4096, "")
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        with pytest.raises(StoreError, match=r"cannot map .*pipe into memory: No such device"):
            map_shards([(tmp_path / "pipe", entry)], LAYOUT)
    finally:
        os.close(writer)


def _mapped_files(folder: Path) -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.rpartition("/")[2] for line in lines if str(folder) in line}
