"""What a step in the steady state costs, counted and not timed: so that no work for each tensor creeps back.

A run of which nothing has changed sends each child one small message and is answered by one; what the library does in
Python does not grow with the number of layers.
"""

import collections
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.engine import notices
from stratagem.processes.pipe import Wire

_ROOT = Path(__file__).parents[2]
_LIBRARY = f"{Path(sg.__file__).parent}/"
_SMALL_BYTES = 2048
_MOST_CALLS = 650
_MOST_CALLS_FOR_A_CHILD = 75
_MOST_FILES = 25
_BEGINS, _ASIDE = "engine/replica.py:_one_step", "processes/group.py:watch"  # which looks after others in a wait
_NUM_WARM_UP, _NUM_COUNTED = notices.NUM_LOOKS + 2, 3
_LEEWAY = 32  # a longer range is summed and updated by a few calls more
OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


class Counted:
    """What one run did in the main program."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self.files_of_step: set[str] = set()  # between the batch and the state after the update, in replica 0
        self.sent: list[int] = []
        self.num_received = 0
        self._depth = 0

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event in ("call", "return") and path.startswith(_LIBRARY):
            file = path.removeprefix(_LIBRARY)
            name = f"{file}:{frame.f_code.co_name}"
            if name in (_BEGINS, _ASIDE):
                self._depth += 1 if (name == _BEGINS) == (event == "call") else -1
            if event == "call":
                self.calls[name] += 1
                self.files_of_step |= {file} if self._depth > 0 else set()


def count(monkeypatch: pytest.MonkeyPatch, num_layers: int, make_optimizer: Any, size: int = 2) -> Counted:
    with sg.MirroredStrategy([f"cpu:{number}" for number in range(size)]) as strategy:
        with strategy.scope():
            model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))
            optimizer = make_optimizer(model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        batch = torch.randn(16, 8), torch.randint(8, (16,))
        batches = iter(strategy.distribute([batch] * (_NUM_WARM_UP + _NUM_COUNTED)))
        for _ in range(_NUM_WARM_UP):
            strategy.run(step, args=next(batches))
        found = [count_run(monkeypatch, strategy, step, last) for last in batches]
    # On a busy machine replicas wait for each other for long, and look after each other meanwhile.
    return min(found, key=lambda counted: counted.calls.total())


def count_run(monkeypatch: pytest.MonkeyPatch, strategy: sg.Strategy, step: Any, args: Any) -> Counted:
    counted = Counted()
    send, receive = Wire.send_packed, Wire.receive

    def noting_send(self: Wire, packed: Any) -> None:
        counted.sent.append(len(packed.data) + sum(map(len, packed.buffers)))
        send(self, packed)

    def noting_receive(self: Wire) -> Any:
        counted.num_received += 1
        return receive(self)

    with monkeypatch.context() as noting:
        noting.setattr(Wire, "send_packed", noting_send)
        noting.setattr(Wire, "receive", noting_receive)
        before = sys.getprofile()
        sys.setprofile(counted.note)
        try:
            strategy.run(step, args=args)
        finally:
            sys.setprofile(before)
    return counted


@pytest.fixture(autouse=True)
def _four_devices() -> None:
    sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * 4)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_steady_step_sends_one_small_message_and_does_nothing_for_each_tensor(
    monkeypatch: pytest.MonkeyPatch, make_optimizer: Any
) -> None:
    few, many = (count(monkeypatch, number, make_optimizer) for number in (20, 60))
    for each in (few, many):
        assert len(each.sent) == 1
        assert each.sent[0] < _SMALL_BYTES
        assert each.num_received == 1
    more = {name: number - few.calls[name] for name, number in many.calls.items() if number > few.calls[name]}
    assert sum(more.values()) <= _LEEWAY, more
    assert "objects/captured.py:delivery" not in many.calls  # all that the function can reach is found as it was
    assert many.calls.total() < _MOST_CALLS, many.calls.total()


_FILES = """
import pytest
import stratagem as sg
from tests.engine import test_cost_of_a_step as tests

sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * 2)
found = tests.count(pytest.MonkeyPatch(), 20, tests.OPTIMIZERS["momentum"])
print(*sorted(found.files_of_step - {"_clock.py"}))  # at which only those look that have to wait
"""


@pytest.mark.slow
def test_a_step_passes_few_files() -> None:
    # In a program of its own: what other tests have used of the library may take part in a step.
    run = [sys.executable, "-c", _FILES]
    done = subprocess.run(run, cwd=_ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    files = done.stdout.split()
    assert "engine/replica.py" in files
    assert len(files) <= _MOST_FILES, done.stdout


def test_a_child_more_costs_its_rows_and_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    two, four = (count(monkeypatch, 20, OPTIMIZERS["momentum"], size) for size in (2, 4))
    assert len(four.sent) == four.num_received == 3
    assert max(four.sent) < _SMALL_BYTES
    # What is the same for all children is packed once.
    assert four.calls["engine/recipe.py:told"] == two.calls["engine/recipe.py:told"] == 1
    assert four.calls["processes/packing.py:pack"] == two.calls["processes/packing.py:pack"] + 2
    assert four.calls.total() - two.calls.total() < 2 * _MOST_CALLS_FOR_A_CHILD
