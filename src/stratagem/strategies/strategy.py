"""What every strategy offers: a scope, runs on all replicas, reductions, distributed data.

Owns the public contract and the parts that are the same for all. Where variables live and when
replicas agree is each strategy's own.
"""

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, final

import torch

from stratagem import _integrations, _tensorflow_names, _torch, _tree, inputs
from stratagem._checks import StaysHere, require_count
from stratagem._parallel_wrappers import advise
from stratagem.cluster.resolvers.resolver import Resolver
from stratagem.devices.device import LogicalDevice
from stratagem.engine import context
from stratagem.engine.strategy_in_replica import no_sync_here
from stratagem.errors import PreemptedExit, StrategyError
from stratagem.objects import per_replica
from stratagem.objects.per_replica import PerReplica
from stratagem.objects.step_arguments import StepArguments
from stratagem.processes.losses import leave_users_frames
from stratagem.processes.numbered import plain
from stratagem.strategies import run_arguments
from stratagem.variables.optimizer_slices import in_every_replica


class Strategy(StaysHere, ABC):
    """The base of all strategies: it decides where variables live and when replicas agree.

    Example:
        >>> import stratagem as sg
        >>> isinstance(sg.OneDeviceStrategy("cpu:0"), Strategy)
        True
    """

    @property
    @abstractmethod
    def devices(self) -> tuple[LogicalDevice, ...]:
        """The devices of the replicas, in the order of the replicas."""

    def scope(self) -> contextlib.AbstractContextManager[Self]:
        """Returns a block for `with`: modules and optimizers that are made in it are distributed.

        The returned object may be entered many times.
        """
        context.require_controller(f"{type(self).__name__}.scope()")
        self.require_usable()
        return _Scope(self._opened)

    @abstractmethod
    def _opened(self) -> contextlib.AbstractContextManager[Self]:
        """A scope that can be entered once."""

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | inputs.Pass = (),
        kwargs: dict[str, Any] | None = None,
        *,
        num_steps: int | None = None,
    ) -> Any:
        """Calls `fn` in every replica, each with its part of distributed values.

        Args:
            fn: The function. In each replica it uses the replica's own copy of distributed objects.
            args: The arguments of `fn`. Of a value that `distribute` made, each replica gets its part.
            kwargs: The keyword arguments of `fn`, likewise.
            num_steps: Makes this number of steps in one call, so that replicas do not wait for the main program after
                each step. Give an iterator over distributed data: `args=iterator` if its batches have one part for
                each argument of `fn`, `args=(iterator,)` if `fn` takes the whole batch as one argument. Each step uses
                the next batch; other arguments are the same in all steps. The call ends early when the data ends. The
                result equals that of single runs, to the last bit. If a step fails, the steps before it stay done.
        Returns:
            What `fn` returned, with a `PerReplica` in the place of each value. With `num_steps`, a list with the
            result of each step. The list is shorter at the end of the data and empty after it, so that
            `while results := strategy.run(step, args=(iterator,), num_steps=16)` uses all batches.
        Example:
            >>> import stratagem as sg
            >>> strategy = sg.OneDeviceStrategy("cpu:0")
            >>> batches = iter(strategy.distribute([torch.ones(2), torch.ones(3), torch.ones(4)]))
            >>> strategy.run(len, args=(batches,), num_steps=2)
            [2, 3]
            >>> strategy.run(len, args=(batches,), num_steps=2), strategy.run(len, args=(batches,), num_steps=2)
            ([4], [])
        """
        context.require_controller("strategy.run()")
        self.require_usable()
        self.require_call(fn, args, kwargs, num_steps)
        fn = in_every_replica(fn)
        if num_steps is None:
            given = tuple(args)
            try:
                return self._run(fn, StepArguments(given, dict(kwargs or {})))[0]
            except BaseException as error:
                if isinstance(error, TypeError) and (misfit := run_arguments.misfit(fn, given, kwargs)):
                    error.add_note(misfit)
                advise(error)
                leave_users_frames(error)
                raise
        if not isinstance(args, inputs.Pass) and (misfit := run_arguments.misfit(fn, args, kwargs)):
            raise StrategyError(misfit)
        try:
            return run_steps(self._run, fn, inputs.Drawing(args, dict(kwargs or {}), num_steps), self._most_steps)
        except BaseException as error:
            advise(error)
            leave_users_frames(error)
            raise

    @abstractmethod
    def _run(self, fn: Callable[..., Any], arguments: StepArguments) -> list[Any]:
        """Calls a function for some steps, of which the first at least are done when this returns; their results."""

    @property
    def _most_steps(self) -> int:
        """How many steps are given to `_run` together."""
        return 1

    @abstractmethod
    def close(self) -> None:
        """Ends the replica processes. Afterwards the model is a plain model with the trained weights."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that work on one global batch."""
        return len(self.devices)

    @property
    def device(self) -> torch.device:
        """The torch device of the replica in this process."""
        return self.devices[self.global_rank - self.replicas_here.start].torch_device

    @property
    def world_size(self) -> int:
        """The number of replicas; PyTorch's name for `num_replicas_in_sync`."""
        return self.num_replicas_in_sync

    @property
    def global_rank(self) -> int:
        """The number of this replica, from 0; PyTorch's name for it. In the main program it is 0."""
        replica = context.current_replica()
        return replica.replica_id_in_sync_group if replica else self.replicas_here.start

    @property
    def replicas_here(self) -> range:
        """The numbers of the replicas that this program drives."""
        return range(len(self.devices))

    @property
    def input_pipeline(self) -> tuple[int, int]:
        """How many programs read data for one training, and the number of this one."""
        return 1, 0

    _resolver: Resolver | None = None

    @property
    def cluster_resolver(self) -> Resolver | None:
        """The resolver that knows all tasks of the cluster and which one this is.

        Strategies for several machines always have one; in a program that runs alone its `task_type` and `task_id` are
        `None`. `None` for strategies of a single machine.
        """
        return self._resolver

    @property
    def is_chief(self) -> bool:
        """Whether this program does what must be done once for all programs, such as saving and logging."""
        return True

    @property
    def is_in_step(self) -> bool:
        """Whether programs that train together take all steps together; else each has results of its own."""
        return True

    def draw_alike(self) -> None:  # most have nobody else
        """Lets all programs that train together draw the same random numbers from here on; all ask at the same time."""

    def compare_data(self, told: inputs.Told) -> None:  # most have nobody else
        """Raises the error of programs that train together with different data; all tell of theirs at the same time."""

    def is_any(self, has_data: bool) -> bool:
        """Whether any of the programs that train together still has data; all ask at the same time."""
        return has_data

    @property
    def num_replicas(self) -> int:
        """The number of replicas; the same as `num_replicas_in_sync`."""
        return self.num_replicas_in_sync

    def distribute(
        self,
        data: Any,
        *,
        global_batch_size: int | None = None,
        shuffle: bool = False,
        uneven: str = "allow",
        auto_shard: str = "data",
        batch_dim: inputs.BatchDim = 0,
        prefetch: bool = False,
        **unknown: Any,
    ) -> inputs.Distributed:
        """Gives each replica its slice of every global batch.

        Every example is used once per epoch, in the order that one device would see, without
        padding. Each iteration over the result is one epoch.

        Args:
            data: A DataLoader, a Dataset (also of Hugging Face), tensors, arrays or tables of pandas or polars (whose
                batches are dicts of columns), any iterable of global batches, a tf.data dataset (which gives tensors),
                or a function that makes an iterable.
            global_batch_size: The number of examples in a global batch, for a Dataset, tensors and arrays. A DataLoader
                has its own `batch_size`, which is the global batch.
            shuffle: Whether each epoch has a new order, for a Dataset, tensors and arrays.
            uneven: `allow`: some replicas may get one example more than others, or none. `error`: that is an error.
            auto_shard: How several machines share the data. `data`: all machines see the same global batches, and each
                loads only its rows. `file`: each machine reads some of the `files` of the data. `off`: each machine
                has its own data already. With `file` and `off` a batch is that of one machine: one step takes
                `global_batch_size` examples on each machine.
            batch_dim: The dimension of the examples in a batch: `1` for sequence-first batches. A dict gives it by key,
                name or position: `{"src": 1, "tgt": 1, "label": 0}`. Batches that replicas load by index are not cut.
            prefetch: Whether a thread reads the next batch while replicas compute, for iterables, generators and
                functions. Leave it off if reading draws random numbers of torch, numpy or Python. Data that replicas
                load by index is always read ahead.
            unknown: Any other option is an error that names the option to write.

        Example, with files (one worker of two gets `part-0` and `part-2`)::

            class Lines(torch.utils.data.IterableDataset):
                def __init__(self, files):
                    self.files = files

                def __iter__(self):
                    for file in self.files:
                        yield from read(file)

            loader = DataLoader(Lines(["part-0", "part-1", "part-2", "part-3"]), batch_size=32)
            for batch in strategy.distribute(loader, auto_shard="file"):
                ...
        """
        context.require_controller("strategy.distribute()")
        self.require_usable()
        inputs.require_known_options(unknown)
        return inputs.distribute(
            data,
            self,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            uneven=uneven,
            auto_shard=auto_shard,
            batch_dim=batch_dim,
            prefetch=prefetch,
        )

    def distribute_from_function(
        self, fn: Callable[[inputs.InputContext], Any], *, batch_dim: inputs.BatchDim = 0
    ) -> inputs.Distributed:
        """Gives each replica batches that a function makes, already of per-replica size.

        Args:
            fn: Gets an `InputContext` and returns an iterable of per-replica batches. It may also yield single
                examples: a part that is a single number (a label), or parts with different first dimensions, show that.
            batch_dim: The dimension of the examples in a batch, as in `distribute`.
        """
        context.require_controller("strategy.distribute_from_function()")
        self.require_usable()
        return inputs.distribute_from_function(fn, self, batch_dim=batch_dim)

    def adopt(self, *objects: Any) -> None:
        """Distributes modules and optimizers that were made outside the scope."""
        context.require_controller("strategy.adopt()")
        self.require_usable()
        require_adoptable(objects)
        self.take(objects)

    @abstractmethod
    def take(self, objects: Sequence[Any]) -> None:
        """Distributes objects of any kind; for parts of the library that know them."""

    @abstractmethod
    def call_in_children(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function of the library in every child; nothing once the strategy is closed."""

    def revive(self) -> None:  # many have nothing to lose
        """Makes the strategy usable again after a `LostError`: new processes replace the lost ones.

        Objects that were distributed before are plain objects now; make new ones in a scope. Does nothing if no
        process was lost.
        """

    def global_batch_size(self, per_replica_batch_size: int) -> int:
        """Returns the global batch size that gives every replica `per_replica_batch_size` examples."""
        require_count(per_replica_batch_size=per_replica_batch_size)
        return per_replica_batch_size * self.num_replicas_in_sync

    def reduce(self, op: str, value: Any, axis: int | None = None, *, weighted: bool = True) -> Any:
        """Reduces the values of all replicas to one value.

        Args:
            op: `sum`, `mean`, `max` or `min`.
            value: What `run` returned, in any nesting. The sum of a plain value is an error under several replicas.
            axis: `None` reduces one tensor per replica to one tensor of the same shape. A number joins the tensors of
                all replicas along this axis and reduces over it: `axis=0` reduces over all rows.
            weighted: Whether a mean weights each replica by its number of examples, which gives the mean over the
                global batch. `False` gives all replicas the same weight.
        """
        context.require_controller("strategy.reduce()")
        op = per_replica.require_op(op)
        if op == "sum":
            self._require_per_replica("reduce('sum')", value)
        return self._map(lambda each: per_replica.reduce(op, each, axis, weighted=weighted), value)

    def gather(self, value: Any, axis: int = 0, *, pad: float | None = None) -> Any:
        """Joins the tensors of all replicas along an axis. Replicas without examples are left out.

        Args:
            value: What `run` returned or `distribute` yielded, in any nesting.
            axis: The axis along which tensors are joined.
            pad: The number that fills up tensors that are shorter along another axis, such as sequences that each
                replica padded to its own length. `None` makes different lengths an error.
        """
        context.require_controller("strategy.gather()")
        self._require_per_replica("gather", value)
        return self._map(lambda each: per_replica.gather(each, axis, pad), value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the values of the replicas of this program as a tuple. Replicas without examples are left out."""
        context.require_controller("strategy.local_results()")
        return per_replica.local_results(value)

    def is_ready(self, value: Any) -> bool:
        """Returns whether a result of `run` can be read without waiting."""
        return True

    def synchronize(self) -> None:  # most replicas never differ
        """Makes all replicas equal now, under a strategy that lets them differ for some steps."""

    def barrier(self) -> None:
        """Waits until all programs that train together call it, and until all steps that they began are done.

        Call it in every program before one program acts for all, such as saving the last checkpoint: without it, steps
        that still run elsewhere would be missing. It does not wait for programs that have ended.
        """
        context.require_controller("strategy.barrier()")
        self.require_usable()
        self._meet()

    def _meet(self) -> None:  # most have nobody else, and have done a step when `run` returns
        """Waits for other programs, and for steps under way."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block, backward passes add up the gradients of each replica alone; nothing is exchanged.

        Use it in a step, or in the main program around runs::

            for number, batch in enumerate(batches):
                with strategy.no_sync() if number + 1 < len(batches) else contextlib.nullcontext():
                    strategy.run(backward, args=batch)
            strategy.run(update)
        """
        with self._hold_back() if context.current_replica() is None else no_sync_here():
            yield

    def _hold_back(self) -> contextlib.AbstractContextManager[None]:
        """A block around runs that leave every replica its own gradients."""
        return contextlib.nullcontext()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints once, however many replicas call it."""
        if self.global_rank == 0:
            print(*args, **{"file": plain(sys.stdout), **kwargs})

    def __enter__(self) -> Self:
        context.require_controller("with strategy")
        self.require_usable()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and not (isinstance(error, PreemptedExit) and self.is_in_step):  # all have agreed on that
            self.tell_others(error)
        self.close()

    def tell_others(self, error: BaseException) -> None:  # most have nobody else
        """Tells programs that train together with this one that it cannot go on."""

    def _require_per_replica(self, what: str, value: Any) -> None:
        """Refuses a value that is not one of each replica, where it matters how often it counts."""
        plain = [each for each in _tree.leaves(value, is_leaf=_is_per_replica) if not _is_per_replica(each)]
        if plain and self.num_replicas_in_sync > 1 and self.is_in_step:  # else run returns what this program has
            raise StrategyError(
                f"{what} takes what run returned, one value from each of {self.num_replicas_in_sync} replicas, got "
                f"{type(plain[0]).__name__} {plain[0]!r}; return it from the function of run, or use it as it is"
            )

    def _map(self, function: Callable[[PerReplica], Any], value: Any) -> Any:
        return _tree.map(
            lambda each: function(each if _is_per_replica(each) else PerReplica([each])),
            value,
            is_leaf=_is_per_replica,
        )

    def require_call(self, fn: Any, args: Any, kwargs: Any, num_steps: Any = None) -> None:
        """Refuses what is not a function with its arguments, and values of another strategy's replicas."""
        run_arguments.require_call(self, fn, args, kwargs, num_steps)

    def __getattr__(self, name: str) -> Any:
        """What is not found otherwise may be called so in TensorFlow."""
        return _tensorflow_names.of_strategy(self, name)

    @abstractmethod
    def require_usable(self) -> None:
        """Refuses use after the end."""

    @contextlib.contextmanager
    def _in_scope(self) -> Iterator["Strategy"]:
        """Makes this the strategy of the block; another strategy's scope must not be open."""
        self.require_usable()
        context.require_controller(f"{type(self).__name__}.scope()")
        outer = context.state.scopes[-1] if context.state.scopes else None
        if outer is not None and outer is not self:
            raise StrategyError(
                f"scope of {type(self).__name__} entered inside the scope of another {type(outer).__name__}; "
                f"leave that scope first"
            )
        _integrations.connect()
        context.state.scopes.append(self)
        try:
            yield self
        finally:
            context.state.scopes.pop()
            _integrations.connect()


@final
class _Scope(contextlib.ContextDecorator, contextlib.AbstractContextManager[Any]):
    """A scope that can be entered many times, also inside itself.

    Args:
        opened: Makes one that can be entered once.
    """

    def __init__(self, opened: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._opened = opened
        self._entered: list[contextlib.AbstractContextManager[Any]] = []

    def __enter__(self) -> Any:
        _torch.compiling.spare_compiler()  # the first optimizer of most programs is made in a scope
        block = self._opened()
        strategy = block.__enter__()
        self._entered.append(block)
        return strategy

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool | None:
        advise(error)
        return self._entered.pop().__exit__(kind, error, trace)


def run_steps(
    run: Callable[[Callable[..., Any], StepArguments], list[Any]],
    fn: Callable[..., Any],
    drawing: inputs.Drawing,
    most_steps: int,
) -> list[Any]:
    """Runs a function for several steps; returns what it returned in each.

    Args:
        run: Runs some of the steps.
        fn: The function.
        drawing: The steps.
        most_steps: How many of them `run` is given at once.
    """
    results: list[Any] = []
    for arguments in drawing.calls(most_steps):
        try:
            done = run(fn, arguments)
        except BaseException as error:
            drawing.name_step(error, arguments.under_way)
            raise
        drawing.note_done(len(done))
        results += done
    return results


def require_adoptable(objects: tuple[Any, ...]) -> None:
    """Refuses what cannot be distributed."""
    for obj in objects:
        if not isinstance(obj, torch.nn.Module | torch.optim.Optimizer | _ALSO_ADOPTABLE):
            raise StrategyError(
                f"adopt takes modules, optimizers, schedulers and gradient scalers, got {type(obj).__name__} {obj!r}"
            )


_ALSO_ADOPTABLE = torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler


def _is_per_replica(value: Any) -> bool:
    return isinstance(value, PerReplica)
