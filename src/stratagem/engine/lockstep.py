"""Drives the replicas of one machine: this process as replica 0 and its children as the others.

Owns their life from the first scope to the close, and the course of one run: bring the children up
to date, call the function everywhere, collect, and choose the error that is shown. Where variables
live is decided by `distribution`; strategies only choose how these parts are put together.
"""

import contextlib
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch

from stratagem import _tree
from stratagem._turns import Turn
from stratagem.collectives.shared_memory import SharedMemory
from stratagem.collectives.signals import PeerAborted, Signals
from stratagem.devices.device import LogicalDevice
from stratagem.devices.serving import hosting
from stratagem.engine import child_calls, context
from stratagem.engine.distribution import GivenTensors
from stratagem.engine.joining import Elsewhere, connect, join
from stratagem.engine.lifecycle import Driver, ReplicaResources
from stratagem.engine.machines import Alone, Workers
from stratagem.engine.notices import NonFinite, SameRows, Stragglers
from stratagem.engine.random_numbers import RandomNumbers
from stratagem.engine.recipe import Call, Recipe, Step
from stratagem.engine.replica import Done, Replica
from stratagem.errors import ReplicaError, StrategyError
from stratagem.objects import per_replica
from stratagem.objects.captured import Captured
from stratagem.objects.step_arguments import StepArguments
from stratagem.objects.tracking import pending_parameters
from stratagem.placement import log, residence, scopes
from stratagem.placement.home import at_home
from stratagem.processes import losses
from stratagem.processes.affinity import pinned
from stratagem.processes.allocator import freed_memory_kept
from stratagem.processes.group import ChildGroup, GroupMember, PendingCall
from stratagem.processes.interrupts import Interrupts
from stratagem.processes.losses import Fatal, raise_first
from stratagem.processes.region import Region
from stratagem.processes.registry import Registry
from stratagem.variables import agreement
from stratagem.variables.aggregation import is_agreed_on


@final
class LocalReplicas(Driver):
    """The replicas of one strategy on this machine.

    Args:
        owner: The strategy, whose name errors show.
        devices: Where the replicas compute.
        recipe: What all replicas have in common.
        stall_timeout_s: How long replicas wait for another before it counts as stalled.
        workers: Those of other machines that train together with this one.
        elsewhere: Where the other replicas are, if not on this machine.
    """

    def __init__(
        self,
        owner: Any,
        devices: Sequence[LogicalDevice],
        recipe: Recipe,
        stall_timeout_s: float,
        workers: Workers | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        super().__init__(owner)
        self.turn = _turn
        self._devices = tuple(devices)
        self._recipe = recipe
        self._workers = workers or Alone()
        self._workers.fatal = Fatal
        self._elsewhere = elsewhere
        self._group = ChildGroup(
            self.distribution.registry,
            stall_timeout_s=stall_timeout_s,
            children=elsewhere.children if elsewhere is not None else None,
        )
        self._captured = Captured(self.distribution.registry, self.distribution.steady)
        self._random_numbers = RandomNumbers(
            recipe.first, apart=recipe.num_machines > 1, on_device=devices[0].torch_device.type != "cpu"
        )
        self._stragglers = Stragglers()
        self._same_rows = SameRows()
        self._num_steps = 0
        self._num_alone = 0  # steps since replicas last agreed
        self._told: agreement.Told = {}  # what other machines will compare at the next meeting
        self._nonfinite = NonFinite(recipe.on_nonfinite)
        self._unwanted: list[tuple[int, int]] = []
        self._kept: Iterable[Any] = ()  # parameters, for the time of a run
        self._join: tuple[Region, Region] | None = None  # what children are given, until they have it
        self.runtime: Replica | None = None
        registry, tracker = self.distribution.registry, self.distribution.tracker
        self._held = ReplicaResources(self.key, self._group, registry, tracker, self._workers, self._started)
        self._hold(self._held)
        if recipe.sync.lets_differ:
            context.readers.add(self)

    @property
    def variables_on(self) -> torch.device:
        return self._devices[0].torch_device

    def begin(self) -> Replica:
        self.require_usable()
        if self.runtime is not None:
            return self.runtime
        size = len(self._devices)
        self._started.enter_context(hosting(self._devices[0]))
        if not self._recipe.kept_on:
            registry, device = weakref.ref(self.distribution.registry), self._devices[0]
            self._started.enter_context(residence.owned(lambda tensor: _place_of(tensor, registry(), device)))
        meeting = Region.create(Signals.num_bytes(size))
        scratch = Region.create(SharedMemory.num_bytes(size))
        meet = self._elsewhere.meet if self._elsewhere is not None else None
        self.runtime = Replica(0, self._recipe, meeting, scratch, self.strategy, self._workers.between, meet)
        self._held.runtime = self.runtime
        self.runtime.signals.reset()
        self.runtime.signals.attend = self._group.watch
        self.distribution.registry.add(0, self.strategy)
        self._join = meeting, scratch
        if size > 1:
            with self._or_end():
                self._group.begin(range(1, size))
        return self.runtime

    def start(self) -> Replica:
        own = self.begin()
        if self._join is None:
            return own
        (meeting, scratch), self._join = self._join, None
        if self._devices[0].memory_limit_bytes is None:
            # Not before: variables leave the memory that they were made in, which then goes back to the system.
            self._started.enter_context(freed_memory_kept())
        if len(self._devices) > 1:
            with self._or_end():
                self._group.start()
                if self._elsewhere is not None:
                    self._elsewhere.join(self._group, self.key, self._recipe, self._devices)
                else:
                    join(self._group, self.key, self._recipe, self._devices, meeting, scratch)
        self._connect(own)
        return own

    def run(self, function: Callable[..., Any], arguments: StepArguments) -> list[Any]:
        """Calls the function in every replica for some steps, and joins what they return.

        Returns:
            What came of each step; of the first of them where another machine has fewer for this call.
        """
        with self.in_turn("strategy.run()", refusal=_ONE_ORDER if self._workers.size > 1 else ""), scopes.recording():
            try:
                return self._run(function, arguments)
            finally:
                self._kept = ()

    def _run(self, function: Callable[..., Any], arguments: StepArguments) -> list[Any]:
        own = self.start()
        self._connect(own)
        # Children have each parameter until they are told that it is gone. Where all count what they have, none goes
        # in this process before the run has ended.
        self._kept = () if self._recipe.sync.sums_gradients else own.copies.ledger.parameters()
        self.distribution.bring_up_to_date(own)
        counts_here = arguments.counts()
        with self.with_workers():
            call = self._next_call(own, counts_here)
        self._num_steps += len(call.steps)
        num_joint_values = context.state.num_joint_values
        self._group.run_number = call.number
        with Interrupts() as interrupts:
            with self.with_workers():
                self._send(call, function, arguments.first(len(call.steps)))
            with self._ended_by_children(own):
                error, done = self._run_here(own, interrupts, call, function, arguments)
                if error is None:
                    error = self.distribution.look_after_run(several=self._recipe.total > 1)
                if error is None:
                    # While the others finish: the state is the same in all, and after a failure it is forgotten.
                    self.distribution.note_state()
                    self._captured.note_run()
                    own.copies.note_state()
                    self._random_numbers.note_run()
                answers = self._collect(interrupts)
            failures = self._group.failures(besides=PeerAborted)
            if error is not None or failures or own.signals.aborted:
                self._forget_results(answers)
                self._captured.forget()
                own.signals.reset()
                self._num_alone = 0  # the next run gives all what replica 0 has
                self._disconnect(own)
                self.distribution.forget_state(own)
                with self.with_workers():
                    is_one_of_several = len(self._devices) > 1 or self._workers.size > 1
                    raise_first(error, failures, own.global_rank if is_one_of_several else None)
            if own.unsettled or any(map(_unsettled, answers)):
                self._publish_written(own)
        try:
            self._num_alone = own.num_alone
            for rank, answer in enumerate(answers, start=own.global_rank + 1):
                log.take_in(answer.placed, rank)
            steps = zip(call.steps, counts_here, done, *map(_done, answers), strict=False)
            joined = []
            for place, (step, counts, *everyones) in enumerate(steps):
                arguments.under_way = place
                self._judge(step, counts, everyones)
                results = list(map(_result, everyones))
                if counts is None and context.state.num_joint_values == num_joint_values:
                    self._same_rows.note(arguments.leaves(), results, updated=everyones[0].updated)
                joined.append(self._joined(results, counts))
            return joined
        except BaseException:
            self._forget_results(answers)
            raise

    def _judge(self, step: Step, counts_here: tuple[int, ...] | None, everyones: Sequence[Done]) -> None:
        """Says what the user must know of a step."""
        skipped = dict.fromkeys(itertools.chain.from_iterable(map(_skipped, everyones)))
        self._nonfinite.judge(list(skipped), updated=everyones[0].updated, run_number=step.number)
        self._stragglers.note(list(map(_busy_s, everyones)), counts_here)

    def _joined(self, results: Sequence[Any], counts_here: tuple[int, ...] | None) -> Any:
        # A result that waits in its replica keeps the strategy; the notice that nobody wants it does not.
        fetch = functools.partial(self._fetch, self.strategy)
        in_turn = functools.partial(self.in_turn, "the fetch of a result")
        return per_replica.join_results(results, counts_here, fetch, self._unwanted.append, in_turn)

    def _next_call(self, own: Replica, counts_here: Sequence[tuple[int, ...] | None]) -> Call:
        try:
            seed, changes = self._random_numbers.new_seed(), self.distribution.changes()
            written = own.take_written()
            if self._workers.size > 1:
                written.told.update(agreement.changed_objects(changes, self.distribution.registry.resolve))
                self._told |= written.told
            if self._recipe.sync.agrees(self._num_alone + len(counts_here) - 1):  # in one of the steps
                counts = self._meet_machines(own, counts_here)
            else:
                counts = [each and self._recipe.counts_alone(each) for each in counts_here]
            sums = self not in context.state.held_back
            steps = tuple(Step(self._num_steps + place, each, sums) for place, each in enumerate(counts, start=1))
            return Call(steps, self._num_alone, self._nonfinite.num_in_a_row, seed, changes, written)
        except BaseException:
            self.distribution.forget_state(own)  # some of what was found may count as told
            raise

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block, runs leave every replica its own gradients."""
        context.state.held_back.append(self)
        try:
            yield
        finally:
            context.state.held_back.remove(self)

    def agree(self) -> None:
        """Brings replicas that train alone to one state, if they have taken a step since they last were."""
        own = self.runtime
        if own is None or not self._num_alone or self.closed_at is not None:
            return
        with self.in_turn("strategy.synchronize()"), self.with_workers(), self._or_end():
            self._group.call_all(child_calls.agree, self.key, own.take_written())
            with contextlib.suppress(PeerAborted):  # then a child says why
                own.sync.agree()
            self._group.collect()
            raise_first(None, self._group.failures(besides=PeerAborted))
        self._num_alone = 0
        own.copies.note_state()

    def before_read(self, module: torch.nn.Module) -> None:
        """Lets replicas agree before the main program reads a module of theirs."""
        if not self._num_alone or context.current_runs or module not in self.distribution.registry or not self.is_home:
            return
        if self._workers.size == 1 and is_agreed_on(module):
            return
        if self._workers.size > 1 and self.closed_at is None:
            raise StrategyError(
                f"replicas have trained alone for {self._num_alone} steps; to read {type(module).__name__}, this "
                f"worker must first average its weights with the other workers; call strategy.synchronize() in every "
                f"worker first"
            )
        self.agree()

    def _meet_machines(
        self, own: Replica, counts_here: Sequence[tuple[int, ...] | None]
    ) -> Sequence[tuple[int, ...] | None]:
        """Begins steps in all machines at once; how many examples each replica of all of them has in each."""
        told, self._told = self._told, {}
        wrote = own.copies.take_wrote()
        counts, writer = self._workers.meet(self._num_steps + 1, counts_here, wrote, told)
        if writer is not None:
            own.copies.take_from(writer, wrote=wrote)
        return counts

    def tell_others(self, error: BaseException) -> None:
        """Tells other machines that this program cannot go on."""
        self._num_alone = 0  # nobody waits for those who are told
        if self.closed_at is None and self.is_home:
            self._workers.fail(error)

    def make_equal(self, tensors: Sequence[torch.Tensor], labels: Mapping[int, str], settings: Sequence[str]) -> None:
        """Lets replicas of all machines start from the same values."""
        with self.with_workers():
            self._workers.make_equal(tensors, labels, settings)

    def with_workers(self) -> contextlib.AbstractContextManager[None]:
        """A block after whose failure other machines, if there are any, cannot go on."""
        return _NOT_AT_ALL if self._workers.size == 1 else self._or_end()

    def _forget_results(self, answers: Sequence[Any]) -> None:
        """Lets replicas drop what they keep for results that nobody will get."""
        for rank, answer in enumerate(answers, start=1):
            done = answer.done if isinstance(answer, child_calls.Answer) else ()
            for leaf in _tree.leaves([each.result for each in done]):
                if isinstance(leaf, per_replica.Remote):
                    self._unwanted.append((rank, leaf.number))

    def _publish_written(self, own: Replica) -> None:
        """Lets all replicas make known what they wrote to after their last update."""
        differ: StrategyError | None = None
        with self._or_end():
            self._group.call_all(child_calls.publish_written, self.key)
            try:
                own.publish_written()
            except StrategyError as error:  # all replicas say the same
                differ = error
            self._group.collect()
            failures = self._group.failures(besides=PeerAborted)
            if differ is None:
                raise_first(None, failures)
        if differ is not None:
            self.distribution.forget_state(own)
            with self.with_workers():
                raise differ

    def _send(self, call: Call, function: Callable[..., Any], arguments: StepArguments) -> None:
        """Sends every child its part of a run; what cannot be sent is an error before anything runs."""
        roots = arguments.args, tuple(arguments.kwargs.values()), arguments.batches
        delivery = self._captured.prepare(function, *roots, tuple(call.changes.values()))
        parts = [arguments.part(rank, sent=True) for rank in range(1, len(self._devices))]
        unwanted = self._unwanted[:]
        del self._unwanted[: len(unwanted)]
        is_new = any(delivery[:2]) or bool(delivery.dropped)
        name = None if is_new else self._captured.reference(function)
        shared: tuple[Any, ...] = (
            self.key,
            call.told(),
            function if name is None else name,
            delivery if is_new else None,
        )
        own = [
            (tuple([number for owner, number in unwanted if owner == rank]), *part.fields())
            for rank, part in enumerate(parts, start=1)
        ]
        if name is None:
            # What children are given now may be in arguments too: there it is the same object.
            shared, own = (), [(*shared, *each) for each in own]
        try:
            given = functools.partial(_given, arguments, parts)
            reference = functools.partial(self.distribution.reference_in_run, given=given)
            self._group.call(child_calls.run, own, self._captured.referring(reference), shared=shared)
        except BaseException as error:
            if any(each.calls for each in self._group.members.values()):  # some have it, or a half of it
                self.end(error)
            self._captured.forget()
            if self.runtime is not None:
                self.distribution.forget_state(self.runtime)  # what the children were not told, they are told next time
            self._unwanted += unwanted
            raise

    @property
    def are_at_work(self) -> bool:
        return False

    def ask_children(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if len(self._devices) == 1:
            return []
        with self.in_turn("a call in all replicas"):
            self._group.call_all(function, *arguments)
            answers = self._collect()
            raise_first(None, self._group.failures())
            return answers

    def _finish(self) -> None:
        self.agree()
        self._held.bring_state_home()

    def _give_up(self, cause: BaseException | None) -> None:
        self._captured.forget()
        if cause is not None:
            self._workers.fail(cause)

    def _connect(self, own: Replica) -> None:
        """Connects the replicas, where they do not share all memory and are not connected yet."""
        if own.copies.link is not None and not own.copies.link.connected:
            with self._or_end(), self._ended_by_children(own):
                lasting = self._started if own.device.type != "cpu" else None  # NCCL needs the file while it lives
                connect(self._group, self.key, own.copies.link, lasting)

    def _disconnect(self, own: Replica) -> None:
        """Ends sums that some replicas have begun and others never will, after a run that failed."""
        link = own.copies.link
        if link is not None and link.connected:
            with contextlib.suppress(ReplicaError):  # the error of the run was the first
                self._group.call_all(child_calls.disconnect, self.key)
                link.disconnect()
                self._collect()

    def _run_here(
        self,
        own: Replica,
        interrupts: Interrupts,
        call: Call,
        function: Callable[..., Any],
        arguments: StepArguments,
    ) -> tuple[BaseException | None, list[Done]]:
        part = arguments.part(0)
        try:
            pinning = pinned(self._devices[0]) if len(self._devices) > 1 else _NOT_AT_ALL
            numbers = self._random_numbers.of_replica(call.seed)
            # Ctrl-C last: what the others change must be put back whole.
            with pinning, numbers, at_home(self._devices[0], self.tenant, own.global_rank), interrupts.allowed():
                return None, own.run(call, function, part, per_replica.kept_result)
        except PeerAborted:
            return None, []
        except Fatal as fatal:
            self._note_torn(own, fatal.error)
            self.end(fatal.error)
            raise fatal.error from None
        except BaseException as error:
            torch.set_grad_enabled(call.surroundings.grad)  # Ctrl-C may come just before a block puts it back
            self._note_torn(own, error)
            self._abort(own)  # also if it came before the function began
            return error, []
        finally:
            interrupts.allow(False)  # Ctrl-C may have come in place of the end of its block
            arguments.under_way = part.under_way

    def _note_torn(self, own: Replica, error: BaseException) -> None:
        """Says so where a call ended in the middle of an update; else all have the state of the last whole step."""
        if own.is_between_steps:
            error.add_note(losses.TORN)

    def _ended_by_children(self, own: Replica) -> "_EndedByChildren":
        """A block in which the failure of a child ends the waits of all.

        The child cannot do it itself before it has begun to run, or where it shares no memory with the others.
        """
        return _EndedByChildren(self._group, lambda *_: self._abort(own))

    def _abort(self, own: Replica) -> None:
        """Ends the waits of all replicas in a run that has failed."""
        own.signals.abort()
        self._group.abort()

    def _collect(self, interrupts: Interrupts | None = None) -> list[Any]:
        with self._or_end(), interrupts.allowed() if interrupts is not None else _NOT_AT_ALL:
            return self._group.collect()

    def _fetch(self, owner: Any, rank: int, number: int) -> Any:
        """Brings a result from its replica; its `owner` only has to live as long as that may be asked for."""
        self.require_usable()
        try:
            return self._group.ask(rank, child_calls.fetch, number)
        except (KeyboardInterrupt, ReplicaError) as error:
            self.end(error)
            raise


@final
class _EndedByChildren:
    """The block of `LocalReplicas._ended_by_children`."""

    __slots__ = ("_group", "_on_failure")

    def __init__(self, group: ChildGroup, on_failure: Callable[[GroupMember, PendingCall], None]) -> None:
        self._group, self._on_failure = group, on_failure

    def __enter__(self) -> None:
        self._group.on_failure = self._on_failure

    def __exit__(self, *_: object) -> None:
        self._group.on_failure = _nothing


def _given(arguments: StepArguments, parts: Sequence[StepArguments]) -> GivenTensors:
    """The tensors that are arguments of a call; those in its parts that are not in it are of batches."""
    everyones = {id(each) for part in parts for each in part.leaves() if isinstance(each, torch.Tensor)}
    return GivenTensors(everyones, everyones - {id(each) for each in arguments.leaves()})


def _place_of(tensor: torch.Tensor, registry: Registry | None, device: LogicalDevice) -> LogicalDevice | None:
    """Where a variable is in the main program."""
    is_variable = registry is not None and tensor in registry
    return device if is_variable or any(tensor is each for each in pending_parameters()) else None


_NOT_AT_ALL = contextlib.nullcontext()
_unsettled, _done = operator.attrgetter("unsettled"), operator.attrgetter("done")  # of answers
_result, _skipped, _busy_s = map(operator.attrgetter, ("result", "skipped", "busy_s"))  # of what came of steps
_ONE_ORDER = "all workers must call run in the same order; call it in one thread"

# Of all strategies: which replica this process is, is known for the process (the backward pass has threads of its own).
_turn = Turn()


def _nothing(_: GroupMember, __: PendingCall) -> None:
    """Outside runs nobody waits for a child but the one who asked it."""
