"""The promises of `scone.storage` on a real S3 server."""

import pyarrow.fs
import pytest

from scone.errors import CorruptArtifactError
from scone.storage import Folder


@pytest.fixture
def folder(s3_bucket: str) -> Folder:
    return Folder(f"{s3_bucket}/run")


def test_written_bytes_come_back_whole_and_in_ranges(folder):
    entry = folder.write_bytes("a/b.bin", b"0123456789")
    assert folder.read_bytes("a/b.bin", 2, 5) == b"234"
    assert entry == folder.describe_file("a/b.bin")
    assert folder.file_sizes() == {"a/b.bin": 10}


def test_create_happens_only_once(folder):
    assert folder.create_bytes("plan.json", b"first")
    assert not folder.create_bytes("plan.json", b"second")
    assert folder.read_bytes("plan.json") == b"first"


def test_write_that_raises_publishes_nothing(folder):
    def fail() -> None:
        with folder.open_write("x") as file:
            file.write(bytes(12 << 20))  # more than one part of a multipart upload
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert folder.list_files() == []


def test_empty_folder_objects_are_not_files(folder):
    folder.write_bytes("a", b"1")
    pyarrow.fs.FileSystem.from_uri(folder.uri)[0].create_dir(f"{folder.uri.removeprefix('s3://')}/_work/ray")
    assert folder.list_files() == ["a"]
    folder.delete("_work")


def test_local_copy_is_made_once_and_checked(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("SCONE_CACHE", str(tmp_path))
    entry = folder.write_bytes("rows.bin", b"rows")
    assert folder.local_path(entry).read_bytes() == b"rows"
    folder.write_bytes("other.bin", b"rowz")
    altered = entry.__class__("other.bin", 4, "0" * 32)
    with pytest.raises(CorruptArtifactError, match=r"other\.bin has checksum .* altered since"):
        folder.local_path(altered)
    folder.delete("rows.bin")
    assert folder.local_path(entry).read_bytes() == b"rows"
