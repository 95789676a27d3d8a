"""Windows of a unit as one file that is read by partition."""

from pathlib import Path

import numpy as np
import pytest

from scone.count_object import CountObject, write_count_object
from scone.counting import PartitionMerge, WindowCoding, Windows, count_windows, partition_slices
from scone.errors import CorruptArtifactError
from scone.storage import FileEntry, Folder

VOCAB_SIZE = 70_000


def unit_windows(coding: WindowCoding) -> Windows:
    tokens = np.random.default_rng(0).integers(0, 50, 3000).astype(np.uint32)
    return count_windows(tokens, np.array([0, 1000, 3000]), coding, [], VOCAB_SIZE)


@pytest.mark.parametrize("max_length", [3, 5])  # one word, two words
def test_sections_read_back_as_written(tmp_path: Path, max_length: int) -> None:
    folder, coding = Folder(tmp_path), WindowCoding.choose(max_length, VOCAB_SIZE, [], 4)
    windows = unit_windows(coding)
    entry = write_count_object(folder, "unit.bin", windows, coding, 3)
    assert entry == folder.describe_file("unit.bin", rows=len(windows.keys))
    unit = CountObject(folder, entry, coding, 3)
    sections = [unit.read(partition) for partition in range(3)]
    assert np.array_equal(np.concatenate([s.keys for s in sections]), windows.keys)
    assert np.array_equal(np.concatenate([s.counts for s in sections]), windows.counts)
    assert np.array_equal(np.concatenate([unit.slice_rows(p) for p in range(3)]), windows.slice_rows)


def test_a_read_section_can_be_merged(tmp_path: Path) -> None:
    folder, coding = Folder(tmp_path), WindowCoding.choose(3, VOCAB_SIZE, [], 4)
    windows = unit_windows(coding)
    unit = CountObject(folder, write_count_object(folder, "unit.bin", windows, coding, 2), coding, 2)
    found = 0
    for partition, first in enumerate(partition_slices(coding.num_slices, 2)[:-1].tolist()):
        merge = PartitionMerge(coding, first, unit.slice_rows(partition))
        merge.add(unit.read(partition))
        fgrams = merge.survivors(1)
        found += int(fgrams.counts[fgrams.lengths == 2].sum())
    assert found == 2998


def test_altered_or_foreign_objects_are_refused(tmp_path: Path) -> None:
    folder, coding = Folder(tmp_path), WindowCoding.choose(3, VOCAB_SIZE, [], 4)
    entry = write_count_object(folder, "unit.bin", unit_windows(coding), coding, 2)
    with pytest.raises(CorruptArtifactError, match="its footer is not that of this plan; delete it and run the stage"):
        CountObject(folder, entry, coding, 3)
    content = bytearray((tmp_path / "unit.bin").read_bytes())
    content[8] ^= 1
    (tmp_path / "unit.bin").write_bytes(content)
    unit = CountObject(folder, entry, coding, 2)
    with pytest.raises(CorruptArtifactError, match="section 0 has another checksum than its footer says"):
        unit.read(0)
    (tmp_path / "unit.bin").write_bytes(content[:-1])
    with pytest.raises(CorruptArtifactError, match="truncated or overwritten"):
        CountObject(folder, entry, coding, 2)
    (tmp_path / "tiny.bin").write_bytes(b"nothing")
    with pytest.raises(CorruptArtifactError, match="its footer is not that of this plan"):
        CountObject(folder, FileEntry("tiny.bin", 7, ""), coding, 2)
