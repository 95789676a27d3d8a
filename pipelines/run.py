"""The whole life cycle from one config: reads documents, writes every artifact of a run; resumes where it stopped."""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipelines.cluster import ClusterConfig, sharing_ray
from pipelines.doctor import check_one_place
from pipelines.progress import format_seconds
from pipelines.stage import StageClock, StageContext
from pipelines.stages import STAGES, load_cluster, run_folder_of
from pipelines.tracking import RunTracking
from scone.artifacts import MANIFEST, Manifest, load_manifest
from scone.config import Config, build_config
from scone.errors import ArtifactError, MissingArtifactError
from scone.storage import Folder, fingerprint

logger = logging.getLogger(__name__)


class RunSettings(Config):
    """What a run config says beside its stages' sections."""

    name: str = "scone"
    """Name of the run, in its folder and in MLflow."""
    output: str = ""
    """Folder of all artifacts, local or in object storage; `out/NAME` if empty."""
    train_baseline: bool = True
    """Train the plain model of the same shape on the same data, for comparison."""
    tracking: bool = True
    """Track the run in MLflow."""


@dataclass(frozen=True, slots=True)
class Step:
    """One stage of a run, with its config. The train stage comes twice when there is a baseline."""

    label: str
    stage: str
    config: Any

    @property
    def folder(self) -> str:
        folder = STAGES[self.stage].folder
        return f"{folder}/{self.config.variant}" if self.stage == "train" else folder


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step made; `did_work` is false if it was complete before."""

    step: Step
    manifest: Manifest
    seconds: float
    did_work: bool
    folder: Folder


@dataclass(frozen=True, slots=True)
class Run:
    """A run as configured: checked whole before anything starts."""

    settings: RunSettings
    folder: Folder
    cluster: ClusterConfig
    steps: tuple[Step, ...]

    @classmethod
    def load(cls, settings: Mapping[str, Any], output: str = "", ray_address: str = "", only: str = "") -> Run:
        """All stages of `settings`, or `only` one. Raises ConfigError for any wrong setting of any of them."""
        own = {key: value for key, value in settings.items() if key not in (*STAGES, "cluster")}
        run_settings = build_config(RunSettings, own)
        steps = []
        for name, stage in STAGES.items():
            if only and name != only:
                continue
            config = stage.load_config(settings)
            if name != "train" or only:
                steps.append(Step(_label(name, config), name, config))
                continue
            variants = ("baseline", "scone") if run_settings.train_baseline else ("scone",)
            configs = [config.model_copy(update={"variant": variant}) for variant in variants]
            steps += [Step(_label(name, variant_config), name, variant_config) for variant_config in configs]
        return cls(run_settings, run_folder_of(settings, output), load_cluster(settings, ray_address), tuple(steps))

    def execute(self, *, show_progress: bool = True) -> list[StepResult]:
        """Every step in order; complete ones are passed over. Ray starts with the first that has work.

        Raises:
            SconeError: Whatever a stage raises; or the project's packages come from different places.
        """
        check_one_place()
        key = f"{self.settings.name}-{fingerprint([step.config.to_dict() for step in self.steps])[:8]}"
        tracking = RunTracking(self.folder, key, enabled=self.settings.tracking)
        succeeded = False
        try:
            with sharing_ray():
                results = [self._execute_step(step, tracking, show_progress) for step in self.steps]
            succeeded = True
        finally:
            tracking.close(succeeded)
        return results

    def plan(self) -> dict[str, dict[str, Any]]:
        """What each step would do, by label; a step whose inputs do not exist yet says so."""
        plans: dict[str, dict[str, Any]] = {}
        for step in self.steps:
            try:
                plans[step.label] = STAGES[step.stage].module().plan(step.config, self._context())
            except MissingArtifactError as error:
                plans[step.label] = {"estimate": f"possible once its input exists ({error})"}
        return plans

    def report(self) -> dict[str, Any] | None:
        """The evaluation's report, if there is one."""
        folder = self.folder / STAGES["evaluate"].folder
        report = folder.read_json("report.json") if folder.exists("report.json") else None
        return report if isinstance(report, dict) else None

    def next_command(self) -> str:
        """What a user would type next."""
        return f'scone generate --output {shlex.quote(_short(self.folder))} "Returns the"'

    def _context(self) -> StageContext:
        return StageContext(run_folder=self.folder, cluster=self.cluster)

    def _execute_step(self, step: Step, tracking: RunTracking, show_progress: bool) -> StepResult:
        folder = self.folder / step.folder
        did_work = not folder.exists(MANIFEST)
        clock = StageClock()
        if did_work:
            logger.info("%s: started", step.label)
        with tracking.stage(step.label) as stage_tracking:
            context = replace(self._context(), tracking=stage_tracking, show_progress=show_progress)
            manifest = STAGES[step.stage].module().run(step.config, context)
            if did_work:
                _track_manifest(folder, manifest, context)
        if did_work:
            logger.info("%s: done in %s", step.label, format_seconds(clock.seconds))
        return StepResult(step, manifest, clock.seconds, did_work, folder)


def _label(stage: str, config: Any) -> str:
    return f"train {config.variant}" if stage == "train" else stage


def _track_manifest(folder: Folder, manifest: Manifest, context: StageContext) -> None:
    context.tracking.log_parameters(manifest.config)
    context.tracking.set_tags(
        {
            "scone.artifact": folder.uri,
            "scone.fingerprint": manifest.fingerprint,
            "scone.inputs": json.dumps(manifest.inputs, sort_keys=True),
        }
    )
    if folder.is_local:
        context.tracking.log_file(folder.locate(MANIFEST))


def stage_states(run_folder: Folder) -> list[dict[str, Any]]:
    """What stands in a run's folder, stage by stage: complete, unfinished with its units, damaged or absent."""
    states = []
    for stage in STAGES.values():
        names = [stage.folder]
        if stage.name == "train":
            found = {path.split("/")[1] for path in run_folder.list_files(stage.folder) if path.count("/") > 1}
            names = [f"{stage.folder}/{variant}" for variant in sorted(found)] or [f"{stage.folder}/scone"]
        states += [{"stage": stage.name, "folder": name, **_state(run_folder / name)} for name in names]
    return states


def _state(folder: Folder) -> dict[str, Any]:
    try:
        manifest = load_manifest(folder)
    except MissingArtifactError:
        groups = _unit_groups(folder)
        return {"state": "unfinished" if groups else "not started", "units": groups}
    except ArtifactError as error:
        return {"state": "damaged", "problem": str(error)}
    return {"state": "complete", "fingerprint": manifest.fingerprint, "bytes": manifest.num_bytes}


def _unit_groups(folder: Folder) -> dict[str, dict[str, int]]:
    groups: dict[str, dict[str, int]] = {}
    for path in folder.list_files("_work/groups"):
        name = path.removeprefix("_work/groups/").removesuffix(".json")
        committed = len(folder.list_files(f"_work/units/{name}"))
        groups[name] = {"committed": committed, "total": int(folder.read_json(path)["units"])}
    if not groups and folder.exists("_work/plan.json"):
        groups["plan"] = {"committed": 0, "total": 0}
    return groups


def _short(folder: Folder) -> str:
    if not folder.is_local:
        return folder.uri
    relative = os.path.relpath(folder.uri)
    return folder.uri if relative.startswith("..") else relative
