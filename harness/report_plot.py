"""One plot per task and device: the peer's time over ours, case by case, on a log axis. Above the line ours is faster.

Deterministic: the same series give the same file, byte for byte, under the same matplotlib.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.verdict import ExitCode, KitError

# By language: colours that stay apart for every kind of colour vision (Okabe and Ito), markers in black and white.
_LOOKS = {"CUDA": ("#0072B2", "o"), "Triton": ("#D55E00", "s"), "TileLang": ("#009E73", "^")}
_FINE = tuple(tenths / 10 for tenths in range(5, 20))
_COARSE = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)


@dataclasses.dataclass(frozen=True)
class Series:
    """A kernel's ratios over the cases; None where there is none. `name`: the language, then the variant if any."""

    name: str
    title: str
    labels: Sequence[str]
    ratios: Sequence[float | None]


def draw(series: Sequence[Series], path: Path, identifier: str) -> None:
    """Write an SVG. KitError when matplotlib is not here."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        figure_module: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise KitError(
            f"Plots need matplotlib ({error}); `make env EXTRA=report` installs it.", ExitCode.ENVIRONMENT
        ) from error
    labels = series[0].labels
    settings = {"svg.fonttype": "none", "svg.hashsalt": "kit", "font.size": 9, "font.family": "sans-serif"}
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "svg", **settings}):
        figure = figure_module.Figure(figsize=(max(6.4, 2.2 + 0.36 * len(labels)), 3.4), layout="constrained")
        axes = figure.add_subplot()
        _plot(axes, series)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None, "Identifier": identifier})
    text = path.read_text(encoding="utf-8")
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


def _plot(axes: Any, series: Sequence[Series]) -> None:
    labels = series[0].labels
    known = [ratio for each in series for ratio in each.ratios if ratio is not None]
    low, high = min([*known, 0.8]) / 1.12, max([*known, 1.25]) * 1.12
    axes.axhspan(1, high, color="#009E73", alpha=0.10, linewidth=0)
    axes.axhline(1, color="black", linewidth=1.2)
    for each in series:
        language, _, variant = each.name.partition(" ")
        colour, marker = _LOOKS[language]
        values = [ratio for ratio in each.ratios if ratio is not None]
        mean = math.exp(sum(map(math.log, values)) / len(values))
        heights = [math.nan if ratio is None else ratio for ratio in each.ratios]
        name = f"{each.name}: {mean:.2f}"
        line, filled = ("--", "white") if variant else ("-", colour)
        look = {"color": colour, "marker": marker, "markerfacecolor": filled, "linestyle": line}
        axes.plot(range(len(labels)), heights, markersize=5, linewidth=1, label=name, **look)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    shown = [tick for tick in (_FINE if high < 2.5 * low else _COARSE) if low <= tick <= high]
    axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
    axes.set_yticks([], minor=True)
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right", rotation_mode="anchor")
    axes.grid(axis="y", color="#cccccc", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_ylabel("peer's time / ours (log)")
    axes.set_title(f"{series[0].title}: above 1 ours is faster", fontsize=10, loc="left")
    axes.legend(title="geometric mean", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
