"""MLflow as people look at it afterwards: a real SQLite store, and a server that is not there."""

import logging
import pickle
import socket

import pytest

from pipelines.tracking import NO_TRACKING, RunTracking, tracking_uri
from scone.storage import Folder


@pytest.fixture
def run_folder(tmp_path, monkeypatch) -> Folder:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Folder(tmp_path / "run")


def runs_of(folder: Folder) -> dict[str, object]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri(folder))
    experiment = client.get_experiment_by_name("scone")
    return {run.data.tags["scone.stage"]: run for run in client.search_runs([experiment.experiment_id])}


def test_stages_nest_below_one_run_and_continue_when_run_again(run_folder):
    for _ in range(2):
        tracking = RunTracking(run_folder, "demo-1")
        with tracking.stage("count") as stage:
            stage.log_parameters({"count": {"num_fgrams": 5}})
            stage.log_metric_rows([(1, {"train/loss": 2.5}), (2, {"train/loss": 2.25})])
            stage.set_tags({"scone.fingerprint": "f00"})
        tracking.close()
    runs = runs_of(run_folder)
    assert set(runs) == {"run", "count"}
    assert runs["count"].data.tags["mlflow.parentRunId"] == runs["run"].info.run_id
    assert runs["count"].data.params == {"count.num_fgrams": "5"}
    assert runs["count"].data.metrics == {"train/loss": 2.25}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}


def test_failed_stage_is_marked_and_its_error_passes(run_folder):
    tracking = RunTracking(run_folder, "demo-1")
    with pytest.raises(ValueError, match="broken"), tracking.stage("count"):
        raise ValueError("broken")
    tracking.close(succeeded=False)
    assert {run.info.status for run in runs_of(run_folder).values()} == {"FAILED"}


def test_stage_tracking_travels_to_workers(run_folder):
    tracking = RunTracking(run_folder, "demo-1")
    with tracking.stage("train") as stage:
        pickle.loads(pickle.dumps(stage)).log_metrics({"loss": 1.5}, step=3)
    assert runs_of(run_folder)["train"].data.metrics == {"loss": 1.5}


def test_unreachable_server_warns_once_and_stops_nothing(run_folder, monkeypatch, caplog):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    with caplog.at_level(logging.WARNING, logger="pipelines.tracking"):
        tracking = RunTracking(run_folder, "demo-1")
        with tracking.stage("count") as stage:
            stage.log_metrics({"tokens": 1.0})
        tracking.close()
    warnings = [record for record in caplog.records if "going on without tracking" in record.getMessage()]
    assert len(warnings) == 1
    assert f"MLflow at http://127.0.0.1:{port} failed" in warnings[0].getMessage()


def test_no_tracking_does_nothing(run_folder):
    NO_TRACKING.log_metrics({"loss": 1.0})
    assert not RunTracking(run_folder, "demo-1", enabled=False).uri
