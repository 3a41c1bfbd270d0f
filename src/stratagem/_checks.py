"""Rules that arguments of several parts of the library obey."""

import os
import sys
from typing import Any, NoReturn

from stratagem.errors import StratagemError, StrategyError

_MOST_SECONDS = 10**9  # 30 years; the operating system takes no longer waits


def require_seconds(error: type[StratagemError] = StrategyError, /, *, or_zero: bool = False, **times: Any) -> None:
    """Refuses times that are no number of seconds.

    Args:
        error: What is raised.
        or_zero: Whether they may be 0.
        times: The times, by their names.
    """
    for name, value in times.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (0 < value <= _MOST_SECONDS or (or_zero and value == 0)):
            least = "from 0 up" if or_zero else "above 0"
            raise error(f"{name} is a number of seconds {least}, got {value!r}; the longest is {_MOST_SECONDS:.0e} s")


def require_seconds_if_given(**times: Any) -> None:
    """The same for times that may be `None`."""
    require_seconds(**{name: value for name, value in times.items() if value is not None})


def require_count(error: type[StratagemError] = StrategyError, /, **counts: object) -> None:
    """Refuses what is not a number of things, of which there is at least one."""
    for name, value in counts.items():
        if type(value) is not int or not 1 <= value <= sys.maxsize:
            came = "nothing" if value is None else f"{type(value).__name__} {value!r}"
            raise error(f"{name} is a positive int, got {came}")


def require_folder(error: type[StratagemError] = StrategyError) -> None:
    """Refuses to start processes in a folder that was deleted: torch cannot be loaded there."""
    try:
        os.getcwd()
    except OSError as gone:
        raise error(
            f"the folder that this program runs in does not exist any more ({gone.strerror}); go to one that does with "
            f"cd, or os.chdir"
        ) from gone


class StaysHere:
    """An object that works in the process that made it and nowhere else: it is neither copied nor saved."""

    _instead = "save what it has made (state_dict(), tensors), and make another one where one is needed"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise StrategyError(
            f"a {type(self).__name__} is of use only as it is, in the process that made it, and cannot be copied, "
            f"sent or saved; {self._instead}"
        )
