import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import stratagem as sg
from stratagem import __version__
from stratagem.cli import watching
from stratagem.cli.app import app
from stratagem.devices import usage
from stratagem.devices.device import MIB
from stratagem.devices.inventory import Inventory

STRATAGEM = [sys.executable, "-m", "stratagem"]


def test_devices_shows_physical_and_logical_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_SIMULATE", "gpu:2:512")
    result = CliRunner().invoke(app, ["devices"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].strip() == "Physical devices"
    physical = next(line for line in lines if line.lstrip().startswith("/physical_device:GPU:1"))
    assert " ".join(physical.split()[1:4]) == "simulated GPU yes"
    assert " ".join(physical.split()[5:]) == "512 MiB -"
    logical = next(line for line in lines if line.lstrip().startswith("/device:GPU:1"))
    assert "512 MiB" in logical
    assert "on demand" in logical
    assert "note: GPU devices are simulated by shares of the CPU" in lines


def test_devices_prints_json_for_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_SIMULATE", "gpu:2")
    result = CliRunner().invoke(app, ["devices", "--json"])
    report = json.loads(result.stdout)
    assert set(report) == {"torch", "physical_devices", "logical_devices", "notes"}
    assert [each["name"] for each in report["logical_devices"]] == ["/device:CPU:0", "/device:GPU:0", "/device:GPU:1"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*STRATAGEM, *arguments], capture_output=True, text=True, timeout=50, env=environment, check=False
    )


@pytest.mark.slow
def test_command_ends_with_one_line_and_a_code_when_the_environment_is_wrong() -> None:
    done = run("devices", STRATAGEM_SIMULATE="gpu:many")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: STRATAGEM_SIMULATE='gpu:many'")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_command_answers_help_and_version_without_torch() -> None:
    program = (
        "import sys\n"
        "from stratagem.cli import main\n"
        "sys.argv[1:] = [{!r}]\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules)\n"
    )
    for argument, words in (("--help", "devices"), ("--version", f"stratagem {__version__}")):
        done = subprocess.run(
            [sys.executable, "-c", program.format(argument)], capture_output=True, text=True, timeout=50, check=False
        )
        assert done.returncode == 0
        assert words in done.stdout
        assert done.stdout.rstrip().endswith("False")


@pytest.mark.slow
def test_command_says_what_it_knows_when_misspelt() -> None:
    done = run("device")
    assert done.returncode == 2
    assert "No such command 'device'" in done.stderr
    assert "devices" in done.stderr


@pytest.mark.parametrize("as_json", [True, False])
def test_watch_shows_processes_again_and_again_until_ctrl_c(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    looks: list[float] = []

    def wait(interval_s: float) -> None:
        looks.append(interval_s)
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(watching.time, "sleep", wait)
    inventory.simulate("GPU", 2, memory_limit=64)
    with sg.OneDeviceStrategy("gpu:1") as strategy:
        strategy.run(lambda: torch.ones(MIB // 4).sum())
        flags = ["--json"] if as_json else []
        result = CliRunner().invoke(app, ["devices", "--watch", "--interval", "0.5", *flags])
    assert (result.exit_code, looks, result.stderr) == (0, [0.5, 0.5], "")
    if not as_json:
        lines = [line.split() for line in result.stdout.splitlines() if str(os.getpid()) in line]
        assert [(line[0], line[-6:]) for line in lines] == [
            ("/device:GPU:1", ["0", "MiB", "1", "MiB", "64", "MiB"])
        ] * 2
        return
    first, second = map(json.loads, result.stdout.splitlines())
    own = [each for each in first["processes"] if each["pid"] == os.getpid()]
    assert [(each["device"], each["peak_bytes"], each["limit_bytes"]) for each in own] == [
        ("/device:GPU:1", MIB + 4, 64 * MIB)
    ]
    assert {"physical_devices", "logical_devices"} < set(second)
    assert not [each for each in usage.of_this_machine() if each.pid == os.getpid()]  # with its strategy
