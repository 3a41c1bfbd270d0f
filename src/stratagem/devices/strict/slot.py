"""Says which kind of device is strict in this process, if one is: torch has one private slot, and nobody gives it back.

Knows nothing of torch, so that everything that names devices can ask it.
"""

from typing import Final, final


@final
class StrictSlot:
    """What stratagem has put into torch's private slot; empty as long as that is nothing."""

    def __init__(self) -> None:
        self.kind = ""
        """The kind of the strict devices, such as `GPU`."""
        self.torch_type = ""
        """Their type among torch's, such as `gpu`."""

    def has(self, torch_type: str) -> bool:
        """Whether the devices of a type are strict ones."""
        return bool(self.kind) and torch_type == self.torch_type


HELD: Final = StrictSlot()
