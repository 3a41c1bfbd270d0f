"""A training whose machine is taken away is saved, and goes on where it was when it is started again (F16)."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stratagem as sg
from stratagem import estimator as sge
from stratagem.errors import PreemptedExit
from stratagem.training.checkpoints import all_checkpoints, step_of
from tests.faults.small_training import data, make, weights


@pytest.fixture(params=["one device", "mirrored"])
def strategy(request: pytest.FixtureRequest, four_cpus: None) -> Iterator[sg.Strategy]:
    made = sg.OneDeviceStrategy("cpu:0") if request.param == "one device" else sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with made:
        yield made


class Terminate(sge.SessionRunHook):
    """Sends this process SIGTERM after a step."""

    def __init__(self, step: int, times: int = 1) -> None:
        self._step, self._times = step, times

    def after_run(self, run_context: sge.RunContext, run_values: sge.RunValues) -> None:
        if run_context.global_step == self._step:
            for _ in range(self._times):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.6)


class SaveAt(sge.SessionRunHook):
    """Writes a checkpoint after a step, and goes on: what is saved decides which random numbers come next."""

    def __init__(self, step: int) -> None:
        self._step = step

    def after_run(self, run_context: sge.RunContext, run_values: sge.RunValues) -> None:
        if run_context.global_step == self._step:
            run_context.save(finished=False)


def steps_in(folder: Path) -> list[int]:
    return [step_of(path) for path in all_checkpoints(folder)]


def test_step_is_finished_and_saved_and_training_goes_on_bit_for_bit(
    tmp_path: Path, strategy: sg.Strategy, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PreemptedExit) as ended:
        make(tmp_path / "preempted", strategy).train(data, [Terminate(7)], max_steps=10)
    assert ended.value.code == 75
    assert "training has stopped after step 7 and is saved" in capsys.readouterr().err
    assert steps_in(tmp_path / "preempted") == [3, 6, 7]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    resumed, undisturbed = make(tmp_path / "preempted", strategy), make(tmp_path / "undisturbed", strategy)
    resumed.train(data, max_steps=9)
    undisturbed.train(data, [SaveAt(7)], max_steps=9)
    for own, other in zip(weights(resumed), weights(undisturbed), strict=True):
        assert torch.equal(own, other)


def test_second_signal_ends_at_once_without_a_checkpoint(
    tmp_path: Path, strategy: sg.Strategy, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        make(tmp_path, strategy).train(data, [Terminate(4, times=2)], max_steps=10)
    assert ended.value.code == 128 + signal.SIGTERM
    assert "SIGTERM came twice; stopped at once, without a checkpoint" in capsys.readouterr().err
    assert steps_in(tmp_path) == [3]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_program_that_handles_the_signal_itself_is_left_alone(tmp_path: Path, strategy: sg.Strategy) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        make(tmp_path, strategy).train(data, [Terminate(2)], max_steps=4)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
    assert steps_in(tmp_path)[-1] == 4
