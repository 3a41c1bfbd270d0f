"""Names the program that is started, and runs it in the place of this process.

Loads nothing that takes time: a program without a launcher around it starts as fast as without one.
"""

import dataclasses
import importlib.machinery
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from stratagem import _env
from stratagem.errors import LaunchError


@dataclasses.dataclass(frozen=True)
class UserProgram:
    """What every task runs.

    Args:
        target: A file, or the name of a module.
        arguments: What the program itself is given.
        is_module: Whether it is run by `python -m`.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def name(self) -> str:
        """What it is called in messages and names of files."""
        return self.target if self.is_module else Path(self.target).name

    @property
    def command(self) -> tuple[str, ...]:
        """The program as `python` runs it without a launcher."""
        return (sys.executable, *(("-m",) if self.is_module else ()), self.target, *self.arguments)

    def check(self) -> None:
        """Refuses a program that is not there."""
        if self.is_module:
            top = self.target.partition(".")[0]
            if not importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *_env.python_path(), *sys.path]):
                raise LaunchError(f"there is no module {self.target!r} here; -m takes a name such as package.train")
        elif not Path(self.target).exists():
            hint = "; for a module write -m" if not self.target.endswith(".py") and "/" not in self.target else ""
            raise LaunchError(f"there is no program {self.target!r} in {os.getcwd()}{hint}")

    def execute(self, changes: Mapping[str, str | None]) -> NoReturn:
        """Turns this process into the program, with changes to its environment; whatever ends it ends this."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, self.command, _env.for_process(changes))  # noqa: S606  # the user's own program
