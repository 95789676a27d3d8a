"""Every error that a user can meet.

    SconeError
    ├── ConfigError            a setting is wrong; nothing was started (exit code 2)
    ├── CorpusError            a document source is empty, unreadable or not what its format says
    ├── ArtifactError
    │   ├── MissingArtifactError       nothing there, or never finished
    │   ├── CorruptArtifactError       truncated, altered or unreadable
    │   └── IncompatibleArtifactError  whole, but made by another config, tokenizer or format
    ├── StoreError             storage refused to read or write
    ├── TrainingError          training cannot go on
    └── ClusterError           Ray is not reachable or lost too much

Messages say where, what was found, what was expected and what to do. Each error takes one message, so
that it survives the pickling between Ray processes.
"""


class SconeError(Exception):
    """Base of all errors that this project raises on purpose."""

    def to_dict(self) -> dict[str, str]:
        """Type and message, for a row or a result that passes through libraries which lose the type."""
        return {"error": type(self).__name__, "message": str(self)}


def error_from_dict(value: dict[str, str]) -> SconeError:
    """The error that `to_dict` described."""
    kinds = {kind.__name__: kind for kind in _all_kinds(SconeError)}
    return kinds[value["error"]](value["message"])


def _all_kinds(kind: type[SconeError]) -> list[type[SconeError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _all_kinds(child))]


class ConfigError(SconeError):
    """A setting is wrong. Raised before any work starts."""


class CorpusError(SconeError):
    """A document source is empty, unreadable, or not what its format says."""


class ArtifactError(SconeError):
    """An artifact folder cannot be used."""


class MissingArtifactError(ArtifactError):
    """The folder holds no finished artifact."""


class CorruptArtifactError(ArtifactError):
    """A file of the artifact is missing, truncated, altered or unreadable."""


class IncompatibleArtifactError(ArtifactError):
    """The artifact is whole, but made by another config, tokenizer or format than the caller needs."""


class StoreError(SconeError):
    """Storage refused to read or write."""


class TrainingError(SconeError):
    """Training cannot go on: the loss is not finite, or a worker was lost too often."""


class ClusterError(SconeError):
    """Ray is not reachable, or a job on it failed for a reason outside this project's code."""
