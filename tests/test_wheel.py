"""What `make dist` builds is all that a user needs: the wheel is installed into an empty environment and trains."""

import json
import os
import pkgutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import stratagem
from tests.documents import ROOT

pytestmark = [pytest.mark.docs, pytest.mark.timeout(240)]

_LOOK = """
import importlib, importlib.metadata, json, pkgutil, sys
import stratagem
names = [each.name for each in pkgutil.walk_packages(stratagem.__path__, "stratagem.")]
for name in names:
    if name != "stratagem.__main__":
        importlib.import_module(name)
(folder,) = stratagem.__path__
metadata = importlib.metadata.metadata("stratagem")
json.dump({
    "folder": folder,
    "names": names,
    "version": metadata["Version"],
    "classifiers": metadata.get_all("Classifier"),
}, sys.stdout)
"""

_TRAIN = """
import json
import torch
import stratagem as sg


def main():
    torch.manual_seed(0)
    cpu = sg.config.list_physical_devices("CPU")[0]
    sg.config.set_logical_device_configuration(cpu, [sg.config.LogicalDeviceConfiguration()] * 2)
    x = torch.randn(64, 4)
    with sg.MirroredStrategy() as strategy:
        with strategy.scope():
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        batches = strategy.distribute((x, x.sum(dim=1, keepdim=True)), global_batch_size=16)
        losses = [
            float(strategy.reduce("mean", strategy.run(step, args=batch))) for _ in range(5) for batch in batches
        ]
        print(json.dumps({"replicas": strategy.num_replicas_in_sync, "losses": losses}))


main()
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist; the wheel is made of the sdist, so that nothing is missing in either."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def empty(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel, and of this one only what stratagem needs from others."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, symlinks=True)
    (wheel,) = built.glob("*.whl")
    python = str(folder / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], timeout=200, check=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    others = {Path(module.__file__).parents[1] for module in (torch, pytest) if module.__file__}
    (site_packages / "others.pth").write_text("".join(f"{path}\n" for path in others))
    return folder / "bin"


def output_of(command: list[str], folder: Path) -> Any:
    done = subprocess.run(
        command, cwd=folder, env=bare(os.environ), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def bare(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what would lead Python to this tree."""
    return {name: value for name, value in environment.items() if name != "PYTHONPATH"}


def test_sdist_has_what_is_needed_and_nothing_that_was_made(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    listed = subprocess.run(["tar", "-tzf", str(sdist)], capture_output=True, text=True, check=True).stdout.split()
    files = {name.partition("/")[2] for name in listed}
    assert {"pyproject.toml", "LICENSE", "README.md", "CITATION.cff", "src/stratagem/py.typed"} <= files
    made = (".venv", "build/", "dist/", "benchmarks/results", ".git/")
    assert not [name for name in files if name.startswith(made) or "__pycache__" in name]


def test_wheel_has_every_module_and_its_types(empty: Path, tmp_path: Path) -> None:
    found = json.loads(output_of([str(empty / "python"), "-c", _LOOK], tmp_path))
    here = [module.name for module in pkgutil.walk_packages(stratagem.__path__, "stratagem.")]
    assert Path(found["folder"]).is_relative_to(empty.parent)
    assert found["names"] == here
    assert (Path(found["folder"]) / "py.typed").exists()
    assert found["version"] == stratagem.__version__
    assert "Development Status :: 4 - Beta" in found["classifiers"]


def test_wheel_trains_on_two_devices(empty: Path, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(_TRAIN)
    found = json.loads(output_of([str(empty / "python"), str(program)], tmp_path))
    assert found["replicas"] == 2
    assert found["losses"][-1] < found["losses"][0] / 10


def test_wheel_brings_the_command(empty: Path, tmp_path: Path) -> None:
    assert "Physical devices" in output_of([str(empty / "stratagem"), "devices"], tmp_path)
