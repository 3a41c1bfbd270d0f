"""Draws the picture of the training benchmark: examples per second relative to DDP, with the targets."""

import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MultipleLocator

mpl.use("Agg")

# In the order of the bars.
_PROGRAMS = {
    "single": ("one process, all cores", "#c9ced6"),
    "hogwild": ("Hogwild: no exchange at all", "#8d99ae"),
    "ddp": ("torchrun + DDP (gloo)", "#e09f3e"),
    "stratagem": ("stratagem MirroredStrategy", "#1d6fa3"),
}
_WIDTH = 0.22
_INK, _MARK = "#22262b", "#c1121f"


def draw(content: dict[str, Any], path: Path) -> None:
    """Writes the picture of what `training` has measured.

    Args:
        content: What is in the JSON file.
        path: Of the PNG.
    """
    measured, environment = content["measured"], content["environment"]
    sizes = sorted({int(name.split()[1]) for programs in measured.values() for name in programs if " " in name})
    style = {"font.family": "DejaVu Sans", "font.size": 10, "text.color": _INK, "axes.labelcolor": _INK}
    with mpl.rc_context(style):
        figure, panels = plt.subplots(
            1, len(sizes), figsize=(1.2 + 6.2 * len(sizes), 5.2), squeeze=False, layout="constrained"
        )
        for panel, size in zip(panels[0], sizes, strict=True):
            _draw_size(panel, measured, content["targets"], size)
        panels[0][0].set_ylabel("examples per second, DDP = 1")
        figure.suptitle("Training speed on the same cores, relative to DDP", fontsize=14, fontweight="bold")
        figure.legend(
            handles=_legend(measured),
            loc="outside lower center",
            ncols=3,
            frameon=False,
            fontsize=9,
            title=f"{environment['cores']} cores ({environment['cpu']}), torch {environment['torch']}; medians of "
            f"{content['num_rounds']} interleaved rounds; whiskers: the slowest and the fastest round",
            title_fontproperties={"size": 8.5},
        )
        figure.savefig(path, dpi=160, facecolor="white")
        plt.close(figure)


def _draw_size(panel: Axes, measured: dict[str, Any], targets: list[dict[str, Any]], size: int) -> None:
    ceiling = 1.3
    for group, (model, programs) in enumerate(measured.items()):
        base = programs.get(f"ddp {size}", {}).get("examples_per_s")
        found = [(name, programs.get("single" if name == "single" else f"{name} {size}")) for name in _PROGRAMS]
        bars = [(name, each) for name, each in found if each and each["examples_per_s"]]
        if not base:
            continue
        for number, (name, each) in enumerate(bars):
            x = group + _WIDTH * (number - (len(bars) - 1) / 2)
            height = each["examples_per_s"] / base
            # The batch is the same in all rounds, so speeds are as the inverse steps.
            steps = [statistics.median(own["seconds"]) for own in each["rounds"] if own]
            low, high = (height * each["step_s"] / step for step in (max(steps), min(steps)))
            panel.bar(x, height, 0.92 * _WIDTH, color=_PROGRAMS[name][1], zorder=2)
            panel.vlines(x, low, high, color=_INK, linewidth=1, zorder=4)
            # At the foot of the bar nothing is in the way, neither marks nor whiskers.
            colors = {"stratagem": "white", "hogwild": "white"}
            panel.annotate(
                f"{height:.2f}",
                (x, 0),
                (0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=7.5,
                color=colors.get(name, _INK),
                fontweight="bold" if name == "stratagem" else "normal",
                zorder=6,
            )
            marks = _marks(model, programs, targets, size) if name == "stratagem" else []
            for y, line in marks:
                panel.hlines(y, x - 0.6 * _WIDTH, x + 0.6 * _WIDTH, color=_MARK, linestyle=line, lw=2, zorder=5)
            ceiling = max([ceiling, *(y for y, _ in marks), *([high] if name != "single" else [])])
    _cut(panel, 1.12 * ceiling)
    panel.set_title(f"{size} replicas", loc="left", fontsize=11)
    panel.set_xticks(range(len(measured)), list(measured))
    panel.set_xlim(-0.6, len(measured) - 0.4)
    panel.axhline(1, color="#6b7280", linewidth=0.8, zorder=1)
    panel.grid(axis="y", color="#e5e7eb", linewidth=0.8, zorder=0)
    panel.tick_params(length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)


def _cut(panel: Axes, top: float) -> None:
    """Ends the axis where the programs that are compared end; arrows show where one process goes on."""
    panel.set_ylim(0, top)
    panel.yaxis.set_major_locator(MultipleLocator(0.5))
    for bar in panel.patches:
        x, height = bar.get_x() + bar.get_width() / 2, bar.get_height()
        if height > top:
            panel.annotate(
                "\N{UPWARDS ARROW}",
                (x, top),
                (0, -4),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=12,
            )


def _marks(model: str, programs: dict[str, Any], targets: list[dict[str, Any]], size: int) -> list[tuple[float, str]]:
    """Where the targets of a bar are, relative to DDP, and how they are drawn."""
    marks = []
    for other, name, line in (
        ("DDP", f"ddp {size}", "-"),
        ("one process", "single", ":"),
        ("Hogwild", f"hogwild {size}", ":"),
    ):
        what = f"examples/s of {other}, {model}, {size} replicas"
        bound = next((each["bound"] for each in targets if each["what"] == what), None)
        against = programs.get(name, {}).get("examples_per_s")
        if bound is not None and against:
            marks.append((bound * against / programs[f"ddp {size}"]["examples_per_s"], line))
    return marks


def _legend(measured: dict[str, Any]) -> list[Any]:
    shown = {name.split()[0] for programs in measured.values() for name in programs}
    return [
        *(Patch(color=color, label=label) for name, (label, color) in _PROGRAMS.items() if name in shown),
        Line2D([], [], color=_MARK, lw=2, label="target against DDP"),
        Line2D([], [], color=_MARK, lw=2, linestyle=":", label="target against one process, or Hogwild"),
    ]
