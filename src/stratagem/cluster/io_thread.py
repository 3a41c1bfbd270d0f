"""Runs the sockets of a task in one thread of their own.

The thread holds no lock that the program could hold, so that signs of life go out whatever the
program does. A process that is forked from this one lets go of all its sockets: it must not keep a
connection open when this process has died.
"""

import asyncio
import contextlib
import logging
import os
import selectors
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar, final

from stratagem.errors import ClusterError

log: Final = logging.getLogger("stratagem.cluster")

_Result = TypeVar("_Result")

# The threads that run; a forked process is told of them by the system, not by a caller.
_running: "weakref.WeakSet[IoThread]" = weakref.WeakSet()


@final
class IoThread:
    """An event loop in a thread of its own; everything that touches a socket runs there.

    Args:
        name: What the thread is called.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._selector: selectors.BaseSelector | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._selector = selectors.DefaultSelector()
        self._loop = _Loop(self._selector)
        self._loop.set_exception_handler(_log)
        self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
        self._thread.start()
        _running.add(self)

    def submit(self, coroutine: Coroutine[Any, Any, _Result]) -> "Future[_Result]":
        """Begins something in the thread, and returns at once."""
        if self._loop is None:
            coroutine.close()
            raise ClusterError("this task no longer takes part in its cluster: it has left or was stopped")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Does something in the thread, and returns when it is done; Ctrl-C ends it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Ends everything that runs in the thread, then the thread. A second time it does nothing."""
        loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        _running.discard(self)
        asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()

    def let_go(self) -> None:
        """In a forked process: gives up the sockets without touching the connections behind them."""
        if self._selector is None or self._loop is None:
            return
        self._loop = None
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        # Replaced, not closed: objects that still know these numbers may close them later.
        for number in [key.fd for key in self._selector.get_map().values()]:
            with contextlib.suppress(OSError):
                os.dup2(nothing, number, inheritable=False)
        os.close(nothing)


class _Loop(asyncio.SelectorEventLoop):
    """A loop that a program may leave running when Ctrl-C ends it."""

    def __del__(self, *arguments: Any) -> None:
        if not self.is_running():
            super().__del__(*arguments)


async def in_thread(function: Callable[[], _Result]) -> _Result:
    """What a function returns that takes its time, called in a thread of its own."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[_Result] = loop.create_future()

    def call() -> None:
        try:
            result = function()
        except Exception as error:  # for whoever waits
            _resolve(ended.set_exception, error)
        else:
            _resolve(ended.set_result, result)

    def _resolve(resolve: Callable[[Any], None], outcome: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(lambda: None if ended.done() else resolve(outcome))

    threading.Thread(target=call, name="stratagem-helper", daemon=True).start()
    return await ended


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0)  # transports that were aborted close their sockets now


def _log(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    log.debug("%s", context.get("message"), exc_info=context.get("exception"))


def _let_go_of_all() -> None:
    for thread in list(_running):
        thread.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)
