"""Paths, globs, folders and URIs become parts; what cannot be read is refused by name before any work starts."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scone.corpus import Part, ReadSettings, group_parts, list_parts, read_part
from scone.corpus.listing import format_of
from scone.errors import ConfigError, CorpusError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with data/{b,a}.jsonl, data/deep/c.txt, data/notes.pdf and data/_meta.json."""
    for name in ("b.jsonl", "a.jsonl", "deep/c.txt", "notes.pdf", "_meta.json"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "x"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _sources(*specs: str) -> list[str]:
    return [part.source for part in list_parts(specs)]


def test_a_file_is_one_part(folder: Path) -> None:
    (part,) = list_parts(["data/a.jsonl"])
    assert (part.source, part.format, part.num_bytes) == ("data/a.jsonl", "jsonl", 14)
    assert part.location == str(folder / "data/a.jsonl")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("data/*.jsonl", ["data/a.jsonl", "data/b.jsonl"]),
        ("data/?.jsonl", ["data/a.jsonl", "data/b.jsonl"]),
        ("data/[b-z].jsonl", ["data/b.jsonl"]),
        ("data/**/*.txt", ["data/deep/c.txt"]),
        ("**/[ac].*", ["data/a.jsonl", "data/deep/c.txt"]),
        ("data", ["data/a.jsonl", "data/b.jsonl", "data/deep/c.txt"]),
        ("data/", ["data/a.jsonl", "data/b.jsonl", "data/deep/c.txt"]),
    ],
)
def test_globs_and_folders_name_files_in_order(folder: Path, spec: str, expected: list[str]) -> None:
    assert _sources(spec) == expected


def test_a_file_named_twice_is_read_once(folder: Path) -> None:
    assert _sources("data/b.jsonl", "data/*.jsonl") == ["data/b.jsonl", "data/a.jsonl"]


def test_absolute_globs_make_absolute_names(folder: Path) -> None:
    assert _sources(f"{folder}/data/*/*.txt", f"{folder}/data/deep/*.txt") == [f"{folder}/data/deep/c.txt"]


@pytest.mark.parametrize("spec", ["data/*.parquet", "nowhere/x.jsonl", "nowhere"])
def test_nothing_found_is_an_error_that_names_the_spec(folder: Path, spec: str) -> None:
    with pytest.raises(CorpusError, match=r"(no document file matches|nothing at) .*" + spec.replace("*", r"\*")):
        list_parts([spec])


def test_a_folder_without_documents_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"x")
    with pytest.raises(CorpusError, match=r"no document file matches .* among the 1 files below|did you mean"):
        list_parts([str(tmp_path)])


def test_unsupported_suffix_is_an_error_that_lists_the_supported(folder: Path) -> None:
    with pytest.raises(CorpusError, match=r"data/notes\.pdf has an unsupported suffix; scone reads \.parquet, \.jsonl"):
        list_parts(["data/notes.pdf"])


def test_empty_file_is_an_error(folder: Path) -> None:
    (folder / "data/empty.jsonl").touch()
    with pytest.raises(CorpusError, match=r"data/empty\.jsonl is empty \(0 bytes\)"):
        list_parts(["data/*.jsonl"])


def test_no_source_at_all_is_an_error() -> None:
    with pytest.raises(CorpusError, match="the corpus names no source"):
        list_parts([])


def test_unknown_storage_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot open nosuch://bucket/x\.jsonl"):
        list_parts(["nosuch://bucket/x.jsonl"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.JSONL.gz", "jsonl"),
        ("c4-train.00000.json.gz", "jsonl"),
        ("a.jsonl.zst", "jsonl"),
        ("a.md", "text"),
        ("a.parquet", "parquet"),
        ("a.parquet.gz", None),
        ("README", None),
    ],
)
def test_format_follows_the_suffix(name: str, expected: str | None) -> None:
    assert format_of(name) == expected


def test_small_parts_share_units_and_large_json_lines_are_cut(tmp_path: Path) -> None:
    lines = [f'{{"text": "document {number} of the large file"}}\n' for number in range(100)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    for name in ("b.jsonl", "c.jsonl"):
        (tmp_path / name).write_text(lines[0])
    groups = group_parts(list_parts([str(tmp_path)]), unit_bytes=1000)
    assert [[part.start for part in group] for group in groups] == [[0], [1000], [2000], [3000], [4000, 0, 0]]
    documents = [document for group in groups for part in group for document in read_part(part, ReadSettings())]
    texts = [document.text for document in documents]
    assert texts == [f"document {number} of the large file" for number in [*range(100), 0, 0]]
    assert len({document.doc_id for document in documents}) == len(documents)


def test_cutting_json_lines_anywhere_loses_and_doubles_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{"x" * (number % 7)}{number}"}}\n' for number in range(40)))
    (whole,) = list_parts([str(tmp_path / "a.jsonl")])
    expected = list(read_part(whole, ReadSettings()))
    for unit_bytes in (1, 10, 16, 17, 100, 10_000):
        groups = group_parts([whole], unit_bytes)
        assert [d for group in groups for part in group for d in read_part(part, ReadSettings())] == expected


def test_large_parquet_is_cut_between_row_groups(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(100)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=10, compression="none")
    parts = list_parts([str(tmp_path)])
    groups = group_parts(parts, unit_bytes=parts[0].num_bytes // 3)
    found = [document for group in groups for part in group for document in read_part(part, ReadSettings())]
    assert len(groups) > 1
    assert [document.text for document in found] == texts
    assert found[57].doc_id.endswith("a.parquet#57")


def test_large_file_that_is_not_parquet_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"x" * 5000)
    with pytest.raises(CorpusError, match=r"a\.parquet is not a readable Parquet file"):
        group_parts(list_parts([str(tmp_path)]), unit_bytes=1000)


def test_kept_and_streamed_parts_do_not_mix() -> None:
    kept = Part(source="p", format="local-docs", location="p", num_bytes=1)
    streamed = Part(source="f", format="text", location="/f", num_bytes=1)
    assert group_parts([kept, kept, streamed, kept], 100) == [[kept, kept], [streamed], [kept]]


def test_parts_travel_as_plain_values() -> None:
    part = Part(source="f", format="text", location="/f", num_bytes=1, start=2, stop=3, version="4")
    assert Part.from_dict(part.to_dict()) == part
