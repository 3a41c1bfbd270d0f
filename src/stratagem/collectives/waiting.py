"""Waits of torch's exchanges, cut into slices so that somebody can look after the world in between."""

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from datetime import timedelta
from typing import Any, Final, TypeVar, final

from stratagem._clock import Clock
from stratagem.errors import CollectiveError, StratagemError

_SLICE_S: Final = 0.1
_SLICE: Final = timedelta(seconds=_SLICE_S)
_LOOK_S: Final = 0.0002  # how often a GPU is asked whether it is done

_Result = TypeVar("_Result")


@final
class PendingExchange:
    """A sum on its way. Until `wait` returns, its tensor must be neither read nor written.

    Args:
        finish: Takes the result in, or raises what went wrong.
        is_done: Waits at most so many seconds; tells whether there is something to take in.
        attend: Called after each slice of waiting with the seconds waited so far; may raise.
    """

    def __init__(
        self, finish: Callable[[], None], is_done: Callable[[float], bool], attend: Callable[[float], None]
    ) -> None:
        self._finish: Callable[[], None] | None = finish
        self._is_done = is_done
        self._attend = attend

    def wait(self) -> None:
        """Returns when the tensor holds the sum.

        Raises:
            CollectiveError: Replicas summed tensors of other types or sizes, or one is gone.
        """
        if self._finish is None:
            return
        wait_in_slices(self._is_done, self._attend)
        finish, self._finish = self._finish, None
        finish()


def wait_in_slices(is_done: Callable[[float], bool], attend: Callable[[float], None]) -> None:
    """Waits until something is done; after each slice `attend` may raise and so end the wait."""
    clock = Clock(_SLICE_S)
    while not is_done(_SLICE_S):
        attend(clock.now_s())


def is_over(future: "Future[Any]", patience_s: float) -> bool:
    """Whether a future has a result, after waiting at most so many seconds."""
    return future.done() or bool(wait([future], patience_s).done)


def is_completed(work: Any, patience_s: float) -> bool:
    """Whether work of a process group is done, after waiting at most so many seconds."""
    deadline = time.monotonic() + patience_s
    while not work.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def result_of(call: str, future: "Future[_Result]") -> _Result:
    """What a future gives, or raises; in words if it was never begun."""
    try:
        return future.result()
    except CancelledError as error:
        raise CollectiveError(f"{call} had not begun when its collective was closed; wait before you close") from error


def outcome_of(
    begin: Callable[[], Any], attend: Callable[[float], None] | None = None, *, blocks: bool = True
) -> str | None:
    """Begins work of a process group and waits for it; gives what went wrong, in torch's words.

    Args:
        begin: Begins it, or gives what has begun.
        attend: Called after each slice of waiting with the seconds waited so far; may raise.
        blocks: Whether one may wait for it a little: NCCL gives up what has not come in time.
    """
    # Nobody is left the work, nor the error of torch, which keeps it: whoever holds on to our error
    # must not hold on to sockets.
    work: Any = None
    clock = Clock(_SLICE_S)
    try:
        work = begin()
        while attend is not None and not (_comes(work) if blocks else is_completed(work, _SLICE_S)):
            attend(clock.now_s())
        work.wait()
    except RuntimeError as error:
        if isinstance(error, StratagemError):
            raise
        return reason_of(error)
    finally:
        work = None
    return None


def _comes(work: Any) -> bool:
    """Waits for a slice; tells whether it is over, well or not."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        return bool(work.is_completed())
    return True


def reason_of(error: BaseException) -> str:
    """What torch says, without the place in its source and without its advice."""
    line = str(error).strip().partition("\n")[0]
    return (line.partition("] ")[2] or line if line.startswith("[") else line).partition(". ")[0]
