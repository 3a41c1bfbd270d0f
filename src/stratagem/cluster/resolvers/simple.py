"""Resolvers that are told who takes part: one by the program, one by other resolvers."""

from collections.abc import Mapping
from typing import final

from stratagem.cluster.resolvers.resolver import Resolver, require_own_protocol
from stratagem.cluster.spec import ClusterLike, ClusterSpec
from stratagem.errors import ClusterSpecError


@final
class SimpleResolver(Resolver):
    """A cluster that the program itself gives.

    Args:
        cluster: All tasks.
        task_type: The job of this task.
        task_id: Its index.
        master: The result of `master()`; by default the address of this task.
        num_accelerators: The result of `num_accelerators()`; by default the accelerators of this process.
        rpc_layer: Has no meaning here; TensorFlow's defaults are taken.
        environment: Likewise.

    Example:
        >>> SimpleResolver({"worker": ["a:1", "b:1"]}, task_type="worker", task_id=0).master()
        'stratagem://a:1'
    """

    def __init__(
        self,
        cluster: ClusterLike,
        *,
        task_type: str | None = None,
        task_id: int | None = None,
        master: str | None = None,
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        require_own_protocol(rpc_layer, environment)
        super().__init__(
            "the program",
            ClusterSpec(cluster),
            task_type,
            task_id,
            accelerators=num_accelerators,
            master=master or None,
        )


@final
class UnionResolver(Resolver):
    """Joins the tasks of several resolvers into one cluster. The first resolver that knows this task says which it is.

    Args:
        resolvers: The resolvers; a task that several have must have the same address in each.
        task_type: The job of this task, instead of the one that a resolver gives.
        task_id: Its index.

    Raises:
        ClusterSpecError: Two resolvers give different addresses to one task, or one address to different tasks.
    """

    def __init__(self, *resolvers: Resolver, task_type: str | None = None, task_id: int | None = None) -> None:
        if not resolvers:
            raise ClusterSpecError("a UnionResolver joins resolvers, got none; name those to join")
        jobs: dict[str, dict[int, str | None]] = {}
        for resolver in resolvers:
            for task in resolver.cluster_spec().tasks:
                address = None if task.address is None else str(task.address)
                known = jobs.setdefault(task.job, {}).setdefault(task.index, address)
                if known != address:
                    raise ClusterSpecError(
                        f"{task.name} is at {known} for one resolver and at {address} for another; leave one out"
                    )
        first = next((each for each in resolvers if each.task_type is not None), resolvers[0])
        if task_type is None and task_id is None:
            task_type, task_id = first.task_type, first.task_id
        names = ", ".join(type(each).__name__ for each in resolvers)
        super().__init__(
            f"the union of {names}",
            ClusterSpec(jobs),
            task_type,
            task_id,
            local=(first.local_id, first.num_local_tasks),
            accelerators=first._accelerators,
        )
