"""What the controller does while it waits for the other replicas, and what it makes of their failures."""

from typing import final

from stratagem.collectives.signals import PeerAborted
from stratagem.errors import StrategyError
from stratagem.processes.group import Failure, Replica, ReplicaGroup


@final
class Fatal(BaseException):
    """Carries the news of a dead or stalled replica past the user's `except Exception`."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def attend(group: ReplicaGroup, waited_s: float, missing: list[int]) -> None:
    """Takes in news while replica 0 waits, and makes sure that those who are missing still live.

    Args:
        group: The children.
        waited_s: How long it has waited.
        missing: For whom.
    Raises:
        Fatal: One is dead or stalled.
    """
    try:
        group.attend()
        group.require_alive()
        if waited_s > group.stall_timeout_s:
            group.report_stall([group.replicas[rank - 1] for rank in missing])
    except StrategyError:
        raise
    except Exception as error:
        raise Fatal(error) from error


def causes(group: ReplicaGroup) -> list[tuple[Replica, Failure]]:
    """What went wrong in the children, without those that only ended because another failed."""
    return [each for each in group.failures() if not isinstance(each[1][0], PeerAborted)]
