"""The whole life cycle with all artifacts on a real S3 server, through the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scone.artifacts import load_manifest, verify_files
from scone.storage import Folder

from ..tiny_config import write_tiny_config

pytestmark = pytest.mark.timeout(1200)  # a whole run, and a busy machine

ARTIFACTS = ("tokens", "fgrams", "sequences", "model/baseline", "model/scone", "table", "report")


def test_run_with_all_artifacts_on_s3_and_generate_from_there(s3_bucket: str, tmp_path: Path) -> None:
    run = f"{s3_bucket}/run"
    environment = {**os.environ, "SCONE_CACHE": str(tmp_path / "cache")}
    config = write_tiny_config(tmp_path)
    command = [sys.executable, "-m", "scone"]
    arguments = ["run", str(config), "--output", run, "--set", "tracking=false"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{run}/report"
    for artifact in ARTIFACTS:
        folder = Folder(f"{run}/{artifact}")
        verify_files(folder, load_manifest(folder))
        assert not folder.list_files("_work")
    generate = ["generate", "--output", run, "--max-tokens", "4", "--json", "the array"]
    text = subprocess.run([*command, *generate], capture_output=True, text=True, env=environment, timeout=300)
    assert text.returncode == 0, text.stderr
    assert json.loads(text.stdout)["completion"]
