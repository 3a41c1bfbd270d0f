"""Variables of which every replica has a copy of its own, on whatever device it computes.

Owns what keeps the copies equal: gradients are summed in buckets (`buckets`), optimizers run whole
in every replica, buffers are averaged after each run, and what the controller writes to between
runs is sent to the others by value.

A write between runs is found by the version counter of a parameter. Torch does not count writes
through `.data`, so that those do not reach the other replicas: write inside `torch.no_grad()`.
Buffers are compared with what they were, because torch does not count what batch normalization does.
"""

import dataclasses
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch

from stratagem.collectives.reconnecting import Link, Meet
from stratagem.errors import StrategyError
from stratagem.variables import agreement
from stratagem.variables.buckets import BucketedGradients
from stratagem.variables.copies import Copies, Written, mark
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
        by_torch: Whether gradients are summed by torch.distributed, or else by the replica's collective.
        meet: Where replicas meet that share no memory.
    """

    def __init__(self, runtime: Participant, *, by_torch: bool, meet: Meet | None = None) -> None:
        # On several machines sums go over all of them, in two levels.
        linked = by_torch and runtime.settings.size > 1 and runtime.settings.num_machines == 1
        super().__init__(
            Link(runtime.rank, runtime.settings.size, runtime.device, runtime.signals, meet) if linked else None
        )
        self._runtime = runtime
        self._gradients = BucketedGradients(runtime, self.link.start_sum if self.link else self._sum_at_the_end)
        self._buffers: dict[int, weakref.ref[torch.Tensor]] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._forms: dict[int, Any] = {}
        self._marks: dict[int, Any] = {}
        self._gradient_marks: dict[int, Any] = {}

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
        return [placed]

    def build(self, placed: Sequence[Given]) -> dict[int, torch.Tensor]:
        built: dict[int, torch.Tensor] = {}
        for each in placed:
            own = each.value.to(self._runtime.device, copy=True)
            built[each.name] = torch.nn.Parameter(own, each.requires_grad) if each.is_parameter else own
        return built

    def add(self, placed: Sequence[Given], tensors: Mapping[int, torch.Tensor]) -> None:
        parameters = {each.name: tensors[each.name] for each in placed if each.is_parameter}
        self._gradients.add(parameters, {each.name: each.label for each in placed})
        for each in placed:
            tensor = tensors[each.name]
            self._forms[each.name] = _form(tensor), each.label
            if each.is_parameter:
                self._marks[each.name] = mark(tensor)
                self._gradient_marks[each.name] = mark(None)
            else:
                self._buffers[each.name] = weakref.ref(tensor)
                self._before[each.name] = tensor.detach().clone()

    def drop(self, names: set[int]) -> None:
        self._gradients.drop(names)
        for known in (self._buffers, self._before, self._forms, self._marks, self._gradient_marks):
            for name in names & known.keys():
                del known[name]

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for _, parameter in self._gradients.parameters()]

    # Between runs

    def take_written(self) -> Written:
        written = Written()
        for name, parameter in self._gradients.parameters():
            self._check_form(name, parameter)
            if mark(parameter) != self._marks.get(name):
                written.values[name] = _on_host(parameter)
            if mark(parameter.grad) != self._gradient_marks.get(name):
                written.gradients[name] = None if parameter.grad is None else _on_host(parameter.grad)
        for name, buffer in self._live_buffers():
            self._check_form(name, buffer)
            if name not in self._before or not torch.equal(buffer, self._before[name]):
                written.values[name] = _on_host(buffer)
                self._before[name] = buffer.detach().clone()
        self._gradients.take_as_summed(written.gradients)
        if self._runtime.settings.num_machines > 1:
            written.told.update({f"tensor {name}": agreement.checksum(each) for name, each in written.values.items()})
        return written

    @torch.no_grad()
    def receive(self, written: Written) -> None:
        tensors = dict(self._gradients.parameters()) | dict(self._live_buffers())
        for name, value in written.values.items():
            tensors[name].copy_(value)
            if name in self._buffers:
                self._before[name] = tensors[name].detach().clone()
        for name, gradient in written.gradients.items():
            tensors[name].grad = None if gradient is None else gradient.to(self._runtime.device, copy=True)
        self._gradients.take_as_summed(written.gradients)

    def note_state(self) -> None:
        for name, parameter in self._gradients.parameters():
            self._marks[name] = mark(parameter)
            self._gradient_marks[name] = mark(parameter.grad)

    def forget_state(self) -> None:
        for known in (self._before, self._marks, self._gradient_marks):
            known.clear()

    # A run

    def begin_backward(self, *, syncing: bool) -> None:
        self._gradients.begin(syncing=syncing)

    def end_backward(self, *, syncing: bool) -> None:
        start = time.monotonic()
        self._gradients.end(syncing=syncing)
        self._runtime.signals.waited_s += time.monotonic() - start
        if syncing:
            self.judge(self._gradients.culprits)

    def abandon_backward(self) -> None:
        if self._gradients.abandon() and self.link is not None:
            self.link.spoil()

    def publish_written(self) -> None:
        """What the program does in every replica alike is everyone's already."""

    @torch.no_grad()
    def share_from_first(self, parameters: Sequence[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.copy_(self._runtime.control.broadcast(parameter))

    @torch.no_grad()
    def settle(self, share: float) -> bool:
        buffers, collective = dict(self._live_buffers()), self._runtime.collective
        own = [name in buffers and not torch.equal(buffers[name], self._before[name]) for name in self._buffers]
        rows = self._runtime.collective.all_gather(torch.tensor(own, dtype=torch.uint8))
        changed = [name for name, anywhere in zip(self._buffers, torch.stack(rows).amax(0), strict=True) if anywhere]
        floats = [name for name in changed if self._before[name].is_floating_point()]
        for name in changed:
            # A buffer that is gone here, and not yet elsewhere, takes part for the others.
            buffer = buffers.get(name, self._before[name])
            if name not in floats:
                buffer.copy_(collective.broadcast(buffer))
        if floats:
            # All in one row: many are small. In float64, so that what is equal everywhere stays as it is.
            values = torch.cat([buffers.get(name, self._before[name]).double().flatten() for name in floats])
            mean = collective.all_reduce(values * share if share else torch.zeros_like(values))
            parts = torch.split(mean, [self._before[name].numel() for name in floats])
            for name, part in zip(floats, parts, strict=True):
                buffers.get(name, self._before[name]).copy_(part.view(self._before[name].shape))
        for name in changed:
            if name in buffers:
                self._before[name].copy_(buffers[name])
        return False

    def close(self) -> None:
        self._gradients.close()
        if self.link is not None:
            self.link.disconnect()

    def split(self, optimizer: torch.optim.Optimizer, replica: Updating) -> None:
        """Every replica updates all of its own parameters."""

    def _sum_at_the_end(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: self._runtime.collective.all_reduce(flat)

    def _live_buffers(self) -> Iterator[tuple[int, torch.Tensor]]:
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


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, without being the tensor itself, which would travel as a name."""
    return tensor.detach().to(_CPU)


def _form(tensor: torch.Tensor) -> Any:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _words(form: Any) -> str:
    shape, dtype, device = form
    return f"{str(dtype).removeprefix('torch.')} of shape {shape} on {str(device)!r}"
