"""Lines of replica 0 have its number; those of others and of later do not."""

import logging
import sys
import threading

import pytest
import rich.progress

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


def steps(*printed: str) -> None:
    """Each text is what one run of a step writes."""
    for text in printed:
        with numbered(0):
            sys.stdout.write(text)


def test_a_line_that_is_drawn_again_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    steps("\r  0%|  |", "\r 50%|# |", "\r100%|##|", "\n", "done\n")
    assert capsys.readouterr().out == "\r  0%|  |\r 50%|# |\r100%|##|\n[replica 0] done\n"
    steps("1 of 2\r", "2 of 2\r", "\n")  # each begins at the margin
    assert capsys.readouterr().out == "[replica 0] 1 of 2\r[replica 0] 2 of 2\r\n"


def test_a_line_may_be_written_by_several_steps(capsys: pytest.CaptureFixture[str]) -> None:
    steps("epoch 1 ", ".", ".", ".\n", "epoch 2\n")
    assert capsys.readouterr().out == "[replica 0] epoch 1 ...\n[replica 0] epoch 2\n"


def test_coloured_lines_have_a_number_and_moves_of_the_cursor_have_none(capsys: pytest.CaptureFixture[str]) -> None:
    steps("\x1b[31mred\x1b[0m\n", "\n\n\x1b[A\x1b[A", "\r\x1b[2K", "\n")
    assert capsys.readouterr().out == "[replica 0] \x1b[31mred\x1b[0m\n\n\n\x1b[A\x1b[A\r\x1b[2K\n"


def test_progress_of_rich_is_drawn_as_it_would_be_without_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    def show() -> str:
        console = rich.console.Console(file=sys.stdout, force_terminal=True, width=40, height=10, _environ={})
        columns = "{task.description}", rich.progress.BarColumn(bar_width=10)
        with rich.progress.Progress(*columns, console=console, auto_refresh=False) as progress:
            for task in [progress.add_task("one", total=2), progress.add_task("two", total=2)]:
                progress.update(task, advance=1, refresh=True)
        print("after")
        return capsys.readouterr().out

    expected = show()
    with numbered(0):
        assert show() == expected.removesuffix("after\n") + "[replica 0] after\n"


def test_bars_of_tqdm_are_drawn_as_they_would_be_without_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    tqdm = pytest.importorskip("tqdm")
    tqdm.tqdm.monitor_interval = 0

    def show() -> str:
        outer = tqdm.tqdm(total=2, ncols=40, mininterval=0, bar_format="{l_bar}{bar}|", position=0)
        for _ in tqdm.tqdm(range(2), ncols=40, mininterval=0, bar_format="{l_bar}{bar}|", position=1):
            outer.update()
        outer.close()
        return capsys.readouterr().err

    expected = show()
    with numbered(0):
        assert show() == expected
        tqdm.tqdm.write("a line", file=sys.stderr)
    assert capsys.readouterr().err == "[replica 0] a line\n"
