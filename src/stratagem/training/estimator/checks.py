"""The rules that arguments obey."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stratagem.errors import EstimatorError, StratagemError, in_words


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
            raise EstimatorError(
                f"{what} may take the arguments {', '.join(available)}; it also has an argument "
                f"{each.name!r}, and there is no value for it"
            )
    return {each.name: offered[each.name] for each in parameters if each.name in offered}


@contextlib.contextmanager
def labels_needed(what: str, labels: Any) -> Iterator[None]:
    """A block of the user's that fails because there are no labels: says so. Some models do without."""
    try:
        yield
    except (TypeError, AttributeError, ValueError) as error:
        if labels is not None or isinstance(error, StratagemError):
            raise
        raise EstimatorError(
            f"{what} failed with {in_words(error)}, and the batches of input_fn have no labels: let input_fn give "
            f"(features, labels), or a model and a loss that need none"
        ) from error
