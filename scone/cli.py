"""The `scone` command: one table of commands, each loaded only when it is called."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from scone.errors import ConfigError, SconeError
from scone.version import VERSION

logger = logging.getLogger(__name__)

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="scone",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigOption = Annotated[str, typer.Option("--config", "-c", metavar="NAME|PATH", help="Preset or TOML file.")]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set", "-s", metavar="KEY=VALUE", help="Override one setting, as in count.num_fgrams=1000. Repeatable."
    ),
]
OutputOption = Annotated[
    str, typer.Option("--output", "-o", metavar="DIR", help="The run's folder, local or s3://…; default out/NAME.")
]
AddressOption = Annotated[
    str, typer.Option("--ray-address", metavar="A", help="Ray cluster to join; default: RAY_ADDRESS, else a local Ray.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan with sizes and estimates; start nothing.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON on stdout.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Log details, and tracebacks of errors.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Build and use SCONE models: language models whose input embedding is enlarged by frequent n-grams (f-grams).

    The life cycle, each stage one resumable job whose output is a folder with a manifest:

      tokenize → count → pack → train → precompute → evaluate, and then generate

    [bold]scone demo[/bold] does all of it on text that lies on this machine. [bold]scone run CONFIG[/bold] does it on
    yours. Every stage is also a command. The same command again resumes, or finds that nothing is left to do.

    Exit codes: 0 done, 1 failed, 2 wrong usage or config, 130 interrupted.
    """
    if version:
        typer.echo(f"scone {VERSION}")
        raise typer.Exit


_STAGE_HELP = {
    "tokenize": """Turn documents into token ids.

    Reads Parquet, JSONL (also .gz, .zst) and plain text from local disk, s3://, gs:// and hf://, or local-docs:, the
    documentation of the installed Python packages. Exact duplicates are removed; the held-out split is disjoint by
    package or file. Without a tokenizer.json of yours it trains a byte-level BPE.

    Example: scone tokenize -o out/web -s tokenize.corpus='["s3://bucket/web/*.parquet"]' -s tokenize.tokenizer=tok.json
    """,
    "count": """Count n-grams exactly and keep the most frequent as f-grams.

    One scan counts all lengths 2…K. f-grams are ranked by (count descending, shorter first, token ids); the rank is the
    row of the embedding table. Reads the run's tokens, writes fgrams/.

    Example: scone count -o out/web -s count.num_fgrams=10000000 -s count.max_fgram_length=5
    """,
    "pack": """Pack documents into training sequences, with the length of the f-gram match at every token.

    Reads tokens and f-grams, writes sequences/ for the training and the held-out split.

    Example: scone pack -o out/web -s pack.sequence_length=1024
    """,
    "train": """Train a main model and its f-gram model jointly, or the plain baseline.

    Ray Train with DDP over train.num_workers workers. Checkpoints make it resumable: the same command goes on.
    Writes model/scone or model/baseline, a folder that Transformers loads.

    Example: scone train -o out/web -c demo -s train.variant=baseline
    """,
    "precompute": """Compute every f-gram's embedding once and commit it as a version of the embedding table.

    Reads model/scone and fgrams, writes table/.

    Example: scone precompute -o out/web -s precompute.dtype=fp32
    """,
    "evaluate": """Measure held-out perplexity, match rates, parity of table and f-gram model, size and look-up time.

    Reads models, table and sequences, writes report/report.md, report.json and plots.

    Example: scone evaluate -o out/web
    """,
}


def _stage_command(name: str) -> Callable[..., None]:
    def command(
        config: ConfigOption = "",
        overrides: SetOption = [],  # noqa: B006  typer reads it, nothing changes it
        output: OutputOption = "",
        ray_address: AddressOption = "",
        dry_run: DryRunOption = False,
        as_json: JsonOption = False,
        verbose: VerboseOption = False,
    ) -> None:
        with _reporting(verbose):
            _run(config, overrides, output, ray_address, dry_run, as_json, only=name)

    command.__doc__ = _STAGE_HELP[name]
    return command


class _StageCommand(TyperCommand):
    """A command whose help ends with the stage's settings, loaded only when help is asked for."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.epilog = "\n\n".join(_settings_lines(str(self.name)))
        super().format_help(ctx, formatter)


def _settings_lines(stage: str) -> Iterator[str]:
    from pipelines.stages import STAGES

    config_class = getattr(STAGES[stage].module(), STAGES[stage].config_class)
    yield f"[bold]Settings[/bold] (in a config's [{stage}] section, or as --set {stage}.NAME=VALUE):".replace(
        "[" + stage, "\\[" + stage
    )
    for name, field in config_class.model_fields.items():
        default = (
            "required" if field.is_required() else json.dumps(field.get_default(call_default_factory=True), default=str)
        )
        description = " ".join((field.description or "").split())
        yield f"  [cyan]{name}[/cyan] = {default}  {description}".replace("[]", "\\[]")


for _name in _STAGE_HELP:
    app.command(_name, cls=_StageCommand)(_stage_command(_name))


def _run(
    config: str, overrides: list[str], output: str, ray_address: str, dry_run: bool, as_json: bool, only: str = ""
) -> None:
    """All stages of a config, or `only` one; a run of all ends with its summary."""
    from pipelines.run import Run
    from pipelines.stages import load_settings

    run = Run.load(load_settings(config, overrides), output, ray_address, only)
    if dry_run:
        _show_plan(run.plan(), as_json)
        return
    results = run.execute()
    if not only:
        if not any(result.did_work for result in results):
            logger.info("nothing to do: every stage of %s is already complete", run.folder)
        if not as_json:
            from pipelines.summary import print_summary

            print_summary(run, results)
    _show_results(results, as_json)


@app.command("run")
def run_command(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="TOML file or preset with all stages' settings.")],
    overrides: SetOption = [],  # noqa: B006
    output: OutputOption = "",
    ray_address: AddressOption = "",
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Do all stages of a config, tracked in MLflow as one run; resume where an earlier one stopped.

    Complete stages are passed over, so a second run does nothing and says so. Another config in the same folder is
    refused. Example: scone run my.toml -o s3://bucket/runs/web
    """
    with _reporting(verbose):
        _run(config, overrides, output, ray_address, dry_run, as_json)


@app.command("demo")
def demo_command(
    overrides: SetOption = [],  # noqa: B006
    output: OutputOption = "",
    ray_address: AddressOption = "",
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Do the whole life cycle on the documentation of the installed Python packages: about 12 minutes on 2 cores.

    The same as: scone run demo. Nothing is downloaded. Ends with the held-out perplexity of the plain model and of
    SCONE with the same main model, tokens, steps and learning rate, on packages that neither has seen.
    """
    with _reporting(verbose):
        _run("demo", overrides, output, ray_address, dry_run, as_json)


@app.command("generate")
def generate_command(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    output: OutputOption = "out/demo",
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Longest continuation, in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    from_fgram_model: Annotated[
        bool, typer.Option("--from-fgram-model", help="Compute f-gram embeddings anew instead of reading the table.")
    ] = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Continue a text with a run's SCONE model, its f-gram embeddings read from the table; streams as it goes.

    Example: scone generate -o out/demo "Returns the"
    """
    with _reporting(verbose):
        _generate(prompt, output, max_tokens, temperature, seed, from_fgram_model, as_json)


def _generate(
    prompt: str, output: str, max_tokens: int, temperature: float, seed: int, from_fgram_model: bool, as_json: bool
) -> None:
    from scone.generation import TextGenerator
    from scone.storage import Folder

    text = sys.stdin.read() if prompt == "-" else prompt
    generator = TextGenerator.open(Folder(output), from_table=not from_fgram_model)
    pieces = []
    if not as_json:
        sys.stdout.write(text)
    for piece in generator.stream(text, max_tokens=max_tokens, temperature=temperature, seed=seed):
        pieces.append(piece)
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write("\n" if not as_json else json.dumps({"prompt": text, "completion": "".join(pieces)}) + "\n")


@app.command("status")
def status_command(
    output: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, local or s3://….")] = "out/demo",
    as_json: JsonOption = False,
) -> None:
    """Show how far each stage of a run is, from its storage alone: complete, unfinished with its units, or damaged."""
    with _reporting(False):
        from pipelines.run import stage_states
        from pipelines.summary import print_states
        from scone.storage import Folder

        states = stage_states(Folder(output))
        if as_json:
            typer.echo(json.dumps(states, indent=2))
        else:
            print_states(output, states)


@app.command("inspect")
def inspect_command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="An artifact's folder, or its manifest.json.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its checksum.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what an artifact is: kind, settings, inputs, statistics, files, and when and how fast it was made."""
    with _reporting(False):
        from pipelines.summary import print_artifact
        from scone.artifacts import MANIFEST, PROVENANCE, load_manifest, verify_files
        from scone.storage import Folder

        folder = Folder(path.removesuffix(MANIFEST).rstrip("/") or ".")
        manifest = load_manifest(folder)
        if verify:
            verify_files(folder, manifest)
        provenance = folder.read_json(PROVENANCE) if folder.exists(PROVENANCE) else {}
        if as_json:
            typer.echo(json.dumps({**manifest.to_dict(), "provenance": provenance}, indent=2))
        else:
            print_artifact(folder, manifest, provenance, verified=verify)


@app.command("doctor")
def doctor_command(as_json: JsonOption = False) -> None:
    """Check this installation: versions, one place for all packages, cores, memory, disk, storage; exit 1 if unfit."""
    with _reporting(False):
        from pipelines.doctor import examine
        from pipelines.summary import print_checks

        checks = examine()
        if as_json:
            typer.echo(json.dumps([check.to_dict() for check in checks], indent=2))
        else:
            print_checks(checks)
        if any(check.state == "bad" for check in checks):
            raise typer.Exit(EXIT_FAILED)


def _show_plan(plan: dict[str, dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(plan, indent=2))
        return
    from pipelines.summary import print_plan

    print_plan(plan)


def _show_results(results: list[Any], as_json: bool) -> None:
    """The last line of stdout is the artifact's folder, or one JSON object."""
    last = results[-1]
    if as_json:
        stages = [
            {"stage": r.step.label, "folder": r.folder.uri, "did_work": r.did_work, "seconds": round(r.seconds, 3)}
            | {"fingerprint": r.manifest.fingerprint, "statistics": r.manifest.statistics}
            for r in results
        ]
        typer.echo(json.dumps({"artifact": last.folder.uri, "stages": stages}))
    else:
        typer.echo(last.folder.uri)


@contextmanager
def _reporting(verbose: bool) -> Iterator[None]:
    """Logging on stderr for the command, and errors as one message with the documented exit code."""
    _set_up_logging(verbose)
    try:
        yield
    except SconeError as error:
        if verbose:
            logger.exception("failed")
        for number, line in enumerate(str(error).splitlines() or [type(error).__name__]):
            typer.echo(f"{'error: ' if number == 0 else '       '}{line}", err=True)
        raise typer.Exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED) from None
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command resumes", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _set_up_logging(verbose: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    for package in ("scone", "pipelines", "serve"):
        package_logger = logging.getLogger(package)
        package_logger.setLevel(logging.DEBUG if verbose else logging.INFO)
        package_logger.handlers = [handler]
        package_logger.propagate = False


def main() -> None:
    """Entry point of the `scone` command."""
    if Path(sys.argv[0]).name == "__main__.py":
        sys.argv[0] = "scone"
    app()


if __name__ == "__main__":
    main()
