"""Rules that arguments of several parts of the library obey."""

from stratagem.errors import StrategyError


def require_seconds(**times: float) -> None:
    """Refuses times that are no number of seconds."""
    for name, value in times.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise StrategyError(f"{name} is a number of seconds above 0, got {value!r}")
