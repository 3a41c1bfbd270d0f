"""What can be done with one kind of object: its members are read, compared and written."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from stratagem.objects.comparing import Token

CONTENT: Final = 0
"""The key of what has one member."""


class Kind:
    """One kind of object."""

    is_seeded = False  # whether each replica makes something of its own of the content
    leaves_out = False  # whether members that cannot be sent are left out

    def read(self, obj: Any) -> Mapping[Any, Any]:
        """Its members by key."""
        raise NotImplementedError

    def identities(self, obj: Any) -> tuple[int, ...] | None:
        """The `id` of everything in it: while they are the same, so is the object; `None` if that does not tell."""
        return None

    def used(self, obj: Any) -> Iterable[Any]:
        """What is in it that matters, and what it uses besides; is asked of those that have identities."""
        raise NotImplementedError

    def tokens(self, obj: Any, token: Callable[[Any], Token]) -> dict[Any, Token]:
        """What its members are compared by."""
        return {key: token(value) for key, value in self.read(obj).items()}

    def write(self, obj: Any, members: Mapping[Any, Any], removed: Iterable[Any], replica: int) -> None:
        """Gives it members, and takes some away.

        Args:
            obj: The object of this process.
            members: What it gets.
            removed: The keys of those that are gone; done first.
            replica: The number of the replica that this process is.
        """
        raise NotImplementedError


class Whole(Kind):
    """An object with one member, its content."""

    def tokens(self, obj: Any, token: Callable[[Any], Token]) -> dict[Any, Token]:
        return {CONTENT: token(self.content(obj))}

    def read(self, obj: Any) -> Mapping[Any, Any]:
        return {CONTENT: self.content(obj)}

    def write(self, obj: Any, members: Mapping[Any, Any], removed: Iterable[Any], replica: int) -> None:
        if members:
            self.replace(obj, members[CONTENT], replica)

    def content(self, obj: Any) -> Any:
        raise NotImplementedError

    def replace(self, obj: Any, content: Any, replica: int) -> None:
        raise NotImplementedError
