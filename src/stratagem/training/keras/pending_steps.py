"""Steps of a Keras model that are under way while Keras' loop goes on, where a strategy does not wait for each.

Callbacks get the logs of the last step that is done. Whatever reads or writes a variable in the main program
waits for all: metrics at the end of an epoch, evaluation, checkpoints. Knows of strategies only whether a result
is ready.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any, final

from keras.src.backend import Variable

from stratagem.strategies.strategy import Strategy

_busy: "weakref.WeakSet[UnderWay]" = weakref.WeakSet()
_loops: list[bool] = []  # those of Keras that are open: whether steps may be under way in it, innermost last


@final
class UnderWay:
    """The steps of one model that may not be done.

    Args:
        strategy: Who runs them.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._results: list[Any] = []
        self._logs: dict[str, Any] = {}

    def logs_after(self, result: Any) -> dict[str, Any]:
        """Takes the logs of a step that has begun, and returns those of the last one that is done.

        The first of an epoch is waited for, since callbacks look into its logs. What is returned becomes the logs of
        the very last step when all are waited for.

        Args:
            result: What `run` returned for the logs.
        """
        if not _loops or not _loops[-1]:
            return self._read(result)
        self._results.append(result)
        done = [each for each in self._results if self._strategy.is_ready(each)] or self._results[: not self._logs]
        self._results = [each for each in self._results if all(each is not other for other in done)]
        if self._results:
            _watch_reads()
            _busy.add(self)
        for each in done:
            self._show(self._read(each))
        return self._logs

    def finish(self) -> None:
        """Waits for all steps."""
        results, self._results = self._results, []
        _busy.discard(self)
        for each in results:
            self._show(self._read(each))
        self._logs = {}

    def _show(self, logs: dict[str, Any]) -> None:
        self._logs.clear()
        self._logs.update(logs)

    def _read(self, result: Any) -> dict[str, Any]:
        logs: dict[str, Any] = self._strategy.local_results(result)[0]
        return logs


@contextlib.contextmanager
def in_loop(*, may_go_on: bool) -> Iterator[None]:
    """A loop of Keras; all steps are done when it ends, however it ends.

    Args:
        may_go_on: Whether steps may begin before others are done.
    """
    _loops.append(may_go_on)
    try:
        yield
        finish_all()
    finally:
        _loops.pop()
        while _busy:  # after a failure, which is the one to be told
            with contextlib.suppress(Exception):
                finish_all()


def finish_all() -> None:
    """Waits for all steps of all models."""
    for each in list(_busy):
        each.finish()


@functools.cache
def _watch_reads() -> None:
    """Lets the values of variables be read and written only when no step is under way; once for the process."""
    inner = Variable.value.fget

    def value(self: Any) -> Any:
        if _busy:
            finish_all()
        return inner(self)

    Variable.value = property(value)
