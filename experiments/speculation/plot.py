"""The speed-ups as a picture: methods by kinds of text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.speculation.bench import Report


def plot(report: Report, path: Path) -> None:
    """A heat map of the first conditions measured, fastest method on top; blue is slower than plain, red faster."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import TwoSlopeNorm

    found = report.figures(*report.conditions()[0])
    names = sorted(found, key=lambda name: -found[name][""].speedup.value)
    groups = list(dict.fromkeys(group for mine in found.values() for group in mine))
    values = np.array(
        [[found[name][group].speedup.value if group in found[name] else np.nan for group in groups] for name in names]
    )
    figure, axes = plt.subplots(figsize=(2 + 0.85 * len(groups), 1.2 + 0.24 * len(names)))
    most = max(float(np.nanmax(values)), 1.01)
    norm = TwoSlopeNorm(1.0, vmin=min(float(np.nanmin(values)), 0.99), vmax=most)
    image = axes.imshow(values, cmap="RdBu_r", norm=norm, aspect="auto")
    for row, column in zip(*np.nonzero(~np.isnan(values)), strict=True):
        axes.text(column, row, f"{values[row, column]:.2f}", ha="center", va="center", fontsize=7)
    axes.set_xticks(range(len(groups)), [group or "all" for group in groups], fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_title("tokens per second over plain decoding", fontsize=9)
    figure.colorbar(image, ax=axes, fraction=0.04)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
