"""The fork server that `stratagem run` starts before the program: who takes it over, who does not, and its end."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

RUN = [sys.executable, "-m", "stratagem", "run", "--devices", "cpu:2"]
_PID = 2  # its place in what the program is told
_DEADLINE_S = 50.0

TRAINS = """
import json, os
told = json.loads(os.environ["STRATAGEM_EARLY_SERVER"])
import stratagem as sg
for _ in range(2):
    with sg.MirroredStrategy() as strategy:
        print(told[2], strategy.run(os.getppid).values[1], os.environ.get("STRATAGEM_EARLY_SERVER"))
"""
TAKES = """
import json, os, sys
pid = json.loads(os.environ["STRATAGEM_EARLY_SERVER"])[2]
from stratagem.processes import early_server
{change}
print(pid, early_server.take())
"""
NOT_TAKEN = {
    "environment": "os.environ['OMP_NUM_THREADS'] = '1'",
    "files closed": "os.closerange(3, 64)",
}
# Run in forks of one process: each has the surroundings of its parent but for one.
COMPARES = """
import ctypes, os, resource, signal
from stratagem import _env
from stratagem.processes.early_server import _surroundings

changes = {
    "nothing": lambda: None,
    "environment": lambda: os.environ.update(ADDED="1"),
    "folder": lambda: os.chdir("/"),
    "output": lambda: os.dup2(os.open("log", os.O_CREAT | os.O_WRONLY), 2),
    "limit": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    "umask": lambda: os.umask(os.umask(0) ^ 0o77),
    "priority": lambda: os.nice(1),
    "rights": lambda: ctypes.CDLL(None).prctl(38, 1, 0, 0, 0),  # PR_SET_NO_NEW_PRIVS
    "signals": lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
    "session": lambda: os.setsid(),
    "memory": lambda: open("/proc/self/oom_score_adj", "w").write("500"),
    "cores": lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[1:]),
}
before = _surroundings(_env.for_process({}))
for name, change in changes.items():
    if not os.fork():
        change()
        os._exit(_surroundings(_env.for_process({})) != before)
    print(name, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def is_gone(pid: int) -> bool:
    """Whether a process ends in time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    try:
        return bool(poll.poll(1000 * _DEADLINE_S))
    finally:
        os.close(handle)


def run(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(program)
    done = subprocess.run(
        [*RUN, "train.py"], cwd=folder, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_program_takes_its_replicas_from_the_server_that_was_started_with_it(tmp_path: Path) -> None:
    first, second = (line.split() for line in run(tmp_path, TRAINS).stdout.splitlines())
    assert first == [first[0], first[0], "None"]
    assert second[0] == first[0] != second[1]  # it ended with the first strategy
    assert is_gone(int(first[0]))


@pytest.mark.parametrize("change", NOT_TAKEN.values(), ids=NOT_TAKEN.keys())
def test_server_ends_if_the_program_has_changed_what_children_would_have_from_it(tmp_path: Path, change: str) -> None:
    pid, taken = run(tmp_path, TAKES.format(change=change)).stdout.split()
    assert taken == "None"
    assert is_gone(int(pid))


def test_all_that_children_have_from_their_parent_is_compared(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", COMPARES], cwd=tmp_path, capture_output=True, text=True, check=True)
    differs = {name: int(number) for name, number in map(str.split, done.stdout.splitlines())}
    assert differs.pop("nothing") == 0
    assert set(differs.values()) == {1}, differs


def test_server_ends_with_a_program_that_was_killed_while_another_has_its_socket(tmp_path: Path) -> None:
    program = """
import json, os, subprocess, sys, time
told = json.loads(os.environ["STRATAGEM_EARLY_SERVER"])
other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=0, pass_fds=[told[0]])
print(json.dumps(told), other.pid, sep="\\n", flush=True)
time.sleep(60)
"""
    (tmp_path / "train.py").write_text(program)
    process = subprocess.Popen(
        [*RUN, "train.py"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    told, other = json.loads(process.stdout.readline()), int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait(_DEADLINE_S)
    assert is_gone(told[_PID])
    process.communicate(timeout=_DEADLINE_S)  # which ends the other
    assert is_gone(other)


def test_one_device_needs_no_server(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; print('STRATAGEM_EARLY_SERVER' in os.environ)")
    command = [*RUN[:-1], "cpu:1", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
    assert done.stdout == "False\n"
