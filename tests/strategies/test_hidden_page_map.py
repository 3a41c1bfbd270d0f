"""Strategies where the kernel does not tell which pages a process has written, as in a hardened container."""

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from stratagem.processes import region

pytestmark = pytest.mark.timeout(120)  # the first test runs the program, which connects replicas twice

# What container runtimes do with a path that they mask: it stays, and is empty.
MASKED = 'mount --bind /dev/null /proc/$$/pagemap && exec "$@"'
UNSHARE = ("unshare", "--map-root-user", "--mount", "sh", "-c")

PROGRAM = """
import json, sys, warnings
import torch
import stratagem as sg
from stratagem.errors import StrategyError

CHOICES = {
    "mirrored": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central": lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "multi_worker": lambda: sg.MultiWorkerMirroredStrategy(["cpu:0", "cpu:1"]),
    "synchronous": lambda: sg.ParameterServerStrategy(2, consistency=sg.Synchronous()),
    "one_device": lambda: sg.OneDeviceStrategy("cpu:0"),
    "chosen": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops="torch"),
    "explicit": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops="shared_memory"),
    "async": lambda: sg.ParameterServerStrategy(2),
    "backup": lambda: sg.ParameterServerStrategy(2, consistency=sg.Synchronous(backup_workers=1)),
}


def trained(strategy):
    with strategy, strategy.scope():
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()

        batches = strategy.distribute([torch.arange(12.0).view(4, 3) / 12] * 3)
        for batch in batches:
            strategy.run(step, args=(batch,))
        with torch.no_grad():
            model.weight.mul_(0.5)  # what the main program writes reaches all replicas
        for batch in batches:
            strategy.run(step, args=(batch,))
        return [value for each in model.parameters() for value in each.flatten().tolist()]


def outcome(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            strategy = CHOICES[name]()
            weights = trained(strategy) if name in ("mirrored", "central", "one_device") else []
        except StrategyError as error:
            return {"error": str(error)}
    told = [[str(each.message), each.filename, each.category.__name__] for each in caught]
    return {"weights": weights, "told": told}


if __name__ == "__main__":
    sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * 2)
    print(json.dumps({name: outcome(name) for name in CHOICES}))
"""


def can_mask() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, MASKED, "sh", "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each strategy does in a process whose page map is masked."""
    if not can_mask():
        pytest.skip("this machine gives no mount namespace in which to mask the page map")
    program = tmp_path_factory.mktemp("masked") / "program.py"
    program.write_text(PROGRAM)
    ended = subprocess.run(
        [*UNSHARE, MASKED, "sh", sys.executable, str(program)], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout) | {"program": str(program)}
    return found


@pytest.mark.parametrize("name", ["mirrored", "central"])
def test_strategy_without_shared_pages_equals_one_device(outcomes: dict[str, Any], name: str) -> None:
    assert outcomes[name]["weights"] == pytest.approx(outcomes["one_device"]["weights"], abs=1e-6)


@pytest.mark.parametrize("name", ["mirrored", "central", "multi_worker", "synchronous"])
def test_strategy_takes_private_copies_and_says_so_once(outcomes: dict[str, Any], name: str) -> None:
    ((message, file, category),) = outcomes[name]["told"]
    assert category == "StratagemWarning"
    assert file == outcomes["program"]
    assert region.PAGEMAP in message
    assert "copy of the variables" in message


@pytest.mark.parametrize("name", ["one_device", "chosen"])
def test_strategy_that_shares_no_pages_says_nothing(outcomes: dict[str, Any], name: str) -> None:
    assert outcomes[name]["told"] == []


@pytest.mark.parametrize(
    ("name", "cure"), [("explicit", "use 'torch'"), ("async", "MirroredStrategy"), ("backup", "MirroredStrategy")]
)
def test_strategy_that_needs_shared_pages_is_refused(outcomes: dict[str, Any], name: str, cure: str) -> None:
    error = outcomes[name]["error"]
    assert region.PAGEMAP in error
    assert cure in error
