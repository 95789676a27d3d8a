"""Packaging, presets, documents and import rules say the same things."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pipelines.run import Run
from pipelines.stages import load_settings, preset_names

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = dict(
    line.split("==") for line in (ROOT / "constraints" / "py311.txt").read_text().splitlines() if "==" in line
)


def requirements() -> list[Requirement]:
    extras = PROJECT["project"]["optional-dependencies"].values()
    return [Requirement(text) for group in [PROJECT["project"]["dependencies"], *extras] for text in group]


@pytest.mark.parametrize("requirement", requirements(), ids=lambda r: r.name)
def test_every_dependency_has_an_exact_version_within_its_range(requirement):
    pinned = CONSTRAINTS[requirement.name]
    assert requirement.specifier.contains(pinned)


def test_the_installed_versions_are_the_pinned_ones():
    for name in ("ray", "torch", "transformers", "pyarrow", "numba", "numpy", "mlflow"):
        assert version(name).split("+")[0] == CONSTRAINTS[name]


def test_import_rules_hold():
    result = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports"))], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout


def test_architecture_page_shows_the_import_rules():
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    layers = [line for contract in contracts if contract["type"] == "layers" for line in contract["layers"]]
    picture = (ROOT / "docs" / "architecture.md").read_text().split("<!-- layers -->")[1].split("<!-- /layers -->")[0]
    shown = [line.strip() for line in picture.splitlines() if line.strip() and not line.startswith("```")]
    assert shown == list(dict.fromkeys(layers))


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_is_a_valid_run_and_opens_with_its_command(preset):
    text = (ROOT / "pipelines" / "configs" / f"{preset}.toml").read_text()
    assert text.splitlines()[0].startswith("# scone ")
    run = Run.load(load_settings(preset))
    assert [step.stage for step in run.steps][-1] == "evaluate"


@pytest.mark.parametrize("module", ["scone", "pipelines"])
def test_importing_every_module_has_no_side_effect(module, tmp_path):
    code = (
        "import importlib, logging, os, pkgutil, sys\n"
        f"package = importlib.import_module({module!r})\n"
        "names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + '.')]\n"
        "for name in names:\n"
        "    if not name.endswith('__main__'): importlib.import_module(name)\n"
        "assert not os.listdir('.'), os.listdir('.')\n"
        "own = [n for n, log in logging.root.manager.loggerDict.items()\n"
        "       if n.split('.')[0] in ('scone', 'pipelines') and getattr(log, 'handlers', [])]\n"
        "assert not own and not logging.root.handlers, own\n"
        "ray = sys.modules.get('ray')\n"
        "assert ray is None or not ray.is_initialized()\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path / "home")}
    (tmp_path / "here").mkdir()
    result = subprocess.run(
        [sys.executable, "-B", "-c", code],
        cwd=tmp_path / "here",
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "home" / ".ray").exists()


def test_readme_opens_with_the_two_commands_that_exist():
    readme = (ROOT / "README.md").read_text()
    top = "\n".join(readme.splitlines()[:25])
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in top
        assert re.search(rf"\b{target}\b.*:", makefile)


def test_ci_runs_the_test_command_of_the_readme():
    assert "make test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_between_documents_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_bootstrap_without_a_target_shows_how_to_use_it():
    result = subprocess.run(["sh", "scripts/bootstrap.sh"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert result.returncode == 2
    assert "demo" in result.stderr


def test_bootstrap_reuses_the_environment_it_made():
    if not (ROOT / ".venv" / "stamp").exists():
        pytest.skip("the tests run from another environment than the bootstrap's")
    result = subprocess.run(
        ["sh", "scripts/bootstrap.sh", "install"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0
    assert "reusing .venv" in result.stderr
