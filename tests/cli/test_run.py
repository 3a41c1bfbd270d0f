import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stratagem import _env
from stratagem.cli.app import app

STRATAGEM = [sys.executable, "-m", "stratagem"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a cluster around it, and with its temporary folder in the test's."""
    for name in (_env.TF_CONFIG, _env.TOKEN_FILE, *_env.TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def write(program: str) -> None:
    Path("train.py").write_text(program)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*STRATAGEM, "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def refusal(*arguments: str) -> str:
    """What is said before anything is started."""
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exception is not None
    assert not Path("started").exists()
    return str(result.exception)


# One process


@pytest.mark.slow
def test_run_without_workers_is_the_program_itself() -> None:
    write(
        "import os, sys\n"
        "assert 'torch' not in sys.modules\n"
        "print(sys.argv, __name__, sys.path[0] == os.getcwd(), os.environ.get('STRATAGEM_DEVICES'), input())\n"
        "sys.exit(7)"
    )
    command = [*STRATAGEM, "run", "--devices", "cpu:4", "train.py", "--workers", "2", "-m", "x"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate("a line\n", timeout=50)
    assert out == "['train.py', '--workers', '2', '-m', 'x'] __main__ True cpu:4 a line\n"
    assert process.returncode == 7


@pytest.mark.slow
def test_run_takes_a_module() -> None:
    Path("package").mkdir()
    Path("package/train.py").write_text("import sys; print(__package__, sys.argv[1:])")
    assert run("-m", "package.train", "--lr", "1").stdout == "package ['--lr', '1']\n"


@pytest.mark.slow
def test_devices_of_the_command_are_those_of_the_program() -> None:
    write("import stratagem as sg; print([device.name for device in sg.config.list_logical_devices()])")
    done = run("--devices", "cpu:3", "train.py")
    assert done.stdout == "['/device:CPU:0', '/device:CPU:1', '/device:CPU:2']\n"
    assert done.stderr == ""


# What is refused before anything starts


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no program was named"),
        (["missing.py"], "there is no program 'missing.py' in "),
        (["missing"], "for a module write -m"),
        (["-m", "missing.module"], "there is no module 'missing.module' here"),
        (["--json", "train.py"], "--json goes with --dry-run or --explain"),
        (["--devices", "gpu:2", "train.py"], "--devices 'gpu:2' asks for 2 GPUs, this machine has none."),
        (["--devices", "gpu:2", "--workers", "1", "train.py"], "--devices 'gpu:2' asks for 2 GPUs"),
        (["--devices", "cpu:0", "train.py"], "--devices 'cpu:0' is not cpu:COUNT"),
        (["--devices", "cpu:all", "train.py"], "--devices 'cpu:all' is not cpu:COUNT"),
        (["--devices", "npu:1", "train.py"], "Known kinds: cpu, gpu"),
        (["--workers", "-1", "train.py"], "--workers must be a whole number from 0 up, got -1"),
        (["--workers", "0", "train.py"], "--workers 0 leaves no task that trains"),
        (["--workers", "1", "--ps", "-1", "train.py"], "--ps must be a whole number from 0 up, got -1"),
        (["--max-restarts", "-2", "train.py"], "--max-restarts must be a whole number from 0 up, got -2"),
        (["--ps", "1", "train.py"], "give the number of workers with --workers"),
        (["--evaluator", "train.py"], "give the number of workers with --workers"),
        (["--workers", "1", "--show", "boss/1", "train.py"], "--show takes all, or tasks such as 1"),
        (["--workers", "1", "--heartbeat-timeout", "0", "train.py"], "--heartbeat-timeout must be above 0 s, got 0"),
        (["--workers", "1", "--grace", "-1", "train.py"], "--grace is a number of seconds from 0 up, got -1"),
        (["--workers", "1", "--nnodes", "0", "train.py"], "--nnodes must be a whole number from 1 up, got 0"),
        (["--workers", "1", "--nnodes", "2", "train.py"], "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        (
            ["--workers", "1", "--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "h:1", "train.py"],
            "--node-rank must be from 0 to 1 for --nnodes 2, got 2",
        ),
        (
            ["--workers", "1", "--nnodes", "2", "--rdzv-endpoint", "host", "train.py"],
            '--rdzv-endpoint: "host" has no port',
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_run_says_what_is_wrong_before_anything_starts(arguments: list[str], words: str) -> None:
    write("open('started', 'w')")
    assert words in refusal(*arguments)


def test_run_refuses_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "the folder that this program runs in does not exist any more" in refusal("train.py")


def test_run_refuses_a_cluster_inside_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    write("open('started', 'w')")
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}')
    assert "TF_CONFIG is set: this process is a task of a cluster already" in refusal("--workers", "2", "train.py")


def test_run_refuses_more_gpus_than_there_are_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    write("open('started', 'w')")
    monkeypatch.setenv("STRATAGEM_SIMULATE", "gpu:4")
    words = refusal("--workers", "3", "--devices", "gpu:2", "train.py")
    assert "for 3 tasks needs 6 GPUs, this machine has 4" in words


# What would be started


def test_dry_run_shows_what_would_be_started_where(monkeypatch: pytest.MonkeyPatch) -> None:
    write("open('started', 'w')")
    monkeypatch.setenv("STRATAGEM_SIMULATE", "gpu:4")
    options = ["--workers", "2", "--ps", "1", "--devices", "gpu:2", "--dry-run"]
    result = CliRunner().invoke(app, ["run", *options, "train.py", "--lr", "1"])
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert lines[0] == ["would", "run:", sys.executable, "train.py", "--lr", "1"]
    assert lines[1] == ["task", "cores", "GPUs", "devices", "output"]
    assert [[*line[:1], *line[2:]] for line in lines[3:]] == [
        ["worker/0", "0,1", "gpu:2", "shown"],
        ["worker/1", "2,3", "gpu:2", "log"],
        ["ps/0", "none", "all", "log"],
    ]
    report = json.loads(CliRunner().invoke(app, ["run", *options, "--json", "train.py"]).stdout)
    assert report["command"] == [sys.executable, "train.py"]
    assert [task["gpus"] for task in report["tasks"]] == [["0", "1"], ["2", "3"], []]
    assert not Path("started").exists()


def test_explain_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    write("open('started', 'w')")
    result = CliRunner().invoke(app, ["run", "--workers", "2", "--explain", "train.py"])
    assert "2 training tasks share" in result.stdout
    assert "each task is told its place by TF_CONFIG" in result.stdout
    assert "no cluster" not in result.stdout
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}')
    result = CliRunner().invoke(app, ["run", "--explain"])
    assert result.stdout.splitlines()[-1].startswith("TF_CONFIG: a cluster of 2 worker, this is worker/1")
    assert not Path("started").exists()


# Several tasks, as a user sees them


@pytest.mark.slow
def test_run_ends_with_the_first_cause_once_and_where_the_logs_are() -> None:
    write(
        "import json, os, signal\n"
        "if json.loads(os.environ['TF_CONFIG'])['task']['index'] == 1:\n"
        "    raise ValueError('bad row 812')\n"
        "signal.pause()"
    )
    done = run("--workers", "2", "--max-restarts", "1", "train.py")
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    first = "stratagem: worker/1 failed: ValueError: bad row 812"
    assert lines[0] == first + "; starting all tasks again (restart 1 of 1)"
    assert lines[1] == first
    assert lines[2] == "Traceback (most recent call last):"
    (log,) = Path().glob("stratagem-run-*/logs")
    assert lines[-5] == "ValueError: bad row 812"
    assert lines[-4] == "stratagem: gave up after 1 restart(s):"
    assert lines[-3].endswith("worker/1 failed: ValueError: bad row 812")
    assert lines[-1] == f"stratagem: the output of all tasks is in {log.absolute()}"
    assert done.stderr.count("Traceback") == 1


@pytest.mark.slow
def test_tasks_and_secrets_are_gone_when_the_launcher_is_killed() -> None:
    write(
        "import os, subprocess, signal\n"
        "child = subprocess.Popen(['sleep', '50'])\n"
        "print(os.getpid(), child.pid, os.environ['STRATAGEM_TOKEN_FILE'])\n"
        "signal.pause()"
    )
    command = [*STRATAGEM, "run", "--workers", "2", "--show", "all", "train.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [process.stdout.readline().split()[1:] for _ in range(2)]
        process.kill()
    pids = [int(pid) for first, second, _ in told for pid in (first, second)]
    deadline = time.monotonic() + 10
    while (left := [pid for pid in pids if _lives(pid)]) or Path(told[0][2]).exists():
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (33, 77))
    yield ours, theirs
    os.close(ours)


@pytest.mark.slow
def test_first_task_has_a_terminal_when_the_user_has_one_and_hears_ctrl_c(terminal: tuple[int, int]) -> None:
    write(
        "import os, signal, sys\n"
        "sys.stdout.write(f'{sys.stdout.isatty()} {os.get_terminal_size(1).columns}\\n')\n"
        "try: signal.pause()\n"
        "except KeyboardInterrupt: sys.exit(3)"
    )
    ours, theirs = terminal
    command = [*STRATAGEM, "run", "--workers", "1", "train.py"]
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, start_new_session=True)
    os.close(theirs)
    shown = b""
    while not shown.endswith(b"\n"):
        shown += os.read(ours, 1000)
    assert shown == b"True 77\r\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=50)
    assert process.returncode == 3
    assert err.splitlines()[0] == b"stratagem: stopped by SIGINT"
