"""A training whose replicas die goes on from its last checkpoint, and ends as if nothing had happened."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem import estimator as sge
from stratagem.errors import LostError, ReplicaDiedError, ReplicaStalledError, StratagemWarning
from stratagem.training.checkpoints import all_checkpoints, step_of
from stratagem.training.estimator.restarts import PERIOD_S, Restarts
from tests.faults import small_training
from tests.faults.small_training import X, Y, data, weights
from tests.faults.watching import is_gone, pids


@pytest.fixture
def strategy(four_cpus: None) -> Iterator[sg.MirroredStrategy]:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], stall_timeout_s=20.0) as made:
        yield made


def make(folder: Path, strategy: sg.Strategy, **more: Any) -> sge.Estimator:
    return small_training.make(folder, strategy, **{"restart": "from_checkpoint", **more})


class Kill(sge.SessionRunHook):
    """Sends replica 1 a signal before some steps, once each."""

    def __init__(self, strategy: sg.Strategy, *steps: int, number: int = signal.SIGKILL, again: bool = False) -> None:
        self.killed: list[int] = []
        self.moments: list[str] = []
        self._strategy = strategy
        self._steps = list(steps)
        self._number = number
        self._again = again

    def begin(self) -> None:
        self.moments.append("begin")

    def after_create_session(self, run_context: sge.RunContext) -> None:
        self.moments.append(f"created at {run_context.global_step}")

    def before_run(self, run_context: sge.RunContext) -> None:
        if run_context.global_step in self._steps:
            if not self._again:
                self._steps.remove(run_context.global_step)
            self.killed.append(pids(self._strategy)[1])
            os.kill(self.killed[-1], self._number)

    def end(self, run_context: sge.RunContext) -> None:
        self.moments.append("end")


@pytest.fixture
def undisturbed(tmp_path: Path, strategy: sg.MirroredStrategy) -> list[torch.Tensor]:
    estimator = make(tmp_path / "undisturbed", strategy, restart="never")
    estimator.train(data, max_steps=10)
    return weights(estimator)


@pytest.mark.parametrize(("at", "resumed"), [(8, 6), (1, 0), (6, 6)])
def test_training_goes_on_from_its_last_checkpoint_and_ends_bit_for_bit_alike(
    tmp_path: Path, strategy: sg.MirroredStrategy, undisturbed: list[torch.Tensor], at: int, resumed: int
) -> None:
    kill = Kill(strategy, at)
    estimator = make(tmp_path / "disturbed", strategy)
    cause = rf"^replica 1 \(pid \d+\) was killed by SIGKILL .* at step {at + 1} of the training"
    words = rf"{cause}\. Training is restarted from step {resumed}; 2 of 3 restarts are left$"
    with pytest.warns(StratagemWarning, match=words) as warned:
        estimator.train(data, hooks=[kill], steps=10)
    assert len(warned) == 1
    assert len(kill.killed) == 1, "the fault happened"
    assert is_gone(kill.killed[0])
    assert step_of(estimator.latest_checkpoint() or "") == 10
    assert all(map(torch.equal, weights(estimator), undisturbed))
    assert kill.moments == ["begin", "created at 0", f"created at {resumed}", "end"]


def test_training_survives_as_many_losses_as_it_may(
    tmp_path: Path, strategy: sg.MirroredStrategy, undisturbed: list[torch.Tensor]
) -> None:
    kill = Kill(strategy, 2, 5, 9)
    estimator = make(tmp_path / "disturbed", strategy)
    with pytest.warns(StratagemWarning, match="Training is restarted from step") as warned:
        estimator.train(data, hooks=[kill], max_steps=10)
    assert [str(each.message).rsplit("; ", maxsplit=1)[1][:6] for each in warned] == ["2 of 3", "1 of 3", "0 of 3"]
    assert len(kill.killed) == 3
    assert all(map(torch.equal, weights(estimator), undisturbed))


def test_crash_loop_ends_with_the_first_cause_and_the_list(tmp_path: Path, strategy: sg.MirroredStrategy) -> None:
    kill = Kill(strategy, 4, again=True)
    estimator = make(tmp_path, strategy, max_restarts=1)
    with pytest.warns(StratagemWarning, match="0 of 1 restarts"), pytest.raises(ReplicaDiedError) as caught:
        estimator.train(data, hooks=[kill], max_steps=10)
    assert len(kill.killed) == 2
    assert f"replica 1 (pid {kill.killed[0]}) was killed by SIGKILL" in str(caught.value)
    (note,) = caught.value.__notes__
    assert note.splitlines()[0] == "gave up after 1 restart in 600 s:"
    assert [f"(pid {pid})" in line for pid, line in zip(kill.killed, note.splitlines()[1:], strict=True)] == [True] * 2
    assert [step_of(path) for path in all_checkpoints(tmp_path)] == [0, 3]


def test_stalled_replica_is_replaced_too(tmp_path: Path, four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], stall_timeout_s=4.0) as strategy:
        kill = Kill(strategy, 2, number=signal.SIGSTOP)
        with pytest.warns(StratagemWarning, match="state T has not answered .* restarted from step 0"):
            make(tmp_path, strategy).train(data, hooks=[kill], max_steps=4)
        assert is_gone(kill.killed[0])


def test_replica_that_dies_in_an_evaluation_between_is_replaced(
    tmp_path: Path, strategy: sg.MirroredStrategy, undisturbed: list[torch.Tensor]
) -> None:
    estimator = make(tmp_path / "disturbed", strategy)
    kill = Kill(strategy, 6)
    train_spec = sge.TrainSpec(data, max_steps=10)
    eval_spec = sge.EvalSpec(lambda: [(X, Y)], hooks=[kill], throttle_secs=0)
    with pytest.warns(StratagemWarning, match="Training is restarted from step 6"):
        assert sge.train_and_evaluate(estimator, train_spec, eval_spec)["global_step"] == 10
    assert len(kill.killed) == 1
    assert all(map(torch.equal, weights(estimator), undisturbed))


def test_without_restarts_the_loss_is_the_error(tmp_path: Path, strategy: sg.MirroredStrategy) -> None:
    kill = Kill(strategy, 4)
    estimator = make(tmp_path, strategy, restart="never")
    with pytest.raises(ReplicaDiedError, match=r"was killed by SIGKILL .* at step 5 of the training$"):
        estimator.train(data, hooks=[kill], max_steps=10)
    assert len(kill.killed) == 1
    assert [step_of(path) for path in all_checkpoints(tmp_path)] == [3]


def test_error_of_the_program_is_no_reason_to_restart(tmp_path: Path, strategy: sg.MirroredStrategy) -> None:
    class Fail(sge.SessionRunHook):
        def before_run(self, run_context: sge.RunContext) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make(tmp_path, strategy).train(data, hooks=[Fail()], max_steps=10)
    strategy.run(int)


def test_restarts_count_within_ten_minutes() -> None:
    now_s = [0.0]
    config = sge.RunConfig(restart="from_checkpoint", max_restarts=2)
    restarts = Restarts(config, clock=lambda: now_s[0])

    def lost(at_s: float, kind: Callable[[str], LostError] = ReplicaDiedError) -> int:
        now_s[0] = at_s
        return restarts.num_left_after(kind(f"at {at_s}"))

    assert [lost(1.0), lost(2.0)] == [1, 0]
    assert lost(PERIOD_S + 1.5) == 0
    assert lost(2 * PERIOD_S + 1.0, ReplicaStalledError) == 0
    assert lost(3 * PERIOD_S) == 0
    with pytest.raises(ReplicaStalledError, match="at 1201") as caught:
        lost(3 * PERIOD_S + 1.0)
    assert "  1801 s: ReplicaDiedError: at 1801.0" in caught.value.__notes__[0]
