"""The values of the placement log: one operation, and what was copied for it."""

import dataclasses

from stratagem._caller import shown_line


def printable(text: str) -> str:
    """A text of the program's without what a terminal obeys and what no file can hold.

    Example:
        >>> print(printable("red \x1b[31m"))
        red \\x1b[31m
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


@dataclasses.dataclass(frozen=True)
class Copy:
    """An input that was brought from another device.

    Attributes:
        source: Where it was.
        target: Where the operation ran.
        num_bytes: How much was copied.
        maker: The operation that made it; empty if that was before the log.
    """

    source: str
    target: str
    num_bytes: int
    maker: str = ""


@dataclasses.dataclass(frozen=True)
class PlacementRecord:
    """One operation.

    Attributes:
        operation: What it computes: `MatMul`.
        name: Its name in this log: `MatMul_1`.
        requested: The device that a scope asked for; `None` without one.
        device: The device that it ran on.
        why: Why it ran there.
        copies: Inputs that were copied for it.
        inputs: The operations that made its inputs, as far as the log has them.
        file: Of the program.
        line: In that file.
        replica: Which replica of a strategy ran it; `None` outside of runs.
    """

    operation: str
    name: str
    requested: str | None
    device: str
    why: str
    copies: tuple[Copy, ...]
    inputs: tuple[str, ...]
    file: str
    line: int
    replica: int | None = None

    @property
    def num_bytes_copied(self) -> int:
        """How much was copied for it."""
        return sum(copy.num_bytes for copy in self.copies)

    @property
    def where(self) -> str:
        """The line of the program, shortly."""
        return shown_line(self.file, self.line) if self.file else ""

    def shown(self) -> "PlacementRecord":
        """The same with names and paths as they may be shown on a terminal, a page or a picture."""
        return dataclasses.replace(
            self,
            operation=printable(self.operation),
            name=printable(self.name),
            why=printable(self.why),
            copies=tuple(dataclasses.replace(each, maker=printable(each.maker)) for each in self.copies),
            inputs=tuple(map(printable, self.inputs)),
            file=printable(self.file),
        )

    def as_json(self) -> dict[str, object]:
        """What the JSON file says of it."""
        return {**dataclasses.asdict(self), "num_bytes_copied": self.num_bytes_copied}
