"""Replicas that are connected by torch.distributed: its waits must end like all others, and leave nothing.

The guards of `tests/guards.py` hold after each test: no process, thread, socket or setting remains.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.collectives import reconnecting
from stratagem.collectives.torch_distributed import TorchDistributed
from stratagem.errors import CollectiveError, ReplicaDiedError, ReplicaStalledError, StratagemWarning, StrategyError
from stratagem.variables import buckets
from tests.cluster import nursery
from tests.faults.watching import is_gone, pids, train, weights

pytestmark = pytest.mark.usefixtures("four_cpus", "forked_tasks")

SECONDS = 8.0  # what "in seconds" means on a busy machine; torch alone would wait for a day
STALL_S = 10.0


@pytest.fixture
def strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sg.MirroredStrategy]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], cross_device_ops="torch", stall_timeout_s=STALL_S) as made:
        yield made
    assert list(tmp_path.glob("stratagem*")) == []


Fault = Callable[[int], None]


def build(strategy: sg.Strategy) -> tuple[nn.Sequential, Callable[..., torch.Tensor]]:
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(inputs: torch.Tensor, before: Fault | None = None, within: Fault | None = None) -> torch.Tensor:
        buckets.BUCKET_BYTES = 32  # so that sums are under way when the pass comes to the first layer
        replica = sg.get_replica_context().replica_id_in_sync_group
        optimizer.zero_grad()
        hidden = model[0](inputs)
        if within is not None:
            hidden.register_hook(lambda _: within(replica))
        loss = model[1:](hidden).square().mean()
        if before is not None:
            before(replica)
        loss.backward()
        optimizer.step()
        return loss

    return model, step


@pytest.fixture(autouse=True)
def usual_buckets() -> Iterator[None]:
    usual = buckets.BUCKET_BYTES
    yield
    buckets.BUCKET_BYTES = usual


class Failing:
    """Raises in one replica."""

    def __init__(self, replica: int) -> None:
        self.replica = replica

    def __call__(self, replica: int) -> None:
        if replica == self.replica:
            raise ValueError(f"bad row in replica {replica}")


class Killing(Failing):
    def __call__(self, replica: int) -> None:
        if replica == self.replica:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("where", ["before", "within"])
def test_exception_in_one_replica_ends_the_run_in_seconds_and_training_goes_on(
    strategy: sg.MirroredStrategy, failing: int, where: str
) -> None:
    model, step = build(strategy)
    train(strategy, step, 2)
    before, start = weights(model), time.monotonic()
    with pytest.raises(ValueError, match=rf"^bad row in replica {failing}\b"):
        strategy.run(step, args=(torch.ones(3, 4),), kwargs={where: Failing(failing)})
    assert time.monotonic() - start < SECONDS
    assert all(map(torch.equal, weights(model), before))
    train(strategy, step, 2)
    first, *others = strategy.local_results(strategy.run(lambda: model[0].weight.detach().clone()))
    assert not torch.equal(first, before[0])
    assert all(torch.equal(first, each) for each in others)


@pytest.mark.parametrize("where", ["before", "within"])
def test_killed_replica_is_named_in_seconds_and_changes_nothing(strategy: sg.MirroredStrategy, where: str) -> None:
    model, step = build(strategy)
    train(strategy, step, 2)
    before, children, start = weights(model), pids(strategy)[1:], time.monotonic()
    with pytest.raises(ReplicaDiedError, match=rf"replica 1 \(pid {children[0]}\) was killed by SIGKILL in run"):
        strategy.run(step, args=(torch.ones(3, 4),), kwargs={where: Killing(1)})
    assert time.monotonic() - start < SECONDS
    assert all(map(is_gone, children))
    assert all(map(torch.equal, weights(model), before))
    with pytest.raises(StrategyError, match="was closed at"):
        strategy.run(os.getpid)
    model(torch.ones(1, 4)).sum().backward()


def test_replica_killed_while_its_sum_is_awaited_is_named(strategy: sg.MirroredStrategy) -> None:
    """Past the last meeting of the replicas: only torch's own waits are left."""
    model, step = build(strategy)
    train(strategy, step, 2)
    before, start = weights(model), time.monotonic()

    def die_in_sum(replica: int) -> None:
        if replica == 2:
            TorchDistributed._allreduce = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]

    with pytest.raises(ReplicaDiedError, match=r"replica 2 .* was killed by SIGKILL"):
        strategy.run(step, args=(torch.ones(3, 4), die_in_sum))
    assert time.monotonic() - start < SECONDS
    assert all(map(torch.equal, weights(model), before))


def test_stopped_replica_alone_is_named_after_the_deadline(strategy: sg.MirroredStrategy) -> None:
    model, step = build(strategy)
    train(strategy, step, 2)
    before, children = weights(model), pids(strategy)[1:]

    def stop(replica: int) -> None:
        if replica == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(ReplicaStalledError, match=rf"^replica 1 \(pid {children[0]}\), state T has not answered for"):
        strategy.run(step, args=(torch.ones(3, 4), stop))
    assert all(map(is_gone, children))
    assert all(map(torch.equal, weights(model), before))


def test_replica_that_pauses_and_goes_on_changes_nothing(strategy: sg.MirroredStrategy) -> None:
    model, step = build(strategy)
    train(strategy, step, 6)
    undisturbed = weights(model)
    strategy.close()
    with sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], cross_device_ops="torch") as other:
        model, step = build(other)
        paused = pids(other)[1]
        os.kill(paused, signal.SIGSTOP)
        waker = subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {paused}"])
        train(other, step, 6)
        assert waker.wait(30) == 0
        assert all(map(torch.equal, weights(model), undisturbed))


def test_replicas_with_different_numbers_of_passes_are_told_so(strategy: sg.MirroredStrategy) -> None:
    model, step = build(strategy)

    def uneven() -> None:
        for _ in range(2 if sg.get_replica_context().replica_id_in_sync_group == 1 else 1):
            model(torch.ones(3, 4)).sum().backward()

    start = time.monotonic()
    with pytest.raises(CollectiveError, match="replica 0 is at the end of its step while replica 1 is in"):
        strategy.run(uneven)
    assert time.monotonic() - start < SECONDS
    train(strategy, step, 1)


def test_nonfinite_gradient_skips_the_update_everywhere_and_is_named(strategy: sg.MirroredStrategy) -> None:
    model, step = build(strategy)
    train(strategy, step, 2)
    before = weights(model)
    batch = sg.PerReplica([torch.ones(3, 4), torch.full((3, 4), float("nan")), torch.ones(3, 4)], (3, 3, 3))
    with pytest.warns(
        StratagemWarning, match=r"non-finite gradient in replica 1, first in '0.weight', run \d+; update"
    ):
        strategy.run(step, args=(batch,))
    assert all(map(torch.equal, weights(model), before))
    train(strategy, step, 1)
    assert all(each.isfinite().all() for each in weights(model))


def test_empty_replica_with_a_nan_loss_counts_for_nothing(strategy: sg.MirroredStrategy) -> None:
    model, step = build(strategy)
    (batch,) = strategy.distribute([torch.ones(2, 4)])

    def spoiled(inputs: torch.Tensor) -> torch.Tensor:
        return step(inputs if sg.get_replica_context().has_examples else inputs * torch.nan)

    losses = strategy.run(spoiled, args=(batch,))
    assert losses.values[2].isnan()
    assert all(each.isfinite().all() for each in weights(model))


def test_child_that_cannot_connect_says_why(strategy: sg.MirroredStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    # How long torch goes on waiting in its thread, when nobody waits for it any more.
    monkeypatch.setattr(reconnecting, "_START_TIMEOUT_S", 2.0)
    _, step = build(strategy)
    train(strategy, step, 1)

    def fail_to_start(self: TorchDistributed) -> None:
        raise OSError("no more sockets")

    def prepare() -> None:
        if sg.get_replica_context().replica_id_in_sync_group == 1:
            TorchDistributed.start = fail_to_start  # type: ignore[method-assign]
        raise KeyError("so that they connect anew")

    with pytest.raises(KeyError):
        strategy.run(prepare)
    start = time.monotonic()
    with pytest.raises(OSError, match="no more sockets"):
        strategy.run(os.getpid)
    assert time.monotonic() - start < SECONDS


_PROGRAM = """
import os, sys, time
import torch, stratagem as sg

sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * 3)
strategy = sg.MirroredStrategy(cross_device_ops="torch")
with strategy.scope():
    model = torch.nn.Linear(4, 2)

def step():
    model(torch.ones(1, 4)).sum().backward()
    return os.getpid()

print(*strategy.run(step).values, flush=True)
{rest}
"""


def start(rest: str, folder: Path, **options: Any) -> tuple[subprocess.Popen[str], list[int]]:
    program = nursery.Program(
        ["-c", _PROGRAM.format(rest=rest)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
        **options,
    )
    assert program.stdout is not None
    children = [int(each) for each in program.stdout.readline().split()][1:]
    assert len(children) == 2, program.communicate(timeout=30)
    return program, children


@pytest.mark.slow
def test_killed_controller_leaves_neither_children_nor_files(tmp_path: Path) -> None:
    program, children = start("time.sleep(60)", tmp_path)
    program.kill()
    program.communicate(timeout=30)
    assert all(map(is_gone, children))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "rest", ["", "strategy.run(lambda: 1 / (1 - sg.get_replica_context().replica_id_in_sync_group))"]
)
def test_program_ends_at_once_whether_or_not_a_run_failed(tmp_path: Path, rest: str) -> None:
    program, children = start(rest, tmp_path)
    _, stderr = program.communicate(timeout=20)
    assert stderr.count("ZeroDivisionError: division by zero") == (2 if rest else 0)  # itself, and the replica's own
    assert program.returncode == bool(rest)
    assert all(map(is_gone, children))
    assert list(tmp_path.iterdir()) == []
