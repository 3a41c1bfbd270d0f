import signal
import subprocess
import sys

import pytest

from stratagem.cluster.launch.failures import Failure, explain, first_cause

CHAINED = """epoch 1
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    early()
KeyError: 'handled long ago'
epoch 2:  45%|####     |Traceback (most recent call last):
  File "train.py", line 8, in <module>
    load()
ValueError: bad row 812

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 10, in <module>
    raise RuntimeError("cannot train") from error
RuntimeError: cannot train
on two lines
"""


def test_cause_is_the_last_error_with_those_that_led_to_it() -> None:
    failure = explain("worker/1", 1, CHAINED, at=0.0)
    assert failure.cause == "RuntimeError: cannot train"
    lines = failure.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "ValueError: bad row 812" in lines
    assert "KeyError: 'handled long ago'" not in lines
    assert lines[-1] == "on two lines"


def test_line_of_another_stream_within_a_traceback_is_not_the_cause() -> None:
    lines = CHAINED.splitlines()
    last = lines.index("RuntimeError: cannot train")
    failure = explain("worker/1", 1, "\n".join([*lines[:last], '["worker", 1]', *lines[last:]]), at=0.0)
    assert failure.cause == "RuntimeError: cannot train"
    (start,) = (number for number, line in enumerate(lines) if line.startswith("  File") and "line 10" in line)
    failure = explain("worker/1", 1, "\n".join([*lines[:start], "[1]", *lines[start:]]), at=0.0)
    assert failure.cause == "RuntimeError: cannot train"
    for other in ("loss: 0.3", "Done", "INFO:root:saved"):
        failure = explain("worker/1", 1, "\n".join([*lines[:last], other, *lines[last:]]), at=0.0)
        assert failure.cause == "RuntimeError: cannot train"
    for own in ("<odd>", "Überlauf: zu viel", "train.Stopped"):
        assert explain("worker/1", 1, f"Traceback (most recent call last):\n  File\n{own}", at=0.0).cause == own


@pytest.mark.parametrize("code", [7, -signal.SIGKILL, -signal.SIGTERM])
def test_traceback_is_not_the_cause_of_an_end_that_no_exception_has(code: int) -> None:
    failure = explain("worker/1", code, CHAINED, at=0.0)
    assert failure.cause == ("ended with code 7" if code > 0 else f"was killed by {signal.Signals(-code).name}")


def test_traceback_long_before_the_end_is_not_the_cause() -> None:
    failure = explain("worker/1", 1, CHAINED + "going on\n" * 200, at=0.0)
    assert failure.cause == "ended with code 1"


def _end_of(program: str) -> Failure:
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, timeout=50, check=False
    )
    return explain("worker/0", done.returncode, done.stderr, at=0.0)


def test_cause_of_a_group_of_exceptions_is_the_group() -> None:
    failure = _end_of("raise ExceptionGroup('two', [ValueError(1), ExceptionGroup('inner', [KeyError(2)])])")
    assert failure.cause == "ExceptionGroup: two (2 sub-exceptions)"
    assert failure.traceback.startswith("  + Exception Group Traceback")


def test_cause_without_a_traceback_is_the_code_with_the_last_lines() -> None:
    failure = explain("worker/0", 3, "\n".join(f"line {number}" for number in range(50)), at=0.0)
    assert failure.cause == "ended with code 3"
    assert failure.traceback.splitlines() == [f"line {number}" for number in range(30, 50)]
    failure = _end_of("if True print(1)")
    assert failure.cause == "ended with code 1"
    assert "SyntaxError" in failure.traceback


@pytest.mark.parametrize("killed_for_memory", [True, False])
def test_cause_of_a_kill_is_the_signal_and_perhaps_the_memory(killed_for_memory: bool) -> None:
    failure = explain("ps/0", -signal.SIGKILL, CHAINED, at=0.0, killed_for_memory=killed_for_memory)
    assert failure.code == 137
    assert failure.cause.startswith("was killed by SIGKILL")
    assert ("lack of memory" in failure.cause) == killed_for_memory


def test_long_output_is_cut() -> None:
    log = "Traceback (most recent call last):\n" + "  File x\n" * 10 + "ValueError: " + "x" * 50_000
    failure = explain("worker/0", 1, log, at=0.0)
    assert len(failure.traceback) == 16_000
    assert len(failure.cause) == 300


@pytest.mark.parametrize(
    "cause",
    [
        "stratagem.errors.TaskLostError: worker/1 is gone",
        "RuntimeError: [third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
    ],
)
def test_consequence_of_another_end_is_never_the_first_cause(cause: str) -> None:
    lost = Failure("worker/0", 1, cause, at=1.0)
    for own in (
        Failure("worker/1", 1, "ValueError: x", at=2.0),
        Failure("worker/1", 137, "was killed by SIGKILL", at=2.0),
    ):
        assert first_cause([lost, own]) is own
    assert first_cause([Failure("worker/2", 1, cause, at=2.0), lost]) is lost


def test_earliest_failure_is_the_first_cause() -> None:
    failures = [Failure("worker/0", 1, "ValueError: x", at=2.0), Failure("worker/1", 1, "KeyError: y", at=1.0)]
    assert first_cause(failures).task == "worker/1"


def test_failure_travels_as_json() -> None:
    failure = explain("worker/1", 1, CHAINED, at=12.5)
    assert Failure.from_json(failure.to_json()) == failure
