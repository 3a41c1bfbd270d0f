"""What people look for mistakes with works in steps: debuggers, profilers, anomaly mode, warnings and prints."""

import io
import pdb
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import stratagem as sg


@pytest.fixture(scope="module")
def strategy(four_cpus: None) -> Iterator[sg.MirroredStrategy]:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        made.run(int)
        yield made


def rank() -> int:
    return sg.get_replica_context().replica_id_in_sync_group  # type: ignore[union-attr]


@pytest.mark.parametrize("way", ["breakpoint()", "pdb.set_trace()"])
def test_debugger_stops_in_replica_0_and_is_passed_over_in_others(
    strategy: sg.MirroredStrategy, way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = io.StringIO()

    def stop(**_: Any) -> None:
        pdb.Pdb(stdin=io.StringIO("up\np 'in replica', number\nc\n"), stdout=said, nosigint=True).set_trace()

    monkeypatch.setattr(sys, "breakpointhook", stop)
    monkeypatch.setattr(pdb, "set_trace", stop)

    def step() -> torch.Tensor:
        number = rank()
        if way == "breakpoint()":
            breakpoint()
        else:
            pdb.set_trace()
        return sg.get_replica_context().all_reduce("sum", torch.tensor(number + 1))  # type: ignore[union-attr,no-any-return]

    assert [each.item() for each in strategy.run(step).values] == [3, 3]
    assert "('in replica', 0)" in said.getvalue()
    printed = capsys.readouterr().err
    assert "[replica 1] breakpoint at tests/strategies/test_debugging.py:" in printed
    assert "is passed over: only the main program has a terminal" in printed


def test_profiler_works_in_a_step_and_around_a_run(strategy: sg.MirroredStrategy) -> None:
    def multiply() -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.ones(3, 3) @ torch.ones(3, 3)
        return sum(event.key == "aten::mm" for event in profile.key_averages())

    assert strategy.run(multiply).values == (1, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as around:
        strategy.run(lambda: torch.ones(3, 3) @ torch.ones(3, 3))
    assert any(event.key == "aten::mm" for event in around.key_averages())


def test_anomaly_mode_reaches_replicas_and_leaves_them(strategy: sg.MirroredStrategy) -> None:
    def look() -> tuple[bool, bool]:
        return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()

    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        found = strategy.local_results(strategy.run(look))
    assert found == ((True, False), (True, False))
    assert strategy.local_results(strategy.run(look)) == ((False, True), (False, True))


def warn_in_a_child() -> None:
    if rank() == 1:
        warnings.warn("look here", UserWarning, stacklevel=1)
        print("and there")


def test_warnings_and_prints_of_a_child_carry_its_number(
    strategy: sg.MirroredStrategy, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        strategy.run(warn_in_a_child)
    printed = capsys.readouterr()
    assert "UserWarning: look here" in next(line for line in printed.err.splitlines() if line.startswith("[replica 1]"))
    assert "[replica 1] and there" in printed.out


def test_filters_of_warnings_hold_in_every_replica(
    strategy: sg.MirroredStrategy, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "LOOK", UserWarning)
        with pytest.raises(UserWarning, match="look here"):
            strategy.run(warn_in_a_child)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", category=pytest.PytestWarning)  # which a child need not know
        warnings.filterwarnings("ignore", "look")
        strategy.run(warn_in_a_child)
        warnings.filterwarnings("always", "look")
        assert "look here" not in capsys.readouterr().err
        strategy.run(warn_in_a_child)
    assert "look here" in capsys.readouterr().err
