"""Windows of a unit as one file that is read by section."""

from pathlib import Path

import numpy as np
import pytest

from scone.counting import Codec, CountObject, UnitWindows, WindowCoding, write_count_object
from scone.errors import CorruptArtifactError
from scone.storage import FileEntry, Folder

VOCAB_SIZE = 70_000


def make_coding(max_length: int, section_bits: int = 2) -> WindowCoding:
    return WindowCoding.choose(max_length, VOCAB_SIZE, [], 4, section_bits).with_heavy([(1, 2), (3, 4)])


def unit_windows(coding: WindowCoding) -> UnitWindows:
    tokens = np.random.default_rng(0).integers(0, 8, 9000).astype(np.uint32)
    tokens[4000:5000] = 1  # counts beyond a byte
    return UnitWindows(tokens, np.array([0, 1000, 9000]), coding, [], VOCAB_SIZE)


def write(folder: Folder, coding: WindowCoding, codec: Codec = "none", pass_windows: int = 2000) -> FileEntry:
    unit = unit_windows(coding)
    passes = (unit.count(*sections) for sections in unit.passes(pass_windows))
    return write_count_object(folder, "unit.bin", passes, unit.heavy_counts, coding, codec)


@pytest.mark.parametrize("max_length", [3, 5])  # one word, two words
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_sections_read_back_as_written(tmp_path: Path, max_length: int, codec: Codec) -> None:
    folder, coding = Folder(tmp_path), make_coding(max_length)
    unit = unit_windows(coding)
    windows = unit.count(0, 4)
    entry = write(folder, coding, codec)
    assert entry == folder.describe_file("unit.bin", rows=len(windows))
    found = CountObject(folder, entry, coding, codec)
    found.verify()
    assert windows.counts.max() > 255
    parts = [found.read(0, 1)[0], found.read(1, 4)[0]]
    for name in ("high", "low", "counts", "slice_rows"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(windows, name))
    assert found.heavy_counts().tolist() == unit.heavy_counts.tolist()
    assert found.heavy_counts().min() > 0


def test_bytes_do_not_depend_on_passes(tmp_path: Path) -> None:
    coding = make_coding(5)
    entries = [write(Folder(tmp_path), coding, pass_windows=windows) for windows in (1, 2000, 1 << 20)]
    assert len(set(entries)) == 1


def test_sections_that_were_not_counted_are_noticed(tmp_path: Path) -> None:
    coding = make_coding(3)
    unit = unit_windows(coding)
    with pytest.raises(ValueError, match="3 sections were counted, the coding has 4"):
        write_count_object(Folder(tmp_path), "unit.bin", [unit.count(0, 3)], unit.heavy_counts, coding, "none")


def test_altered_truncated_or_foreign_objects_are_refused(tmp_path: Path) -> None:
    folder, coding = Folder(tmp_path), make_coding(3)
    entry = write(folder, coding)
    with pytest.raises(CorruptArtifactError, match="its directory is not that of this plan; delete it and run"):
        CountObject(folder, entry, make_coding(3, section_bits=3), "none").verify()
    content = bytearray((tmp_path / "unit.bin").read_bytes())
    content[8] ^= 1
    (tmp_path / "unit.bin").write_bytes(content)
    unit = CountObject(folder, entry, coding, "none")
    with pytest.raises(CorruptArtifactError, match="section 0 has another checksum than its directory says"):
        unit.read(0, 2)
    (tmp_path / "unit.bin").write_bytes(content[:-40])
    with pytest.raises(CorruptArtifactError, match=rf"it is shorter than the {entry.num_bytes:,} bytes that were"):
        unit.read(3, 4)
    (tmp_path / "unit.bin").unlink()
    with pytest.raises(CorruptArtifactError, match="it is missing; delete it and run the stage again"):
        unit.read(0, 1)
    with pytest.raises(CorruptArtifactError, match="it is too short for a count object of this plan"):
        CountObject(folder, FileEntry("tiny.bin", 7, ""), coding, "none")
