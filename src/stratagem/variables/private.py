"""Variables of which every replica has a copy of its own, on whatever device it computes.

Owns what keeps the copies equal: gradients are summed in buckets (`buckets`), optimizers run whole
in every replica, buffers are averaged after each run, and what the controller writes to between
runs is sent to the others by value.

A write between runs is found by the version counter of a parameter. Torch does not count writes through
`.data` and `numpy()`: after these were taken, and as long as somebody has kept them, values are compared.
Which buffers were written to `BufferChanges` finds; on accelerators the host waits for none of them.
Whether copies of parameters have drifted apart (`drift`) is asked now and then, there where the host waits anyway.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch

from stratagem import _torch
from stratagem.collectives.reconnecting import Meet, TorchLink
from stratagem.errors import StrategyError
from stratagem.variables import agreement, drift
from stratagem.variables.aggregation import (
    COUNTED,
    Aggregation,
    Joining,
    default_of,
    join_in_one_sum,
    joined,
    with_infinite_left_out,
)
from stratagem.variables.buckets import Buckets
from stratagem.variables.buffers import BufferChanges
from stratagem.variables.copies import Copies, Written
from stratagem.variables.ledger import Ledger, gather_numbers
from stratagem.variables.marks import is_as_marked, mark
from stratagem.variables.participant import Participant, Updating

_CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Given:
    """A tensor on its way to the replicas."""

    name: int
    value: torch.Tensor
    label: str
    is_parameter: bool
    requires_grad: bool


@torch.no_grad()
def bring(tensor: torch.Tensor, device: torch.device) -> None:
    """Moves a variable, with its gradient, to a device; it stays the same object."""
    if tensor.device == device:
        return
    gradient, tensor.grad = tensor.grad, None
    tensor.data = tensor.data.to(device)
    tensor.grad = None if gradient is None else gradient.to(device)
    _torch.storages.data_reads.are_known([tensor])


@final
class PrivateCopies(Copies):
    """One replica's own copies of the variables.

    Args:
        runtime: The replica.
        way: How gradients are summed: by `torch`.distributed, by the replica's own `collective`, or not at all because
            each replica trains `alone`.
        meet: Where replicas meet that share no memory.
    """

    def __init__(self, runtime: Participant, *, way: str, meet: Meet | None = None) -> None:
        recipe = runtime.recipe
        # On several machines sums go over all of them, in two levels.
        linked = way == "torch" and recipe.size > 1 and recipe.num_machines == 1
        link = TorchLink(runtime.rank, recipe.size, runtime.device, runtime.signals, meet) if linked else None
        self._buckets = None
        if way != "alone":
            start_sum, spoil = (self._sum_by_link, link.spoil) if link else (self._sum_at_the_end, _nothing)
            self._buckets = Buckets(runtime, start_sum, spoil, self._ask, self._answer)
        super().__init__(Ledger(runtime, self._buckets), link)
        self._runtime = runtime
        self._buffers: dict[int, weakref.ref[torch.Tensor]] = {}
        self._changes = BufferChanges(runtime.device)
        self._agreed: dict[int, torch.Tensor] = {}  # of buffers: what all last had
        self._forms: dict[int, Any] = {}
        self._marks: dict[int, Any] = {}
        self._failed = False
        self._asked_by: list[Callable[[bool], None]] = []  # who waits for an answer of the device
        self._asked_in, self._have_drifted = 0, False  # the last step in which copies were compared, and what was found
        if runtime.rank == 0:
            _torch.storages.data_reads.watch()

    # Distributed tensors

    def place(self, named: Sequence[tuple[int, torch.Tensor]], labels: Mapping[int, str]) -> list[list[Given]]:
        """Moves the controller's tensors to its device; the tensors stay the same objects."""
        placed = []
        for name, tensor in named:
            label = labels.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)}")
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            placed.append(Given(name, _on_host(tensor), label, is_parameter, tensor.requires_grad))
            bring(tensor, self._runtime.device)
        return [placed]

    def build(self, placed: Sequence[Given]) -> dict[int, torch.Tensor]:
        built: dict[int, torch.Tensor] = {}
        for each in placed:
            own = each.value.to(self._runtime.device, copy=True)
            built[each.name] = torch.nn.Parameter(own, each.requires_grad) if each.is_parameter else own
        return built

    def add(self, placed: Sequence[Given], tensors: Mapping[int, torch.Tensor]) -> None:
        parameters = {each.name: tensors[each.name] for each in placed if each.is_parameter}
        labels = {each.name: each.label for each in placed}
        self.ledger.add(parameters, labels)
        if self._buckets is not None:
            self._buckets.add(parameters, labels)
        for each in placed:
            tensor = tensors[each.name]
            self._forms[each.name] = _form(tensor), each.label
            if each.is_parameter:
                self._marks[each.name] = mark(tensor)
            else:
                self._buffers[each.name] = weakref.ref(tensor)
                self._changes.add(tensor)
                self._note_agreed({each.name: tensor})

    def drop(self, names: set[int]) -> None:
        """Not on several machines, where the garbage collector may have been earlier on one than on another."""
        if self._runtime.recipe.num_machines > 1:
            return
        self.ledger.drop(names)
        if self._buckets is not None:
            self._buckets.drop(names)
        for known in (self._buffers, self._agreed, self._forms, self._marks):
            for name in names & known.keys():
                del known[name]
        for name in names:
            self._changes.drop(name)

    # Between runs

    def take_written(self) -> Written:
        failed, self._failed = self._failed, False
        written = Written(after_failure=failed)
        for name, parameter in self.ledger.parameters():
            self._check_form(name, parameter)
            if not is_as_marked(parameter, self._marks.get(name)) or _torch.storages.data_reads.has_written(parameter):
                written.values[name] = _on_host(parameter)
        for name, gradient in self.ledger.changed_gradients().items():
            written.gradients[name] = None if gradient is None else _on_host(gradient)
        buffers = dict(self.buffers())
        for name, buffer in buffers.items():
            self._check_form(name, buffer)
        found = self._changes.between_runs(buffers)
        changed = {name: buffer for name, buffer in buffers.items() if name in found}
        written.values.update({name: _on_host(buffer) for name, buffer in changed.items()})
        self._note_agreed(changed)
        if self._runtime.recipe.num_machines > 1:
            written.told.update({f"tensor {name}": agreement.checksum(each) for name, each in written.values.items()})
        return written

    @torch.no_grad()
    def receive(self, written: Written) -> None:
        tensors = dict(self.ledger.parameters()) | dict(self.buffers())
        for name, value in written.values.items():
            tensors[name].copy_(value)
        self._note_agreed({name: tensors[name] for name in written.values if name in self._buffers})
        self.ledger.receive_gradients(written.gradients)

    def note_state(self) -> None:
        self._marks = {name: mark(parameter) for name, parameter in self.ledger.parameters()}
        _torch.storages.data_reads.follow_memory(self, self.parameters())
        self.ledger.note_gradients()

    def forget_state(self) -> None:
        self._marks, self._failed = {}, True
        self._changes.forget()
        self.ledger.forget_gradients()

    # A run

    def publish_written(self) -> bool:
        """What the program does in every replica alike is everyone's already."""
        return False

    @torch.no_grad()
    def share_from_first(self, parameters: Sequence[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.copy_(self._runtime.control.broadcast(parameter))

    @torch.no_grad()
    def settle(self, share: float, *, all_buffers: bool = False) -> bool:
        self._join(self._buffers, share, all_of_them=all_buffers)
        step = self._runtime.compared_step
        if step and (self._have_drifted if self._asked_in == step else self._differ_somewhere()):
            drift.settle(self.ledger.labelled(), self._runtime.collective, step)
        return False

    @torch.no_grad()
    def _ask(self) -> Sequence[torch.Tensor]:
        """What a pass asks the device where the host waits for it; every replica comes here."""
        questions: dict[Callable[[bool], None], torch.Tensor] = {}
        if (written := self._changes.suspicion(dict(self.buffers()))) is not None:
            questions[self._changes.suspect] = written
        if self._is_beside and self._runtime.compared_step not in (0, self._asked_in):
            questions[self._note_drift] = self._differ_on_device()
        self._asked_by = list(questions)
        return list(questions.values())

    def _answer(self, values: Sequence[bool]) -> None:
        for take, value in zip(self._asked_by, values, strict=True):
            take(value)

    def _note_drift(self, have_drifted: bool) -> None:
        self._asked_in, self._have_drifted = self._runtime.compared_step, have_drifted

    def _differ_somewhere(self) -> bool:
        """Whether replicas differ in any parameter; every one must come here."""
        if self._is_beside:
            return bool(self._differ_on_device())
        number = int(drift.checksum(self.parameters(), self._runtime.device))
        return len(set(gather_numbers(self._runtime.collective, [number]).flatten().tolist())) > 1

    def _differ_on_device(self) -> torch.Tensor:
        number = drift.checksum(self.parameters(), self._runtime.device)
        return drift.differ_in(
            self._sum_on_device(drift.row_for_all(number, self._runtime.rank, self._runtime.recipe.size))
        )

    @property
    def _is_beside(self) -> bool:
        """Whether replicas exchange what is on their devices without the host."""
        return self.link is not None and self._runtime.device.type != "cpu"

    def _join(self, names: Iterable[int], share: float, *, all_of_them: bool = False) -> None:
        """Brings some buffers to one state, in all replicas: those that any has changed, or all."""
        buffers, names = dict(self.buffers()), list(names)
        own = (
            set(names)
            if all_of_them
            else self._changes.in_step({name: buffers[name] for name in names if name in buffers})
        )
        rows = self._runtime.collective.all_gather(torch.tensor([name in own for name in names], dtype=torch.uint8))
        changed = [name for name, anywhere in zip(names, torch.stack(rows).amax(0), strict=True) if anywhere]
        how = {name: self._chosen.get(name, default_of(self._agreed[name].dtype)) for name in changed}
        # A buffer that is gone here, and not yet elsewhere, takes part for the others.
        now = {name: buffers.get(name, self._agreed[name]) for name in changed}
        if self._is_beside:
            self._join_beside(now, how, share)
        else:
            self._join_here(now, how, share)
        self._note_agreed(now)

    def _join_here(self, now: Mapping[int, torch.Tensor], how: Mapping[int, Aggregation], share: float) -> None:
        """Joins buffers by what replicas exchange through the memory of the host."""
        collective = self._runtime.collective
        means = [each for name, each in now.items() if how[name] is Aggregation.MEAN]
        self._join_each({name: each for name, each in now.items() if how[name] is not Aggregation.MEAN}, how, share)
        if means:
            # All in one row: many are small. In float64, so that what is equal everywhere stays as it is.
            values = torch.cat([each.double().flatten() for each in means])
            mean = collective.all_reduce(values * share if share else torch.zeros_like(values))
            mean = with_infinite_left_out(collective, mean, values, share, ~mean.isfinite())
            for each, part in zip(means, torch.split(mean, [each.numel() for each in means]), strict=True):
                each.copy_(part.view(each.shape))

    def _join_beside(self, now: Mapping[int, torch.Tensor], how: Mapping[int, Aggregation], share: float) -> None:
        """Joins buffers by one sum on the device."""
        buffers: dict[Aggregation, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for name, each in now.items():
            buffers.setdefault(how[name], []).append((each, self._agreed[name]))
        if buffers:
            runtime = self._runtime
            is_first = runtime.first_with_examples == runtime.global_rank
            joining = Joining(runtime.rank, runtime.recipe.size, share, is_first)
            join_in_one_sum(self._sum_on_device, buffers, joining)

    def _join_each(self, now: Mapping[int, torch.Tensor], how: Mapping[int, Aggregation], share: float) -> None:
        for name, each in now.items():
            first = self._runtime.first_with_examples
            each.copy_(joined(self._runtime.collective, how[name], self._agreed[name], each, share, first))

    def _sum_on_device(self, flat: torch.Tensor) -> torch.Tensor:
        if self.link is None:
            raise RuntimeError("only replicas that torch.distributed connects sum on their devices")
        return self.link.start_sum(flat)()

    def _note_agreed(self, buffers: Mapping[int, torch.Tensor]) -> None:
        """Takes what some buffers hold as what all have; in the memory of what they had, if there is any."""
        kept = {name: each for name, each in buffers.items() if _can_hold(self._agreed.get(name), each)}
        if kept:
            agreed = [self._agreed[name] for name in kept]
            _torch.tensors.foreach_copy_(agreed, [each.detach() for each in kept.values()])
        for name, buffer in buffers.items():
            if name not in kept:
                self._agreed[name] = buffer.detach().clone()
            self._changes.note(name, buffer, self._agreed[name])

    @torch.no_grad()
    def join_counters(self) -> None:
        counters = [name for name in self._buffers if self._chosen.get(name) in COUNTED]
        if counters:
            self._join(counters, 1.0)  # what does not count has been taken back

    @torch.no_grad()
    def keep_own(self) -> None:
        for name, buffer in self.buffers():
            self._changes.note(name, buffer, buffer.detach().clone())

    @torch.no_grad()
    def take_back_buffers(self) -> None:
        for name, buffer in self.buffers():
            if buffer.is_floating_point() or self._chosen.get(name, Aggregation.FIRST) is not Aggregation.FIRST:
                buffer.copy_(self._changes.before[name])

    def close(self) -> None:
        self.ledger.close()
        if self._runtime.rank == 0:
            _torch.storages.data_reads.follow_memory_no_more(self)
            _torch.storages.data_reads.unwatch()
        if self._buckets is not None:
            self._buckets.close()
        if self.link is not None:
            self.link.disconnect()

    def split(self, optimizer: torch.optim.Optimizer, replica: Updating) -> None:
        """Every replica updates all of its own parameters."""

    def _sum_by_link(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self.link.start_sum(flat, self._runtime.recipe.travels_as(flat.dtype))  # type: ignore[union-attr]

    def _sum_at_the_end(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: self._runtime.collective.sum_as(flat, self._runtime.recipe.travels_as(flat.dtype))

    def buffers(self) -> Iterator[tuple[int, torch.Tensor]]:
        for name, reference in self._buffers.items():
            if (buffer := reference()) is not None:
                yield name, buffer

    def _check_form(self, name: int, tensor: torch.Tensor) -> None:
        form, label = self._forms[name]
        if _form(tensor) != form:
            raise StrategyError(
                f"{label!r} was {_words(form)} when it was distributed and is now {_words(_form(tensor))}; change a "
                f"model's shapes, types and devices before its first run"
            )


def _nothing() -> None:
    """A collective of memory has nothing that could be spoiled."""


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, in memory of their own: what lies in that of the tensor travels as a name."""
    return tensor.detach().to(_CPU, copy=True)


def _can_hold(kept: torch.Tensor | None, buffer: torch.Tensor) -> bool:
    """Whether a copy of a buffer can be written over with what the buffer holds now."""
    return kept is not None and not kept.is_inference() and kept is not buffer and _form(kept) == _form(buffer)


def _form(tensor: torch.Tensor) -> Any:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _words(form: Any) -> str:
    shape, dtype, device = form
    return f"{str(dtype).removeprefix('torch.')} of shape {shape} on {str(device)!r}"
