"""Runs a plan's units of work through Ray Data: skips the committed ones, retries lost ones, shows progress.

Ray carries one small JSON row per unit to a worker and one back. The work itself reads and writes storage
and commits its own record, so that a lost driver, host or duplicate attempt loses and doubles nothing.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from pipelines.cluster import available_cpus
from pipelines.progress import track
from pipelines.stage import StageContext
from scone.artifacts import WORK, ArtifactBuilder, UnitRecord, commit_unit
from scone.errors import ClusterError, SconeError, error_from_dict
from scone.storage import Folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of a stage's work. `spec` is plain JSON; `size` is what progress counts (tokens, rows, bytes)."""

    id: str
    spec: dict[str, Any]
    size: float = 1.0


class UnitWork(Protocol):
    """Does one unit: writes its files into `folder` and returns the record, which the caller commits."""

    def __call__(self, folder: Folder, unit: Unit) -> UnitRecord: ...


def run_units(
    builder: ArtifactBuilder,
    group: str,
    units: Sequence[Unit],
    work: UnitWork | type,
    context: StageContext,
    *,
    size_unit: str,
    num_cpus: float = 1.0,
    memory_bytes: int = 0,
    actor_arguments: dict[str, Any] | None = None,
) -> list[UnitRecord]:
    """Records of all `units`, in their order; only those not yet committed are run.

    Args:
        work: A picklable callable, or, with `actor_arguments`, a class whose instances are one. The instances
            live in actors, so that what they load (a model) is loaded once.

    Raises:
        SconeError: Whatever the work raised on purpose.
        ClusterError: Ray failed for a reason outside the work.
    """
    records = builder.committed_units(group)
    todo = [unit for unit in units if unit.id not in records]
    done_before = sum(unit.size for unit in units if unit.id in records)
    if done_before:
        logger.info("%s: %d of %d units are already committed", group, len(units) - len(todo), len(units))
    sizes = {unit.id: unit.size for unit in todo}
    total = sum(unit.size for unit in units)
    builder.folder.write_json(
        f"{WORK}/groups/{group}.json", {"units": len(units), "size": total, "size_unit": size_unit}
    )
    with track(f"{builder.kind}: {group}", total, size_unit, context.show_progress) as progress:
        progress.resume_at(done_before)
        if todo:
            needs = _Needs(num_cpus, memory_bytes, actor_arguments)
            for record in _dispatch(builder.folder, group, todo, work, context, needs):
                records[record.unit] = record
                progress.advance(sizes[record.unit], f"{len(records)}/{len(units)} units")
    return [records[unit.id] for unit in units]


@dataclass(frozen=True, slots=True)
class _Needs:
    """What one unit needs of a worker."""

    num_cpus: float
    memory_bytes: int
    actor_arguments: dict[str, Any] | None


def _dispatch(
    folder: Folder, group: str, todo: list[Unit], work: UnitWork | type, context: StageContext, needs: _Needs
) -> Iterator[UnitRecord]:
    import ray.data
    from ray.exceptions import RayError

    data_context = ray.data.DataContext.get_current()
    data_context.enable_progress_bars = False
    data_context.print_on_execution_start = False
    data_context.execution_no_progress_timeout_s = -1  # a long unit is not a hang
    logging.getLogger("ray.data").setLevel(logging.ERROR)

    limit = min(context.cluster.max_parallel_units or available_cpus(), len(todo))
    rows = [{"id": unit.id, "spec": json.dumps(unit.spec), "size": unit.size} for unit in todo]
    resources: dict[str, Any] = {"num_cpus": needs.num_cpus}
    if needs.memory_bytes:
        resources["memory"] = needs.memory_bytes
    function: Any
    if needs.actor_arguments is None:
        function = partial(_run_row, folder.uri, group, work)
        resources["compute"] = ray.data.TaskPoolStrategy(size=limit)
    else:
        function = _UnitActor
        actors = min(limit, int(available_cpus() / max(needs.num_cpus, 1e-9)))
        resources["compute"] = ray.data.ActorPoolStrategy(size=max(1, actors))
        resources["fn_constructor_args"] = (folder.uri, group, work, needs.actor_arguments)
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        function, batch_size=1, batch_format="numpy", **resources
    )
    try:
        for batch in dataset.iter_batches(batch_size=1, batch_format="numpy", prefetch_batches=0):
            result = json.loads(str(batch["result"][0]))
            if "error" in result:
                raise error_from_dict(result)
            yield UnitRecord.from_dict(result)
    except RayError as error:
        raise ClusterError(
            f"a unit of {group} failed: {_innermost(error)}; --set cluster.show_worker_logs=true shows what its worker "
            "printed, running again resumes"
        ) from error


def _innermost(error: Exception) -> str:
    """The line that names the first error in Ray's text of nested tracebacks."""
    named = re.search(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*$", str(error), re.MULTILINE)
    return named.group() if named else str(error).strip().partition("\n")[0] or repr(error)


def _run_row(
    folder_uri: str, group: str, work: Callable[[Folder, Unit], UnitRecord], batch: Any
) -> dict[str, list[str]]:
    """One unit in a worker. The project's own errors travel back as rows: Ray's wrappers lose their type."""
    unit = Unit(str(batch["id"][0]), json.loads(str(batch["spec"][0])), float(batch["size"][0]))
    folder = Folder(folder_uri)
    try:
        record = work(folder, unit)
        commit_unit(folder, group, record)
        result = record.to_dict()
    except SconeError as error:
        result = error.to_dict()
    return {"result": [json.dumps(result)]}


class _UnitActor:
    """Work that is set up once per actor. What its set-up raises is answered to every unit it gets."""

    def __init__(self, folder_uri: str, group: str, work_class: type, arguments: dict[str, Any]) -> None:
        self.folder_uri, self.group = folder_uri, group
        self.failure: SconeError | None = None
        try:
            self.work = work_class(**arguments)
        except SconeError as error:
            self.failure = error

    def __call__(self, batch: Any) -> dict[str, list[str]]:
        if self.failure is not None:
            return {"result": [json.dumps(self.failure.to_dict())]}
        return _run_row(self.folder_uri, self.group, self.work, batch)
