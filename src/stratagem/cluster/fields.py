"""Checks JSON objects of which each field may hold only certain things: what two processes say to each other.

Owns the checks that all protocols need. Which fields there are, and how large a whole may be, each
protocol says itself; errors name what it calls the thing.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from stratagem.cluster import strict_json
from stratagem.errors import ProtocolError

_MOST_TEXT: Final = 4096
WHOLE: Final = 2**63  # whole numbers are smaller

Body: TypeAlias = dict[str, Any]
Check: TypeAlias = Callable[[Any], bool]


def is_text(value: Any) -> bool:
    """Whether it is a text, and not too long."""
    return isinstance(value, str) and len(value) <= _MOST_TEXT


def is_flag(value: Any) -> bool:
    """Whether it is true or false."""
    return isinstance(value, bool)


def is_mapping(value: Any) -> bool:
    """Whether it is an object, whatever is in it."""
    return isinstance(value, dict)


def shortened(text: str) -> str:
    """A text that fits into a field."""
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 3] + "..."


def check(body: Any, fields: Mapping[str, Check], what: str) -> None:
    """Refuses a body that does not have exactly these fields, with what each may hold.

    Raises:
        ProtocolError: It does not.
    """
    if not isinstance(body, dict) or body.keys() != fields.keys():
        raise ProtocolError(f"{what} has the fields {', '.join(fields) or 'none'}")
    for name, is_right in fields.items():
        if not is_right(body[name]):
            raise ProtocolError(f"{name!r} of {what} has a value that is not allowed")


def write(body: Body) -> bytes:
    """A body as bytes."""
    return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()


def read(encoded: bytes, what: str) -> Any:
    """What bytes stand for.

    Raises:
        ProtocolError: They are not JSON.
    """
    try:
        return strict_json.read(encoded.decode())
    except (UnicodeDecodeError, strict_json.NotJsonError):
        raise ProtocolError(f"{what} is not valid JSON") from None
