"""The table of stages, and how their settings are found: defaults, then a preset or TOML file, then overrides."""

from __future__ import annotations

import difflib
import importlib
import importlib.resources
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from pipelines.cluster import ClusterConfig
from pipelines.stage import StageContext
from scone.artifacts import Manifest
from scone.config import Config, apply_overrides, build_config, parse_toml
from scone.errors import ConfigError
from scone.storage import Folder


class StageModule(Protocol):
    """What the file of a stage offers."""

    def plan(self, config: Any, context: StageContext) -> dict[str, Any]:
        """What `run` would do, as readable values; starts nothing."""

    def run(self, config: Any, context: StageContext) -> Manifest:
        """Build the artifact, or find it complete."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: its file in `pipelines/`, its section of the settings, its folder in a run."""

    name: str
    config_class: str
    folder: str

    def module(self) -> StageModule:
        return cast(StageModule, importlib.import_module(f"pipelines.{self.name}"))

    def load_config(self, settings: Mapping[str, Any]) -> Any:
        """The stage's typed config from its section. Raises ConfigError."""
        config_class: type[Config] = getattr(self.module(), self.config_class)
        return build_config(config_class, settings.get(self.name, {}), self.name)


STAGES = {
    stage.name: stage
    for stage in (
        Stage("tokenize", "TokenizeConfig", "tokens"),
        Stage("count", "CountConfig", "fgrams"),
        Stage("pack", "PackConfig", "sequences"),
        Stage("train", "TrainConfig", "model"),
        Stage("precompute", "PrecomputeConfig", "table"),
        Stage("evaluate", "EvaluateConfig", "report"),
    )
}
RUN_SETTINGS = ("name", "output", "train_baseline", "tracking")


def load_settings(config: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Nested settings from a preset's name or a TOML file (any storage), with `overrides` applied.

    Raises:
        ConfigError: No such preset or file, not TOML, or a section that no stage has.
    """
    settings: dict[str, Any] = {}
    if config:
        settings = parse_toml(_read_config(config), config)
    settings = apply_overrides(settings, overrides)
    known = [*STAGES, *RUN_SETTINGS, "cluster"]
    for key in settings:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown section or setting {key}: {hint}")
        if (key in STAGES or key == "cluster") and not isinstance(settings[key], dict):
            raise ConfigError(f"{key} must be a section of settings, got {settings[key]!r}")
    return settings


def load_cluster(settings: Mapping[str, Any], ray_address: str = "") -> ClusterConfig:
    """The `[cluster]` section; a Ray address given on the command line wins. Raises ConfigError."""
    section = dict(settings.get("cluster", {}))
    if ray_address:
        section["address"] = ray_address
    return build_config(ClusterConfig, section, "cluster")


def run_folder_of(settings: Mapping[str, Any], output: str = "") -> Folder:
    """The run's folder: the command line's `--output`, else the config's, else `out/NAME`."""
    return Folder(output or settings.get("output") or f"out/{settings.get('name', 'scone')}")


def preset_names() -> list[str]:
    """Names of the shipped presets."""
    files = importlib.resources.files("pipelines").joinpath("configs").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def _read_config(config: str) -> str:
    if config in preset_names():
        return importlib.resources.files("pipelines").joinpath("configs", f"{config}.toml").read_text()
    folder, _, name = config.rpartition("/")
    try:
        return Folder(folder or ".").read_bytes(name).decode()
    except (FileNotFoundError, IsADirectoryError):
        presets = ", ".join(preset_names())
        where = config if "://" in config else str(Path(config).absolute())
        raise ConfigError(f"no config {where}: give a TOML file, or one of the presets: {presets}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{config} is not a text file: {error}") from error
