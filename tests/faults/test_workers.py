"""Workers that die, stop, fail or do not fit: the others hear of it in seconds, and nothing is half done."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.cluster.conftest import token_file
from tests.cluster.machines import Machine, machines, network
from tests.cluster.tasks import TaskProcess, workers
from tests.faults import worker_program

__all__ = ["network", "token_file"]

PROGRAM = "tests.faults.worker_program"

pytestmark = pytest.mark.usefixtures("forked_tasks", "token_file")


@contextlib.contextmanager
def cluster_of(prefixes: list[list[str]]) -> Iterator[list[TaskProcess]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(TaskProcess(prefix, PROGRAM))) for prefix in prefixes]


def begin(tasks: list[TaskProcess], cluster: dict[str, list[str]] | None = None, **options: object) -> None:
    cluster = cluster or workers(len(tasks))
    for index, task in enumerate(tasks):
        task.send(f"begin({cluster!r}, {index}, **{options!r})")
    for task in tasks:
        assert task.value() == "begun"


def together(tasks: list[TaskProcess], expression: str) -> list[object]:
    for task in tasks:
        task.send(expression)
    return [task.value() for task in tasks]


def expected_weights(num_steps: int) -> list[list[float]]:
    """Those of one device after so many steps."""
    model = worker_program.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(num_steps):
        inputs, targets = worker_program.batch(number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return [each.detach().flatten().tolist() for each in model.parameters()]


def assert_whole(outcome: list[object]) -> None:
    """The weights are those of whole steps: the last was applied with all gradients, or not at all."""
    num_steps, _, _, weights = outcome
    ours = torch.tensor([number for each in weights for number in each])
    before, after = (
        torch.tensor([number for each in expected_weights(num_steps + more) for number in each]) for more in (0, 1)
    )
    assert torch.allclose(ours, before, atol=1e-4) or torch.allclose(ours, after, atol=1e-4)
    assert not torch.allclose(before, after, atol=1e-4)


@pytest.mark.parametrize(("number", "victim"), [(signal.SIGKILL, 0), (signal.SIGKILL, 1), (signal.SIGSTOP, 0)])
def test_a_worker_that_dies_or_stops_in_a_step_is_named_to_the_other(number: signal.Signals, victim: int) -> None:
    with cluster_of([[], []]) as tasks:
        begin(tasks, heartbeat_timeout_s=3.0)
        together(tasks, "train(3)")
        for task in tasks:
            task.send("train_until_failure()")
        time.sleep(0.5)  # somewhere in a step, or between two
        tasks[victim].signal(number)
        outcome = tasks[1 - victim].value()
    assert outcome[1] == "TaskLostError", outcome[:3]
    assert f"worker/{victim} (127.0.0.1:" in outcome[2]
    assert f"pid {tasks[victim].pid} " in outcome[2]
    assert_whole([outcome[0] + 3, *outcome[1:]])


@pytest.mark.parametrize("way", ["torch"])
def test_workers_whose_replicas_share_no_variables(way: str) -> None:
    with cluster_of([[], []]) as tasks:
        begin(tasks, num_replicas=2, cross_device_ops=way)
        first, second = together(tasks, "train(3)")
        assert first == second
        weights, others = together(tasks, "weights()")
    assert weights == others
    for ours, theirs in zip(weights, expected_weights(3), strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("width", "outcome"), [(16, "value"), (200_000, "error")])
def test_a_pass_that_failed_can_be_ignored_only_if_nothing_was_sent(width: int, outcome: str) -> None:
    with cluster_of([[], []]) as tasks:
        begin(tasks, width=width)
        together(tasks, "train(1)")
        for task in tasks:
            task.send("swallow_a_failed_pass(1)")
        outcomes = [task.answer() for task in tasks]
        assert all(outcome in each for each in outcomes), outcomes
        if outcome == "value":
            first, second = together(tasks, "weights()")
            assert first == second


def test_an_error_in_one_worker_is_raised_there_and_told_to_the_other() -> None:
    with cluster_of([[], []]) as tasks:
        begin(tasks, num_replicas=2)
        before = together(tasks, "weights()")
        for task in tasks:
            task.send("train(1, fail_in=3)")
        kind, message = tasks[1].error()
        assert (kind, message.splitlines()[0]) == ("ValueError", "bad row 812")
        kind, message = tasks[0].error()
        assert kind == "TaskLostError"
        assert message.startswith("worker/1 (127.0.0.1:")
        assert "was lost: ValueError: bad row 812" in message
        assert together(tasks, "weights()") == before
        for task in tasks:
            task.send("train(1)")
            assert task.error()[0] == "StrategyError"  # it was closed, and says why


def test_a_replica_that_is_killed_ends_its_worker_and_the_others() -> None:
    with cluster_of([[], []]) as tasks:
        begin(tasks, num_replicas=2)
        together(tasks, "train(1)")
        tasks[1].ask("kill_own_replica()")
        for task in tasks:
            task.send("train(1)")
        assert tasks[1].error()[0] == "ReplicaDiedError"
        kind, message = tasks[0].error()
        assert kind == "TaskLostError"
        assert "ReplicaDiedError: replica" in message


def test_different_types_of_exchange_are_named() -> None:
    with cluster_of([[], []]) as tasks:
        cluster = workers(2)
        for index, (task, dtype) in enumerate(zip(tasks, ("bf16", None), strict=True)):
            task.send(f"begin({cluster!r}, {index}, exchange_dtype={dtype!r})")
        for task in tasks:
            assert 'worker/1 and worker/0 disagree on exchange_dtype: null vs "bfloat16"' in task.error()[1]


def test_different_models_are_named() -> None:
    with cluster_of([[], []]) as tasks:
        cluster = workers(2)
        for index, task in enumerate(tasks):
            task.send(f"begin({cluster!r}, {index}, width={16 + index})")
        for task in tasks:
            assert task.value() == "begun"
            task.send("train(1)")
        for task in tasks:
            kind, message = task.error()
            assert kind in ("WorkerError", "TaskLostError")
            assert "worker/0 and worker/1 have different models: part 0 is '0.weight (16, 6)" in message
            assert "'0.weight (17, 6)" in message


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ("worker.model[0].weight.data.add_(1.0).sum().item()", "0.weight"),
        ("worker.optimizer.param_groups[0].update(lr=0.5)", "SGD (object"),
    ],
)
def test_what_one_worker_alone_changes_between_runs_is_named(change: str, changed: str) -> None:
    with cluster_of([[], []]) as tasks:
        begin(tasks)
        together(tasks, "train(1)")
        tasks[1].ask(change)
        for task in tasks:
            task.send("train(1)")
        for task in tasks:
            kind, message = task.error()
            assert kind in ("WorkerError", "TaskLostError")
            assert f"before run 2 only worker/1 changed {changed}" in message
            assert "in every worker" in message


def test_what_all_workers_change_alike_and_what_stays_as_it_was_is_no_error() -> None:
    with cluster_of([[], []]) as tasks:
        begin(tasks)
        together(tasks, "train(1)")
        tasks[0].ask("worker.model[0].weight.data.mul_(1.0).sum().item()")  # written, and not changed
        together(tasks, "train(1)")
        together(tasks, "worker.model[0].weight.data.mul_(0.5).sum().item()")
        together(tasks, "worker.optimizer.param_groups[0].update(lr=0.05)")
        first, second = together(tasks, "train(2)")
        assert first == second
        first, second = together(tasks, "weights()")
        assert first == second


def test_workers_with_different_optimizers_are_told_so() -> None:
    with cluster_of([[], []]) as tasks:
        begin(tasks)
        tasks[1].ask("worker.optimizer.param_groups[0].update(momentum=0.5)")
        for task in tasks:
            task.send("train(1)")
        for task in tasks:
            message = task.error()[1]
            assert 'worker/0 and worker/1 have different models: part 4 is "SGD' in message
            assert "'momentum': 0.9" in message
            assert "'momentum': 0.5" in message


def test_a_worker_that_does_more_than_the_others_is_told_that_they_have_gone() -> None:
    with cluster_of([[], []]) as tasks:
        begin(tasks)
        together(tasks, "train(1)")
        tasks[1].send("train(1)")
        assert tasks[0].ask("close()") == "closed"
        kind, message = tasks[1].error()
        assert kind == "WorkerError"
        assert "worker/1 wanted to begin an epoch, but not all of worker/0 take part any more" in message


def test_workers_that_do_different_things_are_told_so() -> None:
    with cluster_of([[], []]) as tasks:
        begin(tasks)
        together(tasks, "train(1)")
        tasks[0].send("train(1)")
        tasks[1].send("worker.strategy.is_any(True)")
        for task in tasks:
            kind, message = task.error()
            assert kind in ("WorkerError", "TaskLostError")
            assert (
                "worker/0 called iter() of strategy.distribute, worker/1 called next() of strategy.distribute"
                in message
            )


def test_a_worker_that_lives_but_does_not_come_is_waited_for_so_long_and_no_longer() -> None:
    with cluster_of([[], []]) as tasks:
        begin(tasks, worker_timeout_s=2.0)
        together(tasks, "train(1)")
        tasks[0].send("train(1)")
        kind, message = tasks[0].error()
        assert kind == "WorkerStalledError"
        assert "worker/0 has waited 2 s to begin an epoch: not all of worker/1 have come" in message
        assert "worker_timeout_s" in message


def test_a_worker_that_is_slow_does_no_harm() -> None:
    with cluster_of([[], []]) as tasks:
        begin(tasks)
        together(tasks, "train(1)")
        tasks[0].send("train(3)")
        tasks[1].signal(signal.SIGSTOP)
        time.sleep(1.5)  # shorter than what counts as lost
        tasks[1].signal(signal.SIGCONT)
        assert tasks[1].ask("train(3)") == tasks[0].value()


def expect_losses(tasks: list[TaskProcess]) -> None:
    """Both sides of a cut hear of it."""
    for index, task in enumerate(tasks):
        outcome = task.value()
        assert outcome[1] == "TaskLostError", outcome
        assert f"worker/{1 - index} (10.77.0.{2 - index}:" in outcome[2] or "worker/1 (" in outcome[2]
        assert_whole(outcome)


def on(rented: list[Machine]) -> tuple[list[list[str]], dict[str, list[str]]]:
    return [machine.prefix for machine in rented], {"worker": [f"{machine.address}:4000" for machine in rented]}


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("how", ["cut", "silence"])
def test_workers_on_machines_that_lose_each_other_stop_and_stay_apart(how: str) -> None:
    with machines(2) as rented:
        prefixes, cluster = on(rented)
        with cluster_of(prefixes) as tasks:
            begin(tasks, cluster)
            for task in tasks:
                task.send("train_until_failure()")
            time.sleep(0.5)
            getattr(rented[1], how)()
            expect_losses(tasks)
            rented[1].heal()
            for task in tasks:
                task.send("train(1)")
                assert task.error()[0] == "StrategyError"


@pytest.mark.usefixtures("network")
def test_a_short_interruption_does_no_harm_and_workers_that_only_cannot_reach_each_other_say_so() -> None:
    """In the second case all still give signs of life to the keeper, so that nobody is lost."""
    with machines(3) as rented:
        prefixes, cluster = on(rented)
        with cluster_of(prefixes) as tasks:
            begin(tasks, cluster)
            for task in tasks:
                task.send("train(100)")
            rented[1].cut()
            time.sleep(1.0)
            rented[1].heal()
            losses = [task.value() for task in tasks]
            assert losses[0] == losses[1] == losses[2]
            together(tasks, "notice_cuts_after(1.0)")
            for task in tasks:
                task.send("train_until_failure()")
            rented[1].part_from(rented[2])
            errors = [task.value()[1:3] for task in tasks]
    assert {kind for kind, _ in errors} >= {"WorkerError"}, errors
    for _, message in errors:  # one or both have found it out, and told the others
        assert "has not answered this one for 1 s; the network between them is cut" in message, errors


def test_replicas_of_a_killed_worker_die_with_it() -> None:
    with cluster_of([[], []]) as tasks:
        begin(tasks, num_replicas=2)
        together(tasks, "train(1)")
        children = tasks[1].ask("[each.pid for each in worker.strategy._replicas._group.members.values()]")
        tasks[1].kill()
        deadline = time.monotonic() + 20
        while any(os.path.exists(f"/proc/{pid}") for pid in children):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_workers_whose_copies_of_the_data_differ_are_named_before_the_first_step() -> None:
    with cluster_of([[], []]) as tasks:
        begin(tasks)
        for task, size in zip(tasks, (1002, 1003), strict=True):
            task.send(f"[*worker.strategy.distribute(torch.arange({size}.0), global_batch_size=64, shuffle=True)]")
        for task in tasks:
            kind, message = task.error()
            assert kind == "WorkerError"
            assert "worker/0 and worker/1 have different data: examples 1002 and 1003" in message
            assert "auto_shard='off'" in message
