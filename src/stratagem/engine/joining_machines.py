"""Lets this program take part in a training with those of other machines.

One program takes part in a cluster by one strategy at a time.
"""

import weakref
from collections.abc import Mapping
from typing import Any, Final, Protocol

from stratagem._caller import calling_line
from stratagem.cluster.membership.membership import Membership
from stratagem.cluster.resolvers.detection import found
from stratagem.cluster.resolvers.resolver import Resolver
from stratagem.cluster.spec import CHIEF, EVALUATOR, WORKER, ClusterSpec
from stratagem.engine.machines import Workers
from stratagem.errors import StrategyError, TaskLostError

_JOBS = (CHIEF, WORKER)

RUNS_ALONE: Final = Resolver("the environment", ClusterSpec({}), None, None)
"""The resolver of a program that could take part in a cluster, and runs alone: it is no task, and its own chief."""


class ClusterMember(Protocol):
    """A strategy that takes part in a cluster."""

    @property
    def is_open(self) -> bool:
        """Whether it still does."""


def require_resolver(resolver: Any) -> Resolver | None:
    """What says who takes part: what the program gave, or what the environment says."""
    if resolver is not None and not isinstance(resolver, Resolver):
        raise StrategyError(f"cluster_resolver is one of sg.cluster's resolvers, got {resolver!r}")
    return resolver or found().resolver


def join_workers(
    strategy: str,
    resolver: Resolver | None,
    num_replicas: int,
    signature: Mapping[str, Any],
    *,
    join_timeout_s: float,
    heartbeat_timeout_s: float | None,
    worker_timeout_s: float,
    allow_all_interfaces: bool = False,
) -> Workers | None:
    """Meets the other workers and connects with them; `None` if there are no others.

    Args:
        strategy: The name of the strategy, for errors.
        resolver: What says who takes part.
        num_replicas: How many replicas this worker has.
        signature: What must be the same in all workers.
        join_timeout_s: How long to wait for all of them to come.
        heartbeat_timeout_s: How long one whose machine answers may give no sign of life, from then on.
        worker_timeout_s: How long to wait for a worker that lives but does not come.
        allow_all_interfaces: Whether the first worker may listen on all addresses of its machine.
    """
    _check_first(resolver)
    if resolver is None:
        return None
    spec, job, index = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    jobs = [each for each in _JOBS if each in spec.jobs]
    if sum(spec.num_tasks(each) for each in jobs) < 2 or job == EVALUATOR:  # which evaluates on its own
        return None
    if job not in jobs or index is None:
        raise StrategyError(
            f"{strategy} is for tasks of the jobs {' and '.join(_JOBS)}, and this is "
            f"{job or 'no task'}; leave it out of this task's program, or give the task another job"
        )
    membership = Membership(
        *(spec, job, index),
        jobs=jobs,
        signature={"strategy": strategy, **signature},
        join_timeout_s=join_timeout_s,
        heartbeat_timeout_s=heartbeat_timeout_s,
        allow_all_interfaces=allow_all_interfaces,
    ).join()
    try:
        return Workers(membership, num_replicas, stall_timeout_s=worker_timeout_s)
    except BaseException as error:
        lost = membership.lost
        membership.fail(f"{type(error).__name__}: {error}")
        if lost is not None:
            raise TaskLostError(str(lost)) from None
        raise


def note_member(strategy: ClusterMember, resolver: Resolver | None) -> None:
    """Remembers by which strategy this program takes part in its cluster."""
    if resolver is not None:
        _members[strategy] = resolver, f"{type(strategy).__name__} of {calling_line()}"


def _check_first(resolver: Resolver | None) -> None:
    """Refuses a second strategy in the same cluster: it would be the same task a second time."""
    for other, (its_resolver, made_at) in _members.items():
        if resolver is not None and other.is_open and its_resolver.cluster_spec() == resolver.cluster_spec():
            raise StrategyError(
                f"this program takes part in its cluster already, by the {made_at}; use that one for all models, or "
                f"close() it first"
            )


# Those that take part in a cluster, by which resolver, and where they were made.
_members: "weakref.WeakKeyDictionary[ClusterMember, tuple[Resolver, str]]" = weakref.WeakKeyDictionary()
