"""The rules that arguments obey."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stratagem.errors import EstimatorError


def require_count(name: str, value: Any) -> None:
    """Refuses what is not a positive whole number."""
    if type(value) is not int or value < 1:
        raise EstimatorError(f"{name} is a positive int, got {described(value)}")


def require_seconds(name: str, value: Any) -> None:
    """Refuses what is not a time."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise EstimatorError(f"{name} is a number of seconds, more than 0, got {value!r}")


def require_one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuses what is not one of some words."""
    if value not in allowed:
        raise EstimatorError(f"{name} is one of {', '.join(map(repr, allowed))}, got {value!r}")


def require_input_fn(input_fn: Any) -> None:
    """Refuses data in the place of a function that makes it."""
    if not callable(input_fn):
        raise EstimatorError(
            f"input_fn is a function that returns the data, got {type(input_fn).__name__}; write input_fn=lambda: data"
        )


def described(value: Any) -> str:
    """What came, for an error."""
    return "nothing" if value is None else f"{type(value).__name__} {value!r}"


def accepted(function: Callable[..., Any], what: str, available: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments on offer that a user's function takes, by their names.

    Raises:
        EstimatorError: It needs an argument that is not on offer.
    """
    parameters = inspect.signature(function).parameters.values()
    given = function.keywords if isinstance(function, functools.partial) else {}
    offered = {name: value for name, value in available.items() if name not in given}
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return offered
    for each in parameters:
        if each.name not in available and each.default is each.empty and each.kind is not each.VAR_POSITIONAL:
            raise EstimatorError(f"{what} may take {', '.join(available)}; it needs an argument {each.name!r}")
    return {each.name: offered[each.name] for each in parameters if each.name in offered}
