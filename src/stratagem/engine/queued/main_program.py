"""The main program's side of variables that workers update: it places them, and shows their state.

Offers `distribution` what it needs of a replica. The main program computes nothing here.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast, final

import torch

from stratagem import _torch
from stratagem.engine import context
from stratagem.engine.distribution import Distribution
from stratagem.engine.queued import worker_calls
from stratagem.engine.recipe import Recipe
from stratagem.errors import StrategyError
from stratagem.parameters.local.gradient_slots import GradientSlots
from stratagem.parameters.local.shared_variables import Held, LocalVariables, SharedMemoryOfShards
from stratagem.parameters.local.slot_memory import StateMemory, layout_of, make_memory
from stratagem.processes.registry import Registry
from stratagem.variables.optimizer_slices import StateElsewhere, parameters_of, put_step
from stratagem.variables.slices import SplitUpdate

_OVERRIDDEN = ("step", "state_dict", "load_state_dict")


class Updaters(Protocol):
    """The workers, as far as the main program needs them."""

    @property
    def key(self) -> int:
        """By which they know the strategy."""

    @property
    def strategy(self) -> Any:
        """Whose workers they are."""

    def settle(self) -> None:
        """Waits for all steps that they have."""

    def ask_children(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls a function of the library in each, and waits."""


@final
class PlacedVariables:
    """Where variables lie that workers update: once, in memory that all processes share.

    Args:
        memory: What all processes share.
        registry: The names of distributed objects.
    """

    def __init__(self, memory: SharedMemoryOfShards, registry: Registry) -> None:
        self.variables = LocalVariables(memory)
        self.placed: list[Held] = []
        self.pending: Sequence[Any] = ()  # what is about to be distributed
        self._registry = registry

    def place(self, named: Sequence[tuple[int, torch.Tensor]], labels: Mapping[int, str]) -> list[Held]:
        for _, tensor in named:
            if tensor.device.type != "cpu":
                raise StrategyError(
                    f"variables of a parameter server lie on the CPU, wherever workers compute; "
                    f"{labels.get(id(tensor), 'a tensor')!r} is on {tensor.device}, make it on the CPU"
                )
        made = [*self.pending, *self._registry.live().values()]
        tables = {
            id(each.weight)
            for obj in made
            if isinstance(obj, torch.nn.Module)
            for each in obj.modules()
            if isinstance(each, torch.nn.Embedding | torch.nn.EmbeddingBag) and each.sparse
        }
        placed = self.variables.place(named, labels, tables)
        self.placed += placed
        return placed

    def add(self, placed: Held, tensors: Mapping[int, torch.Tensor]) -> None:
        self.variables.add(placed)

    def drop(self, names: Sequence[int]) -> None:
        """Lets go of variables that the program has dropped."""
        self.variables.drop(names)
        self.placed = [held for held in self.placed if held in self.variables.held]

    def forget_state(self) -> None:
        """Nothing is known of workers that is not told to each."""

    def parameters(self) -> list[torch.Tensor]:
        """The parameters that still exist."""
        return [
            tensor
            for held in self.variables.held
            for tensor in held.store.tensors
            if isinstance(tensor, torch.nn.Parameter)
        ]


@final
class MainProgram:
    """Variables and optimizers, as the main program has them.

    Args:
        memory: What all processes share.
        distribution: What was made in scopes.
        workers: Those who update; not kept alive.
        num_slots: For how many workers gradients are collected; 0 if each applies its own.
    """

    def __init__(
        self, memory: SharedMemoryOfShards, distribution: Distribution, workers: Updaters, *, num_slots: int
    ) -> None:
        self.copies = PlacedVariables(memory, distribution.registry)
        self.variables = self.copies.variables
        self.recipe = Recipe(1, kept_on="cpu")
        self.updates: dict[int, SplitUpdate] = {}  # none: workers have them
        self._registry, self._tracker = distribution.registry, distribution.tracker
        self._workers_ref = weakref.ref(workers)
        self._num_slots = num_slots
        self._states: dict[int, tuple[StateMemory, GradientSlots | None]] = {}
        self._signatures: dict[int, Any] = {}
        context.open_runtimes.append(self)

    @property
    def _workers(self) -> Updaters:
        if (workers := self._workers_ref()) is None:
            raise ReferenceError("the strategy of these variables is gone")
        return workers

    def close(self) -> None:
        """Makes objects plain again, with all their state, when no worker is there; tensors keep their memory."""
        if self in context.open_runtimes:
            context.open_runtimes.remove(self)
        self.repair()
        for name, obj in self._registry.live().items():
            if isinstance(obj, torch.optim.Optimizer):
                if name in self._states:
                    self.bring_home(name, obj)
                for overridden in _OVERRIDDEN:
                    obj.__dict__.pop(overridden, None)

    def repair(self) -> None:
        """Undoes what workers that were ended had begun."""
        with self.variables.journal.writing(range(self.variables.memory.num_shards)):
            pass

    def recover(self, worker: int) -> tuple[int, int]:
        """Puts right what a lost worker left; which call it was in, and how many pushes of that it had made."""
        board = self.variables.board
        with self.variables.journal.writing(range(self.variables.memory.num_shards)):
            board.pushing[worker] = board.committed[worker]
        board.num_writes += 1  # its last push may be there and not be counted as one: all look for it
        board.in_flight[worker] = 0
        return int(board.call[worker]), int(board.committed[worker] - board.call_start[worker])

    # What `distribution` asks

    def add_objects(self, objects: dict[int, Any]) -> None:
        for obj in objects.values():
            if isinstance(obj, torch.nn.Module):
                obj.register_state_dict_pre_hook(_settle)  # type: ignore[no-untyped-call]

    def drop(self, names: Sequence[int]) -> None:
        for name in names:
            self._signatures.pop(name, None)
            if name in self._states:
                self.variables.journal.drop(self._states.pop(name)[0].targets)
        self.copies.drop(names)

    def distributed(self) -> list[Any]:
        """The modules and other objects that have been given out."""
        return list(self._registry.live().values())

    @property
    def strategy(self) -> Any:
        """The strategy, for objects that distribute what they make."""
        return self._workers.strategy

    def note_pending(self) -> None:
        """Looks at what is about to be distributed."""
        pending = self.copies.pending = self._tracker.pending()
        if any(isinstance(obj, torch.optim.LBFGS) for obj in pending):
            raise StrategyError(
                "LBFGS computes the loss many times in one step, but a worker pushes gradients once; use another "
                "optimizer"
            )
        for obj in pending:
            if isinstance(obj, torch.nn.Embedding | torch.nn.EmbeddingBag) and obj.sparse and obj.max_norm is not None:
                raise StrategyError(
                    f"a table with sparse=True is not copied to workers, and max_norm={obj.max_norm} would change it "
                    f"while others read it; leave out one of the two"
                )

    # Optimizers

    def states(self) -> dict[int, tuple[StateMemory, GradientSlots | None]]:
        """The shared memory of each optimizer's state, by name."""
        live = self._registry.live()
        return {name: each for name, each in self._states.items() if name in live}

    def bring_up_to_date(self) -> None:
        """Gives optimizers that are new, or have other parameters or options, memory for their state."""
        self.copies.pending = ()
        for name, obj in self._registry.live().items():
            if isinstance(obj, torch.optim.Optimizer):
                signature = [
                    (list(map(id, group["params"])), {key: each for key, each in group.items() if key not in _CHANGING})
                    for group in obj.param_groups
                ]
                if name in self._states and not isinstance(obj.state, StateElsewhere):
                    self._workers.settle()
                    self.take_home(name, obj)  # the program has given it another
                if self._signatures.get(name) != signature:
                    self._give_memory(name, obj)
                    self._signatures[name] = signature

    def _give_memory(self, name: int, optimizer: torch.optim.Optimizer) -> None:
        parameters = parameters_of(optimizer)
        names = [cast(int, self._registry.reference(each)) for each in parameters]
        before = self._states.get(name)
        if before is not None:
            optimizer.state = defaultdict(dict)
        layout = layout_of(optimizer, names, self.variables)
        if before is not None and before[0].slots.parts == layout.parts:
            return
        self._workers.settle()
        states = before[0].slots.read() if before is not None else self._states_at_home(optimizer)
        memory = make_memory(layout, self.variables)
        if before is not None:
            self.variables.journal.drop(before[0].targets)
        self.variables.journal.targets += memory.targets
        memory.slots.write(states)
        optimizer.state = _elsewhere()
        board, locks, num_shards = self.variables.board, self.variables.memory.locks, self.variables.memory.num_shards
        slots = (
            GradientSlots.create(parameters, self._num_slots, board, locks, num_shards + 1) if self._num_slots else None
        )
        self._states[name] = memory, slots
        self._show_state(name, optimizer)
        self._workers.ask_children(worker_calls.take_state, self._workers.key, name, memory, slots)

    def _show_state(self, name: int, optimizer: torch.optim.Optimizer) -> None:
        """Lets the main program's optimizer show and take the state that workers share."""
        kind, held, main = type(optimizer), weakref.ref(optimizer), weakref.proxy(self)

        def gather() -> dict[str, Any]:
            own = cast(torch.optim.Optimizer, held())
            main._workers.settle()
            main.repair()
            main.bring_home(name, own)
            try:
                return kind.state_dict(own)
            finally:
                own.state = _elsewhere()

        def load(state: dict[str, Any]) -> None:
            own = cast(torch.optim.Optimizer, held())
            main._workers.settle()
            kind.load_state_dict(own, state)
            main.take_home(name, own)

        def step(closure: Any = None) -> Any:
            raise StrategyError(
                "optimizer.step() was called outside strategy.run, where there are no gradients; "
                "call it in the function that you run"
            )

        # Schedulers look for these, and warn if nobody has stepped; workers are about to.
        _torch.optimizer_parts.mark_stepped(optimizer)
        optimizer.state_dict = gather  # type: ignore[method-assign]
        optimizer.load_state_dict = load  # type: ignore[method-assign,assignment]
        put_step(optimizer, step)

    def bring_home(self, name: int, optimizer: torch.optim.Optimizer) -> None:
        """Gives the program's optimizer a copy of its state; nobody changes that meanwhile."""
        states = self._states[name][0].slots.read()
        optimizer.state = defaultdict(dict)
        for group in optimizer.param_groups:
            for each in group["params"]:
                own = self._registry.reference(each)
                if own in states:
                    optimizer.state[each] = states[own]

    def take_home(self, name: int, optimizer: torch.optim.Optimizer) -> None:
        """Makes the state that the program's optimizer has that of all workers."""
        self._states[name][0].slots.write(self._states_at_home(optimizer))
        self.variables.board.state_version += 1
        optimizer.state = _elsewhere()

    def _states_at_home(self, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
        """What the program's optimizer has, by the names of variables: their places change when some are added."""
        named = {self._registry.reference(each): state for each, state in optimizer.state.items()}
        return {name: state for name, state in named.items() if name is not None}


def _elsewhere() -> StateElsewhere:
    return StateElsewhere(
        "workers share the state of this optimizer; read it with optimizer.state_dict() and change it with "
        "optimizer.load_state_dict(), between two runs",
        writes=False,
    )


_CHANGING = frozenset({"params", "lr", "initial_lr"})  # which make no difference to what state there is


def settle_all() -> None:
    """Waits for the steps under way of all parameter servers of this program, before it reads variables directly."""
    for runtime in context.open_runtimes:
        if isinstance(runtime, MainProgram):
            runtime._workers.settle()


def _settle(module: torch.nn.Module, *_: Any) -> None:
    """Before the state of a module is taken, steps that change it are done."""
    for runtime in context.open_runtimes:
        if isinstance(runtime, MainProgram) and module in runtime._registry:
            runtime._workers.settle()
