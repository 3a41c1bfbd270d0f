"""Finds the line of the user's program that led here.

Owns the walk up the stack past the frames of stratagem and torch; errors, warnings and logs name that line.
"""

import contextlib
import importlib.util
import linecache
import os
import re
import sys
import traceback
import warnings
from pathlib import Path
from types import TracebackType
from typing import Final

_torch = importlib.util.find_spec("torch")  # the command line answers without importing it

# contextlib stands between a `with` line and the generator that serves it.
LIBRARIES: Final = (
    f"{Path(__file__).parent}{os.sep}",
    f"{Path(_torch.origin).parent}{os.sep}" if _torch is not None and _torch.origin else os.devnull,
    contextlib.__file__,
)
_TRACE_LINE: Final = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+)(?P<rest>.*)')


def users_line() -> tuple[str, int]:
    """File and number of the nearest line that is neither stratagem's nor torch's; the outermost if all are."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def users_trace(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the first line on that is neither stratagem's nor torch's; nothing if all are."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(LIBRARIES):
        trace = trace.tb_next
    return trace


def calling_line() -> str:
    """The same as `src/train.py:12`, seen from the current folder."""
    file, line = users_line()
    return f"{cell_of(file) or _shortened(file)}:{line}"


def short_line() -> str:
    """The same as `train.py:12`, as graphs have it."""
    return shown_line(*users_line())


def shown_line(file: str, line: int) -> str:
    """A line of a program as `train.py:12`, of a cell of a notebook as `In[3]:12`."""
    return f"{cell_of(file) or Path(file).name}:{line}"


def cell_of(file: str) -> str | None:
    """The cell of a notebook, as `In[3]`, that runs under the name of a file."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    found = shell and shell.compile.format_code_name(file)
    return found[1] if found else None


def with_cells(text: str) -> str:
    """A traceback of another process, in which lines of cells are named as the notebook does, and shown."""
    lines = []
    for line in text.splitlines():
        found = _TRACE_LINE.match(line)
        cell = cell_of(found["file"]) if found else None
        lines.append(f"  Cell {cell}, line {found['line']}{found['rest']}" if found and cell else line)
        if found and cell and (source := linecache.getline(found["file"], int(found["line"])).strip()):
            lines.append(f"    {source}")
    return "\n".join(lines)


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warns at that line."""
    warnings.warn_explicit(message, category, *users_line())


def _shortened(filename: str) -> str:
    with contextlib.suppress(OSError, ValueError):  # the folder is gone, or the file lies elsewhere
        return str(Path(filename).relative_to(Path.cwd()))
    return filename


def last_line(error: BaseException) -> str:
    """The last line of an error's own text, as Python shows it, without the notes that follow."""
    lines = traceback.format_exception_only(error)
    num_notes = sum(len(str(note).split("\n")) for note in getattr(error, "__notes__", ()))
    return lines[-1 - num_notes].strip()
