"""The whole life cycle through the command line, as a user runs it: to the end, again, killed, and with wrong input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..tiny_config import write_tiny_config

pytestmark = pytest.mark.timeout(1200)  # a whole run, or two, and a busy machine


def scone(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scone", *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "COLUMNS": "160", **environment},
    )


def contents(run: Path) -> dict[str, bytes]:
    """Everything that must be the same in equal runs. Reports and provenance hold measured times."""
    kept = [path for path in run.rglob("*") if path.is_file() and "report" not in path.relative_to(run).parts]
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in kept
        if path.name not in ("provenance.json", "mlflow.db")
    }


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_config(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    run = tmp_path_factory.mktemp("finished") / "run"
    result = scone("run", str(config), "--output", str(run))
    assert result.returncode == 0, result.stderr
    return run, result


def test_run_makes_every_artifact_and_says_what_it_found(finished):
    run, result = finished
    for artifact in ("tokens", "fgrams", "sequences", "model/scone", "model/baseline", "table", "report"):
        assert (run / artifact / "manifest.json").exists()
        assert not (run / artifact / "_work").exists()
    assert result.stdout.splitlines()[-1] == str(run / "report")
    for part in ("corpus", "f-grams", "match rate", "perplexity", "table", "parity", "report", "MLflow", "next"):
        assert part in result.stdout


def test_run_again_does_nothing_and_says_so(finished, config):
    run, _ = finished
    before = contents(run)
    result = scone("run", str(config), "--output", str(run))
    assert result.returncode == 0, result.stderr
    assert "nothing to do: every stage of" in result.stderr
    assert "started" not in result.stderr
    assert contents(run) == before


def test_run_is_one_mlflow_run_with_a_nested_run_per_stage(finished):
    from mlflow.tracking import MlflowClient

    run, _ = finished
    client = MlflowClient(f"sqlite:///{run}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("scone").experiment_id])
    by_stage = {r.data.tags["scone.stage"]: r for r in runs}
    assert len(runs) == len(by_stage)
    parent = by_stage.pop("run")
    assert set(by_stage) == {"tokenize", "count", "pack", "train baseline", "train scone", "precompute", "evaluate"}
    assert {r.data.tags["mlflow.parentRunId"] for r in by_stage.values()} == {parent.info.run_id}
    assert {r.info.status for r in [parent, *by_stage.values()]} == {"FINISHED"}
    steps = [metric.step for metric in client.get_metric_history(by_stage["train scone"].info.run_id, "train/loss")]
    assert steps == sorted(set(steps))
    assert len(steps) == 3


def test_killed_run_continues_to_the_same_bytes(finished, config, tmp_path):
    run = tmp_path / "run"
    for milestone in ("fgrams/_work", "model/scone/_work/ray"):
        _kill_when(config, run, milestone)
    result = scone("run", str(config), "--output", str(run))
    assert result.returncode == 0, result.stderr
    assert contents(run) == contents(finished[0])


def _kill_when(config: Path, run: Path, milestone: str) -> None:
    """SIGKILL the driver as soon as a file is there, so that the stage is in the middle of its work."""
    command = [sys.executable, "-m", "scone", "run", str(config), "--output", str(run)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        deadline = time.monotonic() + 400
        while not (run / milestone).exists() and driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert driver.poll() is None, f"the run ended before {milestone}"
        driver.send_signal(signal.SIGKILL)
    assert (run / milestone).exists()


def test_changed_config_in_the_same_folder_is_refused(finished, config):
    run, _ = finished
    before = contents(run)
    result = scone("run", str(config), "--output", str(run), "--set", "count.num_fgrams=100")
    assert result.returncode == 1
    assert "num_fgrams was 200, now 100" in result.stderr
    assert "choose another --output" in result.stderr
    assert contents(run) == before


def test_status_and_inspect_show_what_is_there(finished):
    run, _ = finished
    states = json.loads(scone("status", str(run), "--json").stdout)
    assert {state["state"] for state in states} == {"complete"}
    inspected = scone("inspect", str(run / "fgrams"), "--verify")
    assert "fgrams, format 1" in inspected.stdout
    assert "all checksums agree" in inspected.stdout


def test_altered_file_is_found_by_inspect_and_stops_the_stages_that_need_it(finished, tmp_path):
    run, _ = finished
    shard = next((run / "fgrams" / "ranked").glob("*.parquet"))
    content = shard.read_bytes()
    try:
        shard.write_bytes(content[:-10] + bytes(10))
        assert "altered since it was written" in scone("inspect", str(run / "fgrams"), "--verify").stderr
        shard.write_bytes(content[:-10])
        result = scone("pack", "--output", str(tmp_path / "other"), *_inputs_from(run, "pack", "tokens", "fgrams"))
        assert result.returncode == 1
        assert "truncated or overwritten" in result.stderr
        assert not (tmp_path / "other" / "sequences").exists()
    finally:
        shard.write_bytes(content)


def _inputs_from(run: Path, stage: str, *names: str) -> list[str]:
    return [part for name in names for part in ("--set", f"{stage}.{name}={run / name}")]


def test_generate_continues_a_text_through_the_table(finished):
    run, _ = finished
    result = scone("generate", "--output", str(run), "--max-tokens", "5", "the array")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("the array")
    assert len(result.stdout) > len("the array")
    again = json.loads(scone("generate", "-o", str(run), "-n", "5", "--json", "--from-fgram-model", "the array").stdout)
    assert "the array" + again["completion"] == result.stdout.removesuffix("\n")


def test_dry_run_plans_without_starting_anything(config, tmp_path):
    result = scone("run", str(config), "--output", str(tmp_path / "run"), "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert list(plan) == ["tokenize", "count", "pack", "train baseline", "train scone", "precompute", "evaluate"]
    assert plan["tokenize"]["units"] >= 1
    assert "possible once its input exists" in plan["count"]["estimate"]
    assert not (tmp_path / "run").exists()
