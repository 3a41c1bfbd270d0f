"""What a user sees when a replica dies, stalls or fails, and what is left: nothing.

The guards of `tests/guards.py` hold after each test: no process, memory, socket or setting remains.
"""

import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.collectives.exchange import WindowExchange
from stratagem.errors import (
    CollectiveError,
    NonFiniteGradientError,
    ReplicaDiedError,
    ReplicaStalledError,
    StratagemWarning,
    StrategyError,
)
from stratagem.processes import losses
from stratagem.processes.group import ChildGroup
from stratagem.processes.registry import Registry
from stratagem.variables.slices import SplitUpdate
from tests.cluster import nursery
from tests.fakes import fake_host
from tests.faults.watching import is_gone, pids, train, weights

pytestmark = pytest.mark.usefixtures("four_cpus", "forked_tasks")


@pytest.fixture
def strategy() -> Iterator[sg.MirroredStrategy]:
    with sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as made:
        yield made


def build(strategy: sg.Strategy) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(inputs: torch.Tensor, fault: Callable[[int], None] | None = None) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        if fault is not None:
            fault(sg.get_replica_context().replica_id_in_sync_group)
        loss.backward()
        optimizer.step()
        return loss

    return model, step


def test_killed_replica_is_named_and_the_others_end(strategy: sg.MirroredStrategy) -> None:
    model, step = build(strategy)
    train(strategy, step, 3)
    before, children = weights(model), pids(strategy)[1:]
    os.kill(children[0], signal.SIGKILL)
    with pytest.raises(ReplicaDiedError, match=rf"replica 1 \(pid {children[0]}\) was killed by SIGKILL in run"):
        train(strategy, step, 1)
    assert all(map(is_gone, children))
    assert all(map(torch.equal, weights(model), before))
    with pytest.raises(StrategyError, match="was closed at"):
        strategy.run(os.getpid)
    with torch.no_grad():
        model(torch.ones(1, 4))


def test_replica_killed_inside_the_exchange_changes_nothing(strategy: sg.MirroredStrategy) -> None:
    model, step = build(strategy)
    train(strategy, step, 4)
    before = weights(model)

    def die_in_exchange(replica: int) -> None:
        if replica != 1:
            return
        show = WindowExchange._show

        def half(self: WindowExchange, vectors: Any, *rest: Any) -> None:
            show(self, [*vectors[:2], *[None] * (len(vectors) - 2)], *rest)
            os.kill(os.getpid(), signal.SIGKILL)

        WindowExchange._show = half  # type: ignore[method-assign]

    with pytest.raises(ReplicaDiedError, match=r"replica 1 .* was killed by SIGKILL") as caught:
        strategy.run(step, args=(torch.ones(3, 4), die_in_exchange))
    assert losses.TORN not in getattr(caught.value, "__notes__", ())
    assert all(map(torch.equal, weights(model), before))


def test_replica_killed_in_an_update_says_that_parameters_may_be_of_two_steps(strategy: sg.MirroredStrategy) -> None:
    _, step = build(strategy)
    train(strategy, step, 2)

    def die_in_update(replica: int) -> None:
        if replica == 1:
            SplitUpdate._update = lambda self, _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]

    with pytest.raises(ReplicaDiedError, match=r"replica 1 .* was killed by SIGKILL") as caught:
        strategy.run(step, args=(torch.ones(3, 4), die_in_update))
    assert losses.TORN in caught.value.__notes__
    with pytest.raises(StrategyError, match="was closed at"):
        strategy.run(os.getpid)


@pytest.mark.parametrize("who", [0, 1, None])
@pytest.mark.parametrize("num_steps", [None, 2])
def test_step_that_fails_after_its_update_has_the_state_after_it_and_nothing_is_torn(
    strategy: sg.MirroredStrategy, who: int | None, num_steps: int | None
) -> None:
    model, step = build(strategy)

    def fail(x: torch.Tensor, fails: bool) -> None:
        step(x)
        if fails and who in (None, sg.get_replica_context().replica_id_in_sync_group):  # type: ignore[union-attr]
            raise ValueError("after the update")

    x = torch.ones(3, 4)
    strategy.run(fail, args=(x, False))
    before = weights(model)
    with pytest.raises(ValueError, match="after the update") as caught:
        strategy.run(fail, args=(x, True), num_steps=num_steps)
    assert losses.TORN not in getattr(caught.value, "__notes__", ())
    after = weights(model)
    assert not any(map(torch.equal, after, before))
    found = strategy.local_results(strategy.run(lambda: [each.detach().clone() for each in model.parameters()]))
    for replica in found:
        assert all(map(torch.equal, replica, after))


def test_gradients_are_those_of_before_when_a_pass_has_failed_in_another_replica(strategy: sg.MirroredStrategy) -> None:
    model, _ = build(strategy)

    def accumulate(x: torch.Tensor, fails: bool) -> None:
        if fails and sg.get_replica_context().replica_id_in_sync_group == 1:  # type: ignore[union-attr]
            raise ValueError("before the pass")
        model(x).sum().backward()

    def gradients() -> list[torch.Tensor]:
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    x = torch.ones(3, 4)
    strategy.run(accumulate, args=(x, False))
    once = gradients()
    with pytest.raises(ValueError, match="before the pass"):
        strategy.run(accumulate, args=(x, True))
    assert all(map(torch.equal, gradients(), once))
    strategy.run(accumulate, args=(x, False))
    assert len(once) == len(list(model.parameters()))
    for now, each in zip(gradients(), once, strict=True):
        torch.testing.assert_close(now, 2 * each)


def test_ctrl_c_leaves_the_gradient_mode_as_it_was(strategy: sg.MirroredStrategy) -> None:
    def interrupted() -> None:
        torch.set_grad_enabled(False)  # as inside `no_grad`, when Ctrl-C comes at its end
        if sg.get_replica_context().replica_id_in_sync_group == 0:  # type: ignore[union-attr]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        strategy.run(interrupted)
    assert torch.is_grad_enabled()
    assert set(strategy.local_results(strategy.run(torch.is_grad_enabled))) == {True}


def test_crashed_replica_is_named_with_its_signal(strategy: sg.MirroredStrategy) -> None:
    _, step = build(strategy)

    def crash(replica: int) -> None:
        if replica == 2:
            os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(ReplicaDiedError, match=r"replica 2 .* was killed by SIGSEGV"):
        strategy.run(step, args=(torch.ones(3, 4), crash))


def test_stopped_replica_is_named_after_the_deadline() -> None:
    # Long enough for a busy machine, where a replica that works may have to wait for its core.
    with sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], stall_timeout_s=8.0) as strategy:
        model, step = build(strategy)
        train(strategy, step, 2)
        before, children = weights(model), pids(strategy)[1:]
        os.kill(children[0], signal.SIGSTOP)
        words = rf"replica 1 \(pid {children[0]}\), state T has not answered for 8.0 s"
        with pytest.raises(ReplicaStalledError, match=words):
            train(strategy, step, 1)
        assert all(map(is_gone, children))
        assert all(map(torch.equal, weights(model), before))


def test_replica_that_pauses_and_goes_on_changes_nothing(strategy: sg.MirroredStrategy) -> None:
    model, step = build(strategy)
    train(strategy, step, 6)
    undisturbed = weights(model)
    strategy.close()
    with sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as other:
        model, step = build(other)
        (_, paused, _) = pids(other)
        os.kill(paused, signal.SIGSTOP)
        waker = subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {paused}"])
        train(other, step, 6)
        assert waker.wait(30) == 0
        assert all(map(torch.equal, weights(model), undisturbed))


def test_exception_in_one_replica_is_shown_once_with_its_own_traceback(strategy: sg.MirroredStrategy) -> None:
    model, step = build(strategy)
    train(strategy, step, 2)
    before = weights(model)

    def fail(replica: int) -> None:
        if replica == 1:
            raise ValueError("bad row 812")

    with pytest.raises(ValueError, match=r"^bad row 812") as caught:
        strategy.run(step, args=(torch.ones(3, 4), fail))
    (note,) = caught.value.__notes__
    lines = note.splitlines()
    assert lines[0] == "raised in replica 1:"
    assert [line.split()[-1] for line in lines if line.startswith("  File ")] == ["step", "fail"]
    assert files_of(caught.value) == {__file__}, "the library's frames are left out"
    assert all(map(torch.equal, weights(model), before))
    train(strategy, step, 2)
    assert not torch.equal(weights(model)[0], before[0]), "the strategy goes on after a mended mistake"


def files_of(error: BaseException) -> set[str]:
    return {frame.filename for frame in traceback.extract_tb(error.__traceback__)}


@pytest.mark.parametrize("num_steps", [None, 2])
@pytest.mark.parametrize(("failing", "named"), [({0}, "replica 0"), ({0, 1}, "replicas 0, 1")])
def test_exception_in_the_main_program_names_the_replicas(
    strategy: sg.MirroredStrategy, failing: set[int], named: str, num_steps: int | None
) -> None:
    def step() -> None:
        if strategy.global_rank in failing:
            raise ValueError("bad row 812")
        sg.get_replica_context().all_reduce("sum", torch.ones(1))  # type: ignore[union-attr]  # not before the other fails

    with pytest.raises(ValueError, match=r"^bad row 812\n") as caught:
        strategy.run(step, num_steps=num_steps)
    assert re.fullmatch(rf"raised in {named}|raised in replica 0", caught.value.__notes__[0])
    assert files_of(caught.value) == {__file__}
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "step"


def test_exception_on_one_device_has_the_users_frames_alone() -> None:
    def step() -> None:
        raise ValueError("bad row 812")

    with sg.OneDeviceStrategy() as strategy, pytest.raises(ValueError, match=r"^bad row 812$") as caught:
        strategy.run(step)
    assert not hasattr(caught.value, "__notes__")
    assert files_of(caught.value) == {__file__}


def test_exception_in_every_replica_is_that_of_the_main_program(strategy: sg.MirroredStrategy) -> None:
    _, step = build(strategy)

    def fail(replica: int) -> None:
        raise KeyError(f"in {replica}")

    with pytest.raises(KeyError, match="in 0"):
        strategy.run(step, args=(torch.ones(3, 4), fail))
    train(strategy, step, 1)


def test_exception_that_cannot_travel_is_told_in_words(strategy: sg.MirroredStrategy) -> None:
    class StubbornError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def fail() -> None:
        if sg.get_replica_context().replica_id_in_sync_group == 2:
            raise StubbornError(1, 2)

    with pytest.raises(sg.errors.ReplicaError, match=r"replica 2 raised .*StubbornError: 1 and 2"):
        strategy.run(fail)


def test_nonfinite_gradient_skips_the_update_everywhere_and_is_named(strategy: sg.MirroredStrategy) -> None:
    model, step = build(strategy)
    train(strategy, step, 2)
    before = weights(model)
    poisoned = [torch.ones(3, 4), torch.full((3, 4), float("nan")), torch.ones(3, 4)]
    batch = sg.PerReplica(poisoned, (3, 3, 3))
    with pytest.warns(
        StratagemWarning, match=r"non-finite gradient in replica 1, first in '0.weight', run \d+; update"
    ):
        strategy.run(step, args=(batch,))
    assert all(map(torch.equal, weights(model), before))
    train(strategy, step, 1)
    assert all(each.isfinite().all() for each in weights(model))

    def go_on() -> None:
        for _ in range(11):
            strategy.run(step, args=(batch,))

    with pytest.warns(StratagemWarning), pytest.raises(NonFiniteGradientError, match="number 10 in a row"):
        go_on()


def test_empty_replica_with_a_nan_loss_counts_for_nothing(strategy: sg.MirroredStrategy) -> None:
    model, step = build(strategy)

    def bad_if_empty(x: torch.Tensor) -> torch.Tensor:
        replica = sg.get_replica_context()
        return step(x if replica is not None and replica.has_examples else x * torch.nan)

    (batch,) = strategy.distribute([torch.ones(2, 4)])
    losses = strategy.run(bad_if_empty, args=(batch,))
    assert losses.counts == (1, 1, 0)
    assert losses.values[2].isnan()
    assert strategy.reduce("mean", losses).isfinite()
    assert len(strategy.local_results(losses)) == len(strategy.gather(losses)) == 2
    assert all(each.isfinite().all() for each in weights(model))


def test_replica_over_its_memory_limit_says_so_and_lives_on() -> None:
    sg.config.set_logical_device_configuration(
        "cpu:0", [sg.config.LogicalDeviceConfiguration(memory_limit=512) for _ in range(4)]
    )
    try:
        with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:

            def take(num_mib: int) -> int:
                replica = sg.get_replica_context().replica_id_in_sync_group
                return torch.ones(replica * num_mib * 2**20, dtype=torch.uint8).numel()

            with pytest.raises(sg.OutOfMemoryError, match=r"/device:CPU:1: asked for 1 GiB.* its limit is 512 MiB"):
                strategy.run(take, args=(1024,))
            assert strategy.run(take, args=(8,)).values == (0, 8 * 2**20)
    finally:
        sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * 4)


def test_strategy_cannot_be_used_in_a_forked_process(strategy: sg.MirroredStrategy) -> None:
    build(strategy)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            strategy.run(os.getpid)
        except StrategyError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    assert "which was forked from it" in said
    assert len(pids(strategy)) == 3


# Programs of their own: what happens to the children when the controller goes

_PROGRAM = """
import os, signal, sys, time
import torch, stratagem as sg

sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * 3)
strategy = sg.MirroredStrategy()
with strategy.scope():
    model = torch.nn.Linear(4, 2)
print(*strategy.run(os.getpid).values, flush=True)
{rest}
"""


def start(rest: str, **options: Any) -> tuple[subprocess.Popen[str], list[int]]:
    program = nursery.Program(
        ["-c", _PROGRAM.format(rest=rest)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    assert program.stdout is not None
    children = [int(each) for each in program.stdout.readline().split()][1:]
    assert len(children) == 2, program.communicate(timeout=30)
    return program, children


@pytest.mark.slow
@pytest.mark.parametrize("busy", ["time.sleep(60)", "strategy.run(lambda: time.sleep(60))"])
def test_children_end_with_a_killed_controller(busy: str) -> None:
    program, children = start(busy)
    program.kill()
    program.communicate(timeout=30)
    assert all(map(is_gone, children))


@pytest.mark.slow
def test_program_that_does_not_close_its_strategy_ends_cleanly() -> None:
    program, children = start("print('the end')")
    assert program.wait(30) == 0
    with program.stdout as stdout, program.stderr as stderr:  # type: ignore[union-attr]
        assert (stdout.read().strip(), stderr.read()) == ("the end", "")
    assert all(map(is_gone, children))


@pytest.mark.slow
def test_ctrl_c_stops_cleanly() -> None:
    program, children = start(
        "def step():\n    print('in step', flush=True)\n    time.sleep(0.5)\nwhile True: strategy.run(step)",
        start_new_session=True,
    )
    assert program.stdout is not None
    while "in step" not in program.stdout.readline():
        pass
    os.killpg(program.pid, signal.SIGINT)
    _, stderr = program.communicate(timeout=30)
    assert program.returncode == -signal.SIGINT
    assert stderr.count("Traceback") == 1
    assert "KeyboardInterrupt" in stderr
    assert all(map(is_gone, children))


@pytest.mark.slow
def test_small_dev_shm_does_not_matter(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root for a mount of its own")
    program = _PROGRAM.format(rest="print(os.statvfs('/dev/shm').f_blocks * 4096, flush=True)")
    script = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, sys.executable, program],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) <= 65536


@pytest.mark.slow
def test_too_few_open_files_is_one_clear_error() -> None:
    program = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (14, 14))\n" + _PROGRAM.format(rest="")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert "open files" in done.stderr.splitlines()[-1] or "Too many open files" in done.stderr


def test_slow_replica_is_named_once_a_minute(strategy: sg.MirroredStrategy) -> None:
    _, step = build(strategy)

    def sleep(replica: int) -> None:
        if replica == 1:
            time.sleep(0.05)

    train(strategy, step, 2)
    with pytest.warns(StratagemWarning, match=r"replica 1 is the slowest: it computes \d+\.\d times") as caught:  # noqa: PT031
        for _ in range(30):
            strategy.run(step, args=(torch.ones(3, 4), sleep))
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_replicas_with_different_numbers_of_passes_are_told_so(strategy: sg.MirroredStrategy) -> None:
    model, step = build(strategy)

    def uneven() -> None:
        for _ in range(2 if sg.get_replica_context().replica_id_in_sync_group == 1 else 1):
            model(torch.ones(3, 4)).sum().backward()

    with pytest.raises(CollectiveError, match=r"replica \d has finished this run while replica 1 still waits for it"):
        strategy.run(uneven)
    train(strategy, step, 1)


def test_replica_that_the_kernel_killed_for_memory_is_told_so(tmp_path: Path, fork_server: None) -> None:
    files = {
        "proc/self/cgroup": "0::/box",
        "sys/fs/cgroup/box/memory.max": str(300 * 2**20),
        "sys/fs/cgroup/box/memory.current": "0",
        "sys/fs/cgroup/box/memory.events": "oom_kill 0\n",
    }
    group = ChildGroup(Registry(), host=fake_host(tmp_path, files))
    group.begin([1])
    group.start()
    try:
        group.call_all(time.sleep, 60)
        (tmp_path / "sys/fs/cgroup/box/memory.events").write_text("oom_kill 1\n")
        os.kill(group.members[1].pid, signal.SIGKILL)
        with pytest.raises(
            ReplicaDiedError, match=r"probably out of memory: cgroup oom_kill rose from 0 to 1, limit 300"
        ):
            group.collect()
    finally:
        group.stop()
