"""The report of an evaluation: its figures as a plain dict, and the same as Markdown for readers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipelines.plots import LABELS
from pipelines.progress import format_bytes, format_count, format_seconds
from scone.table.manifest import TableVersion

if TYPE_CHECKING:
    from scone.evaluation import LookupTiming, Measurement

PATHS = ("baseline", "scone_fgram_model", "scone_table")


def build_report(
    measured: Measurement,
    *,
    heldout: Mapping[str, Any],
    version: TableVersion,
    parameters: Mapping[str, Mapping[str, int]],
    bytes_per_token: float | None,
    training: Mapping[str, Mapping[str, Any]],
    timings: Mapping[str, Any],
) -> dict[str, Any]:
    """All results. Everything but the part "measured" is the same whenever and wherever it is measured.

    Args:
        heldout: How many sequences of what length, of how many.
        bytes_per_token: Of the held-out text, if known: gives bits per byte.
        training: What the models' own manifests and logs say of their training, by variant.
        timings: What differs from run to run.
    """
    losses = {path: measured.losses[path] for path in PATHS if path in measured.losses}
    scone = losses["scone_table"]
    report: dict[str, Any] = {
        "heldout": {**heldout, "tokens": scone.num_tokens},
        "loss_nats_per_token": {path: sums.loss for path, sums in losses.items()},
        "perplexity": {path: sums.perplexity for path, sums in losses.items()},
        "bits_per_byte": None
        if bytes_per_token is None
        else {path: sums.loss / math.log(2) / bytes_per_token for path, sums in losses.items()},
        "matches": {
            "rate": scone.match_rate,
            "mean_length": scone.mean_match_length,
            "share_by_length": {str(n): int(scone.tokens[n]) / scone.num_tokens for n in range(2, len(scone.tokens))},
        },
        "by_match_length": _by_match_length(measured),
        "parity": _parity(measured, version),
        "table": {
            "rows": version.num_rows,
            "width": version.width,
            "dtype": version.dtype,
            "bytes": version.num_bytes,
            "bytes_per_row": version.stride_bytes,
            "index_bytes": version.index.num_bytes if version.index else 0,
            "shards": len(version.shards),
            "version": version.number,
            **version.statistics,
        },
        "parameters": {name: dict(counts) for name, counts in parameters.items()},
        "training": {name: dict(values) for name, values in training.items()},
        "measured": dict(timings),
    }
    return {"summary": _summary(report), **report}


def lookup_dict(timing: LookupTiming) -> dict[str, float]:
    """One measured batch size, for the report."""
    return {
        "batch": timing.batch,
        "lookup_microseconds": round(timing.lookup_microseconds, 2),
        "copy_microseconds": round(timing.copy_microseconds, 2),
        "ratio": round(timing.ratio, 2),
    }


def _by_match_length(measured: Measurement) -> list[dict[str, Any]]:
    by_path = {path: sums.loss_by_length() for path, sums in measured.losses.items()}
    tokens = measured.losses["scone_table"].tokens
    rows = []
    for length in (0, *range(2, len(tokens))):
        losses = {path: values[length] for path, values in sorted(by_path.items())}
        rows.append(
            {
                "match_length": length,
                "tokens": int(tokens[length]),
                "share": int(tokens[length]) / int(tokens.sum()),
                "perplexity": {path: math.exp(loss) for path, loss in losses.items() if loss is not None},
            }
        )
    return rows


def _parity(measured: Measurement, version: TableVersion) -> dict[str, Any]:
    from scone.evaluation import LOGITS_TOLERANCE

    result = {}
    for name, dtype in (("stored", version.dtype), ("fp32", "fp32")):
        parity = measured.parity[name]
        result[name] = {
            "dtype": dtype,
            "relative_difference": parity.relative_difference,
            "tolerance": LOGITS_TOLERANCE[dtype],
            "largest_difference": parity.largest_difference,
            "positions": parity.positions,
            "is_within": parity.is_within(version.dtype if name == "stored" else "fp32"),
        }
    return result


def _summary(report: Mapping[str, Any]) -> dict[str, str]:
    perplexity, matches, table = report["perplexity"], report["matches"], report["table"]
    by_length = ", ".join(f"{n}: {share:.1%}" for n, share in matches["share_by_length"].items())
    summary = {"match rate": f"{matches['rate']:.1%} of held-out positions (by length {by_length})"}
    if "baseline" in perplexity:
        change = perplexity["scone_table"] / perplexity["baseline"] - 1
        summary["perplexity"] = (
            f"baseline {perplexity['baseline']:.2f}, SCONE {perplexity['scone_table']:.2f} ({change:+.1%})"
        )
    else:
        summary["perplexity"] = f"SCONE {perplexity['scone_table']:.2f} (no baseline was trained)"
    size = format_bytes(table["bytes"])
    summary["table"] = f"{table['rows']:,} rows of {table['bytes_per_row']:,} bytes ({table['dtype']}), {size}"
    lookups = [f"{one['lookup_microseconds']:.0f} µs for {one['batch']:,}" for one in report["measured"]["lookup"]]
    summary["look-up"] = f"{', '.join(lookups)} rows" if lookups else "not measured: the table is empty"
    summary["parity"] = "; ".join(_parity_line(parity) for parity in report["parity"].values())
    return summary


def _parity_line(parity: Mapping[str, Any]) -> str:
    verdict = "within" if parity["is_within"] else "NOT WITHIN"
    relative, tolerance = parity["relative_difference"], parity["tolerance"]
    return f"{parity['dtype']} rows {relative:.1e}, {verdict} {tolerance:.1e}"


def render_markdown(report: Mapping[str, Any], command: str, plots: Sequence[str]) -> str:
    """The report for readers; `command` is what made it, `plots` are paths of images beside it."""
    sections = [
        "# Evaluation",
        f"Made by `{command}`.",
        _scope(report),
        _table(("", "value"), [(key, value) for key, value in report["summary"].items()]),
        "## Perplexity on held-out text",
        _perplexity_table(report),
        _images(plots, "perplexity", "training-curves"),
        "## Matches, and where they help",
        "A position counts under the length of its longest match; the perplexity is of the token after it.",
        _by_length_table(report),
        _images(plots, "match-rate", "gain-by-match-length"),
        "## Parity: table against f-gram model",
        "Logits through the table against logits through the f-gram model, as |difference| / |logits|. "
        "fp32 rows are computed apart from their text and never rounded; stored rows are those of the table.",
        _parity_table(report),
        "## Cost",
        _cost_table(report),
        "## Look-up time",
        _lookup_section(report),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _scope(report: Mapping[str, Any]) -> str:
    heldout = report["heldout"]
    text = (
        f"{heldout['tokens']:,} held-out tokens: {heldout['sequences']:,} of {heldout['available_sequences']:,} "
        f"sequences of {heldout['sequence_length']:,} tokens, the same for every model."
    )
    if "baseline" not in report["perplexity"]:
        text += " **No plain baseline was trained: SCONE stands alone here, and nothing is said about its gain.**"
    return text


def _perplexity_table(report: Mapping[str, Any]) -> str:
    bits = report["bits_per_byte"]
    baseline = report["perplexity"].get("baseline")
    rows = []
    for path, perplexity in report["perplexity"].items():
        row = [LABELS[path], f"{perplexity:.3f}", f"{report['loss_nats_per_token'][path]:.4f}"]
        row.append(f"{bits[path]:.4f}" if bits else "unknown")
        row.append(f"{perplexity / baseline - 1:+.2%}" if baseline and path != "baseline" else "–")
        rows.append(row)
    header = ("model", "perplexity", "nats per token", "bits per byte", "against the baseline")
    note = "" if not bits else "\n\nBits per byte use the mean bytes per token of the whole held-out split."
    return _table(header, rows) + note


def _by_length_table(report: Mapping[str, Any]) -> str:
    paths = list(report["perplexity"])
    rows = []
    for row in report["by_match_length"]:
        values = [f"{row['perplexity'][path]:.2f}" if path in row["perplexity"] else "–" for path in paths]
        name = str(row["match_length"]) if row["match_length"] else "none"
        rows.append([name, f"{row['tokens']:,}", f"{row['share']:.1%}", *values])
    matches = report["matches"]
    summary = f"Match rate {matches['rate']:.2%}, mean length of matches {matches['mean_length']:.3f} tokens."
    return summary + "\n\n" + _table(("match length", "tokens", "share", *(LABELS[path] for path in paths)), rows)


def _parity_table(report: Mapping[str, Any]) -> str:
    rows = [
        (
            "stored rows" if name == "stored" else "rows in memory",
            parity["dtype"],
            f"{parity['relative_difference']:.2e}",
            f"{parity['tolerance']:.2e}",
            "yes" if parity["is_within"] else "**no**",
            f"{parity['largest_difference']:.2e}",
            f"{parity['positions']:,}",
        )
        for name, parity in report["parity"].items()
    ]
    header = (
        "rows",
        "type",
        "relative difference",
        "tolerance",
        "within",
        "largest difference of a logit",
        "positions",
    )
    return _table(header, rows)


def _cost_table(report: Mapping[str, Any]) -> str:
    table = report["table"]
    rows = []
    for name, counts in report["parameters"].items():
        training = report["training"].get(name, {})
        cost = report["measured"].get("training", {}).get(name, {})
        rows.append(
            (
                LABELS[name],
                f"{counts['inference']:,}",
                f"{counts['training_only']:,}",
                f"{training['final_loss']:.4f}" if "final_loss" in training else "unknown",
                format_count(training["tokens"]) if "tokens" in training else "unknown",
                f"{cost['seconds_per_step']:.3f}" if "seconds_per_step" in cost else "unknown",
                format_count(cost["tokens_per_second"]) if "tokens_per_second" in cost else "unknown",
            )
        )
    header = (
        "model", "parameters on the accelerator", "parameters in training only", "training loss, last step",
        "training tokens", "seconds per step", "tokens per second",
    )  # fmt: skip
    text = (
        f"The table holds {table['rows']:,} rows of {table['bytes_per_row']:,} bytes ({table['dtype']}, width "
        f"{table['width']:,}): {format_bytes(table['bytes'])} off the accelerator, and "
        f"{format_bytes(table['index_bytes'])} of match index. "
        f"Computing it took {table['nodes_per_row']:.2f} f-gram model tokens per row."
    )
    return _table(header, rows) + "\n\n" + text


def _lookup_section(report: Mapping[str, Any]) -> str:
    measured = report["measured"]
    rows = [
        (
            f"{one['batch']:,}",
            f"{one['lookup_microseconds']:.1f}",
            f"{one['copy_microseconds']:.1f}",
            f"{one['ratio']:.2f}",
        )
        for one in measured["lookup"]
    ]
    text = (
        "Median of one call for uniformly random rows, which is the hardest case, beside a copy of as many consecutive "
        f"rows in the same process. Measured on {measured['machine']} on {measured['date']}, after "
        f"{format_seconds(measured['evaluation_seconds'])} of evaluation; other work on the machine shows in it."
    )
    return text + "\n\n" + _table(("rows per call", "look-up (µs)", "contiguous copy (µs)", "ratio"), rows)


def _images(plots: Sequence[str], *names: str) -> str:
    present = [path for name in names for path in plots if path.endswith(f"/{name}.png")]
    return "\n".join(f"![{path.rpartition('/')[2].removesuffix('.png').replace('-', ' ')}]({path})" for path in present)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
