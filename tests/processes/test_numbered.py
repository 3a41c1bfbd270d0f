"""Lines of replica 0 have its number; those of others and of later do not."""

import logging
import sys
import threading

import pytest

from stratagem.processes.numbered import numbered, plain


def test_only_the_running_replica_is_numbered(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with numbered(0):
        handler = logging.StreamHandler(sys.stdout)
        print("a\nb")
        thread = threading.Thread(target=print, args=("other",))
        thread.start()
        thread.join()
        assert sys.stdout.errors == before.errors
        with numbered(1):
            print("inner")
        print("c", end="")
        print("d")
    assert sys.stdout is before is plain(sys.stdout)
    handler.stream.write("later\n")
    with numbered(0):
        handler.stream.write("next\n")
    assert capsys.readouterr().out.splitlines() == [
        "[replica 0] a",
        "[replica 0] b",
        "other",
        "[replica 1] inner",
        "[replica 0] cd",
        "later",
        "[replica 0] next",
    ]


def test_a_program_may_have_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with numbered(0):
        print("nobody reads this")
        assert sys.stdout is None
    assert sys.stdout is None
