"""Draws the placement log with matplotlib, which is loaded only for this."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from stratagem.placement import log_layout
from stratagem.placement.log_layout import COLOURS, Arrow, Box, amount, short
from stratagem.placement.records import PlacementRecord

_WIDTH, _HEIGHT = 0.72, 0.62
_NUM_HEAVIEST = 5


def draw(records: Sequence[PlacementRecord], path: Path, summary: str) -> None:
    """Writes the picture to a file."""
    picture = log_layout.arrange(records)
    lines = [
        f"{amount(each.num_bytes):>10}  {short(each.source)} -> {short(each.target)}  "
        f"{each.maker} -> {each.taker}  {each.where}"
        for each in log_layout.heaviest(records)[:_NUM_HEAVIEST]
    ]
    heading = 0.55 + 0.2 * (len(lines) + 1)
    height = heading + 0.62 * (picture.num_rows + 0.8)
    figure = Figure(figsize=(max(7.0, 2.9 * len(picture.devices)), height), dpi=110)
    axes: Axes = figure.add_axes((0.02, 0.01, 0.96, 1 - heading / height))
    axes.set_xlim(-0.5, max(1, len(picture.devices)) - 0.5)
    axes.set_ylim(picture.num_rows - 0.4, -1.0)
    axes.axis("off")
    figure.text(0.02, 1 - 0.28 / height, summary, fontsize=11, weight="bold", parse_math=False)
    listed = "\n".join(("heaviest copies:", *lines)) if lines else "nothing was copied between devices"
    if picture.num_hidden:
        listed += f"\n({picture.num_hidden} boxes without heavy copies are not shown)"
    figure.text(0.02, 1 - 0.42 / height, listed, fontsize=9, family="monospace", va="top", parse_math=False)
    for number, device in enumerate(picture.devices):
        axes.text(number, -0.75, short(device), ha="center", va="center", weight="bold", color=_colour(number))
    most = max((arrow.num_bytes for arrow in picture.arrows), default=0)
    for arrow in reversed(picture.arrows):
        _draw_arrow(axes, arrow, most)
    for box in picture.boxes:
        _draw_box(axes, box)
    for arrow in picture.labelled():
        _draw_label(axes, arrow)
    figure.savefig(path)


def _colour(column: int) -> str:
    return COLOURS[column % len(COLOURS)]


def _draw_box(axes: Axes, box: Box) -> None:
    corner, colour = (box.column - _WIDTH / 2, box.row - _HEIGHT / 2), _colour(box.column)
    shape = FancyBboxPatch(corner, _WIDTH, _HEIGHT, boxstyle="round,pad=0,rounding_size=0.06", zorder=3)
    shape.set(facecolor=log_layout.tint(colour), edgecolor=colour)
    axes.add_patch(shape)
    title = f"{box.title} ({box.times} x)" if box.times > 1 else box.title
    # Names are the program's: a $ in one is no mathematics.
    middle: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 4, "parse_math": False}
    axes.text(box.column, box.row - 0.09 * bool(box.where), title, fontsize=8.5, **middle)
    axes.text(box.column, box.row + 0.17, box.where, fontsize=7, color="#777777", **middle)


def _ends(arrow: Arrow) -> tuple[tuple[float, float], tuple[float, float]]:
    tail, head = arrow.tail, arrow.head
    if tail.column == head.column:
        return (tail.column, tail.row + _HEIGHT / 2), (head.column, head.row - _HEIGHT / 2)
    side = 1 if head.column > tail.column else -1
    return (tail.column + side * _WIDTH / 2, tail.row), (head.column - side * _WIDTH / 2, head.row)


def _draw_arrow(axes: Axes, arrow: Arrow, most: int) -> None:
    start, end = _ends(arrow)
    near = arrow.tail.column != arrow.head.column or arrow.head.row == arrow.tail.row + 1
    width = 1.2 + 4.5 * (arrow.num_bytes / most) ** 0.5 if arrow.num_bytes else 0.8
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=9 + 2 * width,
            linewidth=width,
            color=_colour(arrow.tail.column) if arrow.num_bytes else "#bbbbbb",
            alpha=0.85,
            connectionstyle=f"arc3,rad={0 if near else -0.35}",
            shrinkA=0,
            shrinkB=0,
            zorder=2 if arrow.num_bytes else 1,
        )
    )


def _draw_label(axes: Axes, arrow: Arrow) -> None:
    (x, y), (to_x, to_y) = _ends(arrow)
    background = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
    part = log_layout.label_at(arrow, _WIDTH)
    place = (x + part * (to_x - x), y + part * (to_y - y))
    axes.text(*place, amount(arrow.num_bytes), ha="center", va="center", fontsize=8, bbox=background, zorder=5)
