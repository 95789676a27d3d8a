import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scone.errors import CorruptArtifactError, IncompatibleArtifactError, MissingArtifactError
from scone.storage import Folder
from scone.table.layout import TableDtype, bfloat16_to_float32
from scone.table.manifest import TableVersion
from scone.table.reader import EmbeddingTable
from scone.table.writer import commit_version

from .conftest import BuildTable, draft_version, make_rows


def read_rows(table: EmbeddingTable, ids: list[int]) -> np.ndarray:
    out = np.empty((len(ids), table.width), table.element)
    table.lookup(np.array(ids, np.int64), out)
    return out


# Rows are 32 bytes: shards of 128 and 256 rows fill pages and lie one after the other in memory, others do not.
@pytest.mark.parametrize("shard_rows", [(237,), (100, 100, 37), (1, 1, 1, 1), (128, 256, 37), (100, 128, 128, 5, 128)])
@pytest.mark.parametrize("width", [8, 5])
def test_lookup_gives_the_rows_of_any_ids_in_order(
    folder: Folder, build_table: BuildTable, shard_rows: tuple[int, ...], width: int
) -> None:
    build_table(shard_rows, width)
    table = EmbeddingTable.open(folder)
    oracle = make_rows(0, table.num_rows, width)

    @settings(max_examples=50)
    @given(st.lists(st.integers(0, table.num_rows - 1), max_size=40))
    def check(ids: list[int]) -> None:
        np.testing.assert_array_equal(read_rows(table, ids), oracle[ids])

    check()


def test_lookup_of_many_padded_rows_spans_several_rounds(folder: Folder, build_table: BuildTable) -> None:
    build_table((2000, 1500), width=3)
    ids = np.random.default_rng(0).permutation(3500)
    np.testing.assert_array_equal(read_rows(EmbeddingTable.open(folder), ids.tolist()), make_rows(0, 3500, 3)[ids])


def test_bf16_rows_come_out_as_bits(folder: Folder, build_table: BuildTable) -> None:
    build_table((50,), 4, "bf16")
    table = EmbeddingTable.open(folder)
    rows = read_rows(table, [49, 0])
    assert rows.dtype == np.uint16
    # 49 + 1/8 needs 9 bits, bfloat16 has 8: it rounds to 49.
    np.testing.assert_array_equal(bfloat16_to_float32(rows), [[50, 49.5, 49.25, 49], [1, 0.5, 0.25, 0.125]])


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_ids_of_any_integer_type_work_also_strided(folder: Folder, build_table: BuildTable, dtype: type) -> None:
    build_table()
    out = np.empty((3, 8), np.float32)
    EmbeddingTable.open(folder).lookup(np.array([5, 0, 150, 0, 236, 0], dtype)[::2], out)
    np.testing.assert_array_equal(out, make_rows(0, 237, 8)[[5, 150, 236]])


@pytest.mark.parametrize("shard_rows", [(237,), (100, 137)])
@pytest.mark.parametrize("bad", [-1, 237, 2**62, -(2**62)])
def test_ids_outside_the_table_are_refused_never_clipped(
    folder: Folder, build_table: BuildTable, shard_rows: tuple[int, ...], bad: int
) -> None:
    build_table(shard_rows)
    with pytest.raises(IndexError, match=f"1 of 3 ids are outside the table's 237 rows, the first is {bad}"):
        read_rows(EmbeddingTable.open(folder), [3, bad, 200])


def test_ids_that_are_not_integers_are_refused(folder: Folder, build_table: BuildTable) -> None:
    build_table()
    with pytest.raises(TypeError, match="ids must be integers, got float64"):
        EmbeddingTable.open(folder).lookup(np.array([1.0]), np.empty((1, 8), np.float32))


def test_out_of_another_type_shape_or_layout_is_refused(folder: Folder, build_table: BuildTable) -> None:
    build_table()
    table, ids = EmbeddingTable.open(folder), np.arange(4)
    with pytest.raises(TypeError, match="out must be float32 for a fp32 table, got uint16"):
        table.lookup(ids, np.empty((4, 8), np.uint16))
    with pytest.raises(ValueError, match=r"need out of shape \[n, 8\] with one row per id, got \(4, 9\)"):
        table.lookup(ids, np.empty((4, 9), np.float32))
    with pytest.raises(ValueError, match=r"ids of shape \(2, 2\)"):
        table.lookup(ids.reshape(2, 2), np.empty((4, 8), np.float32))
    with pytest.raises(ValueError, match="C-contiguous and writable"):
        table.lookup(ids, np.empty((4, 16), np.float32)[:, ::2])
    frozen = np.empty((4, 8), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="C-contiguous and writable"):
        table.lookup(ids, frozen)


def test_consecutive_rows_are_copied_over_the_borders_of_shards(folder: Folder, build_table: BuildTable) -> None:
    build_table((100, 100, 37), width=5)
    table, out = EmbeddingTable.open(folder), np.empty((150, 5), np.float32)
    table.copy_rows(80, out)
    np.testing.assert_array_equal(out, make_rows(80, 150, 5))
    with pytest.raises(IndexError, match="rows 88 to 238 are outside the table's 237 rows"):
        table.copy_rows(88, out)
    with pytest.raises(IndexError, match="rows -1 to 149"):
        table.copy_rows(-1, out)


def test_threads_look_up_at_once_and_never_mix_rows(folder: Folder, build_table: BuildTable) -> None:
    build_table((400, 400, 200), width=5)
    table, oracle, wrong = EmbeddingTable.open(folder), make_rows(0, 1000, 5), []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(50):
            ids = random.integers(0, 1000, random.integers(1, 200))
            if not np.array_equal(read_rows(table, ids.tolist()), oracle[ids]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_earlier_version_stays_readable_beside_the_current_one(folder: Folder, build_table: BuildTable) -> None:
    build_table((100,))
    build_table((100, 37))
    assert EmbeddingTable.open(folder).num_rows == 137
    assert EmbeddingTable.open(folder, 1).num_rows == 100
    with pytest.raises(MissingArtifactError, match="no version 3; committed are 1, 2"):
        EmbeddingTable.open(folder, 3)


def test_open_checks_what_the_caller_needs(folder: Folder, build_table: BuildTable) -> None:
    build_table()
    with pytest.raises(IncompatibleArtifactError, match="rows of width 8, the main model needs 128"):
        EmbeddingTable.open(folder, width=128)


def test_a_missing_shard_is_corrupt(folder: Folder, build_table: BuildTable) -> None:
    folder.delete(build_table().shards[1].rows.path)
    with pytest.raises(CorruptArtifactError, match="is missing although its manifest names it"):
        EmbeddingTable.open(folder)


@pytest.mark.parametrize("cut_bytes", [1, 32, 3200])
def test_a_truncated_shard_is_corrupt(folder: Folder, build_table: BuildTable, cut_bytes: int) -> None:
    path = build_table().shards[1].rows.path
    folder.write_bytes(path, folder.read_bytes(path)[:-cut_bytes])
    with pytest.raises(CorruptArtifactError, match="truncated or overwritten"):
        EmbeddingTable.open(folder, verify="size")


def test_a_flipped_bit_anywhere_is_found_by_reading_all_content(folder: Folder, build_table: BuildTable) -> None:
    path = build_table((1000,)).shards[0].rows.path
    original = folder.read_bytes(path)
    for position in (0, 15_999, 16_001, 31_999):
        altered = bytearray(original)
        altered[position] ^= 1
        folder.write_bytes(path, bytes(altered))
        with pytest.raises(CorruptArtifactError, match="altered since it was written"):
            EmbeddingTable.open(folder, verify="content")
    folder.write_bytes(path, original)
    EmbeddingTable.open(folder, verify="content")


def test_rows_shifted_by_one_are_found_by_the_samples(folder: Folder, build_table: BuildTable) -> None:
    path = build_table((1000,)).shards[0].rows.path
    content = folder.read_bytes(path)
    folder.write_bytes(path, content[32:] + content[:32])
    EmbeddingTable.open(folder, verify="size")
    with pytest.raises(CorruptArtifactError, match="holds other values for row 0 than its sampled"):
        EmbeddingTable.open(folder)


def test_shards_in_the_wrong_order_are_found_by_the_samples(folder: Folder) -> None:
    version = draft_version(folder, (100, 100), 8, "fp32")
    commit_version(folder, _with_swapped_rows(version))
    with pytest.raises(CorruptArtifactError, match="holds other values for row 0 than its sampled"):
        EmbeddingTable.open(folder)


def test_altered_samples_are_named_as_such(folder: Folder, build_table: BuildTable) -> None:
    samples = build_table().shards[2].samples
    folder.write_bytes(samples.path, bytes(samples.num_bytes))
    with pytest.raises(CorruptArtifactError, match=f"{samples.path} has checksum"):
        EmbeddingTable.open(folder)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_stored_byte_belongs_to_a_row(folder: Folder, build_table: BuildTable, dtype: TableDtype) -> None:
    version = build_table((100, 37), 8, dtype)
    assert version.num_bytes == 137 * version.layout.row_bytes


def _with_swapped_rows(version: TableVersion) -> TableVersion:
    one, two = version.shards
    return replace(version, shards=(replace(one, rows=two.rows), replace(two, rows=one.rows)))
