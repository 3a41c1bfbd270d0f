"""Finds the line of the user's program that something comes from, past stratagem's own code and torch's."""

import contextlib
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Final

import torch

LIBRARIES: Final = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
    contextlib.__file__,
)


def users_line() -> tuple[str, int]:
    """File and number of the nearest line that is neither stratagem's nor torch's; nothing and 0 if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def short_line() -> str:
    """The same, shortly: `train.py:12`."""
    file, line = users_line()
    return f"{Path(file).name}:{line}"
