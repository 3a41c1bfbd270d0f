"""Launches real processes of small programs, in this very process as the launcher."""

import io
import json
import os
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from stratagem import _env
from stratagem.cluster.launch import task_processes as crew_module
from stratagem.cluster.launch.agent import Patience
from stratagem.cluster.launch.launching import Launching, LaunchOutcome
from stratagem.cluster.launch.local_launcher import launch_here
from stratagem.cluster.launch.output import ALL, Screen
from stratagem.cluster.launch.plan import Order, make_plan
from stratagem.cluster.launch.user_program import UserProgram
from stratagem.cluster.resolvers.tf_config import TFConfigResolver
from stratagem.devices.inventory import Inventory
from stratagem.errors import LaunchError

# What the small programs share: who they are, and how they meet in a folder without being in time by chance.
PRELUDE = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(__file__).parent
config = json.loads(os.environ.get("TF_CONFIG", "{}"))
job, index = config["task"].values() if config else ("program", 0)
name = f"{job}-{index}"
def note(what, text=""):
    (folder / "draft").with_suffix("." + name).write_text(text)
    (folder / "draft").with_suffix("." + name).rename(folder / f"{name}.{what}")
def await_note(path):
    deadline = time.monotonic() + 30
    while not (folder / path).exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.005)
"""


class Launch:
    """Runs programs as a launcher does, and keeps what would be on the screen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out, self.err = io.BytesIO(), io.BytesIO()
        self.said: list[str] = []

    def __call__(
        self,
        program: str,
        *arguments: str,
        show: Sequence[str] | None = None,
        patience: Patience | None = None,
        log_dir: Path | None = None,
        **order: object,
    ) -> LaunchOutcome:
        file = self.folder / "program.py"
        file.write_text(PRELUDE + program)
        plan = make_plan(Order(UserProgram(str(file), arguments), **order), Inventory())  # type: ignore[arg-type]
        screen = Screen(self.out, self.err, None if show is None else frozenset(show))
        return launch_here(plan, Launching(screen, self.said.append, log_dir, patience or Patience()))

    def note(self, path: str) -> str:
        return (self.folder / path).read_text()

    def await_notes(self, *paths: str) -> None:
        deadline = time.monotonic() + 30
        while not all((self.folder / path).exists() for path in paths):
            assert time.monotonic() < deadline, paths
            time.sleep(0.005)


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (_env.TF_CONFIG, _env.TOKEN_FILE, *_env.TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    return Launch(tmp_path)


@pytest.fixture
def meanwhile(launch: Launch) -> Callable[..., None]:
    """Does something in a thread once notes are there, while the main thread launches."""
    threads = []

    def start(action: Callable[[], object], *notes: str) -> None:
        def act() -> None:
            launch.await_notes(*notes)
            action()

        threads.append(threading.Thread(target=act))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(30)


def run_folders(launch: Launch) -> list[Path]:
    return list(launch.folder.glob("stratagem-run-*"))


DESCRIBE = """
secret = pathlib.Path(os.environ["STRATAGEM_TOKEN_FILE"])
note("json", json.dumps({
    "environment": dict(os.environ),
    "cores": sorted(os.sched_getaffinity(0)),
    "token": [secret.stat().st_mode, secret.parent.stat().st_mode, secret.read_text()],
    "arguments": sys.argv[1:],
    "launcher_listens": sorted(
        {os.readlink(f"/proc/{os.getppid()}/fd/{fd}") for fd in os.listdir(f"/proc/{os.getppid()}/fd")
         if os.path.lexists(f"/proc/{os.getppid()}/fd/{fd}")}
        & {f"socket:[{line.split()[9]}]" for file in ("tcp", "tcp6") for line in open(f"/proc/net/{file}")
           if line.split()[3] == "0A"}),
}))
if job in ("worker", "chief"):
    for each in ("chief-0", "worker-0", "worker-1", "ps-0", "evaluator-0"):
        await_note(each + ".json")
if job == "ps":
    signal.pause()
"""


def test_launch_tells_each_task_who_takes_part(launch: Launch) -> None:
    listeners = _listening()
    assert launch(DESCRIBE, "--lr", "1", num_workers=2, num_ps=1, chief=True, evaluator=True).code == 0
    names = ("chief-0", "worker-0", "worker-1", "ps-0", "evaluator-0")
    told = {name: json.loads(launch.note(f"{name}.json")) for name in names}
    for name, each in told.items():
        resolver = TFConfigResolver(each["environment"]["TF_CONFIG"])
        assert f"{resolver.task_type}-{resolver.task_id}" == name
        assert resolver.cluster_spec() == TFConfigResolver(told["ps-0"]["environment"]["TF_CONFIG"]).cluster_spec()
        assert each["arguments"] == ["--lr", "1"]
        assert each["environment"]["PYTHONUNBUFFERED"] == "1"
        assert set(each["launcher_listens"]) <= listeners, "the launcher must not listen anywhere"
    spec = resolver.cluster_spec()
    assert spec.jobs == ["chief", "worker", "ps"]
    assert all(str(task.address).startswith("127.0.0.1:") for task in spec.tasks)
    ranks = {name: each["environment"].get("RANK") for name, each in told.items()}
    assert ranks == {"chief-0": "0", "worker-0": "1", "worker-1": "2", "ps-0": None, "evaluator-0": None}
    for name in ("chief-0", "worker-0", "worker-1"):
        assert told[name]["environment"]["WORLD_SIZE"] == "3"
        assert told[name]["environment"]["MASTER_PORT"] not in [
            str(task.address.port) for task in spec.tasks if task.address
        ]


def _listening() -> set[str]:
    lines = [line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()]
    return {f"socket:[{fields[9]}]" for fields in lines if fields[3] == "0A"}


def test_launch_gives_the_tasks_a_secret_that_ends_with_it(launch: Launch) -> None:
    program = DESCRIBE.replace('("chief-0", "worker-0", "worker-1", "ps-0", "evaluator-0")', '("worker-0", "worker-1")')
    old = os.umask(0)
    try:
        assert launch(program, num_workers=2).code == 0
    finally:
        os.umask(old)
    first, second = (json.loads(launch.note(f"worker-{index}.json")) for index in (0, 1))
    file_mode, folder_mode, secret = first["token"]
    assert stat.S_IMODE(file_mode) == 0o600
    assert stat.S_IMODE(folder_mode) == 0o700
    assert second["token"][2] == secret
    assert len(secret.strip()) >= 32
    assert run_folders(launch) == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_launch_divides_the_cores_over_the_workers(launch: Launch) -> None:
    program = DESCRIBE.replace('("chief-0", "worker-0", "worker-1", "ps-0", "evaluator-0")', '("worker-0", "worker-1")')
    assert launch(program, num_workers=2, num_ps=1).code == 0
    first, second = (json.loads(launch.note(f"worker-{index}.json"))["cores"] for index in (0, 1))
    assert not set(first) & set(second)
    assert sorted(first + second) == sorted(os.sched_getaffinity(0))


SPEAK = """
print("out of", name)
print("err of", name, file=sys.stderr)
sys.stdout.write("no newline")
"""


def test_first_task_is_shown_as_it_is_and_the_others_are_not(launch: Launch) -> None:
    assert launch(SPEAK, num_workers=2).code == 0
    assert launch.out.getvalue() == b"out of worker-0\nno newline"
    assert launch.err.getvalue() == b"err of worker-0\n"
    assert launch.said == []


def test_all_tasks_are_shown_with_their_names_when_asked_for(launch: Launch) -> None:
    assert launch(SPEAK, num_workers=2, show=[ALL]).code == 0
    lines = launch.out.getvalue().decode().splitlines()
    assert sorted(lines) == [
        "[worker/0] no newline",
        "[worker/0] out of worker-0",
        "[worker/1] no newline",
        "[worker/1] out of worker-1",
    ]
    assert sorted(launch.err.getvalue().decode().splitlines()) == [
        "[worker/0] err of worker-0",
        "[worker/1] err of worker-1",
    ]


def test_log_dir_keeps_the_output_of_every_task(launch: Launch, tmp_path: Path) -> None:
    outcome = launch(SPEAK, num_workers=2, log_dir=tmp_path / "logs" / "here")
    assert outcome.logs == tmp_path / "logs" / "here"
    for index in (0, 1):
        log = (tmp_path / f"logs/here/worker-{index}.log").read_text()
        assert sorted(log.splitlines()) == sorted([f"out of worker-{index}", f"err of worker-{index}", "no newline"])
    assert run_folders(launch) == []


def test_log_dir_that_is_a_file_is_refused_before_anything_starts(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"logs cannot be written to '.*file': .*name another --log-dir"):
        launch("note('started')", num_workers=1, log_dir=tmp_path / "file")
    assert not (tmp_path / "worker-0.started").exists()
    assert run_folders(launch) == []


FAIL = """
note("started")
if index == 1:
    await_note("worker-0.started")
    def load():
        raise ValueError("bad row 812")
    try:
        load()
    except ValueError as error:
        raise RuntimeError("cannot train") from error
signal.pause()
"""


def test_failure_of_one_task_ends_all_and_names_the_cause(launch: Launch) -> None:
    outcome = launch(FAIL, num_workers=2, num_ps=1)
    (failure,) = outcome.failures
    assert (outcome.code, failure.code, failure.task) == (1, 1, "worker/1")
    assert failure.cause == "RuntimeError: cannot train"
    assert not failure.shown
    assert failure.traceback.startswith("Traceback (most recent call last):")
    assert "ValueError: bad row 812" in failure.traceback
    assert failure.traceback.endswith("RuntimeError: cannot train")
    assert outcome.logs is not None
    assert sorted(path.name for path in outcome.logs.iterdir()) == ["ps-0.log", "worker-0.log", "worker-1.log"]
    (folder,) = run_folders(launch)
    assert [path.name for path in folder.iterdir()] == ["logs"], "only the logs outlive a run that failed"


ALL_FAIL = """
import atexit
if index == 0:  # fails as the other does, and has said so when that ends, but has not ended itself
    atexit.register(signal.pause)
    atexit.register(note, "shown")
else:
    await_note("worker-0.shown")
raise ValueError("bad row 812")
"""


def test_failure_of_all_tasks_alike_is_that_of_the_one_that_was_shown(launch: Launch) -> None:
    outcome = launch(ALL_FAIL, num_workers=2)
    (failure,) = outcome.failures
    assert failure.describe() == "worker/0 failed: ValueError: bad row 812"
    assert failure.shown  # so that it is not shown again
    assert launch.err.getvalue().decode().count("ValueError: bad row 812") == 1


def test_exit_code_is_the_one_of_the_program(launch: Launch) -> None:
    outcome = launch("print('going'); sys.exit(7)", num_workers=1)
    assert outcome.code == 7
    assert outcome.failures[0].describe() == "worker/0 ended with code 7"
    assert outcome.failures[0].shown


def test_task_that_is_killed_is_named_with_its_signal(launch: Launch) -> None:
    outcome = launch("if index: os.kill(os.getpid(), signal.SIGKILL)\nsignal.pause()", num_workers=2)
    assert outcome.code == 128 + signal.SIGKILL
    assert outcome.failures[0].describe() == "worker/1 was killed by SIGKILL"


def test_cause_is_of_the_last_start_and_not_of_those_before(launch: Launch) -> None:
    program = "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise ValueError('first')\nsys.exit(1)"
    outcome = launch(program, num_workers=1, max_restarts=1)
    assert [each.cause for each in outcome.failures] == ["ValueError: first", "ended with code 1"]


def test_log_that_cannot_be_written_does_not_hold_the_program_up(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").symlink_to("/dev/full")
    assert launch("print('x' * 1_000_000)", num_workers=1, log_dir=tmp_path / "logs").code == 0
    assert launch.out.getvalue() == b"x" * 1_000_000 + b"\n"
    complaint = f"stratagem: {tmp_path}/logs/worker-0.log is incomplete: No space left on device\n"
    assert launch.err.getvalue().decode() == complaint


def test_user_is_told_when_tasks_take_long_to_end(
    launch: Launch, meanwhile: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew_module, "_PATIENT_S", 0.05)
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT
    meanwhile(lambda: os.kill(os.getpid(), signal.SIGTERM), "worker-0.here")
    launch(program, num_workers=1, patience=Patience(grace_s=0.3))
    assert launch.said == ["waiting up to 0.3 s for worker/0 to end; Ctrl-C ends it"]


def test_crash_of_the_interpreter_shows_where_the_program_was(launch: Launch) -> None:
    outcome = launch("import faulthandler\ndef crash(): faulthandler._sigsegv()\ncrash()", num_workers=1)
    assert outcome.code == 128 + signal.SIGSEGV
    assert "was killed by SIGSEGV" in outcome.failures[0].cause
    assert "in crash" in outcome.failures[0].traceback


def test_first_cause_is_not_the_task_that_only_lost_another(launch: Launch) -> None:
    program = """
if index == 0:
    note("failing")
    raise ConnectionResetError("Connection reset by peer")
await_note("worker-0.failing")
raise ValueError("bad row 812")
"""
    outcome = launch(program, num_workers=2)
    assert outcome.failures[0].describe() == "worker/1 failed: ValueError: bad row 812"


def test_all_tasks_start_again_after_a_failure(launch: Launch) -> None:
    program = """
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
note(f"start-{restart}")
await_note(f"worker-{1 - index}.start-{restart}")
print("start", restart)
if restart < 2:
    if index == 1:
        raise ValueError(f"failure {restart}")
    signal.pause()
"""
    outcome = launch(program, num_workers=2, max_restarts=3)
    assert outcome.code == 0
    assert [each.cause for each in outcome.failures] == ["ValueError: failure 0", "ValueError: failure 1"]
    assert launch.out.getvalue().splitlines() == [b"start 0", b"start 1", b"start 2"]
    assert [line.partition(";")[0] for line in launch.said] == [each.describe() for each in outcome.failures]
    assert "restart 2 of 3" in launch.said[1]
    assert run_folders(launch) == []


def test_crash_loop_ends_with_all_causes(launch: Launch) -> None:
    program = "raise ValueError('failure ' + os.environ['TORCHELASTIC_RESTART_COUNT'])"
    outcome = launch(program, num_workers=1, max_restarts=2)
    assert outcome.code == 1
    assert [each.cause for each in outcome.failures] == [f"ValueError: failure {number}" for number in range(3)]
    assert [each.at for each in outcome.failures] == sorted(each.at for each in outcome.failures)
    assert outcome.logs is not None
    log = (outcome.logs / "worker-0.log").read_text()
    assert log.count("--- restart") == 2
    assert "failure 0" in log


def test_program_without_a_cluster_is_started_again_too(launch: Launch) -> None:
    program = "assert not config\nsys.exit(3 - int(os.environ['TORCHELASTIC_RESTART_COUNT']))"
    outcome = launch(program, max_restarts=3)
    assert outcome.code == 0
    assert [each.describe() for each in outcome.failures] == [
        f"program.py ended with code {code}" for code in (3, 2, 1)
    ]


def test_parameter_servers_are_stopped_when_the_workers_are_done(launch: Launch) -> None:
    program = """
if job == "ps":
    signal.signal(signal.SIGTERM, lambda *_: (note("stopped"), sys.exit(0)))
    note("serves")
    while True:
        signal.pause()
await_note("ps-0.serves")
note("done", str((folder / "ps-0.stopped").exists()))
"""
    assert launch(program, num_workers=2, num_ps=1).code == 0
    assert launch.note("worker-0.done") == launch.note("worker-1.done") == "False"
    assert (launch.folder / "ps-0.stopped").exists()


def test_evaluator_may_end_after_the_workers(launch: Launch) -> None:
    program = """
if job == "evaluator":
    await_note("worker-0.pid")
    while pathlib.Path("/proc", (folder / "worker-0.pid").read_text()).exists():
        time.sleep(0.01)  # until the launcher has seen that it ended
    note("evaluated")
else:
    note("pid", str(os.getpid()))
"""
    assert launch(program, num_workers=1, evaluator=True).code == 0
    assert (launch.folder / "evaluator-0.evaluated").exists()


def test_evaluator_that_does_not_end_is_stopped(launch: Launch) -> None:
    program = "note('here')\nif job == 'evaluator': signal.pause()\nawait_note('evaluator-0.here')"
    outcome = launch(program, num_workers=1, evaluator=True, patience=Patience(evaluator_s=0.2))
    assert outcome.code == 0
    assert "evaluator/0 may take another 0.2 s" in launch.said[0]
    assert "evaluator/0 is stopped" in launch.said[1]


def test_failure_of_the_evaluator_is_a_failure(launch: Launch) -> None:
    outcome = launch("if job == 'evaluator': sys.exit(5)\nsignal.pause()", num_workers=1, evaluator=True)
    assert outcome.code == 5
    assert outcome.failures[0].task == "evaluator/0"


WAIT = "note('here')\nsignal.pause()"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_all_tasks(launch: Launch, meanwhile: Callable[..., None], number: signal.Signals) -> None:
    meanwhile(lambda: os.kill(os.getpid(), number), "worker-0.here", "worker-1.here", "ps-0.here")
    outcome = launch(WAIT, num_workers=2, num_ps=1)
    assert (outcome.code, outcome.stopped_by, outcome.failures) == (128 + number, number, ())
    if number == signal.SIGINT:
        assert launch.err.getvalue().rstrip().endswith(b"KeyboardInterrupt"), "it is the program that was interrupted"


def test_program_decides_its_code_when_it_is_asked_to_stop(launch: Launch, meanwhile: Callable[..., None]) -> None:
    program = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\n" + WAIT
    meanwhile(lambda: os.kill(os.getpid(), signal.SIGTERM), "worker-0.here", "worker-1.here")
    assert launch(program, num_workers=2).code == 42


def test_children_of_a_task_serve_it_until_it_has_ended(launch: Launch, meanwhile: Callable[..., None]) -> None:
    program = """
ours, theirs = os.pipe(), os.pipe()
if not os.fork():
    os.read(theirs[0], 1)
    os.write(ours[1], b"data")
    signal.pause()
signal.signal(signal.SIGTERM, lambda *_: None)
note("here")
signal.pause()
os.write(theirs[1], b".")
os.close(ours[1])
note("got", os.read(ours[0], 4).decode())
"""
    meanwhile(lambda: os.kill(os.getpid(), signal.SIGTERM), "worker-0.here")
    assert launch(program, num_workers=1).code == 0
    assert launch.note("worker-0.got") == "data"


def test_second_signal_does_not_wait(launch: Launch, meanwhile: Callable[..., None]) -> None:
    program = """
signal.signal(signal.SIGINT, lambda *_: note("asked"))
note("here")
while True:
    signal.pause()
"""
    meanwhile(lambda: os.kill(os.getpid(), signal.SIGINT), "worker-0.here", "worker-1.here")
    meanwhile(lambda: os.kill(os.getpid(), signal.SIGINT), "worker-0.asked", "worker-1.asked")
    outcome = launch(program, num_workers=2, patience=Patience(grace_s=1000))  # the test's own limit is below that
    assert outcome.code == 128 + signal.SIGINT


def test_task_that_ignores_the_signal_is_killed_after_its_grace(launch: Launch, meanwhile: Callable[..., None]) -> None:
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT
    meanwhile(lambda: os.kill(os.getpid(), signal.SIGTERM), "worker-0.here")
    assert launch(program, num_workers=1, patience=Patience(grace_s=0.2)).code == 128 + signal.SIGTERM


def test_stopped_task_is_ended_too(launch: Launch) -> None:
    program = """
if index == 1:
    note("stopping")
    os.kill(os.getpid(), signal.SIGSTOP)
await_note("worker-1.stopping")
sys.exit(4)
"""
    assert launch(program, num_workers=2, patience=Patience(grace_s=0.2)).code == 4


def test_children_of_a_task_end_with_it(launch: Launch) -> None:
    program = """
import subprocess
child = subprocess.Popen(["sleep", "50"])
note("child", str(child.pid))
"""
    assert launch(program, num_workers=1).code == 0
    assert not Path(f"/proc/{launch.note('worker-0.child')}/cmdline").exists() or (
        "Z" in Path(f"/proc/{launch.note('worker-0.child')}/stat").read_text()
    )


def test_task_hears_when_nobody_reads_the_screen(launch: Launch) -> None:
    class Closed(io.BytesIO):
        def write(self, _: object) -> int:
            raise BrokenPipeError

    launch.out = Closed()
    outcome = launch("while True: print('a line')", num_workers=1)
    assert outcome.failures[0].cause.startswith("BrokenPipeError")


def test_first_signal_before_the_start_is_heard(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    from stratagem.cluster.launch import local_launcher

    create = local_launcher.token.create
    monkeypatch.setattr(
        local_launcher.token, "create", lambda path: (create(path), os.kill(os.getpid(), signal.SIGINT))
    )
    outcome = launch("note('started')\nsignal.pause()", num_workers=1)
    assert outcome.stopped_by == signal.SIGINT
