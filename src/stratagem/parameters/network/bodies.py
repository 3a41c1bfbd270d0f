"""Defines what the bodies of frames say: their fields, and what each field may hold.

A body is a JSON object with exactly the fields of its kind. What breaks a rule is refused whole. Also
owns how plans and optimizers are written, since they travel in bodies; tensors never do.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import torch

from stratagem.cluster import strict_json
from stratagem.errors import ParameterError, ProtocolError
from stratagem.parameters.contract import OptimizerSpec, Piece, Plain, ShardPlan, Variable
from stratagem.parameters.network.frames import MOST_PAYLOAD_BYTES, MOST_SHARD_BYTES, Kind

Body: TypeAlias = dict[str, Any]

_MOST_TEXT: Final = 4096
_MOST_DIMENSIONS: Final = 64
_WHOLE: Final = 2**63
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}

_Check: TypeAlias = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_TEXT


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _WHOLE


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _maybe(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _list_of(check: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _row_of(*checks: _Check) -> _Check:
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(checks)
        and all(check(each) for check, each in zip(checks, value, strict=True))
    )


def _counts_by_text(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_text, value)) and all(map(_count, value.values()))


def _plain(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= _MOST_DIMENSIONS and all(type(each) in (bool, int, float) for each in value)
    return value is None or _text(value) or (type(value) in (bool, int, float) and math.isfinite(value))


def _options(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_text, value)) and all(map(_plain, value.values()))


_VARIABLE: Final = _row_of(_text, _list_of(_count), _DTYPES.__contains__, _flag, _flag)
_OPTIMIZER: Final = _row_of(_text, _list_of(_row_of(_list_of(_text), _options)))
LIKE: Final = "like"
SCALAR: Final = "scalar"


def _form(value: Any) -> bool:
    """Of a part of an optimizer's state: a tensor as its variable, one with one number, or a plain number."""
    return value in (LIKE, SCALAR) or (type(value) in (bool, int, float) and math.isfinite(value))


_SAVED: Final = _list_of(_row_of(_count, _text, _text, _form))

_FIELDS: Final[dict[Kind, dict[str, _Check]]] = {
    Kind.ATTACH: {
        "task": _text,
        "cluster": _mapping,
        "jobs": _list_of(_text),
        "versions": _mapping,
        "signature": _mapping,
        "machine": _text,
        "pid": _count,
        "incarnation": _text,
    },
    Kind.DEFINE: {
        "variables": _list_of(_VARIABLE),
        "shards": _list_of(_list_of(_row_of(_count, _count, _count))),
        "shard": _count,
        "optimizers": _list_of(_OPTIMIZER),
        "max_staleness": _maybe(_count),
        "has_values": _flag,
        "is_open": _flag,
    },
    Kind.PULL: {"names": _maybe(_list_of(_text)), "rows": _list_of(_row_of(_text, _count))},
    Kind.PUSH: {
        "number": _count,
        "version": _count,
        "optimizer": _count,
        "options": _maybe(_list_of(_options)),
        "gradients": _list_of(_row_of(_text, _maybe(_count), _text)),
        "assigned": _list_of(_text),
        "then_pull": _flag,
    },
    Kind.STATE: {"up_to": _counts_by_text},
    Kind.LOAD: {"version": _count, "saved": _SAVED},
    Kind.HOLD: {},
    Kind.DONE: {
        "version": _count,
        "verdict": _text,
        "staleness": _count,
        "reason": _text,
        "lives": _counts_by_text,
        "saved": _SAVED,
    },
    Kind.FAILED: {"why": _text, "retry": _flag},
    Kind.BEAT: {},
    Kind.LEAVE: {"is_done": _flag},
    Kind.FENCED: {"why": _text},
}


def encode(kind: Kind, body: Body) -> bytes:
    """A body as bytes; refuses what the other side would refuse.

    Raises:
        ParameterError: There are more or longer names than fit into one frame.
    """
    _check(kind, body)
    encoded = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    if len(encoded) > MOST_PAYLOAD_BYTES:
        raise ParameterError(
            f"the description of the variables takes {len(encoded)} bytes, at most {MOST_PAYLOAD_BYTES} are sent; "
            f"use fewer variables or shorter names"
        )
    return encoded


def decode(kind: Kind, encoded: bytes) -> Body:
    """The body that bytes stand for.

    Raises:
        ProtocolError: It is not JSON, or not of this kind.
    """
    try:
        body = strict_json.read(encoded.decode())
    except (UnicodeDecodeError, strict_json.NotJsonError):
        raise ProtocolError(f"the body of a {kind.name} frame is not valid JSON") from None
    _check(kind, body)
    return dict(body)


def done(**fields: Any) -> Body:
    """The body of an answer; what is not given is empty."""
    return {"version": 0, "verdict": "", "staleness": 0, "reason": "", "lives": {}, "saved": []} | fields


def shortened(text: str) -> str:
    """A text that fits into a body."""
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 3] + "..."


def plan_to_body(plan: ShardPlan) -> Body:
    """A plan as the fields of a body."""
    places = {variable.name: place for place, variable in enumerate(plan.variables)}
    return {
        "variables": [
            [each.name, list(each.shape), str(each.dtype).removeprefix("torch."), each.sparse, each.trained]
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
        Variable(name, tuple(shape), _DTYPES[dtype], sparse, trained)
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


def _check(kind: Kind, body: Any) -> None:
    fields = _FIELDS.get(kind)
    if fields is None:
        raise ProtocolError(f"a {kind.name} frame has no body")
    if not isinstance(body, dict) or body.keys() != fields.keys():
        raise ProtocolError(f"a {kind.name} body has the fields {', '.join(fields) or 'none'}")
    for name, check in fields.items():
        if not check(body[name]):
            raise ProtocolError(f"{name!r} of a {kind.name} body is not what it may be")
