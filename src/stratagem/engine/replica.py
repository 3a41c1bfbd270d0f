"""One replica of a strategy, in whichever process it is: its variables, its meeting point, its runs.

The controller and every child have one `Replica` for each open strategy. The controller's
(replica 0) is driven by the strategy itself (`lockstep`), a child's by `child_calls`. Here, and
only here, is chosen where variables lie and how gradients travel (`copies`).
"""

import collections
import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, final

import torch

from stratagem import _integrations, _torch, _tree
from stratagem.collectives.between import Between
from stratagem.collectives.collective import Collective
from stratagem.collectives.reconnecting import Meet, OverLink
from stratagem.collectives.shared_memory import SharedMemory
from stratagem.collectives.signals import NUM_LOOKS, PeerAborted, Purpose, Signals
from stratagem.collectives.to_one import ToOne
from stratagem.collectives.two_level import TwoLevel
from stratagem.devices.device import LogicalDevice
from stratagem.engine import backward, context, notices
from stratagem.engine.context import ReplicaContext
from stratagem.engine.recipe import Call, Exchange, Recipe, Step
from stratagem.errors import StrategyError
from stratagem.objects import new_parts, per_replica
from stratagem.objects.step_arguments import StepArguments
from stratagem.placement import home, scopes
from stratagem.processes.allocator import give_back
from stratagem.processes.numbered import numbered
from stratagem.processes.packing import part_of_messages
from stratagem.processes.region import Region
from stratagem.variables import aggregation, buffers
from stratagem.variables.central_updates import CentralUpdate
from stratagem.variables.copies import Copies, Written
from stratagem.variables.optimizer_slices import StateElsewhere, parameters_of, put_step
from stratagem.variables.private import PrivateCopies
from stratagem.variables.shared import SharedCopies
from stratagem.variables.slices import SplitUpdate

# After so many runs with new objects optimizers have made their state; until then freed memory is given back, so
# that only what a step really needs is kept from then on (`processes.allocator`).
_NUM_EARLY_RUNS = 2
_UPDATE_FLAG = 7
_UPDATES, _HAS_UPDATED = 1, 2  # what it says of an update that all have come to: 0 before it and after it
_UNSUMMED_FLAG = 10  # and the next: by turns, since a replica may be one update ahead
_STEP_FLAG = 12  # and the next, likewise: what each replica tells between two steps of a call
_UNSETTLED, _SKIPPED, _UPDATED = 1, 2, 4  # the parts of that
_NUMBER_FLAG = 14
_AS_IT_IS = contextlib.nullcontext()
_PASS_OPTIONS = ("retain_graph", "create_graph", "grad_variables", "inputs")  # of torch.autograd.backward


@part_of_messages
class Done(NamedTuple):
    """What came of one step in one replica.

    Attributes:
        result: What the function returned.
        busy_s: How long it computed.
        skipped: The replicas and parameters whose gradients made it skip an update.
        updated: Whether it made an update.
    """

    result: Any
    busy_s: float
    skipped: list[tuple[int, str]]
    updated: bool


@final
class Replica:
    """One replica of one strategy.

    Args:
        rank: Which replica.
        recipe: What all replicas have in common.
        meeting: Memory for the signals.
        scratch: Memory for the general collective.
        strategy: The strategy, as code in this replica sees it.
        between: How the first replica of each machine exchanges tensors with those of the others.
        meet: Where replicas meet that share no memory; each then has a meeting and a scratch of its own.
    """

    @torch.inference_mode(mode=False)  # its tensors outlive the block in which a program may begin
    def __init__(
        self,
        rank: int,
        recipe: Recipe,
        meeting: Region,
        scratch: Region,
        strategy: Any,
        between: Between | None = None,
        meet: Meet | None = None,
    ) -> None:
        self.rank = rank
        self._strategy = weakref.ref(strategy)  # it ends with the program's last use of it, not with this one
        self.recipe = recipe
        self.global_rank = recipe.first + rank  # which replica this is, among those of all machines
        self._here = slice(recipe.first, recipe.first + recipe.size)
        self.all_counts: tuple[int, ...] | None  # how many examples replicas of all machines have, if that is known
        self.all_counted: list[bool]  # which of them have any, so that their gradients count
        self._begin_step(None)
        self.device: torch.device = strategy.devices[rank].torch_device
        alone = _have_cores_of_their_own(strategy.devices)
        place = (rank, recipe.size) if meet is None else (0, 1)
        self.signals = Signals(meeting, *place, num_looks=NUM_LOOKS if alone else 1)
        self.control = SharedMemory(scratch, self.signals)
        inside: Collective = ToOne(self.control) if recipe.exchange is Exchange.TO_ONE else self.control
        self.collective: Collective = inside
        self.between = between
        if recipe.num_machines > 1:
            self.collective = TwoLevel(inside, between, recipe.machine, recipe.sizes)
        self.copies: Copies
        if recipe.exchange is Exchange.SHARED_MEMORY:
            self.copies = SharedCopies(self)
        else:
            by = "torch" if recipe.exchange is Exchange.TORCH else "collective"
            way = by if recipe.sync.sums_gradients else "alone"
            self.copies = PrivateCopies(self, way=way, meet=meet)
            if meet is not None and self.copies.link is not None:
                self.collective = OverLink(self.copies.link, rank, recipe.size)
        self.sync = recipe.sync.start(self)
        self._given: list[weakref.ref[Any]] = []
        self._num_early_runs = 0
        self.updates: dict[int, SplitUpdate] = {}
        self.run_number = 0  # that of the call; 0 outside of runs
        self.num_alone = 0  # steps since replicas that train alone last agreed
        self._num_skipped = 0  # updates in a row
        self._num_steps = 0  # that others of the call have followed
        self._depth = 0
        self._syncing = True
        self._given_weight: float | None = None
        self._hints = notices.NUM_LOOKS if recipe.total > 1 and self.global_rank == 0 else 0
        self._skipped: list[tuple[int, str]] = []
        self._num_updates = 0
        self._has_summed = False
        self.stepped = self.updated = False
        self.unsettled = False
        self.update_elsewhere: Callable[[torch.optim.Optimizer], None] | None = None
        backward.install()
        context.open_runtimes.append(self)

    @property
    def strategy(self) -> Any:
        """The strategy, as code in this replica sees it."""
        return self._strategy()

    def close(self) -> None:
        """Gives the memory up; tensors that are still used keep theirs."""
        if self in context.open_runtimes:
            context.open_runtimes.remove(self)
        self.copies.close()

    # Distributed objects

    def add_objects(self, objects: dict[int, Any]) -> None:
        """Takes modules, optimizers and the like that have just been distributed."""
        self._num_early_runs = _NUM_EARLY_RUNS
        for name, obj in objects.items():
            self._given.append(weakref.ref(obj))
            _integrations.adapt(obj)
            if self.rank == 0 and self.recipe.sync.lets_differ and isinstance(obj, torch.nn.Module):
                obj.register_state_dict_pre_hook(context.before_read)  # type: ignore[no-untyped-call]
                obj.register_forward_pre_hook(context.before_read)
            if isinstance(obj, torch.optim.Optimizer):
                self._take_over(name, obj)
            if isinstance(obj, torch.nn.Embedding | torch.nn.EmbeddingBag) and obj.max_norm is not None:
                obj.register_forward_pre_hook(_renorm_rows_of_all)

    def distributed(self) -> list[Any]:
        """The modules and other objects that this replica was given and still has."""
        return [obj for reference in self._given if (obj := reference()) is not None]

    def _variables(self) -> Iterator[torch.Tensor]:
        """All tensors that this replica keeps from step to step."""
        for obj in self.distributed():
            if isinstance(obj, torch.nn.Module):
                for tensor in (*obj.parameters(recurse=False), *obj.buffers(recurse=False)):
                    yield tensor
                    if tensor.grad is not None:
                        yield tensor.grad
            elif isinstance(obj, torch.optim.Optimizer) and not isinstance(obj.state, StateElsewhere):
                yield from (each for each in _tree.leaves(list(obj.state.values())) if isinstance(each, torch.Tensor))

    def drop(self, names: Sequence[int]) -> None:
        """Lets go of objects that the program has dropped, and of memory that nothing else is in."""
        for name in names:
            self.updates.pop(name, None)
        self.copies.drop(set(names))

    def _take_over(self, name: int, optimizer: torch.optim.Optimizer) -> None:
        """Puts the replica's own step in the place of the optimizer's."""
        held, whole = weakref.ref(optimizer), type(optimizer).step  # weak: it holds the step, and must go when dropped
        update = None if self.recipe.by_servers else self.copies.split(optimizer, self)
        if update is not None:
            self.updates[name] = update
        elif self.device.type != "cpu" and not self.recipe.kept_on:
            follow_parameters(optimizer)
        once = CentralUpdate(self, torch.device(self.recipe.kept_on)) if self.recipe.kept_on else None

        def step(closure: Any = None) -> Any:
            if not context.current_runs:
                raise StrategyError(
                    "optimizer.step() was called outside strategy.run, where only one replica would take it; "
                    "call it in the function that you run"
                )
            own: Any = held()
            if once is not None:
                once.refuse_inside_another(own)
            _torch.optimizer_parts.mark_stepped(own)
            with self.signals.meeting_for(Purpose.UPDATE), scopes.recording():
                if update is not None:
                    return update.step(closure)
                if closure is not None:
                    if self.recipe.by_servers:
                        raise StrategyError(
                            "parameter servers update once in a step, but an optimizer may call a closure several "
                            "times; call optimizer.step() without a closure, or use one device in each worker task"
                        )
                    if isinstance(own.state, StateElsewhere):
                        own.state = collections.defaultdict(dict)  # with a closure every replica has its own
                    return whole(own, lambda: self._loss_of_all(closure()))
                if once is not None:
                    once.step(own, whole)
                elif self.may_update(parameters_of(own)):
                    return whole(own)
                return None

        put_step(optimizer, step)

    # Between runs

    def take_written(self) -> Written:
        """In the controller: what it wrote to since the last run."""
        written = self.copies.take_written()
        self._note_written(written)
        return written

    def receive(self, written: Written) -> None:
        """In a child: takes what the controller wrote to."""
        self.copies.receive(written)
        self._note_written(written)

    def _note_written(self, written: Written) -> None:
        if written.after_failure:
            self.sync.forget()
        else:
            self.sync.take_written(written.values)

    # A run

    def _begin_step(self, step: Step | None) -> None:
        """Takes a step as the one that is under way; `None` outside of runs."""
        self._step, counts = step, step.counts if step else None
        if counts is not None and not self.meets:
            counts = self.recipe.counts_alone(counts[self._here])
        self.all_counts = counts
        self.all_counted = [True] * self.recipe.total if counts is None else [count > 0 for count in counts]

    @property
    def counted(self) -> list[bool]:
        """The same for those of this machine."""
        return self.all_counted[self._here]

    @property
    def has_examples(self) -> bool:
        """Whether this replica has examples in this step, and not only one that stands in for them."""
        return self.all_counted[self.global_rank]

    @property
    def first_with_examples(self) -> int:
        """The first replica of all machines that has examples in this step; the first of all if none has."""
        return next((rank for rank, counts in enumerate(self.all_counted) if counts), 0)

    @property
    def weight(self) -> float:
        """By which this replica's loss counts."""
        if not self.has_examples:
            return 0.0
        return self.sync.weight if self._given_weight is None else self._given_weight

    @property
    def loss_weight(self) -> float:
        """By which its losses count in what all replicas learn from the step."""
        return self.weight * self.sync.weight_of_update

    @property
    def is_mean(self) -> bool:
        """Whether the weights of all replicas are parts of one."""
        return self._given_weight is not None or self.sync.is_mean

    def weigh(self, number: float) -> float | None:
        """Lets this replica's losses count by a number, such as its tokens, over that of all.

        Every replica must come here.

        Returns:
            The weight that was given before, for `put_back_weight`.
        """
        before, self._given_weight = self._given_weight, self.sync.weigh(number if self.has_examples else 0.0)
        return before

    def put_back_weight(self, before: float | None) -> None:
        """Ends the effect of `weigh`."""
        self._given_weight = before

    @property
    def share(self) -> float:
        """This replica's part of the examples, whatever is done with gradients."""
        counts = self.all_counts
        if counts is None or not (total := sum(counts)):
            return 1.0 / self.recipe.total
        return counts[self.global_rank] / total

    @property
    def num_examples(self) -> float:
        """How many examples of the step this replica has; 1 if nobody knows."""
        return 1.0 if self.all_counts is None else float(self.all_counts[self.global_rank])

    @property
    def syncs(self) -> bool:
        """Whether replicas that train alone agree at the end of the step."""
        return self._step is not None and self.recipe.sync.agrees(self.num_alone)

    @property
    def meets(self) -> bool:
        """Whether replicas of all machines come together in the step, whatever else they do."""
        return self.recipe.num_machines == 1 or self.syncs

    @property
    def compared_step(self) -> int:
        """The number of the step if replicas compare their copies of the parameters at its end; else 0."""
        every, step = self.recipe.check_copies_every, self._step
        if not every or step is None or self.recipe.total == 1:
            return 0
        # Replicas that train alone have the same only when they agree: then for all steps since they last did.
        return step.number if step.number // every > (step.number - 1 - self.num_alone) // every else 0

    def run(
        self, call: Call, function: Callable[..., Any], arguments: StepArguments, keep: Callable[[Any], Any]
    ) -> list[Done]:
        """Calls the user's function as this replica, once for each step. A failure ends the waits of the others.

        Args:
            call: Its steps.
            function: The function.
            arguments: What each step is given.
            keep: Makes of what a step returned what later steps do not change.
        Returns:
            What came of the steps; of fewer than the call has if too many updates were skipped.
        """
        self.run_number, self.num_alone, self._num_skipped = call.number, call.num_alone, call.num_skipped
        self._num_steps = 0
        _torch.compiling.keep_out_of_compiled_code()
        self.signals.enter(call.number)
        context.state.replicas.append(ReplicaContext(self.global_rank, self.collective, self.strategy, replica=self))
        context.current_runs.append(self)
        done: list[Done] = []
        try:
            for place, step in enumerate(call.steps):
                arguments.under_way = place
                self.signals.put_flag(_NUMBER_FLAG, step.number)
                start, waited_s = time.monotonic(), self.signals.waited_s
                result = self._one_step(step, function, *arguments.of(place))
                busy_s = time.monotonic() - start - (self.signals.waited_s - waited_s)
                done.append(Done(keep(result), busy_s, self._take_skipped(), self.updated))
                if self.stepped:
                    self.num_alone = 0 if self.syncs else self.num_alone + 1
                if step is not call.steps[-1] and not self._goes_on(done[-1]):
                    break
            self.signals.leave()
        except BaseException as error:
            # Another replica may have gone on to the next step before this one has noticed that it can.
            arguments.under_way = max(self.signals.flags(_NUMBER_FLAG)) - call.number
            if not isinstance(error, PeerAborted):
                self.signals.abort()
            raise
        finally:
            self._begin_step(None)  # a step leads to what the program has
            self.run_number = 0
            self.signals.enter(0)  # who meets after the run waits for those that have left it
            context.current_runs.pop()
            context.state.replicas.pop()
        return done

    def _goes_on(self, done: Done) -> bool:
        """Ends a step that another of the call follows: what the controller does between two calls, all do here.

        They also wait for each other, so that after a failure all have the state of the step before.

        Returns:
            Whether the next step begins; the same in all replicas.
        """
        told = _UNSETTLED * self.unsettled | _SKIPPED * bool(done.skipped) | _UPDATED * done.updated
        self._num_steps += 1
        with self.signals.meeting_for(Purpose.END):
            everyones = self.signals.exchange_flag(_STEP_FLAG + self._num_steps % 2, told)
            self.copies.settle_before_next(unsettled=any(each & _UNSETTLED for each in everyones))
        if any(each & _SKIPPED for each in everyones):
            self._num_skipped += 1
            return not notices.is_too_many(self._num_skipped, self.recipe.on_nonfinite)
        if everyones[0] & _UPDATED:
            self._num_skipped = 0
        return True

    def _one_step(self, step: Step, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """From the batch to the state after the update: load, compute, agree."""
        self._begin_step(step)
        self._depth, self._syncing, self._given_weight = 0, step.sums, None
        self.signals.put_flag(_UPDATE_FLAG, 0)
        self.stepped = self.updated = self._has_summed = False
        self._skipped, self._num_updates = [], 0  # a failed call may have ended before an update in some
        held = buffers.held_by(self.distributed())
        watched = self._num_early_runs and self.recipe.total > 1
        parts = new_parts.parts_of(self.distributed()) if watched else None
        args, kwargs = per_replica.load_deferred(args), per_replica.load_deferred(kwargs) if kwargs else kwargs
        args, kwargs = per_replica.brought((args, kwargs), self.device, computes_on=self.device)
        # What children print has their number on its way.
        with numbered(self.rank) if self.rank == 0 and self.recipe.size > 1 else _AS_IT_IS:
            result = home.compute(function, args, kwargs, self._variables())
        result = per_replica.brought(result, torch.device("cpu"), computes_on=self.device)
        if parts is not None:
            new_parts.refuse_new(self.distributed(), parts)
        if held:
            buffers.take_in(held)
            self.copies.choose(aggregation.chosen_in(held))
        with self.signals.meeting_for(Purpose.END):
            if not self.stepped:
                self.sum_set_gradients()
            agrees = self.recipe.total > 1 or not self.recipe.sync.sums_gradients
            self.unsettled = agrees and self.sync.end_step()
        if self._num_early_runs:
            self._num_early_runs -= 1
            give_back()
        return result

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block, backward passes keep this replica's own gradients."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def backward(
        self, original: Callable[..., None], tensors: Any, grad_tensors: Any, *args: Any, **kwargs: Any
    ) -> None:
        """A backward pass inside a run; a pass inside a pass is part of the outer one."""
        options = dict(zip(_PASS_OPTIONS, args, strict=False)) | kwargs
        graph, inputs = bool(options.get("create_graph")), options.get("inputs")
        if self._depth or (inputs is not None and not self.copies.ledger.has_any_of(_listed(inputs))):
            original(tensors, grad_tensors, *args, **kwargs)
            return
        with self.signals.meeting_for(Purpose.GRAPH if graph else Purpose.BACKWARD):
            if self._hints and self.is_mean and self._given_weight is None:
                self._hints = notices.about_tokens(_listed(tensors), self._hints)
            syncing = self.sync.begin_pass(syncing=self._syncing, graph=graph)
            self._depth += 1
            try:
                with context.in_pass():
                    original(*self._scaled(tensors, grad_tensors), *args, **kwargs)
            except BaseException:
                self.sync.abandon_pass()
                raise
            finally:
                self._depth -= 1
            self.sync.end_pass(syncing=syncing, graph=graph)
            self._has_summed |= syncing

    def no_contribution(self) -> None:
        """Takes part in a backward pass of the others, and adds nothing to it."""
        with self.signals.meeting_for(Purpose.BACKWARD):
            syncing = self.sync.begin_pass(syncing=self._syncing, counts=False)
            self.sync.end_pass(syncing=syncing)
            self._has_summed |= syncing

    def sum_set_gradients(self, parameters: Sequence[torch.Tensor] = ()) -> None:
        """Sums gradients that the program has set, if there are any; every replica must come here.

        Args:
            parameters: Those whose gradients are about to be used. Where no backward pass has summed any, replicas
                ask each other: one may have set a gradient where another has none.
        """
        ledger = self.copies.ledger
        asks = self.recipe.sync.sums_gradients and not self._has_summed and ledger.has_any_of(parameters)
        is_set = ledger.has_foreign()
        if asks:
            with self.signals.meeting_for(Purpose.SET_GRADIENTS):
                flag = self._tell_unsummed(is_set)
                self.signals.barrier()
                is_set = self._is_any(any(self.signals.flags(flag)))
        if is_set:
            self._sum_rest()

    def _sum_rest(self) -> None:
        with self.signals.meeting_for(Purpose.SET_GRADIENTS):
            self.copies.ledger.sum_rest()

    def _loss_of_all(self, loss: Any) -> Any:
        """What a closure returned, of the global batch: a search along a line must end alike in all replicas."""
        if loss is None:
            return None
        value = float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss)
        own = value * self.weight if self.has_examples else 0.0
        total = self.collective.all_reduce(torch.tensor(own, dtype=torch.float64))
        return total.to(loss.dtype if isinstance(loss, torch.Tensor) else torch.get_default_dtype())

    def _scaled(self, tensors: Any, grad_tensors: Any) -> tuple[Any, Any]:
        """The start of the backward pass, times this replica's part of the global batch."""
        weight = self.weight
        if weight == 1.0:
            return tensors, grad_tensors
        outputs = _listed(tensors)
        if grad_tensors is None and all(output.numel() == 1 and output.requires_grad for output in outputs):
            # Not by a gradient to begin with: to compare its shape, torch would load sympy, a quarter of a second.
            with torch.enable_grad():
                return [output * weight for output in outputs], None
        given = (grad_tensors,) if grad_tensors is None or isinstance(grad_tensors, torch.Tensor) else grad_tensors
        starts = [*given, *[None] * (len(outputs) - len(given))]
        return tensors, [
            (torch.full_like(output, weight) if output.numel() == 1 else None) if start is None else start * weight
            for output, start in zip(outputs, starts, strict=True)
        ]

    def may_update(self, parameters: Iterable[torch.Tensor], *, checked: bool = False) -> bool:
        """Whether the gradients of these parameters are fit to be applied; the same in every replica.

        Args:
            parameters: All that an update is about to change.
            checked: Whether their gradients are known to be finite.
        """
        parameters = list(parameters)
        flag = self._tell_unsummed(not self.copies.ledger.are_summed(parameters))
        if self.recipe.sync.sums_gradients:
            self.signals.barrier()
        return self._judge_update(parameters, flag, checked=checked)

    def _tell_unsummed(self, is_unsummed: bool) -> int:
        """Tells the others, at the next meeting, whether this replica has gradients that are not summed yet."""
        flag, self._num_updates = _UNSUMMED_FLAG + self._num_updates % 2, self._num_updates + 1
        self.signals.put_flag(flag, int(is_unsummed))
        return flag

    def _judge_update(self, parameters: Sequence[torch.Tensor], flag: int, *, checked: bool) -> bool:
        self.stepped = True
        if not self.recipe.sync.sums_gradients:
            if not self.has_examples:
                return False  # it trains alone, and has nothing to learn from
        elif self._is_any(any(self.signals.flags(flag))):
            # All do so together: one replica may have set a gradient where another has none.
            self._sum_rest()
            checked = False
        if checked or self.recipe.on_nonfinite == "apply" or self.sync.before_update(parameters):
            self.updated = True
            return True
        self._skipped = self.copies.ledger.culprits
        return False

    def _is_any(self, is_unsummed: bool) -> bool:
        """Whether replicas of any machine have gradients that are not summed.

        Machines ask each other only if no backward pass of the step has summed any: then the step may set them.
        """
        if self.recipe.num_machines == 1 or self._has_summed:
            return is_unsummed
        return bool(self.collective.all_reduce(torch.tensor([float(is_unsummed)])))

    def note_step(self) -> None:
        """Counts the step as one that trains."""
        self.stepped = True

    @property
    def skipped(self) -> bool:
        """Whether an update of the step was left out because of gradients that are not finite."""
        return bool(self._skipped)

    def split_update(self, parameters: Iterable[torch.Tensor], *, checked: bool = False) -> "_SplitBlock":
        """Around an update of which each replica does its own part, seen by all afterwards.

        Args:
            parameters: All that are updated.
            checked: Whether their gradients are known to be finite.
        Returns:
            A block, which gives whether to update.
        """
        return _SplitBlock(self, parameters, checked)

    def begin_split(self, parameters: list[torch.Tensor], *, checked: bool) -> bool:
        """Waits until all replicas have come to an update; whether to make it."""
        self.signals.put_flag(_UPDATE_FLAG, _UPDATES)
        flag = self._tell_unsummed(not self.copies.ledger.are_summed(parameters))
        try:
            has_met = self.copies.publish_written()
        except StrategyError:  # all say the same, and none has begun
            self.signals.put_flag(_UPDATE_FLAG, 0)
            raise
        if not has_met and self.recipe.sync.sums_gradients:
            self.signals.barrier()
        may_update = self._judge_update(parameters, flag, checked=checked)
        if not may_update:
            self.signals.put_flag(_UPDATE_FLAG, _HAS_UPDATED)
        return may_update

    def end_split(self) -> None:
        """Waits until all have made their parts of an update."""
        self.signals.put_flag(_UPDATE_FLAG, _HAS_UPDATED)
        self.signals.barrier()
        self.signals.put_flag(_UPDATE_FLAG, 0)

    @property
    def is_between_steps(self) -> bool:
        """Whether a call may have ended while replicas updated parameters, so that some are of the step and some not.

        One that is not in the update has not come to it, so that none has begun, or has left it, so that all are done.
        """
        flags = self.signals.flags(_UPDATE_FLAG)
        return _UPDATES in flags and 0 not in flags

    def _take_skipped(self) -> list[tuple[int, str]]:
        """The replicas and parameters whose gradients made this step skip an update."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def publish_written(self) -> None:
        """Makes parameters that the program changed in place, the same in every replica, everyone's."""
        self.copies.publish_written()

    @property
    def writes_once(self) -> bool:
        """Whether variables lie once: what replica 0 writes to them, all have when it is published."""
        return self.recipe.exchange is Exchange.SHARED_MEMORY

    def note_agreed(self, parameters: Sequence[torch.Tensor]) -> None:
        """Takes what all replicas have just written to parameters, each the same, as what they agree on."""
        if not self.recipe.sync.sums_gradients:
            chosen = {id(each) for each in parameters}
            self.sync.take_written([name for name, each in self.copies.ledger.parameters() if id(each) in chosen])

    def share_from_first(self, parameters: Sequence[torch.Tensor]) -> None:
        """Gives all replicas what replica 0 alone has written to parameters; every one must come here."""
        self.copies.share_from_first(parameters)


@final
class _SplitBlock:
    """The block of `Replica.split_update`."""

    __slots__ = ("_checked", "_meeting", "_replica", "_updated")

    def __init__(self, replica: Replica, parameters: Iterable[torch.Tensor], checked: bool) -> None:
        self._replica, self._updated, self._checked = replica, parameters, checked
        self._meeting = replica.signals.meeting_for(Purpose.UPDATE)

    def __enter__(self) -> bool:
        self._meeting.__enter__()
        try:
            return self._replica.begin_split(list(self._updated), checked=self._checked)
        except BaseException:
            self._meeting.__exit__(None, None, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._replica.end_split()
        finally:
            self._meeting.__exit__(None, None, None)


def _listed(tensors: Any) -> tuple[Any, ...]:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)


@torch.no_grad()
def _renorm_rows_of_all(module: Any, args: tuple[Any, ...]) -> None:
    """A hook of embeddings with `max_norm`: limits the rows that any replica is about to use, alike in all."""
    if not context.current_runs or not args or module.max_norm is None:
        return
    replica = context.current_runs[-1]
    used = args[0] if replica.has_examples else args[0][:0]
    indices = torch.cat(replica.collective.all_gather(used.reshape(-1)))
    torch.embedding_renorm_(module.weight, indices, module.max_norm, module.norm_type)


def _have_cores_of_their_own(devices: Sequence[LogicalDevice]) -> bool:
    cores = [core for device in devices for core in device.cores]
    return all(device.cores for device in devices) and len(set(cores)) == len(cores)


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Moves what an optimizer remembers of its parameters to where they are now."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[key] = value.to(parameter.device)
