"""Workers and parameter servers that die, stop, or cannot reach each other: real processes, F13 to F17."""

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stratagem.errors import ParameterServerLostError
from tests.cluster.machines import Machine, machines, network
from tests.cluster.tasks import TaskProcess
from tests.parameters.network.attacker import eventually
from tests.parameters.network.cluster import Cluster, Trainer, same

__all__ = ["network"]

NewCluster = Callable[..., Cluster]

PROGRAM = "tests.parameters.network.task_program"
pytestmark = pytest.mark.usefixtures("forked_tasks")

FAST = {"heartbeat_s": 0.2, "num_missed": 15, "heartbeat_timeout_s": 3.2}


@contextlib.contextmanager
def task(machine: Machine | None = None) -> Iterator[TaskProcess]:
    with contextlib.closing(TaskProcess(machine.prefix if machine else (), PROGRAM)) as process:
        yield process


def test_worker_killed_in_a_push_loses_that_push_and_may_come_back(new_cluster: NewCluster) -> None:  # F13
    cluster = new_cluster(num_ps=2, **FAST)
    trainer = cluster.trainer(0, **FAST)
    with task() as victim, task() as second_life:
        assert victim.ask(f"train({cluster.spec!r}, 1, **{FAST!r})") == "training"
        assert victim.ask("step(1)") == [1, 1]
        trainer.pull()
        before = trainer.copies()
        victim.send("die_after_half_a_push()")
        assert victim.process.wait(20) == -signal.SIGKILL
        assert len(cluster.servers[0]._sessions) >= 1
        trainer.pull()
        assert same(trainer.copies(), before)  # nothing of it was applied
        assert {each.version for each in trainer.step(2)} == {2}  # nobody waits for it
        assert second_life.ask(f"train({cluster.spec!r}, 1, **{FAST!r})") == "training"
        assert second_life.ask("step(3)") == [3, 3]


def test_worker_that_is_stopped_is_fenced_when_it_goes_on(new_cluster: NewCluster) -> None:  # F13
    cluster = new_cluster(**FAST)
    trainer = cluster.trainer(0, **FAST)
    with task() as sleeper:
        sleeper.ask(f"train({cluster.spec!r}, 1, **{FAST!r})")
        sleeper.signal(signal.SIGSTOP)
        assert {each.version for each in trainer.step(1)} == {1}
        assert eventually(lambda: len(cluster.servers[0]._sessions) == 1)
        sleeper.signal(signal.SIGCONT)
        sleeper.send("step(2)")
        kind, message = sleeper.error()
        assert kind in ("TaskLostError", "ParameterServerLostError"), message
        trainer.pull()
        assert {each.version for each in trainer.step(2)} == {2}


def test_tasks_that_hold_the_lock_of_python_are_not_lost(new_cluster: NewCluster) -> None:
    """As a large `json.load` does: no thread of theirs runs, and their machine answers for them."""
    quick = {"heartbeat_s": 0.1, "num_missed": 3}
    cluster = new_cluster(num_ps=2, **quick)
    with task() as server, task() as worker:
        cluster.servers[1].close()
        assert server.ask(f"serve({cluster.spec!r}, 1, **{quick!r})") == "serving"
        trainer = cluster.trainer(0, **quick)
        assert worker.ask(f"train({cluster.spec!r}, 1, **{quick!r})") == "training"
        for each in (server, worker):
            each.send("__import__('ctypes').PyDLL(None).usleep(1_000_000)")
        assert [each.version for each in trainer.step(1)] == [1, 1]
        assert [each.value() for each in (server, worker)] == [0, 0]
        assert worker.ask("step(2)") == [2, 2]
        assert len(cluster.servers[0]._sessions) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_server_is_named_with_what_it_had(new_cluster: NewCluster, number: signal.Signals) -> None:  # F14, F15
    cluster = new_cluster(num_ps=2, **FAST)
    with task() as process:
        cluster.servers[1].close()
        assert process.ask(f"serve({cluster.spec!r}, 1, **{FAST!r})") == "serving"
        trainers = [cluster.trainer(0, **FAST), cluster.trainer(1, **FAST)]
        for trainer in trainers:
            trainer.step(1)
        gone = [piece.name for piece in trainers[0].plan.shards[1]]
        process.signal(number)
        if number == signal.SIGKILL:
            trainers.pop().client.close()  # and a worker at the same moment
        for trainer in trainers:
            with pytest.raises(ParameterServerLostError) as caught:
                _step_for_ever(trainer)
            assert f"ps/1 at {cluster.spec['ps'][1]} is lost" in str(caught.value)
            assert re.search(rf"lost are {len(gone)} of 4 parameters: {re.escape(', '.join(gone))}", str(caught.value))
            with pytest.raises(ParameterServerLostError):  # no step runs on half a model
                trainer.step(2)


@pytest.mark.usefixtures("network")
def test_network_that_comes_back_in_time_loses_nothing(token_file: Path) -> None:  # F17 a
    with machines(2) as (near, far), task(near) as server, task(far) as worker:
        spec = _spec(near, far)
        assert server.ask(f"serve({spec!r}, 0)") == "serving"
        assert worker.ask(f"train({spec!r}, 0)") == "training"
        assert worker.ask("step(1)") == [1]
        far.cut()
        worker.send("step(2)")
        time.sleep(1.0)  # the fault itself: so long there is no network
        assert not worker.has_answered()
        far.heal()
        assert worker.value() == [2]
        assert worker.ask("step(3)") == [3]  # the second one was applied once


@pytest.mark.usefixtures("network")
def test_partition_is_noticed_on_both_sides_and_the_old_life_is_fenced(token_file: Path) -> None:  # F17 b, c
    with machines(2) as (near, far), task(near) as server, task(near) as chief, task(far) as worker:
        spec = _spec(near, far)
        assert server.ask(f"serve({spec!r}, 0, **{FAST!r})") == "serving"
        assert chief.ask(f"train({spec!r}, 0, **{FAST!r})") == "training"
        assert worker.ask(f"train({spec!r}, 1, **{FAST!r})") == "training"
        assert worker.ask("step(1)") == [1]
        far.silence()  # what it sends does not come; what it is sent still does
        worker.send("step(2)")
        assert chief.ask("step(3)") == [2]  # nobody waits for it
        deadline = time.monotonic() + 20
        while server.ask("len(server._sessions)") == 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.ask("len(server._sessions)") == 1
        far.heal()
        kind, message = worker.error()
        assert kind in ("TaskLostError", "ParameterServerLostError"), message
        assert chief.ask("step(4)") == [3]  # what was on its way is refused, not merged
        far.cut()
        with task(far) as late:
            late.send(f"train({spec!r}, 1, **{FAST!r})")
            far.heal()
            assert late.value() == "training"
            late.send("[step(n) for n in range(10**6)]")
            far.cut()
            kind, message = late.error()
            assert kind == "ParameterServerLostError"
            assert "no sign of life" in message


def _spec(near: Machine, far: Machine) -> dict[str, list[str]]:
    return {"worker": [f"{near.address}:4001", f"{far.address}:4002"], "ps": [f"{near.address}:4000"]}


def _step_for_ever(trainer: Trainer) -> Any:
    while True:
        trainer.step(1)
