"""What a child is asked to do: join a strategy, take objects, run, give results and state.

The controller sends these functions by name; the objects in their arguments travel as references.
They keep what belongs to this child: its runtimes, the functions it was sent, results that wait.
"""

import contextlib
import gc
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from stratagem.collectives.reconnecting import Meet
from stratagem.devices.device import LogicalDevice
from stratagem.devices.inventory import Configuration, this_process
from stratagem.engine.random_numbers import seed_of
from stratagem.engine.recipe import Call, Recipe, Told
from stratagem.engine.replica import Done, Replica
from stratagem.engine.strategy_in_replica import StrategyInReplica
from stratagem.objects import captured, per_replica, state_diff, surroundings
from stratagem.objects.step_arguments import StepArguments
from stratagem.placement import scopes
from stratagem.placement.home import stay_at
from stratagem.placement.log import log_placement
from stratagem.placement.records import PlacementRecord
from stratagem.processes.allocator import keep_freed_memory
from stratagem.processes.child import this_child
from stratagem.processes.packing import part_of_messages
from stratagem.processes.region import Region
from stratagem.variables.copies import Written
from stratagem.variables.slots import Slots


@part_of_messages
class Answer(NamedTuple):
    """What comes back from a run.

    Attributes:
        unsettled: Whether parameters are still to be published.
        done: What came of each step.
        placed: Where its operations ran, if the program listens.
    """

    unsettled: bool
    done: list[Done]
    placed: Sequence[PlacementRecord] = ()


class Building(Protocol):
    """Makes this child's own tensors."""

    def build(self, placed: Any) -> dict[int, torch.Tensor]:
        """Makes them of what the child was sent, by name."""

    def add(self, placed: Any, tensors: Mapping[int, torch.Tensor]) -> None:
        """Takes them, once they have their names."""


class Taker(Protocol):
    """What takes distributed objects in a child."""

    @property
    def copies(self) -> Building:
        """Its tensors."""

    def add_objects(self, objects: dict[int, Any]) -> None:
        """Takes modules, optimizers and the like."""

    def drop(self, names: Sequence[int]) -> None:
        """Lets go of what the program has dropped."""


def join(
    key: int,
    rank: int,
    device: LogicalDevice,
    recipe: Recipe,
    meeting: Region,
    scratch: Region,
    strategy: StrategyInReplica,
    meet: Meet | None = None,
    configuration: Configuration | None = None,
) -> None:
    """Makes this child a replica of a strategy, on its device."""
    this_child().registry.add(0, strategy)  # type: ignore[union-attr]
    settle(device, recipe.first + rank, configuration)
    _joined[key] = _takers[key] = Replica(rank, recipe, meeting, scratch, strategy, meet=meet)


def settle(device: LogicalDevice, replica: int, configuration: Configuration | None) -> None:
    """Makes this child compute on its device, and see all devices as the program has configured them.

    Args:
        device: The device.
        replica: Which replica or worker it is.
        configuration: Of the program, if it is on this machine.
    """
    if device.memory_limit_bytes is None:
        keep_freed_memory()
    if configuration is not None:
        this_process().adopt(configuration)
    stay_at(device, replica)
    if device.torch_device.type == "cpu" and hasattr(os, "SCHED_BATCH"):
        # Replicas that share a core then take turns less often, and each has the cache longer.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def enter(key: int, taker: Taker) -> None:
    """Lets what another part of the library has made in this child take distributed objects."""
    _takers[key] = taker


def runtime_of(key: int) -> Replica:
    """This child's replica of a strategy."""
    return _joined[key]


def connect(key: int, path: str) -> None:
    """Connects this replica to the others; all do so at once."""
    if (link := _joined[key].copies.link) is not None:
        link.connect(path)


def disconnect(key: int) -> None:
    """Cuts this replica's connections, after a run that failed."""
    if (link := _joined[key].copies.link) is not None:
        link.disconnect()


def adopt_variables(key: int, variables: Sequence[Any]) -> None:
    """Takes tensors that the controller has distributed."""
    child, copies = this_child(), _takers[key].copies
    for placed in variables:
        tensors = copies.build(placed)
        for name, tensor in tensors.items():
            child.registry.add(name, tensor)  # type: ignore[union-attr]
        copies.add(placed, tensors)


def adopt_objects(key: int, objects: dict[int, Any]) -> None:
    """Takes objects that the controller has distributed."""
    child = this_child()
    for name, obj in objects.items():
        child.registry.add(name, obj)  # type: ignore[union-attr]
    _takers[key].add_objects(objects)


def run(
    key: int,
    told: Told,
    function: Callable[..., Any] | int,
    delivery: captured.Delivery | None,
    unwanted: Sequence[int],
    *fields: Any,
) -> Answer:
    """Runs the user's function as this child's replica; drops results that nobody asked for.

    Args:
        key: By which the strategy is known.
        told: What there is to know of the call.
        function: The function, or its name.
        delivery: What it needs that this child does not have, or has otherwise.
        unwanted: The numbers of such results.
        fields: Those of its arguments.
    """
    call = Call.of(told)
    for number in unwanted:
        _results.values.pop(number, None)
    runtime = _joined[key]
    runtime.receive(call.written)
    take(delivery, runtime.global_rank)
    take_changes(call.changes)
    if call.seed is not None:
        seed_everything(seed_of(call.seed, runtime.global_rank))
    own = this_child().registry.resolve(function) if isinstance(function, int) else function  # type: ignore[union-attr]
    with surrounded_by(call.surroundings) as placed:
        done = runtime.run(call, own, StepArguments(*fields), _packed_result)
    return Answer(runtime.unsettled, done, placed)


def _packed_result(result: Any) -> Any:
    return per_replica.pack_result(result, _results)


@contextlib.contextmanager
def surrounded_by(wanted: surroundings.Surroundings) -> Iterator[Sequence[PlacementRecord]]:
    """A block for a function of the program, as if where it was given; yields where its operations run, if asked."""
    listening = log_placement() if wanted.logs else contextlib.nullcontext()
    with surroundings.surrounded_by(wanted), listening as log, scopes.recording():
        yield log.records if log is not None else ()


def take(delivery: captured.Delivery | None, replica: int) -> None:
    """Takes what the main program's functions use, and what it changed in that, if there is any."""
    if delivery is not None:
        captured.receive(delivery, this_child().registry, replica)  # type: ignore[union-attr]
    if _garbage:
        # What the program has dropped may have been in what has just been replaced.
        _garbage.clear()
        gc.collect()


def publish_written(key: int) -> None:
    """Takes part in the meeting in which all make known what they wrote to after the last update."""
    _joined[key].publish_written()


def agree(key: int, written: Written) -> None:
    """Takes part in the meeting in which replicas that train alone come to one state."""
    runtime = _joined[key]
    try:
        runtime.receive(written)
        runtime.sync.agree()
    except BaseException:
        runtime.signals.abort()  # the others would wait for this one
        raise


def fetch(number: int) -> Any:
    """A result that stayed here until somebody asked for it."""
    return _results.values.pop(number)


def take_changes(changes: state_diff.Snapshot) -> None:
    """Takes what the main program changed in distributed objects."""
    state_diff.apply(changes, this_child().registry.resolve)  # type: ignore[union-attr]


def take_slots(key: int, name: int, slots: Slots, loaded: bool) -> None:
    """Takes the memory in which the state of an optimizer lies."""
    _joined[key].updates[name].take_slots(slots, loaded=loaded)


def load_whole_state(key: int, name: int, state: dict[str, Any]) -> None:
    """Takes the state of an optimizer that runs whole in every replica."""
    optimizer = this_child().registry.resolve(name)  # type: ignore[union-attr]
    type(optimizer).load_state_dict(optimizer, state)


def drop(key: int, names: Sequence[int]) -> None:
    """Lets go of what the program has dropped."""
    child = this_child()
    _takers[key].drop(names)
    for name in names:
        child.registry.remove(name)  # type: ignore[union-attr]
    _garbage.append(None)


def seed_everything(seed: int) -> None:
    """Seeds all random numbers that a step or the loading of its data may draw."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # data sets still draw from the global one
    random.seed(seed)


class _Results:
    """Values that wait to be fetched."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.next_number = 0


_joined: dict[int, Replica] = {}
_takers: dict[int, Taker] = {}  # those that have joined, and others
_results = _Results()
_garbage: list[None] = []  # whether anything was dropped that may not be gone yet
