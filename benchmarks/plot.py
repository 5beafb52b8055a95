"""Times over the machine's limit, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def draw(rows: Sequence[tuple[str, str, float, float]], file: Path) -> None:
    """Bars of time over limit for (case, contender, GB of source, ratio). The limit is the line
    at 1."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if row[1] != "limit"]
    labels = [f"{case}, {size:.1f} GB: {name}" for case, name, size, _ in shown]
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.32 * len(shown)), layout="constrained")
    bars = axes.barh(labels, [ratio for *_, ratio in shown], color="#4477aa")
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("seconds / seconds this machine needs to read and write the same bytes")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)
    plt.close(figure)
