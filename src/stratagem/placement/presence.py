"""Puts the mode that places operations into torch when it is needed, and takes it out when it is not.

It is needed in a thread that is in a scope, while somebody listens to the log, and while a tensor is on a device that
torch cannot tell from the host; without these, torch runs as if stratagem were not there. Meanwhile the configuration
of devices is frozen.
"""

import contextlib
import threading
from typing import Any

from stratagem import _torch
from stratagem.devices.inventory import this_process
from stratagem.placement import log, residence, scopes
from stratagem.placement.eager import Placing


class _ThreadState(threading.local):
    """The mode of this thread, if it is there."""

    def __init__(self) -> None:
        self.mode: Placing | None = None
        self.places = False
        self.changing = False


_thread = _ThreadState()
_lock = threading.RLock()
_placing: set[threading.Thread] = set()  # threads that keep the configuration as it is
_frozen = contextlib.ExitStack()


def update() -> None:
    """Puts the mode of this thread in place where it is needed, and takes it away where it is not."""
    if _thread.changing:
        return
    places = bool(scopes.state.open) or residence.in_use()
    needed = places or bool(log.collectors)
    if not needed and _thread.mode is None and not _placing:
        return  # as around most runs
    _thread.changing = True  # what ends meanwhile must not begin this again
    try:
        mode = _thread.mode or (Placing() if needed else None)
        _freeze(places)
        if mode is None:
            return
        if needed:
            _begin(mode)
        if needed and _thread.mode is None:
            _thread.mode = mode
            _put_in(mode)
        elif not needed and not mode.running:
            _thread.mode = None
            _take_out(mode)
    finally:
        _thread.changing = False


def _begin(mode: Placing) -> None:
    try:
        mode.begin(residence.current())
    except BaseException:  # the configuration cannot be read; that it can be mended is needed all the more
        if _thread.mode is None:
            _freeze(False)
        raise


def _emptied() -> None:
    """A device is empty; a thread without the mode, such as one of autograd's, does not need it for that."""
    if _thread.mode is not None:
        update()


def _freeze(places: bool) -> None:
    """Keeps the configuration of devices as it is while any thread places operations, or tensors are on devices."""
    with _lock:
        _placing.difference_update([thread for thread in _placing if not thread.is_alive()])
        if places and not _placing:
            _frozen.close()
            _frozen.enter_context(this_process().in_use("sg.device()"))
        if places != _thread.places:
            _thread.places = places
            (_placing.add if places else _placing.discard)(threading.current_thread())
        if not _placing:
            _frozen.close()


def _put_in(mode: Placing) -> None:
    above = _taken_off()
    # torch's default device insists on being the lowest.
    if above and above[-1] is _torch.modes.default_device_mode():
        _torch.modes.push_function_mode(above.pop())
    for each in (mode, *reversed(above)):
        _torch.modes.push_function_mode(each)


def _take_out(mode: Placing) -> None:
    for each in reversed(_taken_off()):
        if each is not mode:
            _torch.modes.push_function_mode(each)


def _taken_off() -> list[Any]:
    """All modes of this thread, off the stack, the innermost first."""
    modes: list[Any] = []
    while _torch.modes.num_function_modes():
        modes.append(_torch.modes.pop_function_mode())
    return modes


scopes.observe(update)
residence.when_emptied(_emptied)
log.when_changed(update)
