import threading
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from scone.errors import CorruptArtifactError
from scone.storage import Folder
from scone.table.layout import TableLayout, sample_rows
from scone.table.manifest import TableVersion, list_versions, load_version
from scone.table.writer import ShardWriter, commit_version, publish_index, read_samples

from .conftest import BuildTable, draft_version, make_rows


def test_a_shard_is_raw_rows_at_a_fixed_stride_named_by_its_content(folder: Folder) -> None:
    layout = TableLayout(3, "fp32")
    with ShardWriter(folder, layout, 50) as writer:
        writer.append(make_rows(50, 4, 3))
        writer.append(make_rows(54, 1, 3))
        shard = writer.publish()
    content = folder.read_bytes(shard.rows.path)
    assert shard.first_row == 50
    assert shard.rows.path == f"shards/{xxhash.xxh3_128_hexdigest(content)}.bin"
    assert len(content) == shard.rows.num_bytes == 5 * 16
    np.testing.assert_array_equal(np.frombuffer(content, np.float32).reshape(5, 4)[:, :3], make_rows(50, 5, 3))


def test_the_same_rows_in_other_batches_make_the_same_files(folder: Folder) -> None:
    shards = []
    for batches in ([10], [3, 7], [1] * 10):
        with ShardWriter(folder, TableLayout(4), 0) as writer:
            first = 0
            for count in batches:
                writer.append(make_rows(first, count, 4))
                first += count
            shards.append(writer.publish())
    assert shards[0] == shards[1] == shards[2]
    assert len(folder.list_files()) == 2


def test_a_writer_that_fails_publishes_nothing(folder: Folder) -> None:
    def fail_halfway() -> None:
        with ShardWriter(folder, TableLayout(4), 0) as writer:
            writer.append(make_rows(0, 10, 4))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_halfway()
    assert folder.list_files() == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_refused_with_its_rank(folder: Folder, bad: float) -> None:
    rows = make_rows(0, 10, 4)
    rows[7, 2] = bad
    with (
        ShardWriter(folder, TableLayout(4), 1000) as writer,
        pytest.raises(CorruptArtifactError, match="rank 1007 has a vector with NaN or infinite values"),
    ):
        writer.append(rows)


def test_a_value_that_only_rounding_makes_infinite_is_refused(folder: Folder) -> None:
    rows = np.full((1, 4), np.finfo(np.float32).max, np.float32)
    with ShardWriter(folder, TableLayout(4, "fp32"), 0) as writer:
        writer.append(rows)
    with (
        ShardWriter(folder, TableLayout(4, "bf16"), 0) as writer,
        pytest.raises(CorruptArtifactError, match=r"rank 0 has a vector .* infinite values as bf16"),
    ):
        writer.append(rows)


def test_rows_of_another_width_are_refused(folder: Folder) -> None:
    with (
        ShardWriter(folder, TableLayout(4), 0) as writer,
        pytest.raises(ValueError, match=r"shape \(2, 5\) do not fit a table of width 4"),
    ):
        writer.append(make_rows(0, 2, 5))


def test_samples_read_back_are_the_rows_at_their_places(folder: Folder) -> None:
    layout = TableLayout(3, "fp32")
    with ShardWriter(folder, layout, 0) as writer:
        writer.append(make_rows(0, 500, 3))
        shard = writer.publish()
    np.testing.assert_array_equal(read_samples(folder, layout, shard), make_rows(0, 500, 3)[sample_rows(500)])


def test_samples_that_differ_from_their_shard_are_refused(folder: Folder) -> None:
    layout = TableLayout(4, "fp32")
    with ShardWriter(folder, layout, 0) as writer:
        writer.append(make_rows(0, 10, 4))
        shard = writer.publish()
    folder.write_bytes(shard.rows.path, make_rows(1, 10, 4).tobytes())
    with pytest.raises(CorruptArtifactError, match="holds other rows than samples/"):
        read_samples(folder, layout, shard)


def test_committing_what_is_current_adds_no_version(folder: Folder, build_table: BuildTable) -> None:
    assert build_table() == build_table()
    assert list_versions(folder) == [1]


def test_an_earlier_content_can_be_made_current_again(folder: Folder, build_table: BuildTable) -> None:
    first = build_table(model="one")
    build_table(model="two")
    again = commit_version(folder, first)
    assert again.number == 3
    assert again.has_same_content(first)
    assert load_version(folder) == again


def test_racing_committers_get_distinct_versions_and_none_is_lost(folder: Folder) -> None:
    draft = draft_version(folder, (20,), 4, "bf16")
    committed: list[TableVersion] = []
    start = threading.Barrier(8)

    def commit(model: str) -> None:
        start.wait()
        committed.append(commit_version(folder, replace(draft, model_fingerprint=model)))

    threads = [threading.Thread(target=commit, args=(f"model {i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(version.number for version in committed) == list_versions(folder) == list(range(1, 9))
    assert all(load_version(folder, version.number) == version for version in committed)


def test_a_version_whose_file_is_missing_is_not_committed(folder: Folder) -> None:
    draft = draft_version(folder, (20, 20), 4, "bf16")
    folder.delete(draft.shards[1].rows.path)
    with pytest.raises(CorruptArtifactError, match="is missing although its manifest names it"):
        commit_version(folder, draft)
    assert list_versions(folder) == []


def test_a_version_that_does_not_add_up_is_not_committed(folder: Folder) -> None:
    draft = draft_version(folder, (20, 20), 4, "bf16")
    with pytest.raises(CorruptArtifactError, match=r"the version to commit at .* do not add up"):
        commit_version(folder, replace(draft, num_rows=41))
    assert list_versions(folder) == []


def test_the_match_index_is_copied_under_its_checksum(folder: Folder) -> None:
    fgrams = folder / "fgrams"
    entry = replace(fgrams.write_bytes("match_index.bin", b"index"), rows=3)
    copy = publish_index(folder, fgrams, entry)
    assert copy == replace(entry, path=f"index/{entry.xxh3_128}.bin")
    assert folder.read_bytes(copy.path) == b"index"
