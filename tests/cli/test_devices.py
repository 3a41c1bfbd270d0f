import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from stratagem import __version__
from stratagem.cli.app import app

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
