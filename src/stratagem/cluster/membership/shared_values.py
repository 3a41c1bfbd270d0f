"""Keeps the values that the tasks of a cluster tell each other, in the memory of the keeper.

Owns the meaning of each operation, which is that of torch's stores, and the bounds on what is kept.
Runs in one thread; a wait gives way to others.
"""

import asyncio
import base64
import binascii
import dataclasses
from collections.abc import Callable, Sequence
from typing import Final, final

from stratagem.cluster.membership.member_messages import (
    MOST_BYTES,
    MOST_KEY_CHARACTERS,
    MOST_KEYS,
    MOST_VALUE_BYTES,
    Body,
)
from stratagem.errors import ProtocolError

OK, TIMEOUT, LOST, WRONG = "ok", "timeout", "lost", "wrong"

_MOST_STORED_KEYS: Final = 100_000
_MOST_STORED_BYTES: Final = 256 * 2**20


@final
@dataclasses.dataclass(frozen=True)
class ValueRequest:
    """What a task wants of the store.

    Args:
        operation: Its name, such as `get`.
        keys: Of which values.
        values: What to store, or to compare with.
        amount: What to add.
        timeout_s: How long to wait for keys that are not there yet; 0 for not at all.
    """

    operation: str
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    amount: int = 0
    timeout_s: float = 0.0

    def to_body(self, number: int) -> Body:
        """As a message."""
        return {
            "id": number,
            "operation": self.operation,
            "keys": list(self.keys),
            "values": [_encode(value) for value in self.values],
            "amount": self.amount,
            "timeout_s": self.timeout_s,
        }

    @classmethod
    def from_body(cls, body: Body) -> "ValueRequest":
        """From a message."""
        values = tuple(_decode(value) for value in body["values"])
        return cls(body["operation"], tuple(body["keys"]), values, body["amount"], body["timeout_s"])


@final
@dataclasses.dataclass(frozen=True)
class Reply:
    """What came of it.

    Args:
        status: `ok`, or why not: `timeout`, `lost` (somebody is, so that waiting is in vain), `wrong`.
        values: What was asked for.
        number: A count, or a truth as 0 or 1.
        message: What was wrong.
    """

    status: str = OK
    values: tuple[bytes, ...] = ()
    number: int = 0
    message: str = ""

    def to_body(self, number: int) -> Body:
        """As a message."""
        return {
            "id": number,
            "status": self.status,
            "values": [_encode(value) for value in self.values],
            "number": self.number,
            "message": self.message,
        }

    @classmethod
    def from_body(cls, body: Body) -> "Reply":
        """From a message."""
        return cls(body["status"], tuple(map(_decode, body["values"])), body["number"], body["message"])


@final
class Values:
    """The store itself."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._waiting: set[asyncio.Future[None]] = set()
        self._is_broken = False
        self._operations: dict[str, Callable[[ValueRequest], Reply]] = {
            "set": self._set,
            "get": self._get,
            "add": self._add,
            "append": self._append,
            "check": self._check,
            "compare_set": self._compare_set,
            "delete": self._delete,
            "num_keys": self._num_keys,
        }

    async def answer(self, request: ValueRequest) -> Reply:
        """Does what is asked, after waiting for the keys if they are to be waited for."""
        operation = self._operations.get(request.operation)
        if operation is None:
            return Reply(WRONG, message=f"there is no operation {request.operation!r}")
        wrong = _why_wrong(request)
        if wrong:
            return Reply(WRONG, message=wrong)
        if request.timeout_s and not await self._come(request.keys, request.timeout_s):
            return Reply(LOST if self._is_broken else TIMEOUT)
        return operation(request)

    def give_up(self) -> None:
        """Ends all waits: somebody who might have brought what they wait for is gone."""
        self._is_broken = True
        self._wake()

    async def _come(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Waits until all keys are there."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._has(keys):
                    if self._is_broken:
                        return False
                    changed = asyncio.get_running_loop().create_future()
                    self._waiting.add(changed)
                    try:
                        await changed
                    finally:
                        self._waiting.discard(changed)
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _set(self, request: ValueRequest) -> Reply:
        for key, value in zip(request.keys, request.values, strict=True):
            if not self._put(key, value):
                return _full()
        return Reply()

    def _get(self, request: ValueRequest) -> Reply:
        if not self._has(request.keys):
            return Reply(TIMEOUT)
        values = tuple(self._values[key] for key in request.keys)
        if sum(map(len, values)) > MOST_BYTES // 2:
            return Reply(WRONG, message="these values together are too large for one message; get fewer at a time")
        return Reply(values=values)

    def _add(self, request: ValueRequest) -> Reply:
        (key,) = request.keys
        try:
            total = int(self._values.get(key, b"0")) + request.amount
        except ValueError:
            return Reply(WRONG, message=f"the value of {key!r} is not a number, so nothing can be added to it")
        if not -(2**63) <= total < 2**63:
            return Reply(WRONG, message=f"the sum of {key!r} is too large")
        return Reply(number=total) if self._put(key, str(total).encode()) else _full()

    def _append(self, request: ValueRequest) -> Reply:
        (key,), (value,) = request.keys, request.values
        whole = self._values.get(key, b"") + value
        if len(whole) > MOST_VALUE_BYTES:
            return Reply(WRONG, message=f"the value of {key!r} would grow beyond {MOST_VALUE_BYTES} bytes")
        return Reply() if self._put(key, whole) else _full()

    def _check(self, request: ValueRequest) -> Reply:
        return Reply(number=int(self._has(request.keys)))

    def _compare_set(self, request: ValueRequest) -> Reply:
        (key,), (expected, desired) = request.keys, request.values
        current = self._values.get(key)
        if current is None and expected:
            return Reply(values=(expected,))
        if current is not None and current != expected:
            return Reply(values=(current,))
        return Reply(values=(desired,)) if self._put(key, desired) else _full()

    def _delete(self, request: ValueRequest) -> Reply:
        (key,) = request.keys
        value = self._values.pop(key, None)
        self._num_bytes -= 0 if value is None else len(key) + len(value)
        return Reply(number=int(value is not None))

    def _num_keys(self, request: ValueRequest) -> Reply:
        return Reply(number=len(self._values))

    def _put(self, key: str, value: bytes) -> bool:
        """Stores a value, unless the store would grow too large."""
        before = self._values.get(key)
        grown = len(value) + (len(key) if before is None else -len(before))
        if self._num_bytes + grown > _MOST_STORED_BYTES or (before is None and len(self._values) >= _MOST_STORED_KEYS):
            return False
        self._values[key] = value
        self._num_bytes += grown
        self._wake()
        return True


_NUM_VALUES: Final = {"append": 1, "compare_set": 2}
_ANY_KEYS: Final = ("get", "check", "set")


def check_value(key: str, value: bytes) -> None:
    """Refuses a value that the store would refuse, where it is given.

    Raises:
        ProtocolError: The key or the value is too large.
    """
    if len(key) > MOST_KEY_CHARACTERS:
        raise ProtocolError(f"a key has at most {MOST_KEY_CHARACTERS} characters, got {len(key)}: {key[:40]!r}...")
    if len(value) > MOST_VALUE_BYTES:
        raise ProtocolError(f"a value has at most {MOST_VALUE_BYTES} bytes, got {len(value)} for {key!r}")


def _why_wrong(request: ValueRequest) -> str | None:
    if request.operation == "num_keys":
        return None
    num_keys = len(request.keys)
    if not 1 <= num_keys <= (MOST_KEYS if request.operation in _ANY_KEYS else 1):
        return f"{request.operation} does not take {num_keys} keys"
    expected = num_keys if request.operation == "set" else _NUM_VALUES.get(request.operation, 0)
    if len(request.values) != expected:
        return f"{request.operation} takes {expected} values, got {len(request.values)}"
    return None


def _full() -> Reply:
    return Reply(
        WRONG, message=f"the store is full: {_MOST_STORED_KEYS} keys or {_MOST_STORED_BYTES} bytes; delete what is old"
    )


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ProtocolError("a value is not in base64") from None
