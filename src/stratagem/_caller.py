"""Finds the line of the user's program that led here.

Owns the walk up the stack past the frames of stratagem and torch; errors, warnings and logs name that line.
"""

import contextlib
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from typing import Final

_torch = importlib.util.find_spec("torch")  # the command line answers without importing it

# contextlib stands between a `with` line and the generator that serves it.
LIBRARIES: Final = (
    f"{Path(__file__).parent}{os.sep}",
    f"{Path(_torch.origin).parent}{os.sep}" if _torch is not None and _torch.origin else os.devnull,
    contextlib.__file__,
)


def users_line() -> tuple[str, int]:
    """File and number of the nearest line that is neither stratagem's nor torch's; the outermost if all are."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


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


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warns at that line."""
    warnings.warn_explicit(message, category, *users_line())


def _shortened(filename: str) -> str:
    with contextlib.suppress(OSError, ValueError):  # the folder is gone, or the file lies elsewhere
        return str(Path(filename).relative_to(Path.cwd()))
    return filename
