"""Variables of which every replica has a copy of its own, on whatever device it computes.

Owns what keeps the copies equal: gradients are summed in buckets (`buckets`), optimizers run whole
in every replica, buffers are averaged after each run, and what the controller writes to between
runs is sent to the others by value.

A write between runs is found by the version counter of a parameter. Torch does not count writes
through `.data`: a parameter is sent after each time that was taken, and as long as somebody has kept it.
Buffers are compared with what they were, because torch does not count what batch normalization does.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch

from stratagem import _torch
from stratagem.collectives.reconnecting import Meet, TorchLink
from stratagem.errors import StrategyError
from stratagem.variables import agreement
from stratagem.variables.aggregation import COUNTED, Aggregation, default_of, joined, with_infinite_left_out
from stratagem.variables.buckets import Buckets
from stratagem.variables.copies import Copies, Written
from stratagem.variables.ledger import Ledger, is_as_marked, mark
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
            start_sum, spoil = (link.start_sum, link.spoil) if link else (self._sum_at_the_end, _nothing)
            self._buckets = Buckets(runtime, start_sum, spoil)
        super().__init__(Ledger(runtime, self._buckets), link)
        self._runtime = runtime
        self._buffers: dict[int, weakref.ref[torch.Tensor]] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._agreed: dict[int, torch.Tensor] = {}  # of buffers: what all last had
        self._forms: dict[int, Any] = {}
        self._marks: dict[int, Any] = {}
        self._failed = False
        if runtime.rank == 0:
            _torch.data_reads.watch()

    # Distributed tensors

    def place(self, named: Sequence[tuple[int, torch.Tensor]], labels: Mapping[int, str]) -> list[list[Given]]:
        """Moves the controller's tensors to its device; the tensors stay the same objects."""
        placed = []
        for name, tensor in named:
            label = labels.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)}")
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            placed.append(Given(name, _on_host(tensor), label, is_parameter, tensor.requires_grad))
            if tensor.device != self._runtime.device:
                tensor.data = tensor.data.to(self._runtime.device)
                _torch.data_reads.are_known([tensor])
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
                self._note_agreed(each.name, tensor)

    def drop(self, names: set[int]) -> None:
        """Not on several machines, where the garbage collector may have been earlier on one than on another."""
        if self._runtime.recipe.num_machines > 1:
            return
        self.ledger.drop(names)
        if self._buckets is not None:
            self._buckets.drop(names)
        for known in (self._buffers, self._before, self._agreed, self._forms, self._marks):
            for name in names & known.keys():
                del known[name]

    # Between runs

    def take_written(self) -> Written:
        failed, self._failed = self._failed, False
        written = Written(after_failure=failed)
        for name, parameter in self.ledger.parameters():
            self._check_form(name, parameter)
            if not is_as_marked(parameter, self._marks.get(name)) or _torch.data_reads.has_written(parameter):
                written.values[name] = _on_host(parameter)
        for name, gradient in self.ledger.changed_gradients().items():
            written.gradients[name] = None if gradient is None else _on_host(gradient)
        for name, buffer in self.buffers():
            self._check_form(name, buffer)
            if name not in self._before or not torch.equal(buffer, self._before[name]):
                written.values[name] = _on_host(buffer)
                self._note_agreed(name, buffer)
        if self._runtime.recipe.num_machines > 1:
            written.told.update({f"tensor {name}": agreement.checksum(each) for name, each in written.values.items()})
        return written

    @torch.no_grad()
    def receive(self, written: Written) -> None:
        tensors = dict(self.ledger.parameters()) | dict(self.buffers())
        for name, value in written.values.items():
            tensors[name].copy_(value)
            if name in self._buffers:
                self._note_agreed(name, tensors[name])
        self.ledger.receive_gradients(written.gradients)

    def note_state(self) -> None:
        self._marks = {name: mark(parameter) for name, parameter in self.ledger.parameters()}
        _torch.data_reads.are_known(parameter for _, parameter in self.ledger.parameters())
        self.ledger.note_gradients()

    def forget_state(self) -> None:
        self._before, self._marks, self._failed = {}, {}, True
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
        return False

    def _join(self, names: Iterable[int], share: float, *, all_of_them: bool = False) -> None:
        """Brings some buffers to one state, in all replicas: those that any has changed, or all."""
        buffers, collective, names = dict(self.buffers()), self._runtime.collective, list(names)
        own = [all_of_them or self._is_changed(name, buffers) for name in names]
        rows = self._runtime.collective.all_gather(torch.tensor(own, dtype=torch.uint8))
        changed = [name for name, anywhere in zip(names, torch.stack(rows).amax(0), strict=True) if anywhere]
        how = {name: self._chosen.get(name, default_of(self._before[name].dtype)) for name in changed}
        # A buffer that is gone here, and not yet elsewhere, takes part for the others.
        now = {name: buffers.get(name, self._before[name]) for name in changed}
        means = [name for name in changed if how[name] is Aggregation.MEAN]
        for name in changed:
            if name not in means:
                before = self._agreed.get(name, self._before[name])
                first = self._runtime.first_with_examples
                now[name].copy_(joined(collective, how[name], before, now[name], share, first))
        if means:
            # All in one row: many are small. In float64, so that what is equal everywhere stays as it is.
            values = torch.cat([now[name].double().flatten() for name in means])
            mean = collective.all_reduce(values * share if share else torch.zeros_like(values))
            mean = with_infinite_left_out(collective, mean, values, share, ~mean.isfinite())
            parts = torch.split(mean, [self._before[name].numel() for name in means])
            for name, part in zip(means, parts, strict=True):
                now[name].copy_(part.view(self._before[name].shape))
        for name in changed:
            self._note_agreed(name, now[name])

    def _note_agreed(self, name: int, buffer: torch.Tensor) -> None:
        self._before[name] = self._agreed[name] = buffer.detach().clone()

    @torch.no_grad()
    def join_counters(self) -> None:
        counters = [name for name in self._buffers if self._chosen.get(name) in COUNTED]
        if counters:
            self._join(counters, 1.0)  # what does not count has been taken back

    @torch.no_grad()
    def keep_own(self) -> None:
        for name, buffer in self.buffers():
            self._before[name] = buffer.detach().clone()

    @torch.no_grad()
    def take_back_buffers(self) -> None:
        for name, buffer in self.buffers():
            if buffer.is_floating_point() or self._chosen.get(name, Aggregation.FIRST) is not Aggregation.FIRST:
                buffer.copy_(self._before[name])

    def close(self) -> None:
        if self._runtime.rank == 0:
            _torch.data_reads.unwatch()
        if self._buckets is not None:
            self._buckets.close()
        if self.link is not None:
            self.link.disconnect()

    def split(self, optimizer: torch.optim.Optimizer, replica: Updating) -> None:
        """Every replica updates all of its own parameters."""

    def _sum_at_the_end(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: self._runtime.collective.all_reduce(flat)

    def _is_changed(self, name: int, buffers: Mapping[int, torch.Tensor]) -> bool:
        return name in buffers and not torch.equal(buffers[name], self._before[name])

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


def _form(tensor: torch.Tensor) -> Any:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _words(form: Any) -> str:
    shape, dtype, device = form
    return f"{str(dtype).removeprefix('torch.')} of shape {shape} on {str(device)!r}"
