"""Defines what the bodies of frames say: their fields, and what each field may hold.

A body is a JSON object with exactly the fields of its kind. What breaks a rule is refused whole. Also
owns how plans and optimizers are written, since they travel in bodies; tensors never do.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from stratagem import _dtypes
from stratagem.cluster import fields
from stratagem.cluster.fields import WHOLE, Body, Check, is_flag, is_mapping, is_text, shortened
from stratagem.errors import ParameterError, ProtocolError
from stratagem.parameters.network.frames import MOST_PAYLOAD_BYTES, MOST_SHARD_BYTES, FrameKind
from stratagem.parameters.protocol import OptimizerSpec, Piece, Plain, ShardPlan, Variable

__all__ = ["Body", "decode", "done", "encode", "shortened"]

_MOST_DIMENSIONS: Final = 64


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < WHOLE


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _rate(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _row_of(*checks: Check) -> Check:
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(checks)
        and all(check(each) for check, each in zip(checks, value, strict=True))
    )


def _counts_by_text(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_text, value)) and all(map(_count, value.values()))


def _plain(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= _MOST_DIMENSIONS and all(type(each) in (bool, int, float) for each in value)
    return value is None or is_text(value) or (type(value) in (bool, int, float) and math.isfinite(value))


def _options(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_text, value)) and all(map(_plain, value.values()))


_VARIABLE: Final = _row_of(is_text, _list_of(_count), _dtypes.DTYPES.__contains__, is_flag, is_flag)
_OPTIMIZER: Final = _row_of(is_text, _list_of(_row_of(_list_of(is_text), _options)))
LIKE: Final = "like"


def _form(value: Any) -> bool:
    """Of a part of an optimizer's state: a tensor as its variable, one number in a tensor of a dtype, or a number."""
    if isinstance(value, str):
        return value == LIKE or value in _dtypes.DTYPES
    return type(value) in (bool, int, float) and math.isfinite(value)


_SAVED: Final = _list_of(_row_of(_count, is_text, _form, _list_of(_count)))

_FIELDS: Final[dict[FrameKind, dict[str, Check]]] = {
    FrameKind.ATTACH: {
        "task": is_text,
        "cluster": is_mapping,
        "jobs": _list_of(is_text),
        "versions": is_mapping,
        "signature": is_mapping,
        "machine": is_text,
        "pid": _count,
        "incarnation": is_text,
    },
    FrameKind.DEFINE: {
        "variables": _list_of(_VARIABLE),
        "shards": _list_of(_list_of(_row_of(_count, _count, _count))),
        "shard": _count,
        "optimizers": _list_of(_OPTIMIZER),
        "pacing": _row_of(is_text, _list_of(_count), _list_of(_rate), _list_of(_count), _seconds),
        "has_values": is_flag,
        "is_open": is_flag,
    },
    FrameKind.PULL: {"names": _maybe(_list_of(is_text)), "rows": _list_of(_row_of(is_text, _count))},
    FrameKind.PUSH: {
        "number": _count,
        "version": _count,
        "clock": _count,
        "optimizer": _count,
        "weight": _count,
        "options": _maybe(_list_of(_options)),
        "gradients": _list_of(_row_of(is_text, _maybe(_count), is_text)),
        "assigned": _list_of(is_text),
        "then_pull": is_flag,
        "is_shared": is_flag,
    },
    FrameKind.STATE: {"up_to": _counts_by_text},
    FrameKind.LOAD: {"version": _count, "saved": _SAVED},
    FrameKind.HOLD: {},
    FrameKind.MEET: {},
    FrameKind.SHARE: {"pid": _count, "descriptor": _count, "num_bytes": _count, "proof": is_text},
    FrameKind.DONE: {
        "version": _count,
        "clock": _count,
        "verdict": is_text,
        "staleness": _count,
        "reason": is_text,
        "lives": _counts_by_text,
        "saved": _SAVED,
    },
    FrameKind.FAILED: {"why": is_text, "retry": is_flag},
    FrameKind.BEAT: {},
    FrameKind.LEAVE: {"is_done": is_flag},
    FrameKind.FENCED: {"why": is_text},
}


def encode(kind: FrameKind, body: Body) -> bytes:
    """A body as bytes; refuses what the other side would refuse.

    Raises:
        ParameterError: There are more or longer names than fit into one frame.
    """
    fields.check(body, _fields_of(kind), f"a {kind.name} body")
    encoded = fields.write(body)
    if len(encoded) > MOST_PAYLOAD_BYTES:
        raise ParameterError(
            f"the description of the variables takes {len(encoded)} bytes, at most {MOST_PAYLOAD_BYTES} are sent; "
            f"use fewer variables or shorter names"
        )
    return encoded


def decode(kind: FrameKind, encoded: bytes) -> Body:
    """The body that bytes stand for.

    Raises:
        ProtocolError: It is not JSON, or not of this kind.
    """
    body = fields.read(encoded, f"the body of a {kind.name} frame")
    fields.check(body, _fields_of(kind), f"a {kind.name} body")
    return dict(body)


def done(**fields: Any) -> Body:
    """The body of an answer; what is not given is empty."""
    empty = {"version": 0, "clock": 0, "verdict": "", "staleness": 0, "reason": "", "lives": {}, "saved": []}
    return empty | fields


def plan_to_body(plan: ShardPlan) -> Body:
    """A plan as the fields of a body.

    Raises:
        ParameterError: A variable has a type that cannot travel.
    """
    for each in plan.variables:
        if why := _dtypes.why_not_sent(each.dtype):
            raise ParameterError(f"no server can keep {each.name!r}: {why}")
    places = {variable.name: place for place, variable in enumerate(plan.variables)}
    return {
        "variables": [
            [each.name, list(each.shape), _dtypes.name_of(each.dtype), each.sparse, each.trained]
            for each in plan.variables
        ],
        "shards": [[[places[piece.name], piece.first, piece.last] for piece in shard] for shard in plan.shards],
    }


def plan_from_body(body: Body) -> ShardPlan:
    """The plan that the fields of a body stand for.

    Raises:
        ProtocolError: They describe none.
    """
    variables = tuple(
        Variable(name, tuple(shape), _dtypes.DTYPES[dtype], sparse, trained)
        for name, shape, dtype, sparse, trained in body["variables"]
    )
    for each in variables:
        if len(each.shape) > _MOST_DIMENSIONS or math.prod(each.shape) * each.dtype.itemsize > MOST_SHARD_BYTES:
            raise ProtocolError(f"variable {each.name!r} is too large: {each.shape}")
    if len({each.name for each in variables}) != len(variables):
        raise ProtocolError("two variables have one name")
    shards = []
    for rows in body["shards"]:
        if len({place for place, _, _ in rows}) != len(rows):
            raise ProtocolError("a shard has two pieces of one variable")
        for place, first, last in rows:
            if place >= len(variables) or not 0 <= first <= last <= variables[place].num_rows:
                raise ProtocolError(f"a shard has rows {first} to {last} of variable {place}, which are not there")
        shards.append(tuple(Piece(variables[place], first, last) for place, first, last in rows))
    if not 0 <= body["shard"] < len(shards):
        raise ProtocolError(f"there is no shard {body['shard']}")
    return ShardPlan(variables, tuple(shards))


def optimizer_to_body(spec: OptimizerSpec) -> list[Any]:
    """An optimizer as a field of a body."""
    return [spec.kind, [[list(names), options_to_body(options)] for names, options in spec.groups]]


def optimizer_from_body(field: list[Any]) -> OptimizerSpec:
    """The optimizer that a field of a body stands for."""
    kind, groups = field
    return OptimizerSpec(kind, tuple((tuple(names), options_from_body(options)) for names, options in groups))


def options_to_body(options: Mapping[str, Plain]) -> Body:
    """Options as JSON has them."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}


def options_from_body(options: Mapping[str, Any]) -> dict[str, Plain]:
    """Options with tuples where JSON has lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def _fields_of(kind: FrameKind) -> Mapping[str, Check]:
    if kind not in _FIELDS:
        raise ProtocolError(f"a {kind.name} frame has no body")
    return _FIELDS[kind]
