"""The waits of one worker of this machine, as its consistency decides."""

import time
from collections.abc import Callable
from typing import final

from stratagem.parameters.consistency import Consistency, Progress
from stratagem.parameters.local.board import Board
from stratagem.parameters.local.locks import Locks

_FIRST_WAIT_S, _LONGEST_WAIT_S = 1e-4, 2e-3


@final
class Gate:
    """Lets a worker begin and push when it may. Workers in a step are on the board with the version that they pulled.

    Args:
        consistency: What decides.
        worker: Which worker.
        board: Where all see who is in a step.
        locks: Those of the machine.
        number: Which of them is the gate's.
    """

    def __init__(self, consistency: Consistency, worker: int, board: Board, locks: Locks, number: int) -> None:
        self._consistency = consistency
        self._worker = worker
        self._board = board
        self._locks = locks
        self._number = number

    def enter(self) -> None:
        """Waits until a step may begin, and puts it on the board."""
        self._pass(self._consistency.may_begin, self._note)

    def push(self, push: Callable[[], None]) -> None:
        """Waits until a push may be made, and makes it."""
        self._pass(self._consistency.may_push, push)

    @property
    def progress(self) -> Progress:
        """Where the worker stands now."""
        found = self._board.in_flight.copy()
        found[self._worker] = 0
        return Progress(self._board.version, sorted((found[found > 0] - 1).tolist()))

    def _pass(self, may: Callable[[Progress], bool], then: Callable[[], None]) -> None:
        """Waits until something is allowed and does it, with nobody else between the two."""
        wait_s = _FIRST_WAIT_S
        while True:
            with self._locks.held(self._number):
                if may(self.progress):
                    then()
                    return
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _note(self) -> None:
        self._board.in_flight[self._worker] = self._board.version + 1
