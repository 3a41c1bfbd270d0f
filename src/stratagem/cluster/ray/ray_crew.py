"""The tasks of a launch on the machines of Ray, each in an actor: starts, watches and stops them.

Owns the actors, and which task has which address and rank, which follows from where Ray has placed
them. What the ends of tasks mean is `agent`'s.
"""

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from signal import SIGKILL, Signals
from typing import Any, Final, final

from stratagem import _env
from stratagem.cluster.launch.environment import Offer, tasks_here
from stratagem.cluster.launch.failures import Failure
from stratagem.cluster.launch.output import TaskOutput
from stratagem.cluster.launch.plan import TRAINING, LaunchPlan, Machine, Seat
from stratagem.cluster.launch.task_processes import KILL_TIMEOUT_S, Ended, LaunchedTask, Launcher, Processes
from stratagem.cluster.ray import ray_session
from stratagem.cluster.ray.ray_placement import RayPlacement
from stratagem.cluster.ray.ray_task import ENDED, OUT, RayTask, TaskPlace
from stratagem.cluster.spec import EVALUATOR
from stratagem.errors import LaunchError

_CALLS, _NEWS = "calls", "news"
NOWHERE: Final = "127.0.0.1:1"  # an address where one is asked for, and nobody listens


@dataclasses.dataclass
class _Running:
    """A task under way.

    Args:
        news: What it has to tell next.
        outputs: Where that goes.
    """

    task: LaunchedTask
    actor: Any
    place: TaskPlace
    news: Any
    outputs: tuple[int, int]


@final
class RayCrew(Processes):
    """The tasks of one launch, each in an actor.

    Args:
        launcher: Who starts them.
        plan: What they are.
        placement: Where there is room for them.
        start_timeout_s: How long to wait for the actors.
    """

    def __init__(
        self, launcher: Launcher, plan: LaunchPlan, placement: RayPlacement, *, start_timeout_s: float
    ) -> None:
        super().__init__(launcher)
        self._plan = plan
        self._placement = placement
        self._ray = placement.ray
        self._start_timeout_s = start_timeout_s
        self._run_id = secrets.token_hex(8)
        self._seated: dict[str, tuple[Any, TaskPlace]] = {}
        self._running: dict[str, _Running] = {}
        self._lost: dict[str, str] = {}

    def new_tasks(self, restart: int) -> list[LaunchedTask]:
        """Takes the places of all tasks anew, and makes the tasks of them."""
        with self._launcher.interrupts.raising():
            self._placement.wait()
            actor = self._ray.remote(concurrency_groups={_CALLS: 1, _NEWS: 1})(RayTask)
            numbers = range(len(self._plan.seats))
            actors = [actor.options(**self._placement.options(number)).remote() for number in numbers]
            places: list[TaskPlace] = self._get(actors, "place", 2)
        for place in places:
            ray_session.warn_if_open(place.is_guarded, place.host)
        tasks = list(_tasks_at(self._plan, places, restart, self._run_id))
        self._seated = {task.name: (actors[place], places[place]) for task, place in tasks}
        return [dataclasses.replace(task, number=number) for number, (task, _) in enumerate(tasks)]

    def _start_all(self, output: TaskOutput, tasks: Sequence[LaunchedTask], restart: int) -> list[int]:
        self._lost = {}
        program, secret = self._plan.order.program, self._launcher.directory.token.read_bytes()
        asked = []
        for task in tasks:
            actor, place = self._seated[task.name]
            outputs = output.open(task.name, task.number, restart=restart)
            needs = "" if program.is_module else program.target
            changes = _env.changed(task.environment)
            asked.append(_call(actor, "start", task.seat, program.command, os.getcwd(), needs, changes, secret))
            self._running[task.name] = _Running(task, actor, place, None, outputs)
        output.start([])
        pids: list[int] = self._take(asked)
        for each in self._running.values():
            each.news = _call(each.actor, "news").future()
        return pids

    def poll(self) -> None:
        """Takes in what tasks have written, and notes which have ended."""
        for name, each in list(self._running.items()):
            if each.news is None or not each.news.done():
                continue
            if (error := each.news.exception()) is not None:
                self._lost[name] = ray_session.in_short(error)
                self._bury(name, -SIGKILL)
                continue
            for kind, content in each.news.result():
                if kind == ENDED:
                    self._bury(name, content)
                else:
                    os.write(each.outputs[kind != OUT], content)
            if name in self._running:
                each.news = _call(each.actor, "news").future()

    def explain(self, ended: Ended, *, killed_for_memory: bool) -> Failure:
        """Says why a task that has ended did so; whether a machine of Ray's lacked memory, this one does not know."""
        failure, name = self._explained(ended), ended.task.name
        if name in self._lost:
            failure = dataclasses.replace(failure, cause=f"was lost: {self._lost[name]}")
        return dataclasses.replace(failure, host=self._seated[name][1].host)

    def _under_way(self) -> list[LaunchedTask]:
        return [each.task for each in self._running.values()]

    def _signal(self, names: Sequence[str], number: Signals) -> None:
        for name in names:
            _call(self._running[name].actor, "signal", int(number))

    def _leave(self) -> None:
        for name in list(self._running):
            self._lost[name] = "it does not end although it was killed"
            self._bury(name, -SIGKILL)
        actors = [actor for actor, _ in self._seated.values()]
        self._seated = {}
        with contextlib.suppress(self._ray.exceptions.RayError):  # of a machine that is gone
            self._ray.get([_call(actor, "clean_up") for actor in actors], timeout=KILL_TIMEOUT_S)
        for actor in actors:
            self._ray.kill(actor)

    def _bury(self, name: str, code: int) -> None:
        each = self._running.pop(name)
        for descriptor in each.outputs:
            os.close(descriptor)
        self.ended.append(Ended(each.task, code, time.monotonic(), asked=name in self._asked))

    def _get(self, actors: Sequence[Any], method: str, *arguments: Any) -> list[Any]:
        return self._take([_call(actor, method, *arguments) for actor in actors])

    def _take(self, asked: Sequence[Any]) -> list[Any]:
        """Waits for answers of actors; what goes wrong there is told in words."""
        try:
            found: list[Any] = self._ray.get(list(asked), timeout=self._start_timeout_s)
            return found
        except self._ray.exceptions.GetTimeoutError:
            raise LaunchError(
                f"Ray has not started all tasks within {self._start_timeout_s:g} s, though it has room for them; "
                f"`ray status` and its logs say more. Raise --join-timeout if it only needs more time"
            ) from None
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, LaunchError):
                raise cause from None
            raise LaunchError(f"Ray could not start all tasks: {ray_session.in_short(error)}") from error


def _call(actor: Any, method: str, *arguments: Any) -> Any:
    group = _NEWS if method == "news" else _CALLS
    return getattr(actor, method).options(concurrency_group=group).remote(*arguments)


def _tasks_at(
    plan: LaunchPlan, places: Sequence[TaskPlace], restart: int, run_id: str
) -> Iterator[tuple[LaunchedTask, int]]:
    """The tasks by where they are, each with the number of its place: ranks are counted machine by machine."""
    nodes = list(dict.fromkeys(place.node for place in places))
    here = [[number for number, place in enumerate(places) if place.node == node] for node in nodes]
    offers: list[Offer] = []
    seats: list[list[Seat]] = []
    for numbers in here:
        jobs: dict[str, list[str]] = {}
        seats.append([])
        for number in numbers:
            job = plan.seats[number].job
            seats[-1].append(dataclasses.replace(plan.seats[number], number=len(jobs.get(job, ()))))
            jobs.setdefault(job, []).append("" if job == EVALUATOR else places[number].addresses[0])
        first = next((number for number in numbers if plan.seats[number].job in TRAINING), numbers[0])
        offers.append(Offer(run_id, jobs, places[first].addresses[1]))
    for rank, numbers in enumerate(here):
        machine = Machine(rank, len(nodes), NOWHERE)
        order = dataclasses.replace(plan.order, num_workers=1, chief=False, machine=machine)
        tasks = tasks_here(LaunchPlan(order, tuple(seats[rank]), ()), offers, restart=restart, token_file="")
        yield from zip(tasks, numbers, strict=True)
