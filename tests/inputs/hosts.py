"""A strategy without processes, and helpers that look into distributed batches."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils import _pytree as pytree

from stratagem.objects import per_replica
from stratagem.objects.per_replica import Deferred, PerReplica


class FakeHost:
    """Calls in this very process what children would be asked to do.

    Args:
        num_replicas: How many replicas there are.
        here: Those of this machine; by default all.
        pipeline: How many machines read data, and the number of this one.
        others_have_data: Whether other machines have data, for each time that they are asked.
    """

    def __init__(
        self,
        num_replicas: int,
        here: range | None = None,
        pipeline: tuple[int, int] = (1, 0),
        others_have_data: Iterable[bool] = (),
    ) -> None:
        self.num_replicas = num_replicas
        self.replicas_here = range(num_replicas) if here is None else here
        self.input_pipeline = pipeline
        self._others_have_data = iter(others_have_data)
        self.calls: list[str] = []
        self.told: list[dict[str, Any]] = []

    def require_usable(self) -> None:
        pass

    def draw_alike(self) -> None:
        pass

    def compare_data(self, told: Any) -> None:
        self.told.append(dict(told))

    def is_any(self, has_data: bool) -> bool:
        return next(self._others_have_data, False) or has_data

    def call_in_children(self, function: Callable[..., None], *args: Any) -> None:
        self.calls.append(function.__name__)
        for _ in range(len(self.replicas_here) - 1):
            function(*args)


def seen_by(replica: int, batch: Any) -> Any:
    """What one replica gets of a distributed batch."""
    return per_replica.load_deferred(per_replica.select(batch, replica))


def seen_by_all(batch: Any, num_replicas: int) -> list[Any]:
    return [seen_by(replica, batch) for replica in range(num_replicas)]


def counted(batch: Any) -> list[Any]:
    """What the replicas that have examples get."""
    return [seen_by(replica, batch) for replica in per_replica.with_examples(leaves_of(batch)[0])]


def leaves_of(batch: Any) -> list[PerReplica]:
    return pytree.tree_leaves(batch, is_leaf=lambda each: isinstance(each, PerReplica))


def deferred_in(batch: Any) -> list[bool]:
    return [isinstance(each, Deferred) for each in leaves_of(batch)[0].held]
