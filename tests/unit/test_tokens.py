"""Token shards: what is written is read back, and nothing else is accepted."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scone.artifacts import ArtifactBuilder
from scone.errors import CorruptArtifactError, IncompatibleArtifactError, MissingArtifactError
from scone.storage import FileEntry, Folder
from scone.tokens import (
    TOKENS_KIND,
    Documents,
    concatenate_documents,
    load_tokens,
    read_documents,
    shard_statistics,
    write_documents,
)


def _documents() -> Documents:
    token_ids, offsets = concatenate_documents([[5, 6, 7], [], [70_000]])
    return Documents(token_ids, offsets, ["a", "a", "b"], ["a#0", "a#1", "b#0"])


def _publish(folder: Folder, statistics: dict[str, object] | None = None) -> None:
    documents = _documents()
    entries = [write_documents(folder, f"{split}/00000.parquet", documents) for split in ("train", "heldout")]
    shards = {entry.path: shard_statistics(documents) for entry in entries}
    full = {"token_vocab_size": 80_000, "end_of_text_id": 0, "special_ids": [0], "shards": shards}
    builder = ArtifactBuilder(folder, kind=TOKENS_KIND, format=1, config={}, inputs={}, tokenizer_fingerprint="ab")
    builder.publish(entries, full if statistics is None else statistics, {})


def test_documents_are_read_as_they_were_written(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    entry = write_documents(folder, "train/00000.parquet", _documents())
    found = read_documents(folder, entry)
    assert entry.rows == 3
    assert found.token_ids.dtype == np.uint32
    assert found.token_ids.tolist() == [5, 6, 7, 70_000]
    assert found.offsets.tolist() == [0, 3, 3, 4]
    assert found.sources == ["a", "a", "b"]
    assert found.doc_ids == ["a#0", "a#1", "b#0"]


def test_a_shard_without_documents_is_read(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    token_ids, offsets = concatenate_documents([])
    found = read_documents(folder, write_documents(folder, "empty.parquet", Documents(token_ids, offsets, [], [])))
    assert found.num_documents == 0
    assert found.num_tokens == 0


def test_equal_documents_make_equal_bytes(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    first, second = (write_documents(folder, name, _documents()) for name in ("1.parquet", "2.parquet"))
    assert first.xxh3_128 == second.xxh3_128


def test_columns_of_different_length_are_refused(tmp_path: Path) -> None:
    documents = _documents()
    with pytest.raises(ValueError, match="documents have 1 doc_ids, their offsets say 3"):
        write_documents(Folder(tmp_path), "x", Documents(documents.token_ids, documents.offsets, "aab", ["only"]))


def test_offsets_that_miss_tokens_are_refused(tmp_path: Path) -> None:
    wrong = Documents(np.arange(4, dtype=np.uint32), np.array([0, 3]), ["a"], ["a#0"])
    with pytest.raises(ValueError, match="offsets run from 0 to 3, they must run from 0 to 4"):
        write_documents(Folder(tmp_path), "x", wrong)


def test_truncated_shard_is_reported_with_its_path(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    entry = write_documents(folder, "train/00000.parquet", _documents())
    path = tmp_path / entry.path
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CorruptArtifactError, match=r"train/00000\.parquet holds .* truncated or overwritten"):
        read_documents(folder, entry)


def test_altered_shard_is_reported(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    entry = write_documents(folder, "train/00000.parquet", _documents())
    (tmp_path / entry.path).write_bytes(b"x" * entry.num_bytes)
    with pytest.raises(CorruptArtifactError, match="is not a readable Parquet file"):
        read_documents(folder, entry)


def test_parquet_of_another_shape_is_reported(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "other.parquet")
    entry = FileEntry("other.parquet", (tmp_path / "other.parquet").stat().st_size, "", 1)
    with pytest.raises(CorruptArtifactError, match="holds 1 rows of text; its manifest says 1 rows of doc_id, source"):
        read_documents(Folder(tmp_path), entry)


def test_manifest_tells_sizes_without_reading_shards(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    _publish(folder)
    info = load_tokens(folder)
    assert (info.token_vocab_size, info.end_of_text_id, info.special_ids) == (80_000, 0, (0,))
    assert info.tokenizer_fingerprint == "ab"
    assert (info.num_tokens("train"), info.num_documents("heldout")) == (4, 3)


def test_absent_artifact_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingArtifactError, match="no finished tokens artifact"):
        load_tokens(Folder(tmp_path / "nothing"))


def test_another_kind_of_artifact_is_refused(tmp_path: Path) -> None:
    ArtifactBuilder(Folder(tmp_path), kind="table", format=1, config={}, inputs={}).publish([], {}, {})
    with pytest.raises(IncompatibleArtifactError, match="holds a table artifact, expected tokens"):
        load_tokens(Folder(tmp_path))


def test_manifest_without_its_numbers_is_corrupt(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    _publish(folder, statistics={"token_vocab_size": 3})
    with pytest.raises(CorruptArtifactError, match="does not say 'shards'"):
        load_tokens(folder)
