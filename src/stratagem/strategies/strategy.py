"""What every strategy offers: a scope, runs on all replicas, reductions, distributed data.

Owns the public contract and the parts that are the same for all. Where variables live and when
replicas agree is each strategy's own.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from stratagem import _integrations, _tree, inputs
from stratagem.devices.device import LogicalDevice
from stratagem.engine import context
from stratagem.engine.strategy_in_replica import no_sync_here
from stratagem.errors import PreemptedExit, StrategyError
from stratagem.objects import per_replica
from stratagem.objects.per_replica import PerReplica


class Strategy(ABC):
    """Where variables live, and when replicas agree."""

    @property
    @abstractmethod
    def devices(self) -> tuple[LogicalDevice, ...]:
        """Where the replicas compute, in their order."""

    @abstractmethod
    def scope(self) -> contextlib.AbstractContextManager["Strategy"]:
        """What is made inside is distributed."""

    @abstractmethod
    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Calls `fn` in every replica, each with its part of distributed values.

        Args:
            fn: The function; distributed objects that it uses are the replica's own inside it.
            args: Its arguments; a value made by `distribute` gives each replica its part.
            kwargs: Its keyword arguments.
        Returns:
            What `fn` returned, with a `PerReplica` value in the place of each value.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the replicas. The model stays as it is and works as a plain one."""

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas work on one global batch."""
        return len(self.devices)

    @property
    def device(self) -> torch.device:
        """Where this process' replica computes, for torch."""
        return self.devices[self.global_rank - self.replicas_here.start].torch_device

    @property
    def world_size(self) -> int:
        """The number of replicas, in PyTorch's word."""
        return self.num_replicas_in_sync

    @property
    def global_rank(self) -> int:
        """The number of this replica, in PyTorch's word; 0 in the main program."""
        replica = context.get_replica_context()
        return replica.replica_id_in_sync_group if replica else self.replicas_here.start

    @property
    def replicas_here(self) -> range:
        """The numbers of the replicas that this program drives."""
        return range(len(self.devices))

    @property
    def input_pipeline(self) -> tuple[int, int]:
        """How many programs read data for one training, and the number of this one."""
        return 1, 0

    @property
    def is_chief(self) -> bool:
        """Whether this program does what is to be done once: saving, logging."""
        return True

    @property
    def is_in_step(self) -> bool:
        """Whether programs that train together take all steps together; else each has results of its own."""
        return True

    def draw_alike(self) -> None:  # noqa: B027  # most have nobody else
        """Lets all programs that train together draw the same random numbers from here on; all ask at the same time."""

    def is_any(self, has_data: bool) -> bool:
        """Whether any of the programs that train together still has data; all ask at the same time."""
        return has_data

    @property
    def num_replicas(self) -> int:
        """How many replicas there are; the same as `num_replicas_in_sync`."""
        return self.num_replicas_in_sync

    def distribute(
        self,
        data: Any,
        *,
        global_batch_size: int | None = None,
        shuffle: bool = False,
        uneven: str = "allow",
        auto_shard: str = "data",
    ) -> inputs.Distributed:
        """Gives each replica its slice of every global batch.

        Every example is used once in an epoch, in the order that one device would see, without
        padding. Each iteration over the result is one epoch.

        Args:
            data: A DataLoader, a Dataset, tensors or arrays, any iterable of global batches, or a
                function that makes one.
            global_batch_size: For a Dataset, tensors or arrays: how many examples make a batch.
            shuffle: For the same: whether each epoch has a new order.
            uneven: `allow` replicas to get one example more than others or none, or make that an `error`.
            auto_shard: How several machines share the data. `data`: all see the same global batches, and each
                loads only its rows. `file`: each reads its own of the `files` that the data has. `off`: what
                each has is its own already. In the last two cases batches are those of one machine:
                `global_batch_size` examples, or what the loader yields, on each, so that a step takes as many times
                more examples as there are machines.

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
        return inputs.distribute(
            data,
            self,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            uneven=uneven,
            auto_shard=auto_shard,
        )

    def distribute_from_function(self, fn: Callable[[inputs.InputContext], Any]) -> inputs.Distributed:
        """The same for a function that makes the batches of single replicas, given its `InputContext`."""
        return inputs.distribute_from_function(fn, self)

    def adopt(self, *objects: Any) -> None:
        """Distributes modules and optimizers that were made outside the scope."""
        context.require_controller("strategy.adopt()")
        self._require_usable()
        require_adoptable(objects)
        self.take(objects)

    @abstractmethod
    def take(self, objects: Sequence[Any]) -> None:
        """Distributes objects of any kind; for parts of the library that know them."""

    @abstractmethod
    def call_in_children(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function of the library in every child; nothing once the strategy is closed."""

    def revive(self) -> None:  # noqa: B027  # many have nothing to lose
        """After a `LostError`: makes the strategy usable again, with new processes in the place of those lost.

        What was distributed before has become plain; what is made in a scope from now on is distributed. Nothing
        is done where nothing was lost.
        """

    def global_batch_size(self, per_replica_batch_size: int) -> int:
        """The global batch that gives every replica so many examples."""
        if not isinstance(per_replica_batch_size, int) or per_replica_batch_size < 1:
            raise StrategyError(f"a batch has a whole number of examples from 1 up, got {per_replica_batch_size!r}")
        return per_replica_batch_size * self.num_replicas_in_sync

    def reduce(self, op: str, value: Any, *, weighted: bool = True) -> Any:
        """One value of the values of all replicas.

        Args:
            op: `sum`, `mean`, `max` or `min`.
            value: What `run` returned, in any nesting.
            weighted: A mean counts each replica by its examples, so that it is the mean over the
                global batch; without it, replicas count alike.
        """
        return self._map(lambda each: per_replica.reduce(op, each, weighted=weighted), value)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """The tensors of all replicas, one after the other along an axis."""
        return self._map(lambda each: per_replica.gather(each, axis), value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of all replicas of this process, as a tuple."""
        leaves = _tree.leaves(value, is_leaf=_is_per_replica)
        if not any(map(_is_per_replica, leaves)):
            return (value,)
        return tuple(per_replica.load_deferred(per_replica.select(value, place)) for place in range(len(self.devices)))

    def is_ready(self, value: Any) -> bool:
        """Whether what `run` returned can be read without waiting."""
        return True

    def synchronize(self) -> None:  # noqa: B027  # most replicas never differ
        """Brings replicas to one state, where a strategy lets them differ for some steps."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block, in a replica, backward passes only add up this replica's own gradients."""
        with no_sync_here():
            yield

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints once, however many replicas come here."""
        if self.global_rank == 0:
            print(*args, **kwargs)

    def __enter__(self) -> "Strategy":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and not (isinstance(error, PreemptedExit) and self.is_in_step):  # all have agreed on that
            self.tell_others(error)
        self.close()

    def tell_others(self, error: BaseException) -> None:  # noqa: B027  # most have nobody else
        """Tells programs that train together with this one that it cannot go on."""

    def _map(self, function: Callable[[PerReplica], Any], value: Any) -> Any:
        return _tree.map(
            lambda each: function(each if _is_per_replica(each) else PerReplica([each])),
            value,
            is_leaf=_is_per_replica,
        )

    @abstractmethod
    def _require_usable(self) -> None:
        """Refuses use after the end."""

    @contextlib.contextmanager
    def _in_scope(self) -> Iterator["Strategy"]:
        """Makes this the strategy of the block; another strategy's scope must not be open."""
        self._require_usable()
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


def require_call(fn: Any, args: Any, kwargs: Any) -> None:
    """Refuses what is not a function with its arguments, before anything is sent."""
    if not callable(fn):
        raise StrategyError(f"run calls a function in every replica, got {type(fn).__name__} {fn!r}")
    if not isinstance(args, tuple | list):
        raise StrategyError(f"args is a tuple of arguments, got {type(args).__name__}; for one write args=(x,)")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise StrategyError(f"kwargs is a dict of keyword arguments, got {type(kwargs).__name__} {kwargs!r}")


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
