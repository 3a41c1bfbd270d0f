"""The guards themselves: each must fail the test that leaves its kind of thing behind. What else runs tests works."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.timing import descendants

ROOT = Path(__file__).parents[1]

_LEAKS = """
import atexit, os, socket, subprocess, sys, threading, time
import pytest
from tests import guards
from tests.guards import nothing_left_behind

guards._GRACE_S = 0.5

kept = []

def test_clean():
    subprocess.run([sys.executable, "-c", ""], check=True)
    with socket.socket():
        thread = threading.Thread(target=time.sleep, args=(0.05,))
        thread.start()

def test_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(2)"]))

def test_orphan():
    guards.adopt_orphans()
    subprocess.run(["sh", "-c", "sleep 2 & exit 0"], check=True)

def test_shared_memory():
    path = f"/dev/shm/stratagem-test-{os.getpid()}"
    open(path, "x").close()
    atexit.register(os.unlink, path)

def test_thread():
    threading.Thread(target=time.sleep, args=(20,), daemon=True).start()

def test_socket():
    kept.append(socket.socket())

def test_environment():
    os.environ["STRATAGEM_LEAK"] = "1"

def test_setting():
    os.chdir("/")
"""

_HANG = """
import threading
def test_hangs():
    threading.Event().wait(30)
"""


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A test run of its own, in a process of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider")
    return pytester


@pytest.mark.slow
def test_guards_fail_every_test_that_leaves_something_behind(inner: pytest.Pytester) -> None:
    inner.makepyfile(_LEAKS)
    result = inner.runpytest_subprocess(timeout=55)
    result.assert_outcomes(passed=8, errors=7)
    kinds = ["processes", "processes", "shared memory", "threads", "sockets", "environment", "settings"]
    result.stdout.fnmatch_lines([f"E *Failed: the test left behind: {kind} *" for kind in kinds])


@pytest.mark.slow
def test_time_limit_fails_a_test_that_hangs_and_shows_where(inner: pytest.Pytester) -> None:
    inner.makepyfile(_HANG)
    result = inner.runpytest_subprocess("--timeout=1", timeout=55)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*threading.Event().wait(30)*", "*Failed: Timeout*"])


@pytest.mark.slow
def test_warnings_are_errors_here(inner: pytest.Pytester) -> None:
    careless = inner.makepyfile("import warnings\ndef test_warns():\n    warnings.warn('careless')")
    result = inner.runpytest_subprocess("-c", str(ROOT / "pyproject.toml"), "--rootdir", ".", str(careless), timeout=55)
    result.assert_outcomes(failed=1)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
def test_report_counts_the_time_of_processes_that_a_test_starts(inner: pytest.Pytester, workers: str) -> None:
    inner.makeconftest(
        "from tests.timing import Timing\ndef pytest_configure(config):\n    config.pluginmanager.register(Timing())"
    )
    burn = "import time\nwhile time.process_time() < 0.2: pass"
    inner.makepyfile(
        f"""
import subprocess, sys
running = None
def test_ended():
    subprocess.run([sys.executable, "-c", {burn!r}], check=True)
def test_running():
    global running
    command = [sys.executable, "-c", {burn + chr(10) + "print(flush=True); input()"!r}]
    running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    running.stdout.readline()
"""
    )
    result = inner.runpytest_subprocess("-n", workers, timeout=55)
    result.assert_outcomes(passed=2)
    (line,) = [line for line in result.outlines if line.endswith(".py") and "::" not in line]
    assert float(line.split()[0]) >= 0.4


_MARKED = """
import pytest

def test_once():
    pass

@pytest.mark.docs
def test_document():
    pass

@pytest.mark.soak
@pytest.mark.parametrize("number", range(40))
def test_often(number):
    pass
"""


def test_marked_tests_are_left_out_unless_asked_for_and_shares_are_all_of_soak(
    inner: pytest.Pytester, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # each run would import them again
    inner.makeconftest(
        "from tests.selection import Selection, pytest_addoption\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(Selection(config))"
    )
    inner.makepyfile(_MARKED)
    marked = ("-W", "ignore::pytest.PytestUnknownMarkWarning")
    inner.inline_run(*marked).assertoutcome(passed=1)
    inner.inline_run(*marked, "--docs").assertoutcome(passed=1)
    inner.inline_run(*marked, "--soak").assertoutcome(passed=40)
    inner.inline_run(*marked, "--soak", "--docs").assertoutcome(passed=41)
    shares = [inner.inline_run(*marked, "--soak", f"--soak-share={share}/3").countoutcomes()[0] for share in (1, 2, 3)]
    assert sum(shares) == 40
    assert min(shares) > 0
    inner.inline_run(*marked, "--soak", "--soak-minutes=0").assertoutcome(skipped=40)
    assert inner.inline_run(*marked, "--soak-share=4/3").ret == pytest.ExitCode.USAGE_ERROR
    assert "--soak-share must be K/N with K from 1 to N, for example 2/4, got '4/3'" in capsys.readouterr().err


@pytest.mark.slow
def test_busy_counts_failures_and_its_burners_end_when_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "tests.busy", "--repeat", "2", "--", sys.executable, "-c"]
    failing = [*command, "raise SystemExit(3)"]
    done = subprocess.run(failing, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (2, "2 of 2 runs failed")
    with subprocess.Popen(
        [*command, "print('begun', flush=True); input()"],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as busy:
        assert busy.stdout is not None
        assert busy.stdout.readline() == "run 1 of 2 on a busy machine\n"
        assert busy.stdout.readline() == "begun\n"
        assert len(list(descendants(busy.pid))) == 3
        os.killpg(busy.pid, signal.SIGINT)  # as Ctrl-C on a terminal does
        assert busy.wait(50) == 130  # and the guard looks for what is left
