"""Artifacts: folders with a manifest written last, built from resumable units of work.

    FOLDER/manifest.json            what it is, what decided it, its files; deterministic, published last
    FOLDER/provenance.json          when, where and how fast it was made; differs from run to run
    FOLDER/_work/plan.json          the claim of an unfinished build: its fingerprint and settings
    FOLDER/_work/units/G/U.json     one record per committed unit U of group G
    FOLDER/_work/...                intermediate files; the whole of _work goes when the manifest stands

A fingerprint hashes everything that decides the content: kind, format, settings, input fingerprints. Never
parallelism, paths or times. So the same fingerprint already complete means nothing to do; incomplete means
resume from the committed units; another one in the same folder is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from scone.errors import CorruptArtifactError, IncompatibleArtifactError, MissingArtifactError
from scone.storage import FileEntry, Folder, canonical_json, fingerprint

MANIFEST = "manifest.json"
PROVENANCE = "provenance.json"
WORK = "_work"
_PLAN = f"{WORK}/plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a finished artifact is. Equal artifacts have equal manifests, whoever made them and however parallel."""

    kind: str
    format: int
    fingerprint: str
    config: dict[str, Any]
    """Settings of the stage that decided the content."""
    inputs: dict[str, str]
    """Input name to the fingerprint of the artifact that was read."""
    tokenizer_fingerprint: str
    files: tuple[FileEntry, ...]
    statistics: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "format": self.format,
            "fingerprint": self.fingerprint,
            "config": self.config,
            "inputs": self.inputs,
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
            "files": [entry.to_dict() for entry in self.files],
            "statistics": self.statistics,
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any], where: str) -> Manifest:
        try:
            files = tuple(FileEntry.from_dict(entry) for entry in value["files"])
            return cls(**{**value, "files": files})
        except (TypeError, KeyError) as error:
            raise CorruptArtifactError(f"{where} is not a manifest ({error}); restore or rebuild it") from error

    def file(self, path: str) -> FileEntry:
        """The entry of one file. Raises KeyError where the artifact has no such file."""
        for entry in self.files:
            if entry.path == path:
                return entry
        raise KeyError(path)

    def files_below(self, prefix: str) -> list[FileEntry]:
        """Entries of all files whose path starts with `prefix`, in order of path."""
        return sorted((entry for entry in self.files if entry.path.startswith(prefix)), key=lambda e: e.path)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.files)


def load_manifest(
    folder: Folder,
    kind: str | None = None,
    format: int | None = None,
    tokenizer_fingerprint: str | None = None,
) -> Manifest:
    """The manifest of a finished artifact, checked against what the caller needs.

    Raises:
        MissingArtifactError: Nothing there, or the build never finished.
        IncompatibleArtifactError: Another kind, format or tokenizer.
        CorruptArtifactError: The manifest cannot be read, or a file has another size than it says.
    """
    where = folder.locate(MANIFEST)
    try:
        content = folder.read_json(MANIFEST)
    except FileNotFoundError:
        hint = "an unfinished build; run its stage again to resume" if folder.exists(_PLAN) else "run its stage first"
        expected = f"{kind} artifact" if kind else "artifact"
        raise MissingArtifactError(f"no finished {expected} at {folder}: {hint}") from None
    manifest = Manifest.from_dict(content, where)
    if kind is not None and manifest.kind != kind:
        raise IncompatibleArtifactError(f"{folder} holds a {manifest.kind} artifact, expected {kind}; check the path")
    if format is not None and manifest.format != format:
        raise IncompatibleArtifactError(
            f"{folder} has {manifest.kind} format {manifest.format}, this version reads format {format}; "
            "rebuild it, or use the version that wrote it"
        )
    if tokenizer_fingerprint is not None and manifest.tokenizer_fingerprint != tokenizer_fingerprint:
        raise IncompatibleArtifactError(
            f"{folder} was made with tokenizer {manifest.tokenizer_fingerprint[:12]}, the other inputs with "
            f"{tokenizer_fingerprint[:12]}; rebuild it from the same tokens"
        )
    for entry in manifest.files:
        folder.check_size(entry)
    return manifest


def verify_files(folder: Folder, manifest: Manifest) -> None:
    """Read every file and compare checksums. Raises CorruptArtifactError at the first that differs."""
    for entry in manifest.files:
        folder.check_content(entry)


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """The committed result of one unit of work."""

    unit: str
    files: tuple[FileEntry, ...] = ()
    statistics: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        files = [entry.to_dict() for entry in self.files]
        return {"unit": self.unit, "files": files, "statistics": self.statistics}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> UnitRecord:
        files = tuple(FileEntry.from_dict(entry) for entry in value["files"])
        return cls(value["unit"], files, value["statistics"])


def commit_unit(folder: Folder, group: str, record: UnitRecord) -> None:
    """Publish a unit's record, after its files. Safe to repeat: the same unit has the same record."""
    folder.write_json(f"{WORK}/units/{group}/{record.unit}.json", record.to_dict())


class ArtifactBuilder:
    """One build of one artifact: claims the folder, finds what is committed, publishes the manifest last."""

    def __init__(
        self,
        folder: Folder,
        *,
        kind: str,
        format: int,
        config: Mapping[str, Any],
        inputs: Mapping[str, Manifest],
        tokenizer_fingerprint: str = "",
    ) -> None:
        """Nothing is written before `claim`."""
        self.folder = folder
        self.kind = kind
        self.format = format
        self.config = dict(config)
        self.inputs = {name: manifest.fingerprint for name, manifest in inputs.items()}
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.fingerprint = fingerprint({"kind": kind, "format": format, "config": self.config, "inputs": self.inputs})

    def finished(self) -> Manifest | None:
        """The manifest, if this very artifact is complete.

        Raises:
            IncompatibleArtifactError: The folder holds, or someone builds there, another artifact.
            CorruptArtifactError: It is complete but its files are not.
        """
        if self.folder.exists(MANIFEST):
            manifest = load_manifest(self.folder)
            self._refuse_other(manifest.to_dict())
            if self.folder.exists(_PLAN):
                self.folder.delete(WORK)
            return manifest
        if self.folder.exists(_PLAN):
            self._refuse_other(self.folder.read_json(_PLAN))
        return None

    def claim(self) -> None:
        """Mark the folder as being built with this fingerprint; resuming the same build is fine."""
        plan = {"kind": self.kind, "fingerprint": self.fingerprint, "config": self.config, "inputs": self.inputs}
        if not self.folder.create_bytes(_PLAN, canonical_json(plan, indent=2)):
            self._refuse_other(self.folder.read_json(_PLAN))

    def committed_units(self, group: str) -> dict[str, UnitRecord]:
        """Records of the units of `group` whose files are all in place, by unit id."""
        records = {}
        for path in self.folder.list_files(f"{WORK}/units/{group}"):
            record = UnitRecord.from_dict(self.folder.read_json(path))
            try:
                for entry in record.files:
                    self.folder.check_size(entry)
            except CorruptArtifactError:
                continue
            records[record.unit] = record
        return records

    def publish(
        self,
        files: Iterable[FileEntry],
        statistics: Mapping[str, Any],
        provenance: Mapping[str, Any],
        tokenizer_fingerprint: str | None = None,
    ) -> Manifest:
        """Write provenance, then the manifest, then remove the intermediate files."""
        manifest = Manifest(
            kind=self.kind,
            format=self.format,
            fingerprint=self.fingerprint,
            config=self.config,
            inputs=self.inputs,
            tokenizer_fingerprint=tokenizer_fingerprint or self.tokenizer_fingerprint,
            files=tuple(sorted(files, key=lambda entry: entry.path)),
            statistics=dict(statistics),
        )
        self.folder.write_json(PROVENANCE, dict(provenance))
        self.folder.write_json(MANIFEST, manifest.to_dict())
        self.folder.delete(WORK)
        return manifest

    def _refuse_other(self, found: dict[str, Any]) -> None:
        if found["fingerprint"] == self.fingerprint:
            return
        differences = list(_differences(found.get("config", {}), self.config))
        if found["kind"] != self.kind:
            differences = [f"kind {found['kind']}, now {self.kind}"]
        differences += [
            f"input {name} changed" for name in self.inputs if found.get("inputs", {}).get(name) != self.inputs[name]
        ]
        raise IncompatibleArtifactError(
            f"{self.folder} was made with other settings ({'; '.join(differences) or 'another format'}); "
            "choose another --output, or delete that folder to build it anew"
        )


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    for key in sorted({*found, *wanted}):
        old, new = found.get(key), wanted.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key} was {old!r}, now {new!r}"
