"""What people see on the terminal: plans, states, artifacts, checks, and the summary of a run. Printing only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipelines.progress import format_bytes, format_count, format_seconds
from pipelines.tracking import tracking_uri
from scone.artifacts import Manifest
from scone.storage import Folder

if TYPE_CHECKING:
    from pipelines.doctor import Check
    from pipelines.run import Run, StepResult

_MARKS = {"complete": "[green]✓[/]", "unfinished": "[yellow]…[/]", "damaged": "[red]✗[/]", "not started": "[dim]·[/]"}


def print_summary(run: Run, results: Sequence[StepResult]) -> None:
    """The end of `scone run`: what was made, how good it is, where it lies, and what to type next."""
    console = _console()
    manifests = {result.step.label: result.manifest for result in results}
    table = _key_values(f"scone run: {run.settings.name}")
    for key, value in summary_rows(manifests, run.report() or {}):
        table.add_row(key, value)
    seconds = sum(result.seconds for result in results if result.did_work)
    table.add_row("time", format_seconds(seconds) if seconds else "nothing to do, all complete")
    table.add_row("artifacts", str(run.folder))
    table.add_row("report", (run.folder / "report").locate("report.md"))
    if run.settings.tracking:
        table.add_row("MLflow", f"mlflow ui --backend-store-uri {tracking_uri(run.folder)}")
    table.add_row("next", run.next_command())
    console.print(table)


def summary_rows(manifests: Mapping[str, Manifest], report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures of a run, as (name, readable value); what a run does not have is left out."""
    rows = []
    if "tokenize" in manifests:
        rows += _corpus_rows(manifests["tokenize"].statistics)
    if "count" in manifests:
        statistics = manifests["count"].statistics
        lengths = ", ".join(f"{n}: {format_count(c)}" for n, c in sorted(statistics["num_by_length"].items()))
        rows.append(
            ("f-grams", f"{statistics['num_fgrams']:,} (by length {lengths}), count ≥ {statistics['cutoff_count']:,}")
        )
    rows += [(key, str(value)) for key, value in report.get("summary", {}).items()]
    return rows


def _corpus_rows(statistics: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for split, label in (("train", "corpus"), ("heldout", "held out")):
        part = statistics[split]
        text = f"{part['documents']:,} documents, {format_count(part['tokens'])} tokens"
        rows.append((label, f"{text} (vocabulary {statistics['token_vocab_size']:,})" if split == "train" else text))
    return rows


def print_states(run_folder: str, states: Sequence[Mapping[str, Any]]) -> None:
    """The stages of a run, one line each."""
    table = _grid(run_folder, "", "stage", "state", "size or units")
    for state in states:
        if state["state"] == "complete":
            detail = format_bytes(state["bytes"])
        elif state["state"] == "damaged":
            detail = state["problem"]
        else:
            detail = ", ".join(f"{g}: {u['committed']}/{u['total']}" for g, u in state["units"].items())
        table.add_row(_MARKS[state["state"]], state["folder"], state["state"], detail)
    _console().print(table)


def print_artifact(folder: Folder, manifest: Manifest, provenance: Mapping[str, Any], verified: bool) -> None:
    """One artifact whole."""
    console = _console()
    table = _key_values(str(folder))
    table.add_row("kind", f"{manifest.kind}, format {manifest.format}")
    table.add_row("fingerprint", manifest.fingerprint)
    table.add_row("tokenizer", manifest.tokenizer_fingerprint)
    table.add_row("size", f"{format_bytes(manifest.num_bytes)} in {len(manifest.files)} files")
    table.add_row("files", "all checksums agree" if verified else "sizes agree; --verify reads their checksums")
    for name, value in sorted(manifest.inputs.items()):
        table.add_row(f"input {name}", value)
    for section, values in (("config", manifest.config), ("", manifest.statistics), ("made", provenance)):
        for key, value in values.items():
            table.add_row(f"{section} {key}".strip(), _brief(value))
    console.print(table)


def print_plan(plan: Mapping[str, Mapping[str, Any]]) -> None:
    """What each stage would do."""
    console = _console()
    for label, values in plan.items():
        table = _key_values(label)
        for key, value in values.items():
            table.add_row(key.replace("_", " "), _brief(value))
        console.print(table)


def print_checks(checks: Sequence[Check]) -> None:
    """The result of `scone doctor`."""
    marks = {"good": "[green]✓[/]", "note": "[yellow]![/]", "bad": "[red]✗[/]"}
    table = _grid("scone doctor", "", "check", "found", "what to do")
    for check in checks:
        table.add_row(marks[check.state], check.name, check.found, check.advice)
    _console().print(table)


def _brief(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_brief(item)}" for key, item in value.items())
    text = ", ".join(_brief(item) for item in value) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 300 else f"{text[:300]}…"


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False)


def _key_values(title: str) -> Any:
    table = _grid(title)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _grid(title: str, *columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, show_header=bool(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
