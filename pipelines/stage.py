"""What every stage gets when it runs, and the frame around it: connect, time, record provenance."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pipelines.cluster import ClusterConfig
from pipelines.tracking import NO_TRACKING, StageTracking
from scone.storage import Folder
from scone.version import VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """Where a stage works and reports.

    A stage writes to its own folder below `run_folder` and, unless its config names another path, reads
    its inputs from the neighbouring folders of the same run.
    """

    run_folder: Folder
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tracking: StageTracking = NO_TRACKING
    show_progress: bool = True

    def input_folder(self, configured: str, default_name: str) -> Folder:
        """The folder that the config names, else the neighbour of that name."""
        return Folder(configured) if configured else self.run_folder / default_name


class StageClock:
    """Times a stage and describes the run for provenance.json."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._created = datetime.now(UTC)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def provenance(self, context: StageContext, measured: Mapping[str, Any]) -> dict[str, Any]:
        """When, with what and how fast: everything that may differ between equal artifacts."""
        return {
            "created": self._created.isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 3),
            "version": VERSION,
            "python": platform.python_version(),
            "host": platform.node(),
            "cluster": context.cluster.to_dict(),
            "measured": dict(measured),
        }
