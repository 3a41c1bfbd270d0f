"""Pushes that wait while a checkpoint is made of what all shards have applied.

Called in the executor's thread. A task that saves asks every shard to hold, and then for its state, once it has
applied what any of them had when it was asked. Several may save at once: a push waits for all whom it would disturb.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Final, final

from stratagem.parameters.network.frames import FrameKind
from stratagem.parameters.network.server.client_requests import ClientRequest

HOLD_S: Final = 5.0
"""How long nothing is applied for the sake of a checkpoint, at most."""


@final
@dataclasses.dataclass
class _Hold:
    """The wish of a task.

    Args:
        until: When it ends in any case.
        up_to: The number of the last push of each worker that is applied all the same.
        saving: Asks for the state.
    """

    until: float
    up_to: Mapping[int, int] = dataclasses.field(default_factory=dict)
    saving: ClientRequest | None = None

    def allows(self, push: ClientRequest) -> bool:
        return bool(push.body["number"] <= self.up_to.get(push.worker, 0))


@final
class Holds:
    """Whom pushes wait for, and which.

    Args:
        carry_out: Carries a push out, or gives it to `defer` again.
        save: Answers with the state.
        is_missing: Whether the push of a worker with a number has not been applied yet, but may still be.
    """

    def __init__(
        self,
        carry_out: Callable[[ClientRequest], None],
        save: Callable[[ClientRequest], None],
        is_missing: Callable[[int, int], bool],
    ) -> None:
        self._carry_out = carry_out
        self._save = save
        self._is_missing = is_missing
        self._holds: dict[int, _Hold] = {}
        self._deferred: list[ClientRequest] = []

    @property
    def is_any(self) -> bool:
        """Whether `look` is to be called soon."""
        return bool(self._holds)

    def begin(self, worker: int) -> None:
        """A task wants to save."""
        self._holds[worker] = _Hold(time.monotonic() + HOLD_S)

    def end(self, worker: int) -> None:
        """A task is gone, and needs no state any more."""
        if self._holds.pop(worker, None) is not None:
            self._try_again()

    def defer(self, push: ClientRequest) -> bool:
        """Keeps a push for later, if somebody wants that; returns whether."""
        if all(hold.allows(push) for hold in self._holds.values()):
            return False
        self._deferred.append(push)
        return True

    def has_deferred(self, worker: int) -> bool:
        """Whether a push of a worker waits."""
        return any(each.worker == worker for each in self._deferred)

    def drop(self, worker: int) -> None:
        """Forgets the pushes of a worker that wait."""
        self._deferred = [each for each in self._deferred if each.worker != worker]

    def save(self, request: ClientRequest, up_to: Mapping[int, int]) -> None:
        """A task asks for the state, with these pushes and no others."""
        hold = self._holds.get(request.worker)
        if hold is None:  # this shard may have applied what others have not
            _ask_again(request, "the pause for the checkpoint was over before the state was asked for")
            return
        hold.up_to, hold.saving = up_to, request
        self._try_again()

    def look(self) -> None:
        """Saves as soon as what other shards have applied is applied here too, or will never be; then goes on."""
        for worker, hold in list(self._holds.items()):
            is_late = time.monotonic() >= hold.until
            missing = [each for each, number in hold.up_to.items() if self._is_missing(each, number)]
            if hold.saving is not None and not missing:
                self._save(hold.saving)
            elif not is_late:
                continue
            elif hold.saving is not None:
                _ask_again(hold.saving, "a push that other parameter servers have applied has not come")
            del self._holds[worker]
            self._try_again()

    def _try_again(self) -> None:
        deferred, self._deferred = self._deferred, []
        for each in deferred:
            self._carry_out(each)


def _ask_again(request: ClientRequest, why: str) -> None:
    request.answer(FrameKind.FAILED, {"why": f"{why}, within {HOLD_S:g} s", "retry": True}, ())
