"""A step that a worker of this machine is to do, or has done: what is called, and what came of it."""

from collections.abc import Callable
from typing import Any, final

from stratagem.placement import log
from stratagem.processes.group import PendingCall
from stratagem.processes.losses import Failure, error_of


@final
class QueuedStep(PendingCall):
    """A step of the program in a worker, or a call of the library's own.

    Args:
        function: What is called.
        args: Its arguments, as they are sent.
        kwargs: Its keyword arguments.
        told: What is sent with it besides, for whoever makes the message.
        worker: Which worker must have it; `None` for any.
        is_own: Whether it is a call of the library's own: it is not given to another worker.
        run_number: Which run of the program it is of.

    Attributes:
        logs: Who listened where it was called; they hear of it when it is done.
    """

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        told: Any = None,
        worker: int | None = None,
        is_own: bool = False,
        run_number: int = 0,
    ) -> None:
        super().__init__()
        self.function, self.args, self.kwargs, self.told, self.worker = function, args, kwargs, told, worker
        self.is_own, self.run_number = is_own, run_number
        self.is_sent = False
        self.error: BaseException | None = None
        self.is_reported = False
        self.num_pushed = 0
        self.lost_with: list[str] = []
        self.logs = log.listening()
        self.when_done: Callable[[QueuedStep], object] = lambda _: None

    def finish(self, answer: Any = None, failure: Failure | None = None, error: BaseException | None = None) -> None:
        super().finish(answer, failure)
        self.error = error
        for each in self.logs:
            each.take_in(getattr(answer, "placed", ()), self.done_by)
        self.args, self.kwargs, self.function = (), {}, None  # it may be kept long; what it was given need not be
        self.when_done(self)

    @property
    def has_failed(self) -> bool:
        return self.failure is not None or self.error is not None

    def raise_error(self) -> None:
        """Raises what went wrong, with the worker's own traceback; it then counts as reported."""
        self.is_reported = True
        if self.error is not None:
            raise self.error
        if self.failure is not None:
            error = error_of(self.failure, f"worker {self.done_by}")
            self.failure, self.error = None, error
            raise error
