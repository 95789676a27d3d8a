"""A disk that is really full: a small tmpfs of its own."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scone.errors import StoreError
from scone.storage import Folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_full_disk_is_named_and_leaves_what_was_there(small_disk):
    folder = Folder(small_disk / "run")
    entry = folder.write_bytes("shards/a.bin", bytes(600 << 10))
    with pytest.raises(StoreError, match=r"cannot write .*b\.bin: the disk is full; free some space"):
        folder.write_bytes("shards/b.bin", bytes(600 << 10))
    assert os.listdir(small_disk / "run" / "shards") == ["a.bin"]
    folder.check_content(entry)
    folder.delete("shards/a.bin")
    folder.write_bytes("shards/b.bin", bytes(600 << 10))
