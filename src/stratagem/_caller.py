"""Finds the line of the user's program that led here.

Owns the walk up the stack past stratagem's own frames; errors and warnings name that line.
"""

import contextlib
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

# contextlib stands between a `with` line and the generator that serves it.
_OURS = (str(Path(__file__).parent) + os.sep, contextlib.__file__)


def calling_line() -> str:
    """The nearest caller outside stratagem, as `train.py:12`."""
    frame = _calling_frame()
    return f"{_shortened(frame.f_code.co_filename)}:{frame.f_lineno}"


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warns at the nearest caller outside stratagem."""
    frame = _calling_frame()
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno)


def _calling_frame() -> FrameType:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def _shortened(filename: str) -> str:
    with contextlib.suppress(OSError, ValueError):  # the folder is gone, or the file lies elsewhere
        return str(Path(filename).relative_to(Path.cwd()))
    return filename
