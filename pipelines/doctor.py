"""`scone doctor`: is this installation fit to run, and where it is not, what to do."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pipelines.progress import format_bytes
from scone.errors import ClusterError
from scone.version import VERSION

_LIBRARIES = ("ray", "torch", "transformers", "tokenizers", "pyarrow", "numba", "mlflow", "s3fs")
_OWN_PACKAGES = ("scone", "pipelines")
_MIN_MEMORY_BYTES, _MIN_DISK_BYTES, _MIN_SHARED_BYTES = 4 << 30, 5 << 30, 1 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; `advice` is empty where all is well."""

    name: str
    state: Literal["good", "note", "bad"]
    found: str
    advice: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def examine() -> list[Check]:
    """All checks, in the order in which they are worth reading."""
    return [_python(), _own_packages(), *_libraries(), *_machine(), *_disk(), _tracking()]


def check_one_place() -> None:
    """Raise ClusterError unless all of the project's packages come from one folder.

    `pipelines` and `serve` are common names: another package of that name on the path must not be run.
    """
    check = _own_packages()
    if check.state == "bad":
        raise ClusterError(f"the project's packages come from different places ({check.found}); {check.advice}")


def _python() -> Check:
    fits = sys.version_info >= (3, 11)
    advice = "" if fits else "use Python 3.11 or newer"
    return Check("Python", "good" if fits else "bad", platform.python_version(), advice)


def _own_packages() -> Check:
    modules = [importlib.import_module(name) for name in _OWN_PACKAGES]
    places = [str(Path(str(module.__file__)).resolve().parent.parent) for module in modules]
    if len(set(places)) == 1:
        return Check("scone", "good", f"{VERSION} from {places[0]}")
    listed = ", ".join(f"{name}: {place}" for name, place in zip(_OWN_PACKAGES, places, strict=True))
    return Check("scone", "bad", listed, "reinstall, or fix PYTHONPATH: the packages must come from one place")


def _libraries() -> list[Check]:
    required = {_name_of(text): text for text in importlib.metadata.requires("scone") or [] if "extra ==" not in text}
    checks = []
    for name in _LIBRARIES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            checks.append(Check(name, "bad", "not installed", f"pip install '{required.get(name, name)}'"))
            continue
        fits = _satisfies(version, required.get(name, ""))
        advice = "" if fits else f"this version of scone wants {required[name]}"
        checks.append(Check(name, "good" if fits else "bad", version, advice))
    return checks


def _satisfies(version: str, requirement: str) -> bool:
    from packaging.requirements import Requirement

    return not requirement or Requirement(requirement).specifier.contains(version, prereleases=True)


def _name_of(requirement: str) -> str:
    from packaging.requirements import Requirement

    return Requirement(requirement).name


def _machine() -> list[Check]:
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory()
    checks = [Check("cores", "good", str(cores))]
    low = memory.available < _MIN_MEMORY_BYTES
    advice = "close other programs, or use smaller settings" if low else ""
    found = f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}"
    checks.append(Check("memory", "note" if low else "good", found, advice))
    return checks


def _disk() -> list[Check]:
    checks = [_space("disk here", os.getcwd(), _MIN_DISK_BYTES)]
    if os.path.isdir("/dev/shm"):
        checks.append(_space("shared memory", "/dev/shm", _MIN_SHARED_BYTES))
    return checks


def _space(name: str, path: str, wanted_bytes: int) -> Check:
    usage = shutil.disk_usage(path)
    low = usage.free < wanted_bytes
    advice = f"free at least {format_bytes(wanted_bytes)}" if low else ""
    return Check(name, "note" if low else "good", f"{format_bytes(usage.free)} free at {path}", advice)


def _tracking() -> Check:
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    return Check("MLflow", "good", uri or "SQLite in each run's folder (MLFLOW_TRACKING_URI is not set)")
