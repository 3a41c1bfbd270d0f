"""Which buffers a step has written to; those that it gives its modules anew (`self.mean = ...`) count as written to."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final

import torch

from stratagem import _torch
from stratagem.variables.marks import is_as_marked, mark

_LOOK_EVERY: Final = 100  # steps: how often values are looked at, whatever torch has counted
_MOST_KNOWN: Final = 64
_SMALL: Final = 2**16  # elements: smaller buffers are looked at together

Held = tuple[torch.nn.Module, str, torch.Tensor]


def held_by(objects: Iterable[Any]) -> list[Held]:
    """The buffers of the modules among some objects, before a step."""
    modules = [each for each in objects if isinstance(each, torch.nn.Module)]
    buffers = list(map(_torch.module_parts.buffers_of, modules))  # most have none
    return [
        (module, key, buffer)
        for module, own in itertools.compress(zip(modules, buffers, strict=True), buffers)
        for key, buffer in own.items()
        if buffer is not None
    ]


def take_in(held: Sequence[Held]) -> None:
    """Writes what modules hold now, in new tensors of the same form, into the buffers that they held."""
    for module, key, buffer in held:
        new = _torch.module_parts.buffers_of(module).get(key)
        if new is None or new is buffer or _form(new) != _form(buffer) or buffer.layout != torch.strided:
            continue
        with torch.no_grad():
            buffer.copy_(new.clone())  # it may be a view of the buffer itself
        _torch.module_parts.buffers_of(module)[key] = buffer


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


@final
class BufferChanges:
    """Finds buffers that were written to since all replicas had the same in them.

    On the CPU they are compared with what they were. On other devices the host would have to wait for each
    comparison: torch's count of writes tells instead. It does not count what kernels of normalization do. Where a pass
    waits for the device anyway, it also asks whether any of those not counted has changed (`suspicion`); else values
    are looked at when other buffers were written to than in any step before, and now and then. What was found once to
    be written to without being counted is taken for written to from then on.

    Args:
        device: Where the buffers are.
    """

    def __init__(self, device: torch.device) -> None:
        self.before: dict[int, torch.Tensor] = {}
        """What they were."""
        self._compares = device.type == "cpu"
        self._marks: dict[int, Any] = {}
        self._uncounted: set[int] = set()
        self._known: set[frozenset[int]] = set()
        self._num_steps = self._num_runs = 0
        self._is_suspected = False

    def add(self, buffer: torch.Tensor) -> None:
        """Prepares for a buffer, of which nothing is noted yet."""
        self._known.clear()
        if not self._compares:
            _torch.storages.data_reads.follow(buffer)

    def drop(self, name: int) -> None:
        """Lets go of a buffer."""
        self.before.pop(name, None)
        self._marks.pop(name, None)
        self._uncounted.discard(name)

    def note(self, name: int, buffer: torch.Tensor, before: torch.Tensor) -> None:
        """Takes a buffer as it is, with a copy of it."""
        self.before[name] = before
        if not self._compares:
            self._marks[name] = None if buffer.is_inference() else mark(buffer)
            _torch.storages.data_reads.are_known([buffer])

    def forget(self) -> None:
        """Nobody knows what they were."""
        self.before, self._marks = {}, {}

    def suspicion(self, buffers: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        """Whether any buffer of which torch counts no write has changed, on the device; `None` if there is none."""
        if self._compares:
            return None
        counted = self._counted(buffers)
        left = [
            (each.detach().reshape(-1), self.before[name].reshape(-1))
            for name, each in buffers.items()
            if name not in counted and name not in self._uncounted and _have_one_form(each, self.before.get(name))
        ]
        small: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for pair in left:
            if pair[0].numel() <= _SMALL:
                small.setdefault(pair[0].dtype, []).append(pair)
        together = [tuple(map(torch.cat, zip(*pairs, strict=True))) for pairs in small.values()]
        large = [pair for pair in left if pair[0].numel() > _SMALL]
        differ = [(now != before).any() for now, before in (*together, *large)]
        return torch.stack(differ).any() if differ else None

    def suspect(self, is_written: bool) -> None:
        """Takes the answer: the end of the step looks at each, if any was written to without being counted."""
        self._is_suspected |= is_written

    def in_step(self, buffers: Mapping[int, torch.Tensor]) -> set[int]:
        """Those that a step has written to, or may have."""
        if self._compares:
            return self._differing(buffers)
        self._num_steps += 1
        counted = frozenset(self._counted(buffers))
        if self._is_suspected or self._num_steps % _LOOK_EVERY == 0 or counted not in self._known:
            self._is_suspected = False
            self._uncounted |= self._differing({name: each for name, each in buffers.items() if name not in counted})
            self._known = self._known | {counted} if len(self._known) < _MOST_KNOWN else {counted}
        return set(counted) | (self._uncounted & buffers.keys())

    def between_runs(self, buffers: Mapping[int, torch.Tensor]) -> set[int]:
        """Those that the main program has written to."""
        if self._compares:
            return self._differing(buffers)
        self._num_runs += 1
        counted = self._counted(buffers)
        if not counted and self._num_runs % _LOOK_EVERY:
            return counted
        return counted | self._differing({name: each for name, each in buffers.items() if name not in counted})

    def _counted(self, buffers: Mapping[int, torch.Tensor]) -> set[int]:
        written = _torch.storages.data_reads.has_written
        return {
            name for name, each in buffers.items() if not is_as_marked(each, self._marks.get(name)) or written(each)
        }

    def _differing(self, buffers: Mapping[int, torch.Tensor]) -> set[int]:
        """Those that are not what they were; one look for all."""
        if self._compares:
            return {
                name
                for name, each in buffers.items()
                if name not in self.before or not torch.equal(each, self.before[name])
            }
        alike = {name: each for name, each in buffers.items() if _have_one_form(each, self.before.get(name))}
        differ = [(each != self.before[name]).any() for name, each in alike.items()]
        found = torch.stack(differ).tolist() if differ else []
        return buffers.keys() - alike.keys() | {name for name, differs in zip(alike, found, strict=True) if differs}


def _have_one_form(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and _form(one) == _form(other)
