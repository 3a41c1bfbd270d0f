"""Steps that all workers of a parameter server share, where the slowest of each may be dropped."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stratagem.engine.queued.pending_results import joined
from stratagem.objects import per_replica
from stratagem.parameters.local.gradient_slots import PER_RUN, Round

if TYPE_CHECKING:
    from stratagem.engine.queued.workers import ParameterWorkers


def run_round(
    workers: "ParameterWorkers",
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    counts: tuple[int, ...] | None,
    *,
    num_backups: int,
) -> Any:
    """Gives each worker its part of a step, and returns when enough are done.

    Args:
        workers: Who do it.
        function: What is called.
        args: Its arguments, with a part for each worker.
        kwargs: Its keyword arguments, likewise.
        counts: How many examples each worker has.
        num_backups: How many may be missing.
    Returns:
        The results of those that were in time.
    """
    scheduler, group = workers.scheduler, workers.scheduler.group
    with_data = {
        place: number for place, number in enumerate(sorted(group.members)) if counts is None or counts[place] > 0
    }
    needed = max(1, len(with_data) - num_backups)
    first = workers.num_runs * PER_RUN

    def has_room(number: int) -> bool:
        return group.has_room(group.members[number])

    with workers.attending():
        # One that is late by two steps would be late again: its part is dropped now.
        scheduler.wait(lambda: sum(map(has_room, with_data.values())) >= needed)
        steps = {}
        for place, number in with_data.items():
            if not has_room(number):
                workers.board.num_dropped[number] += 1
            else:
                own = Round(first, needed, counts[place] if counts else 1)
                parts = per_replica.load_deferred(per_replica.select((args, kwargs), place, sent=True))
                steps[place] = workers.new_step(function, *parts, own_round=own, worker=number)
                workers.enter(steps[place])
        every = list(steps.values())
        scheduler.wait(lambda: sum(each.is_done for each in every) >= needed or any(each.has_failed for each in every))
    if any(each.has_failed for each in every):
        workers.board.closed_round = first + PER_RUN - 1  # those who wait for it go on
    done = {place: step for place, step in steps.items() if step.is_done}
    for step in done.values():
        if step.has_failed:
            step.raise_error()
    workers.raise_failures()
    own_counts = tuple(counts[place] for place in done) if counts else None
    return joined([workers.result_of(step) for step in done.values()], own_counts)
