"""Defines the messages between tasks: their kinds, their fields, and what each field may hold.

A message is a JSON object with exactly the fields of its kind. What breaks a rule is refused whole,
before anything acts on it. Does not know how messages travel (`channel`) or what they lead to.
"""

import enum
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from stratagem.cluster import strict_json
from stratagem.errors import ProtocolError

MOST_BYTES: Final = 2**20
MOST_VALUE_BYTES: Final = 64 * 2**10
MOST_KEY_CHARACTERS: Final = 1024
MOST_KEYS: Final = 1024
_MOST_TEXT: Final = 4096
_WHOLE: Final = 2**63

Body: TypeAlias = dict[str, Any]


class Kind(enum.IntEnum):
    """What a message is about."""

    PING = 1
    """Who are you?"""
    PONG = 2
    STOP = 3
    """The cluster is to end."""
    DONE = 4
    JOIN = 5
    """A task introduces itself to the keeper."""
    HERE = 6
    """The keeper has taken it in; these have come so far."""
    READY = 7
    """All have come."""
    REFUSED = 8
    BEAT = 9
    """A sign of life."""
    LOST = 10
    """A task is gone."""
    FENCED = 11
    """To a task that was declared lost: it no longer takes part."""
    LEAVE = 12
    LEFT = 13
    FAIL = 14
    """A task ends because of an error."""
    REQUEST = 15
    """To the store of the keeper."""
    REPLY = 16
    CALL = 17
    """Of a session to a task that runs parts of its graph; bytes of tensors follow."""
    RETURN = 18
    """What came of it; bytes of tensors follow."""


_Check: TypeAlias = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_TEXT


def _whole(value: Any) -> bool:
    return type(value) is int and -_WHOLE <= value < _WHOLE


def _duration(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= 10**9


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _texts_of(longest: int, most: int) -> _Check:
    def check(value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) <= most
            and all(isinstance(each, str) and len(each) <= longest for each in value)
        )

    return check


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MOST_KEYS and all(_whole(each) and each >= 0 for each in value)


def _places(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) and _fits(each, _PLACE) for each in value)


def _fits(body: Body, fields: Mapping[str, _Check]) -> bool:
    return body.keys() == fields.keys() and all(check(body[name]) for name, check in fields.items())


_ENCODED: Final = -(-MOST_VALUE_BYTES // 3) * 4  # in base64
_PLACE: Final[dict[str, _Check]] = {"task": _text, "address": _text, "machine": _text, "pid": _whole}
_WHY: Final[dict[str, _Check]] = {"why": _text}
_FIELDS: Final[dict[Kind, dict[str, _Check]]] = {
    Kind.PING: {},
    Kind.PONG: _PLACE,
    Kind.STOP: _WHY,
    Kind.DONE: {},
    Kind.JOIN: {
        "task": _text,
        "cluster": _mapping,
        "jobs": _texts_of(64, 16),
        "versions": _mapping,
        "signature": _mapping,
        "machine": _text,
        "pid": _whole,
        "incarnation": _text,
    },
    Kind.HERE: {"tasks": _texts_of(64, 100_000)},
    Kind.READY: {"members": _places, "heartbeat_s": _duration, "num_missed": _whole},
    Kind.REFUSED: {"why": _text, "retry": _flag},
    Kind.BEAT: {},
    Kind.LOST: _PLACE | _WHY,
    Kind.FENCED: _WHY,
    Kind.LEAVE: {},
    Kind.LEFT: {"task": _text},
    Kind.FAIL: _WHY,
    Kind.REQUEST: {
        "id": _whole,
        "operation": _text,
        "keys": _texts_of(MOST_KEY_CHARACTERS, MOST_KEYS),
        "values": _texts_of(_ENCODED, MOST_KEYS),
        "amount": _whole,
        "timeout_s": _duration,
    },
    Kind.REPLY: {
        "id": _whole,
        "status": _text,
        "values": _texts_of(_ENCODED, MOST_KEYS),
        "number": _whole,
        "message": _text,
    },
    Kind.CALL: {"id": _whole, "call": _text, "about": _mapping, "sizes": _sizes},
    Kind.RETURN: {"id": _whole, "error": _text, "message": _text, "about": _mapping, "sizes": _sizes},
}


def encode(kind: Kind, body: Body) -> bytes:
    """A message as bytes; refuses what the other side would refuse."""
    _check(kind, body)
    encoded = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    if len(encoded) > MOST_BYTES:
        raise ProtocolError(f"a {kind.name} message takes {len(encoded)} bytes, at most {MOST_BYTES} are allowed")
    return encoded


def decode(kind: Kind, encoded: bytes) -> Body:
    """The message that bytes stand for.

    Raises:
        ProtocolError: It is not JSON, or not of this kind.
    """
    try:
        body = strict_json.read(encoded.decode())
    except (UnicodeDecodeError, strict_json.NotJsonError):
        raise ProtocolError(f"a {kind.name} message is not valid JSON") from None
    _check(kind, body)
    return dict(body)


def shortened(text: str) -> str:
    """A text that fits into a message."""
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 3] + "..."


def _check(kind: Kind, body: Any) -> None:
    fields = _FIELDS[kind]
    if not isinstance(body, dict) or body.keys() != fields.keys():
        raise ProtocolError(f"a {kind.name} message has the fields {', '.join(fields) or 'none'}")
    for name, check in fields.items():
        if not check(body[name]):
            raise ProtocolError(f"{name!r} of a {kind.name} message is not what it may be")
