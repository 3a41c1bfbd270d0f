"""Tasks on machines of their own, whose network is cut: each side hears of it, and a cut that heals changes nothing."""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import Machine, machines, network
from tests.cluster.membership.test_membership import lost_by
from tests.cluster.tasks import TaskProcess, begin, listening_at

__all__ = ["network"]

pytestmark = [pytest.mark.usefixtures("token_file", "network", "forked_tasks"), pytest.mark.slow]

# Half of the usual patience.
RHYTHM = {"heartbeat_s": 0.5, "join_timeout_s": 30.0}


@pytest.fixture(scope="module")
def three_machines(network: None) -> Iterator[list[Machine]]:
    with machines(3) as made:
        yield made


@pytest.fixture
def tasks(three_machines: list[Machine], token_file: Path) -> Iterator[list[TaskProcess]]:
    with contextlib.ExitStack() as stack:
        for machine in three_machines:
            stack.callback(machine.heal)
        yield [stack.enter_context(contextlib.closing(TaskProcess(machine.prefix))) for machine in three_machines]


def cluster_on(three_machines: list[Machine]) -> dict[str, list[str]]:
    return {"worker": [f"{machine.address}:2222" for machine in three_machines]}


def test_tasks_meet_across_machines(tasks: list[TaskProcess], three_machines: list[Machine]) -> None:
    begin(tasks, cluster_on(three_machines))
    assert [task.ask("m().own_host") for task in tasks] == [machine.address for machine in three_machines]
    assert listening_at(tasks[0].pid) == {"01004d0a:08ae"}
    tasks[2].ask("m().set('k', b'v')")
    assert tasks[1].ask("m().get('k')") == "v"


def test_task_of_another_machine_cannot_take_this_ones_address(
    tasks: list[TaskProcess], three_machines: list[Machine]
) -> None:
    tasks[1].send(f"begin({cluster_on(three_machines)!r}, 'worker', 0)")
    name, message = tasks[1].error()
    assert name == "AddressError"
    assert message.startswith("worker/0 cannot listen at 10.77.0.1:2222: that is not an address of this machine")


def test_short_cut_is_survived(tasks: list[TaskProcess], three_machines: list[Machine]) -> None:
    begin(tasks, cluster_on(three_machines), heartbeat_s=1.0)
    three_machines[1].cut()
    tasks[1].send("[m().add('n', 1), m().losses]")  # sent into the void, and again when the cable is back
    time.sleep(2.0)  # the fault itself, not a wait for something
    assert not tasks[1].has_answered()
    three_machines[1].heal()
    assert tasks[1].value() == [1, []]
    assert [task.ask("[m().get('n'), m().losses]") for task in tasks] == [["1", []]] * 3


def test_cut_for_good_is_noticed_on_both_sides_and_healing_changes_nothing(
    tasks: list[TaskProcess], three_machines: list[Machine]
) -> None:
    begin(tasks, cluster_on(three_machines), **RHYTHM)
    three_machines[1].cut()
    tasks[1].send("m().set('late', b'')")  # will arrive when the cable is back
    assert tasks[1].error()[0] == "TaskLostError"
    with_host, alone = lost_by([tasks[0], tasks[2]]), lost_by([tasks[1]])
    for losses in with_host:
        assert [loss[:2] for loss in losses] == [["worker/1", tasks[1].pid]]
        assert re.match(r"no sign of life for (1\.9|[2-9]\.\d) s; its machine does not answer either", losses[0][2])
    assert alone[0][0][0] == "worker/0"
    three_machines[1].heal()
    # It is told that it was declared lost, and what it says is refused.
    losses = lost_by([tasks[1]], count=2)[0]
    assert losses[1][0] == "worker/1"
    assert losses[1][2].startswith("worker/0 had declared this task lost")
    tasks[1].send("m().set('later', b'')")
    assert tasks[1].error()[0] == "TaskLostError"
    assert tasks[0].ask("[m().num_keys(), [each.task for each in m().members]]") == [
        0,
        ["worker/0", "worker/2"],
    ]


@pytest.mark.parametrize("way", ["deafen", "silence"])
def test_cut_in_one_direction_is_noticed_on_both_sides(
    tasks: list[TaskProcess], three_machines: list[Machine], way: str
) -> None:
    begin(tasks, cluster_on(three_machines), **RHYTHM)
    getattr(three_machines[1], way)()
    for losses in lost_by([tasks[0], tasks[2]]):
        assert [loss[:2] for loss in losses] == [["worker/1", tasks[1].pid]]
    assert lost_by([tasks[1]])[0][0][0] in ("worker/0", "worker/1")


def test_machine_that_is_switched_off_is_noticed(tasks: list[TaskProcess], three_machines: list[Machine]) -> None:
    begin(tasks, cluster_on(three_machines), **RHYTHM)
    three_machines[0].cut()
    os.kill(tasks[0].pid, 9)
    for losses in lost_by(tasks[1:]):
        assert losses[0][:2] == ["worker/0", tasks[0].pid]
        assert "its machine does not answer either" in losses[0][2]
