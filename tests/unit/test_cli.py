"""The command line as a user meets it: in a process of its own, by its exit code and its messages."""

import json
import subprocess
import sys

import pytest


def scone(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scone", *arguments], capture_output=True, text=True, timeout=120, **options
    )


def test_help_names_every_command_without_importing_the_heavy_libraries():
    code = (
        "import sys; sys.argv = ['scone', '--help']\n"
        "from scone.cli import app\n"
        "try: app()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "heavy = {'torch', 'ray', 'numba', 'transformers', 'mlflow', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    for command in (
        "tokenize",
        "count",
        "pack",
        "train",
        "precompute",
        "evaluate",
        "run",
        "demo",
        "generate",
        "status",
    ):
        assert command in result.stdout


@pytest.mark.parametrize("stage", ["tokenize", "count", "pack", "train", "precompute", "evaluate"])
def test_help_of_a_stage_lists_its_settings_with_defaults(stage):
    result = scone(stage, "--help", env={"COLUMNS": "200", "PATH": "/usr/bin"})
    assert result.returncode == 0, result.stderr
    assert f"--set {stage}.NAME=VALUE" in result.stdout
    assert " = " in result.stdout.split("Settings")[1]


def test_version():
    assert scone("--version").stdout.startswith("scone 0.")


def test_unknown_setting_is_wrong_usage_and_names_the_nearest(tmp_path):
    result = scone("count", "--output", str(tmp_path), "--set", "count.num_fgram=5")
    assert result.returncode == 2
    assert "error: unknown setting count.num_fgram: did you mean num_fgrams?" in result.stderr


def test_unknown_section_is_wrong_usage_and_names_the_nearest(tmp_path):
    result = scone("run", "demo", "--output", str(tmp_path), "--set", "counts.num_fgrams=5")
    assert result.returncode == 2
    assert "unknown section or setting counts: did you mean count?" in result.stderr
    assert not any(tmp_path.iterdir())


def test_unknown_config_lists_the_presets():
    result = scone("run", "nosuch")
    assert result.returncode == 2
    assert "nosuch: give a TOML file, or one of the presets: " in result.stderr
    assert "demo" in result.stderr


def test_stage_without_its_input_says_which_stage_to_run(tmp_path):
    result = scone("count", "--output", str(tmp_path / "run"))
    assert result.returncode == 1
    assert "no finished tokens artifact at" in result.stderr
    assert "run its stage first" in result.stderr
    assert not (tmp_path / "run" / "fgrams").exists()


def test_status_of_an_empty_run_is_machine_readable(tmp_path):
    states = json.loads(scone("status", str(tmp_path), "--json").stdout)
    assert {state["stage"] for state in states} == {"tokenize", "count", "pack", "train", "precompute", "evaluate"}
    assert {state["state"] for state in states} == {"not started"}


def test_inspect_of_nothing_fails_clearly(tmp_path):
    result = scone("inspect", str(tmp_path))
    assert result.returncode == 1
    assert f"no finished artifact at {tmp_path}" in result.stderr


def test_doctor_finds_this_installation_fit():
    result = scone("doctor", "--json")
    assert result.returncode == 0, result.stdout
    checks = {check["name"]: check for check in json.loads(result.stdout)}
    assert checks["scone"]["state"] == "good"
    assert checks["ray"]["found"].startswith("2.60")


def test_doctor_refuses_packages_from_two_places(tmp_path):
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "__init__.py").write_text("")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import pipelines\n"
        "pipelines.__path__.append(sys.argv[2])\n"
        "from pipelines.doctor import check_one_place; check_one_place()"
    )
    import scone as package

    real = str(package.__path__[0]).removesuffix("scone") + "pipelines"
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), real], capture_output=True, text=True, timeout=60
    )
    assert "the project's packages come from different places" in result.stderr
