from pathlib import Path

import pytest

from scone.artifacts import (
    MANIFEST,
    ArtifactBuilder,
    UnitRecord,
    commit_unit,
    load_manifest,
    verify_files,
)
from scone.errors import CorruptArtifactError, IncompatibleArtifactError, MissingArtifactError
from scone.storage import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "artifact")


def builder_of(folder: Folder, **config: object) -> ArtifactBuilder:
    return ArtifactBuilder(
        folder, kind="tokens", format=1, config=config or {"a": 1}, inputs={}, tokenizer_fingerprint="t1"
    )


def build(folder: Folder, **config: object):
    builder = builder_of(folder, **config)
    builder.claim()
    entry = folder.write_bytes("x.bin", b"123")
    commit_unit(folder, "map", UnitRecord("u0", (entry,), {"rows": 3}))
    return builder.publish([entry], {"rows": 3}, {"seconds": 1.0})


def test_manifest_comes_back_as_published(folder):
    manifest = build(folder)
    assert load_manifest(folder, kind="tokens", format=1, tokenizer_fingerprint="t1") == manifest
    assert builder_of(folder).finished() == manifest
    assert manifest.file("x.bin").num_bytes == 3
    assert folder.list_files("_work") == []


def test_equal_artifacts_have_equal_manifests(tmp_path):
    build(Folder(tmp_path / "one"))
    build(Folder(tmp_path / "two"))
    assert (tmp_path / "one" / MANIFEST).read_bytes() == (tmp_path / "two" / MANIFEST).read_bytes()


def test_nothing_there_says_which_stage_to_run(folder):
    with pytest.raises(MissingArtifactError, match=r"no finished tokens artifact at .*: run its stage first"):
        load_manifest(folder, kind="tokens")


def test_unfinished_build_says_so_and_resumes(folder):
    builder_of(folder).claim()
    with pytest.raises(MissingArtifactError, match="run its stage again to resume"):
        load_manifest(folder)
    entry = folder.write_bytes("x.bin", b"123")
    commit_unit(folder, "map", UnitRecord("u0", (entry,), {"rows": 3}))
    resumed = builder_of(folder)
    assert resumed.finished() is None
    resumed.claim()
    assert resumed.committed_units("map") == {"u0": UnitRecord("u0", (entry,), {"rows": 3})}


def test_unit_whose_file_is_gone_counts_as_not_done(folder):
    builder = builder_of(folder)
    builder.claim()
    entry = folder.write_bytes("x.bin", b"123")
    commit_unit(folder, "map", UnitRecord("u0", (entry,)))
    folder.write_bytes("x.bin", b"12")
    assert builder.committed_units("map") == {}


def test_other_settings_in_the_same_folder_are_refused_by_name(folder):
    build(folder, a=1, nested={"b": 2})
    with pytest.raises(IncompatibleArtifactError, match=r"nested\.b was 2, now 3.*choose another --output"):
        builder_of(folder, a=1, nested={"b": 3}).finished()


def test_other_settings_while_someone_builds_are_refused(folder):
    builder_of(folder, a=1).claim()
    with pytest.raises(IncompatibleArtifactError, match="a was 1, now 2"):
        builder_of(folder, a=2).claim()


def test_changed_input_is_named(folder, tmp_path):
    source = build(Folder(tmp_path / "source"))
    other = build(Folder(tmp_path / "other"), a=2)
    ArtifactBuilder(folder, kind="fgrams", format=1, config={}, inputs={"tokens": source}).claim()
    with pytest.raises(IncompatibleArtifactError, match="input tokens changed"):
        ArtifactBuilder(folder, kind="fgrams", format=1, config={}, inputs={"tokens": other}).finished()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"kind": "fgrams"}, "holds a tokens artifact, expected fgrams"),
        ({"format": 2}, "has tokens format 1, this version reads format 2"),
        ({"tokenizer_fingerprint": "t2"}, "was made with tokenizer t1, the other inputs with t2"),
    ],
)
def test_artifact_of_another_make_is_refused(folder, wanted, message):
    build(folder)
    with pytest.raises(IncompatibleArtifactError, match=message):
        load_manifest(folder, **wanted)


def test_truncated_file_is_seen_on_load_and_altered_one_on_verify(folder):
    manifest = build(folder)
    folder.write_bytes("x.bin", b"12X")
    assert load_manifest(folder) == manifest
    with pytest.raises(CorruptArtifactError, match="altered since"):
        verify_files(folder, manifest)
    folder.write_bytes("x.bin", b"1")
    with pytest.raises(CorruptArtifactError, match="holds 1 bytes, its manifest says 3"):
        load_manifest(folder)


def test_manifest_with_missing_fields_is_corrupt(folder):
    folder.write_json(MANIFEST, {"kind": "tokens"})
    with pytest.raises(CorruptArtifactError, match="is not a manifest"):
        load_manifest(folder)


def test_leftover_work_of_a_finished_build_is_removed(folder):
    build(folder)
    commit_unit(folder, "map", UnitRecord("late"))
    folder.create_bytes("_work/plan.json", b"{}")
    assert builder_of(folder).finished() is not None
    assert folder.list_files("_work") == []
