import errno
import os
import pickle
import stat
from pathlib import Path

import pytest

from scone.errors import CorruptArtifactError, StoreError
from scone.storage import FileEntry, Folder, canonical_json, fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "here")


def test_written_bytes_come_back_whole_and_in_ranges(folder):
    entry = folder.write_bytes("a/b.bin", b"0123456789")
    assert folder.read_bytes("a/b.bin") == b"0123456789"
    assert folder.read_bytes("a/b.bin", 2, 5) == b"234"
    assert entry == folder.describe_file("a/b.bin")
    assert folder.list_files() == ["a/b.bin"]


def test_write_that_raises_leaves_the_old_file_and_no_temporary(folder):
    folder.write_bytes("x", b"old")

    def fail() -> None:
        with folder.open_write("x") as file:
            file.write(b"half of the new")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert folder.read_bytes("x") == b"old"
    assert os.listdir(folder.uri) == ["x"]


def test_unfinished_file_is_invisible(folder):
    with folder.open_write("x") as file:
        file.write(b"half")
        file.flush()
        assert not folder.exists("x")
        assert folder.list_files() == []
    assert folder.exists("x")


def test_create_happens_only_once(folder):
    assert folder.create_bytes("plan.json", b"first")
    assert not folder.create_bytes("plan.json", b"second")
    assert folder.read_bytes("plan.json") == b"first"
    assert os.listdir(folder.uri) == ["plan.json"]


def test_folder_travels_as_its_uri(folder):
    assert pickle.loads(pickle.dumps(folder)) == folder
    assert (folder / "sub").uri == f"{folder.uri}/sub"
    assert Folder("s3://bucket/prefix/").uri == "s3://bucket/prefix"
    assert not Folder("s3://bucket/prefix").is_local


def test_absent_file_is_file_not_found(folder):
    with pytest.raises(FileNotFoundError):
        folder.read_bytes("nothing")
    assert folder.list_files() == []
    folder.delete("nothing")


def test_broken_json_is_corrupt(folder):
    folder.write_bytes("m.json", b"{")
    with pytest.raises(CorruptArtifactError, match=r"m\.json is not valid JSON"):
        folder.read_json("m.json")


def test_truncated_altered_and_missing_files_are_told_apart(folder):
    entry = folder.write_bytes("x", b"0123456789")
    folder.check_content(entry)
    folder.write_bytes("x", b"01234")
    with pytest.raises(CorruptArtifactError, match="holds 5 bytes, its manifest says 10"):
        folder.check_size(entry)
    folder.write_bytes("x", b"012345678X")
    folder.check_size(entry)
    with pytest.raises(CorruptArtifactError, match="altered since it was written"):
        folder.check_content(entry)
    folder.delete("x")
    with pytest.raises(CorruptArtifactError, match="is missing although its manifest names it"):
        folder.local_path(entry)


def test_full_disk_is_a_clear_store_error(folder, monkeypatch):
    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StoreError, match=r"cannot write .*/x: the disk is full; free some space"):
        folder.write_bytes("x", b"1")
    assert not folder.exists("x")


def test_no_space_from_the_system_is_explained():
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with pytest.raises(StoreError, match="disk is full"):
        _write_through_full_device()


def _write_through_full_device() -> None:
    folder = Folder("/dev")
    with folder._errors("write", "full"), open("/dev/full", "wb") as file:
        file.write(b"x" * 10)


def test_path_below_a_file_is_a_clear_store_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match=r"cannot write .*file/sub/x"):
        Folder(tmp_path / "file" / "sub").write_bytes("x", b"1")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder_is_a_clear_store_error(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(StoreError, match="choose another --output or change its permissions"):
        Folder(tmp_path).write_bytes("x", b"1")


def test_fingerprint_ignores_key_order_and_nothing_else():
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
    assert fingerprint([1, 2]) != fingerprint([2, 1])
    assert canonical_json({"ä": 1.5}) == '{"ä": 1.5}'.encode()


def test_published_file_is_a_copy_with_its_checksum(folder, tmp_path):
    source = tmp_path / "source"
    source.write_bytes(b"rows")
    entry = folder.publish_file(source, "shards/a.bin", rows=4)
    assert entry == FileEntry("shards/a.bin", 4, folder.describe_file("shards/a.bin").xxh3_128, 4)
    assert source.exists()
