"""One local Ray for all stage tests of a session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.cluster import ClusterConfig, connect
from pipelines.stage import StageContext
from scone.storage import Folder


@pytest.fixture(scope="session")
def local_ray() -> Iterator[ClusterConfig]:
    """Settings of a running local Ray with two CPUs, whatever the machine has."""
    config = ClusterConfig(num_cpus=2, object_store_memory_bytes=256 << 20)
    with connect(config):
        yield config


@pytest.fixture
def context(local_ray: ClusterConfig, tmp_path: Path) -> StageContext:
    """A run folder of its own on the shared Ray."""
    return StageContext(run_folder=Folder(tmp_path / "run"), cluster=local_ray, show_progress=False)
