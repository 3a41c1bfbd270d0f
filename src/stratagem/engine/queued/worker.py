"""One worker of a parameter server on this machine, in its process.

Owns what a step means there: its values are pulled, its gradients stay its own until
`optimizer.step()` pushes them, and what it changes in buffers is pushed with them. Offers what
`distribution` and `child_calls` need of a replica.
"""

import dataclasses
import functools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast, final

import torch

from stratagem import _torch, _tree
from stratagem.collectives.one_replica import OneReplica
from stratagem.engine import context
from stratagem.engine.context import ReplicaContext
from stratagem.errors import StrategyError
from stratagem.objects import new_parts, per_replica, state_diff
from stratagem.parameters.consistency import Consistency
from stratagem.parameters.local.gate import Gate
from stratagem.parameters.local.gradient_slots import GradientSlots, Round
from stratagem.parameters.local.journal import Saving, joined
from stratagem.parameters.local.own_writes import OwnWrites
from stratagem.parameters.local.push import SharedUpdate, as_gradient, is_finite_gradient, note_staleness
from stratagem.parameters.local.shared_variables import OTHER, Held, LocalVariables, SharedMemoryOfShards
from stratagem.parameters.local.slot_memory import StateMemory
from stratagem.placement import home, scopes
from stratagem.placement.records import PlacementRecord
from stratagem.processes.allocator import give_back
from stratagem.processes.child import this_child
from stratagem.variables import aggregation, buffers
from stratagem.variables.optimizer_slices import StateElsewhere, parameters_of, put_step, step_with_hooks

_FRESH_S = 1e-3  # for so long after a pull another one would bring next to nothing
_NUM_EARLY_STEPS = 2
_PATIENCE = 0.9  # of stall_timeout_s: who waits for others says so before it counts as stalled itself
_STATE_WORDS = "workers share the state of an optimizer, so a step cannot read or load it; do that in the main program"
_Changes = tuple[list[tuple[Held, torch.Tensor]], list[int]]


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """What all workers of a strategy have in common.

    Args:
        consistency: How far they may be apart.
        on_nonfinite: What a gradient that is not finite does: `skip`, `raise` or `apply`.
        torn_reads: Whether they compute with values that others may be changing.
        torn_pushes: Whether a push of a worker that is killed meanwhile may stay half done.
        stall_timeout_s: How long a step may take.
    """

    consistency: Consistency
    on_nonfinite: str
    torn_reads: bool
    torn_pushes: bool
    stall_timeout_s: float


class StepCall(NamedTuple):
    """What a worker must know of one step, besides the function.

    Args:
        number: Which call of this worker, from 1.
        seed: New seed of random numbers, if any.
        changes: What the main program changed in distributed objects, besides tensors.
        surroundings: What torch and the process are set to around the step.
        version: What the main program may have seen by now: the step computes with that or with newer values.
        num_pushed: How many pushes of this step an earlier worker made before it was lost.
        round: For synchronous training: which step, and this worker's examples in it.
    """

    number: int
    seed: int | None
    changes: state_diff.Snapshot
    surroundings: tuple[Any, ...]
    version: int
    num_pushed: int = 0
    round: Round | None = None


class StepAnswer(NamedTuple):
    """What comes back from a step.

    Args:
        skipped: The parameter whose gradient was not finite.
        updated: Whether it has made an update.
        result: What the function returned.
        scheduled: The scheduler, or the options of an optimizer, that it has changed in its own copy.
        placed: Where its operations ran, if somebody listens.
    """

    skipped: str
    updated: bool
    result: Any
    scheduled: str = ""
    placed: Sequence[PlacementRecord] = ()


@final
class WorkerCopies:
    """A worker's copies of the variables, and what its steps write to in them.

    Args:
        memory: The variables.
        torn_reads: Whether it computes with values that others may be changing.
        device: Where its copies are.
    """

    def __init__(self, memory: SharedMemoryOfShards, *, torn_reads: bool, device: torch.device) -> None:
        self.variables = LocalVariables(memory, torn_reads=torn_reads, device=device)
        self.writes = OwnWrites()

    def build(self, held: Held) -> dict[int, torch.Tensor]:
        """This worker's tensors of what was distributed, by name."""
        return self.variables.build(held)

    def add(self, held: Held, tensors: Mapping[int, torch.Tensor]) -> None:
        """Takes tensors that it has built."""
        self.variables.add(held)
        if held.kind != OTHER and self.variables.has_copy(held):
            self.writes.add(tensors)


@final
class WorkerRuntime:
    """One worker.

    Args:
        worker: Its number.
        settings: What all have in common.
        memory: The variables.
        strategy: The strategy, as code in a step sees it.
    """

    def __init__(self, worker: int, settings: WorkerSettings, memory: SharedMemoryOfShards, strategy: Any) -> None:
        self.worker = worker
        self.shared_settings = settings
        self._device: torch.device = strategy.device
        self.copies = WorkerCopies(memory, torn_reads=settings.torn_reads, device=self._device)
        self.variables, self._writes = self.copies.variables, self.copies.writes
        self.updates: dict[int, Any] = {}
        self._strategy = strategy
        self._board = memory.board
        self._given: list[weakref.ref[Any]] = []
        self._pulled_at = 0.0
        self._to_skip = 0
        self._round: Round | None = None
        self._wait_until = 0.0
        self._in_step = False
        self._num_early_steps = 0
        self._skipped, self._updated = "", False
        self._gate = (
            Gate(settings.consistency, worker, memory.board, memory.locks, memory.num_shards + 1)
            if settings.consistency.can_wait
            else None
        )

    # Distributed objects

    def add_objects(self, objects: dict[int, Any]) -> None:
        self._num_early_steps = _NUM_EARLY_STEPS
        for obj in objects.values():
            self._given.append(weakref.ref(obj))
            if isinstance(obj, torch.nn.Embedding | torch.nn.EmbeddingBag) and obj.sparse:
                self._read_under_lock(obj)
            elif isinstance(obj, torch.nn.Embedding | torch.nn.EmbeddingBag) and obj.max_norm is not None:
                weight = this_child().registry.reference(obj.weight)  # type: ignore[union-attr]
                self.variables.watch([cast(int, weight)])  # it writes to the rows that it looks up

    def drop(self, names: Sequence[int]) -> None:
        """Lets go of objects that the program has dropped, and of memory that nothing else is in."""
        for name in names:
            if name in self.updates:
                self.variables.journal.drop(self.updates.pop(name).targets)
            self._writes.drop(name)
        self.variables.drop(names)

    def take_state(self, name: int, memory: StateMemory, slots: GradientSlots | None) -> None:
        """Takes the shared state of an optimizer: from now on its step is a push."""
        optimizer = this_child().registry.resolve(name)  # type: ignore[union-attr]
        if name in self.updates:
            self.variables.journal.drop(self.updates[name].targets)
        self.variables.journal.targets += memory.targets
        rate_of = self.shared_settings.consistency.rate_of
        update = SharedUpdate(optimizer, memory, self.variables, self.worker, rate_of)
        self.updates[name] = update
        push = functools.partial(self._step_of, weakref.ref(optimizer), update, slots)
        put_step(optimizer, push)
        optimizer.state = StateElsewhere(_STATE_WORDS, writes=False)
        optimizer.load_state_dict = optimizer.state.refuse

    def _read_under_lock(self, module: torch.nn.Module) -> None:
        """Lets a table be read only while nobody changes it."""
        child, forward = this_child(), type(module).forward
        name = child.registry.reference(module.weight)  # type: ignore[union-attr]
        held, own, journal = self.variables.find(cast(int, name))[0], weakref.ref(module), self.variables.journal
        if self.shared_settings.torn_reads or self.variables.has_copy(held):
            return

        @functools.wraps(forward)
        def locked(*args: Any, **kwargs: Any) -> Any:
            with journal.reading(held.shard):
                return forward(own(), *args, **kwargs)

        module.__dict__["forward"] = locked

    # A step

    def execute(
        self, call: StepCall, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepAnswer:
        """Calls the user's function as this worker."""
        board, worker = self._board, self.worker
        board.call_start[worker] = board.committed[worker]
        board.call[worker] = call.number
        self._to_skip, self._round = call.num_pushed, call.round
        self._wait_until = time.monotonic() + _PATIENCE * self.shared_settings.stall_timeout_s
        self._skipped, self._updated = "", False
        self._begin(call.version)
        share = call.round.share if call.round is not None else 1.0
        context.state.replicas.append(ReplicaContext(0, OneReplica(), self._strategy, self._update, share=share))
        self._in_step = True
        given = [obj for reference in self._given if (obj := reference()) is not None]
        held, schedule = buffers.held_by(given), _schedule_of(given)
        parts = new_parts.parts_of(given) if self._num_early_steps else None
        try:
            given_args = per_replica.load_deferred((args, kwargs))
            args, kwargs = per_replica.brought(given_args, self._device, computes_on=self._device)
            result = _tree.map_only(torch.Tensor, _as_it_is_now, home.compute(function, args, kwargs, ()))
            if parts is not None:
                new_parts.refuse_new(given, parts)
            buffers.take_in(held)
            self.variables.choose(aggregation.chosen_in(held))
            self._push_rest()
        except BaseException:
            self._forget()
            raise
        finally:
            self._in_step = False
            board.in_flight[worker] = 0
            context.state.replicas.pop()
        if self._num_early_steps:
            self._num_early_steps -= 1
            give_back()
        changed = [old[0] for old, new in zip(schedule, _schedule_of(given), strict=True) if old != new]
        scheduled = changed[-1] if changed else ""  # a scheduler is made after its optimizer
        return StepAnswer(self._skipped, self._updated, result, scheduled)

    def _forget(self) -> None:
        """Drops what a step that has failed did to this worker's copies."""
        self.variables.forget()
        self._pulled_at = 0.0
        self._writes.settle()

    def _begin(self, version: int) -> None:
        if self._gate is not None:
            self._gate.enter()
        is_old = time.monotonic() - self._pulled_at > _FRESH_S or self.variables.is_behind(version)
        if is_old or self._gate is not None:
            self._pull()
        else:
            self._board.in_flight[self.worker] = self.variables.version + 1

    def _pull(self) -> None:
        self.variables.pull()
        self._note_pull()

    def _note_pull(self) -> None:
        self._pulled_at = time.monotonic()
        self._board.in_flight[self.worker] = self.variables.version + 1

    def _step_of(
        self, held: "weakref.ref[Any]", update: SharedUpdate, slots: GradientSlots | None, closure: Any = None
    ) -> Any:
        """What `optimizer.step()` does in a worker."""
        if not self._in_step:
            raise StrategyError(
                "optimizer.step() was called outside strategy.run; call it in the function that you run"
            )
        optimizer: Any = held()
        _torch.optimizer_parts.mark_stepped(optimizer)
        return step_with_hooks(optimizer, functools.partial(self._push_gradients, optimizer, update, slots), closure)

    @scopes.recording()
    def _push_gradients(self, optimizer: Any, update: SharedUpdate, slots: GradientSlots | None) -> None:
        parameters = parameters_of(optimizer)
        gradients = [None if each.grad is None else as_gradient(each.grad) for each in parameters]
        may_push = self._may_push(parameters, gradients)
        if self._round is not None and slots is not None:
            # Also who has nothing to give: else others would wait for it, and take its next update for this one.
            self._push_in_round(update, gradients if may_push else [None] * len(gradients), slots, self._round)
        elif may_push:
            self._push(update, gradients)
        if may_push:
            self._updated = True
            self._writes.note_update(each for each in parameters if each.grad is not None)

    def _may_push(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> bool:
        if not _has_any(gradients):
            return False
        if self._round is None and self._was_pushed():
            return False
        if self.shared_settings.on_nonfinite == "apply":
            return True
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None and not is_finite_gradient(gradient):
                name = this_child().registry.reference(parameter)  # type: ignore[union-attr]
                self._skipped = self.variables.find(cast(int, name))[1].label
                return False
        return True

    def _was_pushed(self) -> bool:
        """Whether the worker that had this step made the next push before it was lost: what led to it is dropped."""
        if not self._to_skip:
            return False
        self._to_skip -= 1
        self._forget()
        self._pull()
        return True

    def _update(self, function: Callable[[], None]) -> None:
        """A push without an optimizer of torch: a function changes the newest values, with nobody else meanwhile."""
        shared = self.shared_settings
        if self._round is not None or shared.torn_reads or shared.consistency.rate_of is not None:
            raise StrategyError(
                "backup workers, rate_of and torn_reads work with torch optimizers only; leave them out for Keras"
            )
        if not self._was_pushed():
            change = functools.partial(self._change_by, function)
            self._gate.push(change) if self._gate is not None else change()
            self._note_pull()
            self._updated = True

    def _change_by(self, function: Callable[[], None]) -> None:
        variables, shards = self.variables, list(range(self.variables.memory.num_shards))
        with variables.journal.writing(shards):
            staleness = max(0, self._board.version - variables.version)
            written = self._written()
            variables.refresh(written)
            function()
            self._write(shards, self._changes(), None, [], staleness)
            note_staleness(self._board, self.worker, staleness)
        variables.watch(written)  # not what the function wrote: that was to the newest values

    def _push(self, update: SharedUpdate | None, gradients: Sequence[torch.Tensor | None]) -> None:
        """Applies gradients, and with them what this worker wrote to buffers and parameters; then it is up to date."""
        if self._gate is not None:
            self._gate.push(lambda: self._change(update, gradients))
        else:
            self._change(update, gradients)
        self._note_pull()

    def _change(
        self, update: SharedUpdate | None, gradients: Sequence[torch.Tensor | None], closes_round: int = 0
    ) -> None:
        variables, changes = self.variables, self._changes()
        shards = {held.shard for held, _ in changes[0]} | {variables.find(name)[0].shard for name in changes[1]}
        if update is not None:
            shards |= set(update.shards_of(gradients))
        with variables.journal.writing(sorted(shards)):
            staleness = max(0, self._board.version - variables.version)
            self._write(sorted(shards), changes, update, gradients, staleness, closes_round)
        variables.watch(changes[1])
        for shard in set(range(variables.memory.num_shards)) - shards:
            with variables.journal.reading(shard):
                variables.copy_shard(shard)

    def _write(
        self,
        shards: Sequence[int],
        changes: _Changes,
        update: SharedUpdate | None,
        gradients: Sequence[torch.Tensor | None],
        staleness: int,
        closes_round: int = 0,
    ) -> None:
        """Writes a push to shards, which the caller holds, and takes the newest values from them."""
        variables, board = self.variables, self._board
        buffers, written = changes
        plan: list[Saving] = [(held.target, (0, len(held.target.live))) for held, _ in buffers]
        for name in written:
            held, placement = variables.find(name)
            plan.append((held.target, (placement.offset, placement.offset + placement.numel)))
        if update is not None:
            plan += update.savings(gradients)
        with variables.journal.change(shards, self.worker, joined(plan)):
            variables.write_own(written)
            if update is not None:
                update.apply(gradients, staleness)
            variables.add_buffers(buffers)
            variables.note_change(target for target, _ in plan)
            if closes_round:
                board.closed_round = closes_round
        with variables.memory.locks.held(variables.memory.num_shards):
            version = board.version = board.version + 1
        for shard in shards:
            variables.copy_shard(shard)
        variables.version = version
        self._writes.settle(written)

    def _push_in_round(
        self, update: SharedUpdate, gradients: Sequence[torch.Tensor | None], slots: GradientSlots, own: Round
    ) -> None:
        """Gives gradients for a step of all workers; who completes it applies their mean."""

        def apply(means: Sequence[torch.Tensor | None], number: int) -> None:
            self._change(update if _has_any(means) else None, means, number)

        self._round = own.following()
        slots.put(self.worker, own, gradients)
        if slots.arrive(self.worker, own if _has_any(gradients) else own._replace(weight=0), apply):
            slots.wait(own, self._wait_until)
        self._push_rest()  # what the pull would undo; who applied the mean has pushed it with that
        self._pull()

    def _written(self) -> list[int]:
        """The parameters that the step has written to itself."""
        self._writes.note(self.variables.bring_back())
        return self._writes.names()

    def _changes(self) -> _Changes:
        """The buffers and parameters that the step has written to itself."""
        written = self._written()
        return self.variables.changed_buffers(), written

    def _push_rest(self) -> None:
        """Makes known what was written to buffers and parameters after the last update."""
        if (self._written() or self.variables.changed_buffers()) and not self._was_pushed():
            self._push(None, [])


def _schedule_of(given: Sequence[Any]) -> list[tuple[str, Any]]:
    """How far schedulers are, each with its name; what a step itself sets, it may have been told."""
    return [
        (type(each).__name__, getattr(each, "last_epoch", None))  # a chain of others has none
        for each in given
        if isinstance(each, torch.optim.lr_scheduler.LRScheduler)
    ]


def _has_any(gradients: Sequence[torch.Tensor | None]) -> bool:
    return any(each is not None for each in gradients)


def _as_it_is_now(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to("cpu", copy=True)
