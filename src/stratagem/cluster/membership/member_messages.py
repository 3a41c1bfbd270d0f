"""Defines the messages between tasks: their kinds, their fields, and what each field may hold.

A message is a JSON object with exactly the fields of its kind. What breaks a rule is refused whole,
before anything acts on it. Does not know how messages travel (`channel`) or what they lead to.
"""

import enum
import math
from collections.abc import Mapping
from typing import Any, Final

from stratagem.cluster import fields
from stratagem.cluster.fields import WHOLE, Body, Check, is_flag, is_mapping, is_text, shortened
from stratagem.errors import ProtocolError

__all__ = ["Body", "MessageKind", "decode", "encode", "shortened"]

MOST_BYTES: Final = 2**20
MOST_VALUE_BYTES: Final = 64 * 2**10
MOST_KEY_CHARACTERS: Final = 1024
MOST_KEYS: Final = 1024


class MessageKind(enum.IntEnum):
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


def _whole(value: Any) -> bool:
    return type(value) is int and -WHOLE <= value < WHOLE


def _duration(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= 10**9


def _texts_of(longest: int, most: int) -> Check:
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


def _fits(body: Body, wanted: Mapping[str, Check]) -> bool:
    return body.keys() == wanted.keys() and all(check(body[name]) for name, check in wanted.items())


_ENCODED: Final = -(-MOST_VALUE_BYTES // 3) * 4  # in base64
_PLACE: Final[dict[str, Check]] = {"task": is_text, "address": is_text, "machine": is_text, "pid": _whole}
_WHY: Final[dict[str, Check]] = {"why": is_text}
_FIELDS: Final[dict[MessageKind, dict[str, Check]]] = {
    MessageKind.PING: {},
    MessageKind.PONG: _PLACE,
    MessageKind.STOP: _WHY,
    MessageKind.DONE: {},
    MessageKind.JOIN: {
        "task": is_text,
        "cluster": is_mapping,
        "jobs": _texts_of(64, 16),
        "versions": is_mapping,
        "signature": is_mapping,
        "machine": is_text,
        "pid": _whole,
        "incarnation": is_text,
    },
    MessageKind.HERE: {"tasks": _texts_of(64, 100_000)},
    MessageKind.READY: {"members": _places, "heartbeat_s": _duration, "num_missed": _whole, "timeout_s": _duration},
    MessageKind.REFUSED: {"why": is_text, "retry": is_flag},
    MessageKind.BEAT: {},
    MessageKind.LOST: _PLACE | _WHY,
    MessageKind.FENCED: _WHY,
    MessageKind.LEAVE: {},
    MessageKind.LEFT: {"task": is_text},
    MessageKind.FAIL: _WHY,
    MessageKind.REQUEST: {
        "id": _whole,
        "operation": is_text,
        "keys": _texts_of(MOST_KEY_CHARACTERS, MOST_KEYS),
        "values": _texts_of(_ENCODED, MOST_KEYS),
        "amount": _whole,
        "timeout_s": _duration,
    },
    MessageKind.REPLY: {
        "id": _whole,
        "status": is_text,
        "values": _texts_of(_ENCODED, MOST_KEYS),
        "number": _whole,
        "message": is_text,
    },
    MessageKind.CALL: {"id": _whole, "call": is_text, "about": is_mapping, "sizes": _sizes},
    MessageKind.RETURN: {"id": _whole, "error": is_text, "message": is_text, "about": is_mapping, "sizes": _sizes},
}


def encode(kind: MessageKind, body: Body) -> bytes:
    """A message as bytes; refuses what the other side would refuse."""
    fields.check(body, _FIELDS[kind], f"a {kind.name} message")
    encoded = fields.write(body)
    if len(encoded) > MOST_BYTES:
        raise ProtocolError(f"a {kind.name} message takes {len(encoded)} bytes, at most {MOST_BYTES} are allowed")
    return encoded


def decode(kind: MessageKind, encoded: bytes) -> Body:
    """The message that bytes stand for.

    Raises:
        ProtocolError: It is not JSON, or not of this kind.
    """
    body = fields.read(encoded, what := f"a {kind.name} message")
    fields.check(body, _FIELDS[kind], what)
    return dict(body)
