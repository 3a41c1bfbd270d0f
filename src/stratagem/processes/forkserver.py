"""A process that has imported torch, and forks the children of a controller.

It runs no code of the user's and starts no threads, so that forking it is safe. It watches over its
children: when the controller is gone, however it went, it ends them at once; when it goes itself,
the kernel does. Started by `launcher`.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys

from stratagem.processes import child

_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE_BYTES = 1 << 20


def main(descriptor: int) -> None:
    """Serves one controller over an inherited socket until the controller is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to handle
    gc.freeze()  # or the collector would write to all that children share with this process, and so copy it
    gc.enable()  # which was off for the imports
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    with socket.socket(fileno=descriptor) as controller:
        _serve(controller, wake_read)


def _serve(controller: socket.socket, wake: int) -> None:
    children: set[int] = set()
    poll = select.poll()
    poll.register(controller, select.POLLIN)
    poll.register(wake, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if wake in ready:
            _drain(wake)
            _bury(children, controller)
        if controller.fileno() in ready:
            data, descriptors, _, _ = socket.recv_fds(controller, _MAX_MESSAGE_BYTES, 1)
            if not data:
                break
            order = json.loads(data)
            _import(order["modules"])
            children.add(_fork(descriptors[0], order, controller))
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)


def _import(modules: list[str]) -> None:
    """Imports what is missing of some modules, as at the start."""
    if missing := [each for each in modules if each not in sys.modules]:
        gc.disable()
        for each in missing:
            importlib.import_module(each)
        gc.freeze()
        gc.enable()


def _fork(descriptor: int, order: dict[str, object], controller: socket.socket) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        os.close(descriptor)
        with contextlib.suppress(OSError):  # the controller is gone: the next look tells
            controller.sendall(json.dumps({"order": order["order"], "started": pid}).encode())
        return pid
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:  # else it died before the line above took hold
            controller.close()
            sys.path[:] = order["path"]  # type: ignore[call-overload]
            child.main(descriptor)
            status = 0
    except BaseException:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _bury(children: set[int], controller: socket.socket) -> None:
    """Tells the controller how each child that has ended did."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        children.discard(pid)
        with contextlib.suppress(OSError):
            controller.sendall(json.dumps({"ended": pid, "status": status}).encode())


def _drain(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(descriptor, 1024):
            pass
