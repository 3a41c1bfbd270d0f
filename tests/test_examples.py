"""Runs programs of `examples/` as a user would, and checks what they show; notebooks are `test_notebooks`'."""

import difflib
import os
import re
import runpy
from pathlib import Path

import pytest

from tests.cluster import nursery

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.usefixtures("forked_tasks")]


def run_example(name: str, *options: str, keras_programs: nursery.Nursery | None = None) -> str:
    """What an example prints; it must succeed and complain about nothing."""
    done = nursery.run([EXAMPLES / name, *options], 170, {**os.environ, "COLUMNS": "100"}, nursery=keras_programs)
    assert done.returncode == 0, done.stderr
    # On its first day in a fresh home matplotlib says that it lists the fonts.
    assert [line for line in done.stderr.splitlines() if not line.startswith("Matplotlib is building")] == []
    return done.stdout


def epochs_of(text: str) -> tuple[list[float], list[float]]:
    """The losses and accuracies (in percent) that a training loop has printed."""
    lines = re.findall(r"epoch +\d+: loss (\S+), test accuracy (\S+)%", text)
    return [float(loss) for loss, _ in lines], [float(accuracy) for _, accuracy in lines]


@pytest.fixture(scope="module")
def baseline(forked_tasks: None) -> tuple[list[float], list[float]]:
    """What the plain torch program prints: the losses and accuracies that all others must come to."""
    return epochs_of(run_example("custom_loop_baseline.py"))


def test_one_device_trains_and_meets_its_limit() -> None:
    words = " ".join(run_example("one_device.py", "--steps", "200").split())
    accuracy = float(words.split("accuracy ")[1].split("%")[0])
    assert accuracy > 95
    assert "out of memory on /device:CPU:1: asked for 2 GiB" in words


def test_custom_loop_baseline_learns(baseline: tuple[list[float], list[float]]) -> None:
    losses, accuracies = baseline
    assert len(losses) == 12
    assert accuracies[-1] > 95


def test_custom_loop_has_the_losses_of_the_baseline(baseline: tuple[list[float], list[float]]) -> None:
    shown = run_example("custom_loop_distributed.py", "--devices", "3", "--epochs", "4")  # the notebook has 2
    assert epochs_of(shown)[0] == pytest.approx(baseline[0][:4], abs=2e-4)


@pytest.mark.parametrize("name", ["custom_loop", "estimator", "keras"])
def test_distributed_example_shows_how_it_differs_from_the_baseline(name: str) -> None:
    plain, distributed = (
        (EXAMPLES / f"{name}_{kind}.py").read_text().split('"""\n', maxsplit=1) for kind in ("baseline", "distributed")
    )
    changed = [
        line
        for line in difflib.unified_diff(plain[1].splitlines(), distributed[1].splitlines(), n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]
    shown = [line[4:] for line in distributed[0].splitlines() if line.startswith(("    +", "    -"))]
    assert shown == changed


def examples_tested_by(text: str) -> list[tuple[int, float, float]]:
    """The steps, losses and accuracies (in percent) that an Estimator has shown."""
    found = re.findall(r"step (\d+): loss (\S+), accuracy (\S+)%", text)
    return [(int(step), float(loss), float(accuracy)) for step, loss, accuracy in found]


@pytest.fixture(scope="module")
def estimator_baseline(forked_tasks: None) -> list[tuple[int, float, float]]:
    """What the Estimator on one device comes to in four epochs."""
    return examples_tested_by(run_example("estimator_baseline.py", "--epochs", "4"))


def test_estimator_has_the_loss_of_the_baseline(estimator_baseline: list[tuple[int, float, float]]) -> None:
    shown = run_example("estimator_distributed.py", "--devices", "2", "--epochs", "4")
    assert [line.split()[-1] for line in shown.splitlines() if line.startswith("testing after")] == ["50", "100"]
    ((step, loss, accuracy),) = estimator_baseline
    assert examples_tested_by(shown) == [(step, pytest.approx(loss, abs=2e-3), pytest.approx(accuracy, abs=0.6))]
    assert accuracy > 90


def test_keras_has_the_losses_of_the_baseline(keras_programs: nursery.Nursery) -> None:
    commands = (("keras_baseline.py",), ("keras_distributed.py", "--devices", "2"))
    plain, distributed = (
        epochs_of(run_example(*command, "--epochs", "3", keras_programs=keras_programs)) for command in commands
    )
    assert plain[1][-1] > 90
    assert distributed[0] == pytest.approx(plain[0], abs=1e-3)
    assert distributed[1] == pytest.approx(plain[1], abs=0.6)


def test_example_of_the_notes_runs_on_two_replicas(keras_programs: nursery.Nursery) -> None:
    # Keras warns of `input_shape`, which the notes write.
    command = ["-W", "ignore::UserWarning", EXAMPLES / "keras_notes.py"]
    environment = {**os.environ, "STRATAGEM_SIMULATE": "gpu:2"}
    done = nursery.run(command, 170, environment, nursery=keras_programs)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("Epoch 1/2") == done.stdout.count("Epoch 2/2") == 3
    assert "global batch size 10, learning rate 0.15" in done.stdout


def test_demo_shows_that_replicas_agree_and_saves_a_picture(tmp_path: Path) -> None:
    from matplotlib.image import imread

    output = tmp_path / "demo.png"
    text = run_example("demo.py", "--epochs", "4", "--output", str(output))
    rows = re.findall(r"^ *(one device|\d replicas) +(\S+)% +([\d,]+) +(-|\S+ x) +(\S+) +(\S+) *$", text, re.MULTILINE)
    assert [name for name, *_ in rows] == ["one device", "2 replicas", "4 replicas"]
    for _, accuracy, examples_per_s, _, final_loss, difference in rows:
        assert float(accuracy) > 85
        assert float(examples_per_s.replace(",", "")) > 0
        assert float(final_loss) == pytest.approx(float(rows[0][4]), abs=1e-4)
        assert difference == "-" or float(difference) < 1e-4
    assert f"picture: {output}" in text
    height, width, _ = imread(output).shape
    assert width > 1000
    assert height > 400
    assert imread(output)[:, :, :3].std() > 0.05, "the picture is empty"


def test_demo_lets_its_contenders_train_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    rounds: list[tuple[str, int]] = []

    class Contender:
        def __init__(self, name: str) -> None:
            self._name = name

        def train(self, num_epochs: int) -> None:
            rounds.append((self._name, num_epochs))

    runpy.run_path(str(EXAMPLES / "demo.py"))["race"]([Contender("a"), Contender("b")], 7)
    assert [name for name, _ in rounds] == list("abbaabbaabba")
    assert [sum(number for name, number in rounds if name == own) for own in "ab"] == [7, 7]


def test_demo_compares_speeds_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    demo = runpy.run_path(str(EXAMPLES / "demo.py"))
    one = demo["Result"]("one device", [1.0], 0.9, [100.0, 10.0, 100.0])  # busy in the second round
    other = demo["Result"]("2 replicas", [1.0], 0.9, [110.0, 11.0, 121.0])
    assert other.speed_ratios(one) == pytest.approx([1.1, 1.1, 1.21])
    assert demo["doubt"]([one, other]) == ""
    other.speeds[:] = [50.0, 10.0, 200.0]
    assert "2 replicas had 0.50 to 2.00 x the speed of one device" in demo["doubt"]([one, other])


def test_demo_refuses_an_output_before_it_trains(tmp_path: Path) -> None:
    done = nursery.run([EXAMPLES / "demo.py", "--output", tmp_path / "none" / "demo.png"], 60)
    assert done.returncode == 2
    assert "--output is a .png file in a folder that exists" in done.stderr


def test_tpus_train_a_network() -> None:
    shown = run_example("tpu.py")
    assert "4 TPUs, 4 replica(s)" in shown
    assert float(shown.split("test accuracy ")[1].split("%")[0]) > 90
