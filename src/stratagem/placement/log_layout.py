"""Arranges the placement log for pictures and tables: repeated operations as one, a column for each device.

Arithmetic only; `pictures` and `pictures_png` draw it.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from stratagem.placement.records import PlacementRecord

MOST_BOXES = 48
COLOURS = ("#4e79a7", "#e15759", "#59a14f", "#f28e2b", "#b07aa1", "#76b7b2", "#edc948", "#9c755f", "#ff9da7")
_EARLIER = "earlier"
_NUM_LABELS = 8
_LEAST_LABELLED = 0.05


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All copies between the same two operations.

    Attributes:
        maker: The operation that made what was copied; `earlier` if that was before the log.
        taker: The operation that it was copied for.
        where: The line of the taker.
    """

    maker: str
    taker: str
    source: str
    target: str
    where: str
    num_bytes: int
    times: int


@dataclasses.dataclass
class Box:
    """One operation in the picture, or all that are alike.

    Attributes:
        column: Of its device.
        row: From the top.
    """

    title: str
    where: str
    device: str
    times: int = 0
    column: int = 0
    row: int = 0


@dataclasses.dataclass
class Arrow:
    """What one box made and another one used; `num_bytes` is what was copied for that."""

    tail: Box
    head: Box
    num_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Picture:
    """Boxes and arrows, the heaviest copies first.

    Attributes:
        devices: The columns.
        num_hidden: How many boxes were left out.
    """

    devices: list[str]
    boxes: list[Box]
    arrows: list[Arrow]
    num_hidden: int

    @property
    def num_rows(self) -> int:
        return 1 + max((box.row for box in self.boxes), default=0)

    def labelled(self) -> list[Arrow]:
        """The copies that are heavy enough for a label, the heaviest last, so that it is on top."""
        heavy = [arrow for arrow in self.arrows if arrow.num_bytes > _LEAST_LABELLED * self.arrows[0].num_bytes]
        return heavy[:_NUM_LABELS][::-1]


def amount(num_bytes: int) -> str:
    """A size as people read it, also a small one."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


def tint(colour: str) -> str:
    """A light shade of a colour, for the inside of boxes."""
    parts = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{255 - (255 - part) // 6:02x}" for part in parts)


def label_at(arrow: Arrow, width: float) -> float:
    """How far along a copy its label stands: in the gap ahead of its head, past the boxes that it crosses.

    Args:
        width: Of a box, where columns are 1 apart.
    """
    num_columns = abs(arrow.head.column - arrow.tail.column)
    return 1 - (1 - width) / 2 / (num_columns - width)


def short(device: str) -> str:
    """`GPU:0` for `/device:GPU:0`, `worker/1 GPU:0` for that device of another task."""
    task, _, own = device.rpartition("/device:")
    named = "/".join(each.partition(":")[2] for each in task.split("/") if each.startswith(("job:", "task:")))
    return f"{named} {own}".strip() if own else device


def heaviest(records: Sequence[PlacementRecord]) -> list[Traffic]:
    """What was copied between operations of the same kinds in the same lines, the most bytes first."""
    kinds = {record.name: record.operation for record in records}
    found: dict[tuple[str, str, str, str, str], list[int]] = {}
    for record in records:
        for copy in record.copies:
            maker = kinds.get(copy.maker, _EARLIER)
            found.setdefault((maker, record.operation, copy.source, copy.target, record.where), []).append(
                copy.num_bytes
            )
    traffic = [Traffic(*key, num_bytes=sum(sizes), times=len(sizes)) for key, sizes in found.items()]
    return sorted(traffic, key=lambda each: -each.num_bytes)


def arrange(records: Sequence[PlacementRecord]) -> Picture:
    """The picture of a log."""
    alone = len(records) <= MOST_BOXES
    boxes: dict[tuple[str, str, str], Box] = {}
    box_of: dict[str, Box] = {}
    arrows: dict[tuple[int, int], Arrow] = {}
    for record in records:
        key = (record.name if alone else record.operation, record.where, record.device)
        box = box_of[record.name] = boxes.setdefault(key, Box(key[0], record.where, record.device))
        box.times += 1
        copied = {copy.maker: copy.num_bytes for copy in record.copies if copy.maker in box_of}
        for maker in (*record.inputs, *copied):
            if maker in box_of and box_of[maker] is not box:
                _join(arrows, box_of[maker], box)
        for copy in record.copies:
            if (tail := box_of.get(copy.maker)) is None:
                tail = boxes.setdefault((_EARLIER, "", copy.source), Box("tensors made earlier", "", copy.source, 1))
            _join(arrows, tail, box).num_bytes += copy.num_bytes
    joined = sorted(arrows.values(), key=lambda each: -each.num_bytes)
    shown = _choose(list(boxes.values()), joined)
    kept = {id(box) for box in shown}
    visible = [each for each in joined if id(each.tail) in kept and id(each.head) in kept]
    devices = sorted({box.device for box in shown})
    _set_rows(shown, visible, devices)
    return Picture(devices, shown, visible, len(boxes) - len(shown))


def _join(arrows: dict[tuple[int, int], Arrow], tail: Box, head: Box) -> Arrow:
    return arrows.setdefault((id(tail), id(head)), Arrow(tail, head))


def _choose(boxes: list[Box], arrows: Iterable[Arrow]) -> list[Box]:
    """Those that fit into a picture: the ends of the heaviest copies first."""
    wanted: dict[int, Box] = {}
    for arrow in arrows:
        for box in (arrow.tail, arrow.head):
            if len(wanted) < MOST_BOXES:
                wanted[id(box)] = box
    for box in boxes:
        if len(wanted) < MOST_BOXES:
            wanted[id(box)] = box
    return [box for box in boxes if id(box) in wanted]


def _set_rows(boxes: list[Box], arrows: Sequence[Arrow], devices: list[str]) -> None:
    """Each box below what it uses, as far as the order in which they ran goes that way."""
    order = {id(box): number for number, box in enumerate(sorted(boxes, key=lambda box: bool(box.where)))}
    free = [0] * len(devices)
    for box in sorted(boxes, key=lambda each: order[id(each)]):
        above = [each.tail.row for each in arrows if each.head is box and order[id(each.tail)] < order[id(box)]]
        box.column = devices.index(box.device)
        box.row = max(free[box.column], max(above, default=-1) + 1)
        free[box.column] = box.row + 1
