"""Shows the placement log as a table and as a page with a picture; as an image through `pictures_png`."""

import html as markup
import importlib
from collections.abc import Sequence
from pathlib import Path

from stratagem.errors import PlacementError
from stratagem.placement import log_layout
from stratagem.placement.log_layout import COLOURS, Arrow, Box, Picture, amount, short
from stratagem.placement.records import PlacementRecord

_COLUMN, _ROW, _WIDTH, _HEIGHT, _TOP = 250, 66, 180, 42, 40
_MOST_LETTERS = 25
_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff; max-width: 75em }
table { border-collapse: collapse; margin: .5em 0 1.5em } th { text-align: left; color: #555; font-weight: 600 }
td, th { padding: .15em 1.2em .15em 0; border-bottom: 1px solid #ddd; white-space: nowrap }
td.number { text-align: right; font-variant-numeric: tabular-nums } h2 { font-size: 1.05em; margin: 1.5em 0 0 }
svg text { font: 12px system-ui, sans-serif } summary { cursor: pointer }
"""


def table(records: Sequence[PlacementRecord]) -> str:
    """All records, and below them the copies, as text."""
    rows = [
        (
            record.name,
            short(record.device),
            short(record.requested or ""),
            record.why,
            amount(record.num_bytes_copied) if record.copies else "",
            ", ".join(dict.fromkeys(short(copy.source) for copy in record.copies)),
            record.where,
        )
        for record in records
    ]
    text = _aligned(("operation", "device", "asked for", "why", "copied", "from", "line"), rows)
    if traffic := log_layout.heaviest(records):
        copies = [
            (amount(each.num_bytes), short(each.source), short(each.target), each.maker, each.taker, each.where)
            for each in traffic
        ]
        text += "\n\nheaviest copies\n" + _aligned(("bytes", "from", "to", "made by", "copied for", "line"), copies)
    return text


def html(records: Sequence[PlacementRecord]) -> str:
    """A page of its own: the heaviest copies, the picture, all records."""
    picture = log_layout.arrange(records)
    copies = [
        (
            amount(each.num_bytes),
            f"{each.times} x" if each.times > 1 else "",
            short(each.source),
            short(each.target),
            each.maker,
            each.taker,
            each.where,
        )
        for each in log_layout.heaviest(records)[:20]
    ]
    all_rows = [
        (
            record.name,
            short(record.device),
            short(record.requested or ""),
            record.why,
            amount(record.num_bytes_copied) if record.copies else "",
            record.where,
        )
        for record in records
    ]
    hidden = f"<p>{picture.num_hidden} boxes without heavy copies are not shown.</p>" if picture.num_hidden else ""
    heavy = _html_table(("copied", "", "from", "to", "made by", "copied for", "line"), copies)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>placement</title><style>{_STYLE}</style>'
        f"<h1>Where operations ran</h1><p>{_summary(records)}</p>"
        f"<h2>Heaviest copies: operations that should live together</h2>"
        f"{heavy if copies else '<p>Nothing was copied between devices.</p>'}"
        f"<h2>Operations by device, copies as coloured arrows</h2>{hidden}{_svg(picture)}"
        f"<details><summary>All {len(records)} operations</summary>"
        f"{_html_table(('operation', 'device', 'asked for', 'why', 'copied', 'line'), all_rows)}</details></html>\n"
    )


def png(records: Sequence[PlacementRecord], path: Path) -> None:
    """Writes the picture as an image; matplotlib draws it."""
    try:
        drawing = importlib.import_module("stratagem.placement.pictures_png")
    except ModuleNotFoundError as error:
        raise PlacementError(
            f"a picture such as {path.name!r} needs matplotlib ({error}): pip install matplotlib, or save .html"
        ) from error
    drawing.draw(records, path, _summary(records))


def _summary(records: Sequence[PlacementRecord]) -> str:
    devices = ", ".join(
        f"{short(device)} {sum(record.device == device for record in records)}"
        for device in sorted({record.device for record in records})
    )
    copied = sum(record.num_bytes_copied for record in records)
    return f"{len(records)} operations ({devices or 'none'}), {amount(copied)} copied between devices"


def _aligned(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = (titles, ["-" * width for width in widths], *rows)
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _html_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{markup.escape(title)}</th>" for title in titles)
    numbers = {"copied"}
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=number' if title in numbers else ''}>{markup.escape(cell)}</td>"
            for title, cell in zip(titles, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _svg(picture: Picture) -> str:
    width, height = _COLUMN * max(1, len(picture.devices)), _TOP + _ROW * picture.num_rows
    most = max((arrow.num_bytes for arrow in picture.arrows), default=0)
    columns = "".join(
        f'<text x="{_COLUMN * number + _WIDTH / 2 + 20}" y="20" text-anchor="middle" font-weight="600" '
        f'fill="{_colour(number)}">{markup.escape(short(device))}</text>'
        for number, device in enumerate(picture.devices)
    )
    # Light arrows first, so that heavy ones lie above them; labels above all.
    arrows = "".join(_svg_arrow(arrow, most) for arrow in reversed(picture.arrows))
    labels = "".join(map(_svg_label, picture.labelled()))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"{columns}{arrows}{''.join(map(_svg_box, picture.boxes))}{labels}</svg>"
    )


def _colour(column: int) -> str:
    return COLOURS[column % len(COLOURS)]


def _corner(box: Box) -> tuple[int, int]:
    return _COLUMN * box.column + 20, _TOP + _ROW * box.row


def _svg_box(box: Box) -> str:
    left, top = _corner(box)
    whole = f"{box.title} ({box.times} x)" if box.times > 1 else box.title
    title = markup.escape(whole if len(whole) <= _MOST_LETTERS else f"{whole[: _MOST_LETTERS - 1]}…")
    middle = left + _WIDTH / 2
    first = top + (18 if box.where else 25)
    return (
        f'<rect x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" rx="7" '
        f'fill="{log_layout.tint(_colour(box.column))}" stroke="{_colour(box.column)}"/>'
        f'<text x="{middle}" y="{first}" text-anchor="middle">{title}<title>{markup.escape(whole)}</title></text>'
        f'<text x="{middle}" y="{top + 33}" text-anchor="middle" fill="#777">{markup.escape(box.where)}</text>'
    )


def _ends(arrow: Arrow) -> tuple[float, float, float, float]:
    (left, top), (other_left, other_top) = _corner(arrow.tail), _corner(arrow.head)
    middle = _WIDTH / 2
    if arrow.tail.column == arrow.head.column:
        return left + middle, top + _HEIGHT, other_left + middle, other_top
    right = arrow.head.column > arrow.tail.column
    return left + _WIDTH * right, top + _HEIGHT / 2, other_left + _WIDTH * (not right), other_top + _HEIGHT / 2


def _svg_arrow(arrow: Arrow, most: int) -> str:
    x, y, to_x, to_y = _ends(arrow)
    if not arrow.num_bytes:
        # Around the boxes between, if there are any.
        bend = 0 if arrow.head.row == arrow.tail.row + 1 else _WIDTH / 2 + 12
        way = f"M{x},{y} C{x + bend},{y + 12} {to_x + bend},{to_y - 12} {to_x},{to_y}"
        return f'<path d="{way}" fill="none" stroke="#bbb"/>'
    width = 1.5 + 5.5 * (arrow.num_bytes / most) ** 0.5
    colour = _colour(arrow.tail.column)
    pull = 45 if to_x > x else -45
    title = markup.escape(f"{amount(arrow.num_bytes)} from {arrow.tail.title} to {arrow.head.title}")
    return (
        f'<path d="M{x},{y} C{x + pull},{y} {to_x - pull},{to_y} {to_x},{to_y}" fill="none" stroke="{colour}" '
        f'stroke-width="{width:.1f}" stroke-opacity="0.75"><title>{title}</title></path>'
        f'<circle cx="{to_x}" cy="{to_y}" r="{width / 2 + 2.5:.1f}" fill="{colour}"/>'
    )


def _svg_label(arrow: Arrow) -> str:
    x, y, to_x, to_y = _ends(arrow)
    part = log_layout.label_at(arrow, _WIDTH / _COLUMN)
    at_x, at_y = x + part * (to_x - x), y + part * (to_y - y) - 6
    return (
        f'<text x="{at_x:.0f}" y="{at_y:.0f}" text-anchor="middle" font-weight="600" stroke="#fff" '
        f'stroke-width="3" paint-order="stroke">{amount(arrow.num_bytes)}</text>'
    )
