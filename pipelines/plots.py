"""The plots of an evaluation, from its report. Colours keep their order in greyscale; lines differ in style too."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scone.storage import FileEntry, Folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure

_SIZE_INCHES = (6.4, 4.0)
_DPI = 150
# Relative luminance 0.07, 0.29 and 0.45: apart in greyscale, and for every kind of colour vision.
_COLOURS = {"scone": "#0b4f8a", "scone_table": "#0b4f8a", "scone_fgram_model": "#3f9bd1", "baseline": "#f0a43a"}
_GREY = "0.7"
_STYLES = {"scone": "-", "baseline": (0, (4, 1.5))}
LABELS = {
    "baseline": "plain baseline",
    "scone": "SCONE",
    "scone_fgram_model": "SCONE, f-gram model",
    "scone_table": "SCONE, table",
}


def draw_plots(
    folder: Folder, report: Mapping[str, Any], curves: Mapping[str, Sequence[Mapping[str, float]]]
) -> list[FileEntry]:
    """Publish plots/*.png below `folder`. `curves` are the logged training steps by variant."""
    plots = {"match-rate": _match_rate(report), "perplexity": _perplexity(report)}
    if any(curves.values()):
        plots["training-curves"] = _training_curves(curves)
    if "baseline" in report["perplexity"]:
        plots["gain-by-match-length"] = _gain_by_length(report)
    return [_publish(folder, f"plots/{name}.png", figure) for name, figure in sorted(plots.items())]


def _match_rate(report: Mapping[str, Any]) -> Figure:
    matches = report["matches"]
    shares = {"none": 1 - matches["rate"], **matches["share_by_length"]}
    title = (
        f"{matches['rate']:.1%} of held-out positions end an f-gram, of {matches['mean_length']:.2f} tokens on average"
    )
    figure, axes = _axes(title, "length of the longest match (tokens)", "share of positions (%)")
    colours = [_GREY, *[_COLOURS["scone"]] * (len(shares) - 1)]
    bars = axes.bar(list(shares), [100 * share for share in shares.values()], color=colours, width=0.65)
    _label(axes, bars, [f"{100 * share:.1f}" for share in shares.values()])
    axes.margins(y=0.12)
    return figure


def _perplexity(report: Mapping[str, Any]) -> Figure:
    perplexity = report["perplexity"]
    names = [name for name in ("baseline", "scone_fgram_model", "scone_table") if name in perplexity]
    title = f"Held-out perplexity on the same {report['heldout']['tokens']:,} tokens (lower is better)"
    figure, axes = _axes(title, "", "perplexity per token")
    bars = axes.bar(
        [LABELS[name].replace(", ", "\n") for name in names],
        [perplexity[name] for name in names],
        color=[_COLOURS[name] for name in names],
        width=0.55,
    )
    _label(axes, bars, [f"{perplexity[name]:.2f}" for name in names])
    axes.margins(y=0.12)
    return figure


def _training_curves(curves: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    from matplotlib.ticker import EngFormatter

    figure, axes = _axes("Training loss", "training tokens", "loss (nats per token)")
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    for variant in ("baseline", "scone"):
        steps = curves.get(variant, [])
        if not steps:
            continue
        tokens = [step["tokens"] for step in steps]
        losses = [step["loss"] for step in steps]
        label = f"{LABELS[variant]}, last step {losses[-1]:.3f}"
        axes.plot(tokens, losses, color=_COLOURS[variant], linestyle=_STYLES[variant], linewidth=1.8, label=label)
    axes.set_xlim(left=0)
    axes.legend(framealpha=1, edgecolor="white")
    return figure


def _gain_by_length(report: Mapping[str, Any]) -> Figure:
    rows = [row for row in report["by_match_length"] if row["tokens"]]
    changes = [100 * (row["perplexity"]["scone_table"] / row["perplexity"]["baseline"] - 1) for row in rows]
    names = [f"{row['match_length'] or 'none'}\n{row['share']:.1%}" for row in rows]
    figure, axes = _axes(
        "Perplexity of SCONE against the plain baseline, by match (lower is better)",
        "length of the match that predicts (tokens), and its share of positions",
        "change of perplexity (%)",
    )
    bars = axes.bar(names, changes, color=_COLOURS["scone"], width=0.65)
    _label(axes, bars, [f"{change:+.1f}".replace("-", "−") for change in changes])
    axes.axhline(0, color="black", linewidth=0.8)
    axes.margins(y=0.15)
    return figure


def _axes(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _label(axes: Axes, bars: BarContainer, texts: Sequence[str]) -> None:
    """Values at the ends of bars, on white so that no grid line crosses them."""
    axes.bar_label(bars, texts, padding=3, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})


def _publish(folder: Folder, path: str, figure: Figure) -> FileEntry:
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return folder.write_bytes(path, image.getvalue())
