"""The one place that starts or joins Ray, and the settings for it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from scone.config import Config
from scone.errors import ClusterError

logger = logging.getLogger(__name__)

# Without these a host that is cut off silently hangs a job for about 7 minutes (measured with Ray 2.60).
_ENVIRONMENT = {
    "RAY_grpc_client_keepalive_time_ms": "30000",
    "RAY_grpc_client_keepalive_timeout_ms": "10000",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class ClusterConfig(Config):
    """Where and how parallel a stage runs. Never decides what it makes."""

    address: str = ""
    """Ray cluster to join: "auto", "host:6379", "ray://…". Empty: `RAY_ADDRESS` if set, else a local Ray."""
    num_cpus: Annotated[int, Field(ge=0)] = 0
    """CPUs of a local Ray; 0 takes all cores."""
    max_parallel_units: Annotated[int, Field(ge=0)] = 0
    """Upper bound on units of work at the same time; 0 leaves it to the cluster's CPUs."""
    show_worker_logs: bool = False
    """Print what workers print, Ray's own messages among it. Ray keeps it in its session's logs in any case."""
    object_store_memory_bytes: Annotated[int, Field(ge=0)] = 512 << 20
    """Shared memory of a local Ray. Stages move little through it."""


_sharing: contextlib.ExitStack | None = None


@contextlib.contextmanager
def sharing_ray() -> Iterator[None]:
    """In the block, what the first `connect` opens stays open for the next, and is closed at the end."""
    global _sharing
    with contextlib.ExitStack() as stack:
        _sharing = stack
        try:
            yield
        finally:
            _sharing = None


@contextlib.contextmanager
def connect(config: ClusterConfig) -> Iterator[None]:
    """A Ray connection for the block: the open one if there is one, else one that is closed at the end.

    Raises:
        ClusterError: The cluster at the given address cannot be joined.
    """
    address = config.address or os.environ.get("RAY_ADDRESS", "")
    _prepare_environment(is_local=not address)
    import ray

    if ray.is_initialized():
        yield
        return
    try:
        if address:
            ray.init(address=address, log_to_driver=config.show_worker_logs, logging_level=logging.WARNING)
        else:
            _start_local_ray(config)
    except Exception as error:
        target = address or "a local Ray"
        raise ClusterError(f"cannot connect to {target}: {error}; check --ray-address and RAY_AUTH_TOKEN") from error
    with contextlib.ExitStack() as own:
        (_sharing or own).callback(ray.shutdown)
        yield


def available_cpus() -> int:
    """CPUs of the connected cluster, at least 1."""
    import ray

    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def _start_local_ray(config: ClusterConfig) -> None:
    """Ray gives its processes 30 s to appear, too little on a small busy machine: try once more."""
    import ray

    for attempt in range(2):
        try:
            ray.init(
                num_cpus=config.num_cpus or None,
                object_store_memory=config.object_store_memory_bytes or None,
                include_dashboard=False,
                log_to_driver=config.show_worker_logs,
                logging_level=logging.WARNING,
            )
        except Exception as error:
            ray.shutdown()
            if attempt:
                raise
            logger.warning("local Ray did not start (%s); trying once more", str(error).splitlines()[0])
        else:
            return


def _prepare_environment(is_local: bool) -> None:
    """Ray reads these when it is first imported.

    Ray's native log on stderr is silenced: it reports as errors what is none. `RAY_BACKEND_LOG_LEVEL` brings it back.
    A local Ray gets token authentication with a token of this process alone, unless the environment says
    otherwise: Ray's own default writes a token file into the home folder, which changes later clusters.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if is_local:
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    if is_local and "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
