"""MLflow: one parent run per `scone run`, one nested run per stage. Its failures never stop a job.

The store is `MLFLOW_TRACKING_URI`, else SQLite beside the run's artifacts. The driver creates the runs; a
training worker continues its stage's run by id. The first failure warns, and the stage goes on untracked.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from scone.storage import Folder

logger = logging.getLogger(__name__)

# MLflow retries an unreachable server for minutes by default; a job should not wait for its log book.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
_EXPERIMENT = "scone"


@dataclass(frozen=True, slots=True)
class StageTracking:
    """The MLflow run of one stage, by id, so that it travels to workers. An empty id tracks nothing."""

    uri: str = ""
    run_id: str = ""

    def log_parameters(self, parameters: Mapping[str, Any]) -> None:
        self._safely(lambda client: _log_batch(client, self.run_id, params=_flatten(parameters)))

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        self.log_metric_rows([(step, metrics)])

    def log_metric_rows(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Metrics of several steps in one request."""
        self._safely(lambda client: _log_batch(client, self.run_id, rows=rows))

    def last_step(self, metric: str) -> int:
        """Highest step at which a metric was logged; -1 if it never was, or nothing is tracked."""
        steps: list[int] = [-1]
        self._safely(lambda client: steps.extend(m.step for m in client.get_metric_history(self.run_id, metric)))
        return max(steps)

    def log_file(self, path: str) -> None:
        """Keep a small local file (manifest, report, plot) as an artifact of the run."""
        self._safely(lambda client: client.log_artifact(self.run_id, path))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._safely(lambda client: _log_batch(client, self.run_id, tags=tags))

    def _safely(self, act: Callable[[Any], None]) -> None:
        if not self.run_id or self.uri in _unreachable:
            return
        try:
            act(_client(self.uri))
        except Exception as error:  # whatever MLflow raises, the job goes on
            _give_up(self.uri, error)


NO_TRACKING = StageTracking()
_unreachable: set[str] = set()


class RunTracking:
    """The parent run of a pipeline run."""

    def __init__(self, run_folder: Folder, name: str, enabled: bool = True) -> None:
        """`name` is the parent run's name and its key: the same name in the same store continues that run."""
        self.uri = tracking_uri(run_folder) if enabled else ""
        self.name = name
        self._parent_id = ""
        self._key = f"{run_folder.uri}#{name}"
        if enabled:
            self._attempt(self._open_parent)

    @contextmanager
    def stage(self, stage: str) -> Iterator[StageTracking]:
        """A nested run for one stage; the same stage of the same run is continued, not doubled."""
        tracking = NO_TRACKING
        if self._parent_id and self.uri not in _unreachable:
            run_id = self._attempt(lambda: self._open_stage(stage))
            tracking = StageTracking(self.uri, run_id or "")
        try:
            yield tracking
        except BaseException:
            self._finish(tracking.run_id, "FAILED")
            raise
        self._finish(tracking.run_id, "FINISHED")

    def close(self, succeeded: bool = True) -> None:
        self._finish(self._parent_id, "FINISHED" if succeeded else "FAILED")

    def _open_parent(self) -> None:
        client = _client(self.uri)
        experiment = client.get_experiment_by_name(_EXPERIMENT)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(_EXPERIMENT)
        self._experiment_id = experiment_id
        self._parent_id = self._find_or_create({"scone.run_key": self._key, "scone.stage": "run"}, self.name)

    def _open_stage(self, stage: str) -> str:
        tags = {"scone.run_key": self._key, "scone.stage": stage, "mlflow.parentRunId": self._parent_id}
        return self._find_or_create(tags, stage)

    def _find_or_create(self, tags: dict[str, str], name: str) -> str:
        client = _client(self.uri)
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        found = client.search_runs([self._experiment_id], query, max_results=1)
        if found:
            client.update_run(found[0].info.run_id, status="RUNNING")
            return str(found[0].info.run_id)
        return str(client.create_run(self._experiment_id, run_name=name, tags=tags).info.run_id)

    def _finish(self, run_id: str, status: str) -> None:
        if run_id and self.uri not in _unreachable:
            self._attempt(lambda: _client(self.uri).set_terminated(run_id, status))

    def _attempt(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:  # whatever MLflow raises, the job goes on
            _give_up(self.uri, error)
            return None


def tracking_uri(run_folder: Folder) -> str:
    """`MLFLOW_TRACKING_URI`, else a SQLite file in the run's folder (or here, when that folder is remote)."""
    configured = os.environ.get("MLFLOW_TRACKING_URI", "")
    if configured:
        return configured
    folder = run_folder.uri if run_folder.is_local else os.getcwd()
    os.makedirs(folder, exist_ok=True)
    return f"sqlite:///{folder}/mlflow.db"


def _client(uri: str) -> Any:
    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    for name in ("alembic", "mlflow"):  # after the import, which sets its own level
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri)


def _give_up(uri: str, error: Exception) -> None:
    if uri not in _unreachable:
        _unreachable.add(uri)
        logger.warning("MLflow at %s failed (%s); going on without tracking", uri, str(error).splitlines()[0][:200])


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _log_batch(
    client: Any,
    run_id: str,
    params: Mapping[str, Any] | None = None,
    rows: Sequence[tuple[int, Mapping[str, float]]] = (),
    tags: Mapping[str, str] | None = None,
) -> None:
    import time

    from mlflow.entities import Metric, Param, RunTag

    now = int(time.time() * 1000)
    metrics = [Metric(key, float(value), now, step) for step, row in rows for key, value in row.items()]
    for start in range(0, len(metrics), 1000):  # MLflow accepts at most 1,000 metrics a request
        client.log_batch(run_id, metrics=metrics[start : start + 1000])
    if params:
        items = [Param(key, str(value)[:6000]) for key, value in params.items()]
        for start in range(0, len(items), 100):
            client.log_batch(run_id, params=items[start : start + 100])
    if tags:
        client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])
