import json
from dataclasses import replace

import pytest

from scone.errors import CorruptArtifactError, IncompatibleArtifactError, MissingArtifactError
from scone.storage import Folder, canonical_json, fingerprint
from scone.table.manifest import check_consistent, list_versions, load_version, parse_version, version_path

from .conftest import BuildTable


def test_a_version_reads_back_as_it_was_committed(folder: Folder, build_table: BuildTable) -> None:
    committed = build_table()
    assert committed.number == 1
    assert load_version(folder) == committed
    assert parse_version(committed.to_bytes(), "here") == committed


def test_the_highest_number_is_current_and_earlier_ones_stay(folder: Folder, build_table: BuildTable) -> None:
    first, second = build_table(model="one"), build_table(model="two")
    assert list_versions(folder) == [1, 2]
    assert load_version(folder) == second
    assert load_version(folder, 1) == first


def test_no_version_is_missing(folder: Folder) -> None:
    with pytest.raises(MissingArtifactError, match="no committed version of a table"):
        load_version(folder)


def test_an_absent_number_is_missing_and_the_message_names_the_others(folder: Folder, build_table: BuildTable) -> None:
    build_table()
    with pytest.raises(MissingArtifactError, match="no version 7; committed are 1"):
        load_version(folder, 7)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b'{"body": {}}', b'{"body": {}, "xxh3_128": ""}'])
def test_what_is_no_version_file_is_corrupt(content: bytes) -> None:
    with pytest.raises(CorruptArtifactError, match="here is not a table version"):
        parse_version(content, "here")


def test_an_altered_version_file_is_corrupt(folder: Folder, build_table: BuildTable) -> None:
    content = build_table().to_bytes().replace(b'"num_rows": 237', b'"num_rows": 236')
    with pytest.raises(CorruptArtifactError, match="altered since it was committed"):
        parse_version(content, "here")


def test_a_version_file_under_another_number_is_corrupt(folder: Folder, build_table: BuildTable) -> None:
    folder.write_bytes(version_path(5), build_table().to_bytes())
    with pytest.raises(CorruptArtifactError, match="says it is version 1"):
        load_version(folder)


def test_an_unknown_format_is_incompatible(build_table: BuildTable) -> None:
    content = _changed(build_table().to_bytes(), format=9)
    with pytest.raises(IncompatibleArtifactError, match="table format 9, this version of scone reads format 1"):
        parse_version(content, "here")


def test_an_unknown_field_is_corrupt(build_table: BuildTable) -> None:
    content = _changed(build_table().to_bytes(), colour="blue")
    with pytest.raises(CorruptArtifactError, match=r"lacks what a table version needs .*colour"):
        parse_version(content, "here")


def test_rows_that_do_not_add_up_are_corrupt(build_table: BuildTable) -> None:
    version = build_table()
    with pytest.raises(CorruptArtifactError, match="says 238 rows, its shards hold 237: they do not add up"):
        check_consistent(replace(version, num_rows=238), "here")


def test_a_gap_between_shards_is_corrupt(build_table: BuildTable) -> None:
    version = build_table()
    with pytest.raises(CorruptArtifactError, match="starts at row 200 with 37 rows, expected a start at row 100"):
        check_consistent(replace(version, shards=(version.shards[0], version.shards[2])), "here")


def test_a_table_without_rows_is_corrupt(build_table: BuildTable) -> None:
    with pytest.raises(CorruptArtifactError, match="they do not add up"):
        check_consistent(replace(build_table(), num_rows=0, shards=()), "here")


def test_a_stride_that_does_not_follow_from_the_width_is_corrupt(build_table: BuildTable) -> None:
    with pytest.raises(CorruptArtifactError, match="rows lie 64 bytes apart; fp32 rows of width 8 lie 32 apart"):
        check_consistent(replace(build_table(), stride_bytes=64), "here")


def test_a_shard_with_other_bytes_than_its_rows_need_is_corrupt(build_table: BuildTable) -> None:
    version = build_table((10,))
    shard = version.shards[0]
    short = replace(shard, rows=replace(shard.rows, num_bytes=300))
    with pytest.raises(CorruptArtifactError, match="10 rows in 300 bytes, expected 10 rows of 32 bytes"):
        check_consistent(replace(version, shards=(short,)), "here")


def test_needs_that_the_version_does_not_meet_are_incompatible(build_table: BuildTable) -> None:
    version = build_table()
    version.check_compatible(
        "here", width=8, dtype="fp32", model_fingerprint="model", fgrams_fingerprint="fgrams",
        tokenizer_fingerprint="tokenizer",
    )  # fmt: skip
    with pytest.raises(IncompatibleArtifactError, match="rows of width 8, the main model needs 16"):
        version.check_compatible("here", width=16)
    with pytest.raises(IncompatibleArtifactError, match="holds fp32 rows, expected bf16"):
        version.check_compatible("here", dtype="bf16")
    with pytest.raises(IncompatibleArtifactError, match="made from model model, in use is other"):
        version.check_compatible("here", model_fingerprint="other")
    with pytest.raises(IncompatibleArtifactError, match="made from f-grams fgrams, in use is other"):
        version.check_compatible("here", fgrams_fingerprint="other")
    with pytest.raises(IncompatibleArtifactError, match="made from tokenizer tokenizer, in use is other"):
        version.check_compatible("here", tokenizer_fingerprint="other")


def _changed(content: bytes, **changes: object) -> bytes:
    body = {**json.loads(content)["body"], **changes}
    return canonical_json({"body": body, "xxh3_128": fingerprint(body)})
