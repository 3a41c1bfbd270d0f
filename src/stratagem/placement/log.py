"""Writes down where operations ran: as lines in TensorFlow's form, and as records.

`eager` reports every operation while somebody listens (`collectors`); pictures are `pictures`'.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, final

import torch

from stratagem._caller import users_line
from stratagem.devices.inventory import Inventory, this_process
from stratagem.devices.kind_table import CPU
from stratagem.errors import DeviceTypeError
from stratagem.placement import pictures
from stratagem.placement.arguments import tensors_in
from stratagem.placement.names import NameCounter, type_of
from stratagem.placement.records import Copy, PlacementRecord, printable
from stratagem.placement.residence import Asked, ResidencePlace, replica, storage_of
from stratagem.placement.resolution import Devices, full_name

_MAKERS = "_stratagem_makers"


class Collector(Protocol):
    """Who wants to hear of operations."""

    def add(self, event: "Event") -> None: ...


@dataclasses.dataclass(frozen=True)
class Event:
    """One operation that has just run.

    Attributes:
        asked: What scopes asked for, if they did.
        copies: Original, copy and the place of the original, for each input from elsewhere.
    """

    func: Callable[..., Any]
    tensors: Sequence[torch.Tensor]
    results: Any
    asked: Asked | None
    place: ResidencePlace
    why: str
    copies: Sequence[tuple[torch.Tensor, torch.Tensor, ResidencePlace]]


collectors: list[Collector] = []
_changed: list[Callable[[], None]] = []
_numbers = itertools.count()


def when_changed(call: Callable[[], None]) -> None:
    """Has a function called when the first listener has come or the last one gone."""
    _changed.append(call)


def note(
    func: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    results: Any,
    asked: Asked | None,
    place: ResidencePlace,
    why: str,
    copies: Sequence[tuple[torch.Tensor, torch.Tensor, ResidencePlace]],
) -> None:
    """Tells every listener of an operation."""
    event = Event(func, tensors, results, asked, place, why, copies)
    for each in collectors:
        each.add(event)


@final
class PlacementLog:
    """Where operations ran: records in the order in which they ran.

    Example:
        >>> with log_placement() as log:
        ...     total = torch.ones(2).sum()
        >>> [(record.name, record.device) for record in log.records]
        [('Ones', '/device:CPU:0'), ('Sum', '/device:CPU:0')]
    """

    def __init__(self) -> None:
        self.records: list[PlacementRecord] = []
        self._names = NameCounter()
        self._number = next(_numbers)
        self._open = True

    def add(self, event: Event) -> None:
        """Takes an operation down."""
        operation = type_of(event.func)
        name = self._names.unique(operation)
        makers = {id(tensor): self._maker_of(tensor) for tensor in event.tensors}
        copies = tuple(
            Copy(source.device.name, event.place.device.name, _num_bytes(copied), makers.get(id(tensor), ""))
            for tensor, copied, source in event.copies
        )
        file, line = users_line()
        record = PlacementRecord(
            operation=operation,
            name=name,
            requested=None if event.asked is None else event.asked.name,
            device=event.place.device.name,
            why=event.why,
            copies=copies,
            inputs=tuple(dict.fromkeys(maker for maker in makers.values() if maker)),
            file=file,
            line=line,
            replica=replica(),
        )
        self.records.append(record)
        for tensor in tensors_in((event.results,)):
            self._sign(tensor, name)
        for tensor, copied, source in event.copies:
            if copied.requires_grad and copied.grad_fn is not None:
                hook = self._gradient_hook(record, source.device.name, makers.get(id(tensor), ""))
                copied.register_hook(hook)  # type: ignore[no-untyped-call]

    def take_in(self, records: Sequence[PlacementRecord], replica: int) -> None:
        """Takes what another process took down, under names such as TensorFlow's `replica_1/MatMul`."""
        names = {"": ""} | {each.name: self._names.unique(f"replica_{replica}/{each.name}") for each in records}
        for each in records:
            copies = tuple(dataclasses.replace(copy, maker=names[copy.maker]) for copy in each.copies)
            inputs = tuple(names[name] for name in each.inputs)
            self.records.append(dataclasses.replace(each, name=names[each.name], copies=copies, inputs=inputs))

    def unique(self, name: str) -> str:
        """A name that no other record of this log has."""
        return self._names.unique(name)

    def close(self) -> None:
        self._open = False

    def table(self) -> str:
        """The records as a table to print, and below it what was copied between devices."""
        return pictures.table(self._shown())

    def to_json(self) -> str:
        """The records as JSON: a list of objects."""
        return json.dumps([each.as_json() for each in self.records], indent=1)

    def save(self, path: str | Path) -> Path:
        """Writes a picture (`.html`, `.png`), the records (`.json`) or the table (`.txt`) to a file.

        The picture has a column for each device and the operations of each line of the program in it; arrows between
        columns are copies, the heaviest of them listed first.
        """
        if not isinstance(path, str | Path):
            raise DeviceTypeError(f"a placement log is saved to a path, got {type(path).__name__} {path!r}")
        path = Path(path)
        match path.suffix.lower():
            case ".html":
                path.write_text(pictures.html(self._shown()), encoding="utf-8")
            case ".png":
                pictures.png(self._shown(), path)
            case ".json":
                path.write_text(self.to_json())
            case ".txt":
                path.write_text(self.table() + "\n", encoding="utf-8")
            case _:
                raise DeviceTypeError(f"a placement log is saved as .html, .png, .json or .txt, got {str(path)!r}")
        return path

    def _shown(self) -> list[PlacementRecord]:
        return [each.shown() for each in self.records]

    def _gradient_hook(self, forward: PlacementRecord, home: str, maker: str) -> Callable[[torch.Tensor], None]:
        """Takes down that the gradient of a copied input goes back to where that came from."""

        def add(gradient: torch.Tensor) -> None:
            if self._open:
                name = self._names.unique(f"gradients/{forward.name}")
                copy = Copy(forward.device, home, _num_bytes(gradient), forward.name)
                back = dataclasses.replace(
                    forward, operation="Gradient", name=name, requested=None, device=home, copies=(copy,)
                )
                why = f"goes back to {maker or 'its tensor'}"
                self.records.append(dataclasses.replace(back, why=why, inputs=(forward.name,)))

        return add

    def _maker_of(self, tensor: torch.Tensor) -> str:
        makers: dict[int, str] = getattr(storage_of(tensor), _MAKERS, {})
        return makers.get(self._number, "")

    def _sign(self, tensor: torch.Tensor, name: str) -> None:
        if (storage := storage_of(tensor)) is not None:
            makers: dict[int, str] = getattr(storage, _MAKERS, None) or {}
            makers[self._number] = name
            setattr(storage, _MAKERS, makers)

    def __iter__(self) -> Iterator[PlacementRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)


def listening() -> list[PlacementLog]:
    """The logs that take records at this moment."""
    return [each for each in collectors if isinstance(each, PlacementLog)] if collectors else []


def take_in(records: Sequence[PlacementRecord], replica: int) -> None:
    """Gives the logs of this process what a replica in another has taken down."""
    for each in listening() if records else ():
        each.take_in(records, replica)


@contextlib.contextmanager
def log_placement() -> Iterator[PlacementLog]:
    """Takes down where every operation of the block runs, why, and what is copied for it; those of sessions too.

    Example:
        >>> import torch
        >>> with log_placement() as log:
        ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
        >>> log.records[-1].name, log.records[-1].device
        ('MatMul', '/device:CPU:0')
    """
    log = PlacementLog()
    collectors.append(log)
    try:
        _tell_changed()
        yield log
    finally:
        collectors.remove(log)
        log.close()
        _tell_changed()


@final
class _Printer:
    """Prints a line for every operation."""

    def __init__(self, *, mapping: bool) -> None:
        self._names = NameCounter()
        self._mapping = mapping

    def add(self, event: Event) -> None:
        if self._mapping:
            self._mapping = False
            print(mapping_text(this_process()))
        print(line_of(self._names.unique(type_of(event.func)), full_name(event.place.device)))


def set_printing(enabled: bool, *, mapping: bool = True) -> None:
    """Whether a line is printed for every operation, and ahead of them which hardware is behind each device."""
    if type(enabled) is not bool:
        raise DeviceTypeError(f"the log of device placement is True or False, got {enabled!r}")
    collectors[:] = [each for each in collectors if not isinstance(each, _Printer)]
    if enabled:
        collectors.append(_Printer(mapping=mapping))
    _tell_changed()


def is_printing() -> bool:
    """Whether lines are printed."""
    return bool(collectors) and any(isinstance(each, _Printer) for each in collectors)


def line_of(name: str, full_device_name: str) -> str:
    """A line of the log, in TensorFlow's form."""
    return f"{printable(name)}: {full_device_name}"


def mapping_text(inventory: Inventory, devices: Devices | None = None) -> str:
    """What TensorFlow prints ahead of its log: which hardware is behind each accelerator, or of these devices."""
    lines = [
        f"{full_name(device)} -> device: {physical.index}, name: {inventory.details(physical).device_name}"
        for device in (devices or inventory).logical()
        if (physical := device.physical).device_type != CPU
    ]
    return "\n".join(("Device mapping:", *lines)) if lines else "Device mapping: no known devices."


def _tell_changed() -> None:
    for each in _changed:
        each()


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
