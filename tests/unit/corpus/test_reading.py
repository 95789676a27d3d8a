"""Documents come out of every format as they went in; damage is reported with file and line or row."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from scone.corpus import Document, ReadSettings, list_parts, read_part
from scone.errors import CorpusError

TEXTS = ["One.", "Zwei: äöü €", "three\nlines\n\n", "", "  \n"]


def _read(path: Path, **settings: str | bool) -> list[Document]:
    return [d for part in list_parts([str(path)]) for d in read_part(part, ReadSettings(**settings))]


def _json_lines(rows: list[object]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _frames(content: bytes) -> bytes:
    """Two zstd frames in a row, as parallel compressors write them."""
    half = len(content) // 2
    return b"".join(zstandard.ZstdCompressor().compress(piece) for piece in (content[:half], content[half:]))


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [("", bytes), (".gz", gzip.compress), (".zst", zstandard.ZstdCompressor().compress), (".zst", _frames)],
)
def test_json_lines_are_read(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(_json_lines([{"text": text, "n": 1} for text in TEXTS])))
    documents = _read(path)
    assert [document.text for document in documents] == TEXTS
    assert documents[1].doc_id == f"{path}@25"
    assert {document.source for document in documents} == {str(path)}


def test_blank_lines_byte_order_mark_and_missing_last_newline_are_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n\n{"text": "b"}')
    assert [document.text for document in _read(path)] == ["a", "b"]


def test_null_text_is_an_empty_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": null}\n')
    pq.write_table(pa.table({"text": pa.array([None], pa.string())}), tmp_path / "b.parquet")
    assert [document.text for document in _read(tmp_path)] == ["", ""]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_parquet_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": range(5), "text": pa.array(TEXTS, kind)}), path)
    documents = _read(path)
    assert [document.text for document in documents] == TEXTS
    assert documents[3].doc_id == f"{path}#3"


@pytest.mark.parametrize("name", ["a.txt", "a.md.gz"])
def test_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    content = b"\xef\xbb\xbfone\n\ntwo\n"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (document,) = _read(tmp_path / name)
    assert document.text == "one\n\ntwo\n"
    assert document.doc_id == str(tmp_path / name)


def test_text_file_is_divided_at_the_separator(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one<|end|>zwei ä<|end|>\nthree")
    documents = _read(path, text_separator="<|end|>")
    assert [document.text for document in documents] == ["one", "zwei ä", "\nthree"]
    assert [document.doc_id for document in documents] == [f"{path}@{n}" for n in (0, 10, 24)]


def test_separator_is_found_across_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one<|end|>two<|end|>three")
    monkeypatch.setattr("scone.corpus.reading._BLOCK_BYTES", 4)
    assert [document.text for document in _read(path, text_separator="<|end|>")] == ["one", "two", "three"]


def test_text_file_too_large_for_one_document_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (part,) = list_parts([str(tmp_path / "a.txt")])
    with pytest.raises(CorpusError, match=r"a\.txt holds 2,147,483,648 bytes, too many for one document; set tokenize"):
        list(read_part(replace(part, num_bytes=2 << 30), ReadSettings()))


def test_groups_come_from_a_column_or_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(_json_lines([{"text": "x", "domain": "d1"}, {"text": "y", "domain": None}]))
    pq.write_table(pa.table({"text": ["z"], "domain": [7]}), tmp_path / "b.parquet")
    assert [d.group for d in _read(tmp_path)] == ["", "", ""]
    assert [d.group for d in _read(tmp_path, group_column="domain")] == ["d1", "", "7"]
    by_source = _read(tmp_path, group_by_source=True)
    assert [d.group for d in by_source] == [d.source for d in by_source]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "\xff"}', r"a\.jsonl:3: not UTF-8"),
        (b'{"text": "x"', r"a\.jsonl:3: not a JSON line"),
        (b"[" * 100_000, r"a\.jsonl:3: not a JSON line"),
        (b'["text"]', r"a\.jsonl:3: a JSON object is expected, found list"),
        (
            b'{"txt": "x", "id": 1}',
            r"a\.jsonl:3: no key 'text'; found txt, id; did you mean tokenize\.text_column = 'txt'",
        ),
        (b'{"text": 5}', r"a\.jsonl:3: 'text' holds int, expected a string"),
        (b'{"text": "\\ud800"}', r"a\.jsonl:3: 'text' holds half of a surrogate pair"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_bad_json_line_is_named(tmp_path: Path, line: bytes, message: str, suffix: str) -> None:
    content = b'{"text": "good"}\n\n' + line + b"\n"
    (tmp_path / f"a.jsonl{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(CorpusError, match=message.replace("jsonl", f"jsonl{suffix}")):
        _read(tmp_path)


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthr\xe9e\n")
    with pytest.raises(CorpusError, match=r"a\.txt:3: not UTF-8 .*0xe9"):
        _read(tmp_path)


def test_parquet_text_that_is_not_utf8_is_named_with_its_row(tmp_path: Path) -> None:
    column = pa.array([b"good", b"also", b"b\xffd"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=r"a\.parquet, row 2: text is not UTF-8"):
        _read(tmp_path)


def test_missing_column_is_named_with_those_found(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "content": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=r"no column 'text'; found id, content; set tokenize\.text_column"):
        _read(tmp_path)
    with pytest.raises(CorpusError, match=r"did you mean tokenize\.text_column = 'content'"):
        _read(tmp_path, text_column="contents")
    with pytest.raises(CorpusError, match=r"no column 'domain'; .* set tokenize\.group_column"):
        _read(tmp_path, text_column="content", group_column="domain")


def test_column_that_is_not_text_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [[1, 2]]}), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=r"column 'text' holds list<.*>, expected strings"):
        _read(tmp_path)


def test_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("not parquet")
    with pytest.raises(CorpusError, match=r"a\.parquet is not a readable Parquet file"):
        _read(tmp_path)


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_compressed_file_that_is_cut_off_is_named(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    suffix = "gz" if compress is gzip.compress else "zst"
    whole = compress(_json_lines([{"text": str(number)} for number in range(1000)]))
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorpusError, match=rf"a\.jsonl\.{suffix} is damaged or cut off: .*end-of-stream marker"):
        _read(tmp_path)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_file_that_is_not_compressed_is_named(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.jsonl.{suffix}").write_text('{"text": "x"}\n')
    with pytest.raises(CorpusError, match=rf"a\.jsonl\.{suffix} is damaged or cut off"):
        _read(tmp_path)


def test_file_that_has_disappeared_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n')
    (part,) = list_parts([str(path)])
    path.unlink()
    with pytest.raises(CorpusError, match=r"a\.jsonl has disappeared since it was listed"):
        list(read_part(part, ReadSettings()))
