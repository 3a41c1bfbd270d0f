"""Reads JSON without the liberties that Python's reader takes.

A name given twice, NaN and Infinity, and text that is nested too deep are refused. Errors say the
place in words that a user can act on. Whose text it was, and what kind of error that is, callers add.
"""

import json
from typing import Any, Final, NoReturn

_AROUND: Final = 12  # characters shown before and after the place
_PLAIN: Final = {
    "Expecting ',' delimiter": 'expected ","',
    "Expecting ':' delimiter": 'expected ":"',
    "Expecting value": "expected a value",
    "Expecting property name enclosed in double quotes": "expected a name in double quotes",
    "Extra data": "expected the end",
}


class NotJsonError(ValueError):
    """The text is not JSON; never shown to users as it is."""


def read(text: str) -> Any:
    """The value that a text stands for.

    Example:
        >>> read('{"a": [1, 2]}')
        {'a': [1, 2]}
        >>> read('{"cluster": {"worker" ["a:1"]}}')
        Traceback (most recent call last):
        ...
        stratagem.cluster.strict_json.NotJsonError: line 1 column 23: expected ":" (near ': {"worker" ["a:1"]}}')
    """
    try:
        return json.loads(text, object_pairs_hook=_without_twins, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        what = _PLAIN.get(error.msg, error.msg[:1].lower() + error.msg[1:])
        near = text[max(0, error.pos - _AROUND) : error.pos + _AROUND]
        raise NotJsonError(f"line {error.lineno} column {error.colno}: {what} (near {near!r})") from None
    except RecursionError:
        raise NotJsonError("it is nested too deep") from None
    except NotJsonError:
        raise
    except ValueError:  # Python limits the digits of a number
        raise NotJsonError("a number in it is too long") from None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise NotJsonError(f"the name {twin!r} is given twice in one object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise NotJsonError(f"{name} is no number of JSON")
