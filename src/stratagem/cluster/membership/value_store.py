"""Gives torch's process groups the store of a cluster, in the place of one that listens everywhere.

Owns nothing: each call becomes one or more of `membership`, which carries it to the keeper.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, final

import torch.distributed

from stratagem.cluster.membership.member_messages import MOST_BYTES, MOST_VALUE_BYTES
from stratagem.cluster.membership.membership import Membership

# In one message, as many values as fit whatever their sizes.
_AT_ONCE: Final = MOST_BYTES // (2 * MOST_VALUE_BYTES)

# Its stubs do not know the stores.
_c10d: Final[Any] = torch.distributed


@final
class ClusterStore(_c10d.Store):  # type: ignore[misc]  # its base is Any, see there
    """The values of a cluster as a store of torch.

    Torch keeps only its own half of such an object; the membership keeps the other, until it is left.

    Args:
        membership: Through which the values travel; it must have been joined.
        timeout_s: How long `get` and `wait` wait by default.
    """

    def __init__(self, membership: Membership, *, timeout_s: float = 60.0) -> None:
        super().__init__()
        self._membership = membership
        self.set_timeout(timedelta(seconds=timeout_s))
        membership.keep(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._membership.set(key, _bytes(value))

    def get(self, key: str) -> bytes:
        return self._membership.get(key, timeout_s=self._timeout_s())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._membership.wait(keys, self._timeout_s() if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return self._membership.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self._membership.add(key, amount)

    def append(self, key: str, value: str | bytes) -> None:
        self._membership.append(key, _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._membership.compare_set(key, _bytes(expected), _bytes(desired))

    def delete_key(self, key: str) -> bool:
        return self._membership.delete(key)

    def num_keys(self) -> int:
        return self._membership.num_keys()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [value for some in _chunks(keys) for value in self._membership.get_many(some, self._timeout_s())]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for some in _chunks(list(zip(keys, values, strict=True))):
            self._membership.set_many({key: _bytes(value) for key, value in some})

    def has_extended_api(self) -> bool:
        """That there are `append`, `multi_get` and `multi_set`."""
        return True

    def clone(self) -> "ClusterStore":
        """The same store: it may be used by several threads."""
        return self

    # The names under which torch's own code looks for two of them.
    getNumKeys = num_keys  # noqa: N815
    deleteKey = delete_key  # noqa: N815

    def _timeout_s(self) -> float:
        return float(self.timeout.total_seconds())


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _chunks(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[start : start + _AT_ONCE] for start in range(0, len(items), _AT_ONCE))
