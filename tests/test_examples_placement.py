"""Runs the programs of `examples/` about placement, and checks their numbers and lines."""

import re
from pathlib import Path

import pytest

from tests.test_examples import run_example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("forked_tasks")]

TASK = "/job:localhost/replica:0/task:0"


def test_placement_log_prints_the_lines_and_numbers_of_the_notes(tmp_path: Path) -> None:
    text = run_example("placement_log.py", "--save", str(tmp_path / "placement.html"))
    lines = text.splitlines()
    assert lines[0] == "Device mapping:"
    assert f"{TASK}/device:GPU:3 -> device: 3, name: simulated GPU" in lines
    expected = {f"{name}: {TASK}/device:GPU:2" for name in ("Const", "Const_1", "MatMul")}
    expected |= {f"{name}: {TASK}/device:GPU:3" for name in ("Const_2", "Const_3", "MatMul_1")}
    assert expected | {f"AddN: {TASK}/device:CPU:0"} == {line for line in lines if f": {TASK}" in line}
    assert "tensor([[ 44.,  56.],\n        [ 98., 128.]])" in text
    assert re.search(r"AddN +CPU:0 +CPU:0 +scope +48 B +GPU:0, GPU:1, GPU:2", text)
    assert "<svg" in (tmp_path / "placement.html").read_text()


def test_soft_placement_is_an_error_first_and_a_fallback_then() -> None:
    text = run_example("soft_placement.py")
    off, on = text.split("soft placement: on")
    assert "product: DeviceNotFoundError: Ones was placed on '/device:GPU:4'" in off
    assert "histogram: PlacementError: Histogram was placed on /device:GPU:0, which has no kernel" in off
    assert "product: [[2.0, 2.0], [2.0, 2.0]] on /device:GPU:1" in on
    assert "histogram: [1.0, 2.0, 0.0, 1.0] on /device:CPU:0" in on
    assert on.count("told:") == 2


def test_model_parallel_learns_on_two_devices(tmp_path: Path) -> None:
    text = run_example("model_parallel.py", "--save", str(tmp_path / "step.png"))
    assert "tensor([[3., 4.],\n        [6., 9.]])" in text
    first, last = map(float, re.findall(r"loss (\S+)", text))
    assert last < first / 4
    assert re.search(r"encoder.0.weight +/device:GPU:0, its gradient /device:GPU:0", text)
    assert re.search(r"decoder.2.bias +/device:GPU:1, its gradient /device:GPU:1", text)
    # The batch to both ends, the code to the decoder and its gradient back.
    assert "the last step copied 72.0 KiB between devices" in text
    assert (tmp_path / "step.png").stat().st_size > 10_000


def test_towers_learn_as_one_tower_does() -> None:
    text = run_example("towers.py", "--towers", "3", "--epochs", "2")
    (first, last), alone = (tuple(map(float, pair)) for pair in re.findall(r"loss (\S+) -> (\S+)", text))
    assert (first, last) == pytest.approx(alone, abs=5e-3)
    assert last < first / 3
    assert float(re.findall(r"test accuracy (\S+)%", text)[0]) > 85
    assert "/device:GPU:2: Grad, Linear, Relu, SoftmaxCrossEntropy" in text
    assert "parameters: /device:CPU:0" in text


def test_cifar10_is_learnt_by_towers_and_by_the_averages_of_their_parameters() -> None:
    text = run_example("cifar10_multi_gpu.py", "--towers", "2", "--steps", "60")
    losses = [float(loss) for loss in re.findall(r"step +\d+: loss (\S+),", text)]
    assert losses[-1] < losses[0] / 4
    own, averages = (float(accuracy) for accuracy in re.findall(r"test accuracy.* (\S+)%", text))
    assert min(own, averages) > 85
    assert "parameters: /device:CPU:0" in text


def test_device_list_numbers_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    text = run_example("device_list.py")
    assert re.findall(r"^  (/device:GPU:\d)$", text, re.MULTILINE) == [f"/device:GPU:{index}" for index in range(4)]
    assert "after set_visible_devices: /device:GPU:0, /device:GPU:1\n" in text
    assert "/device:GPU:1 is a share of /physical_device:GPU:0" in text


def test_memory_options_limit_what_a_device_takes() -> None:
    text = run_example("memory_options.py")
    assert "/device:GPU:0 may take 40 MiB, growth: True" in text
    assert "out of memory on /device:GPU:0: ConcatV2 needs a uint8 tensor of shape (41943040,), 40 MiB" in text
    assert "without the first one it fits: 40 MiB" in text
