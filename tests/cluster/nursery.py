"""Starts programs of tests from a process that has imported torch: that takes Python seconds, a fork does not.

What is started is a child of the test's process, as with `subprocess`: the guards have made it the
one that adopts, and the process between the two ends at once. The fork server that a program may need
is forked too, before the program begins.
"""

import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_MOST_BYTES = 2**18
_LOOK_S = 0.005
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNET = 0x40000000

current: "Nursery | None" = None


class Nursery:
    """The process that others are forked from.

    Args:
        connection: To that process.
        process: That process, if it is to be waited for.
    """

    def __init__(self, connection: socket.socket, process: "subprocess.Popen[bytes] | None" = None) -> None:
        self._socket, self._process = connection, process

    @classmethod
    def start(cls, *modules: str) -> "Nursery":
        """A new one, which imports these besides torch and stratagem."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno()), *modules]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT)
        assert ours.recv(1), "the nursery could not start"
        return cls(ours, process)

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """The process that does what is requested, with these as its standard input, output and errors."""
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        return int(self._socket.recv(32))

    def close(self) -> None:
        self._socket.close()
        if self._process is not None:
            self._process.wait(20)


class Program(subprocess.Popen[Any]):
    """`subprocess.Popen` of Python with these arguments, but forked: `[-W error] (-m MODULE | -c CODE | FILE) ...`.

    Args:
        arguments: Those of Python.
        namespace: The network namespace to run in.
        nursery: What it is forked from; otherwise the current one.
        launches: Whether it is `stratagem run`, whose tasks are to be forked too.
        options: Pipes, `env`, `cwd`, `text` and `start_new_session` of `Popen`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        namespace: str | None = None,
        nursery: Nursery | None = None,
        *,
        launches: bool = False,
        **options: Any,
    ) -> None:
        self._namespace, self._nursery, self._launches = namespace, nursery or current, launches
        super().__init__(arguments, **options)

    def _execute_child(self, *given: Any) -> None:
        named = inspect.signature(super()._execute_child).bind(*given).arguments
        request = {
            "arguments": [str(each) for each in named["args"]],
            "environment": dict(os.environ if named["env"] is None else named["env"]),
            "folder": str(named["cwd"] or os.getcwd()),
            "is_session": named["start_new_session"],
            "namespace": self._namespace,
            "launches": self._launches,
        }
        ends = [named[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        assert self._nursery is not None, "the fixture forked_tasks is missing"
        self.pid = self._nursery.fork(request, [number if end == -1 else end for number, end in enumerate(ends)])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(named[name] for name in pipes))


def run(
    arguments: Sequence[str | Path],
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    nursery: Nursery | None = None,
    *,
    launches: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """`subprocess.run` of a program, with what it prints."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    given = list(map(str, arguments))
    with Program(given, nursery=nursery, launches=launches, env=env, cwd=cwd, **pipes) as program:
        try:
            out, err = program.communicate(timeout=timeout_s)
        except BaseException:
            program.kill()
            raise
    return subprocess.CompletedProcess(program.args, program.returncode, out, _without_leaks_of_triton(err))


def _without_leaks_of_triton(err: str) -> str:
    """Without what nanobind says at the end of a fork in which triton, of torch for CUDA, was imported before."""
    words = ("nanobind: ", " - leaked ", " - ... skipped ", "See https://nanobind.")
    return "".join(line for line in err.splitlines(keepends=True) if not line.startswith(words))


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """Inside the block programs can be forked."""
    global current  # noqa: PLW0603
    current = Nursery.start()
    try:
        yield
    finally:
        current.close()
        current = None


# In the process that others are forked from, and in those


def _main(connection: socket.socket, *modules: str) -> None:
    import torch._dynamo  # noqa: F401  # which the first optimizer of a process imports, for a second

    import stratagem as sg
    import tests.cluster.task_program
    import tests.faults.worker_program
    import tests.parameters.network.task_program  # noqa: F401

    for name in sg.__all__:
        getattr(sg, name)  # names are imported when they are used
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or a program that is forked would look through it whenever it collects, and for a second when it ends
    connection.send(b"+")
    _answer(connection)


def _answer(connection: socket.socket) -> None:
    """Forks what is requested, until nobody is left to ask; in what was forked, returns when that has ended."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
        if not request:
            return
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            pid = os.fork()
            if pid == 0:
                while os.getppid() == between:  # which ends at once
                    time.sleep(0.0005)
                connection.close()
                os.close(read)
                os.close(write)
                _become(json.loads(request), descriptors)
                return
            os.write(write, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)  # from now on the process is the test's child
        connection.send(os.read(read, 32))
        for each in (read, write, *descriptors):
            os.close(each)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if request["is_session"]:
        os.setsid()
    if namespace := request["namespace"]:
        _enter(namespace)
    if request["launches"]:
        _fork_tasks()
    _ServerToBe.prepare()
    _run(*request["arguments"])


def _run(first: str, *rest: str) -> None:
    """What Python does with its arguments."""
    if first == "-W":
        warnings._setoption(rest[0])  # type: ignore[attr-defined]
        return _run(*rest[1:])
    if first in ("-I", "-S"):
        return _run(*rest)
    if first == "-m":
        sys.argv = list(rest)
        if not hasattr(sys.modules.get(rest[0]), "__path__"):  # a package has a part of its own that is run
            sys.modules.pop(rest[0], None)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))  # noqa: S102
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")
    return None


def _enter(namespace: str) -> None:
    """Moves this process to a machine of `tests.cluster.machines`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"this process cannot enter the network namespace {namespace}")


def _fork_tasks() -> None:
    """Has the launcher that this process becomes fork its tasks from one like it; they are its own children."""
    from stratagem.cluster.launch import task_processes

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        os.execv = _run_in_place  # type: ignore[assignment]
        _answer(theirs)
        sys.exit()
    theirs.close()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    own = Nursery(ours)
    task_processes.subprocess = types.SimpleNamespace(  # type: ignore[assignment]
        **{**vars(subprocess), "Popen": lambda command, **options: Program(command[1:], nursery=own, **options)}
    )


def _run_in_place(_: str, command: Sequence[str]) -> None:
    """What `task_start` asks for: this process goes on as the user's program."""
    import torch

    torch.set_num_threads(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))  # as when it is imported
    _run(*command[1:])


class _ServerToBe:
    """A child that waits to become the fork server of this process, in place of a Python that imports torch again."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_LOOK_S)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    @classmethod
    def prepare(cls) -> None:
        from stratagem.processes import early_server

        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        os.setpgid(
            pid, pid or 0
        )  # as the server, it hears no Ctrl-C; both sides see to it, as neither knows who is first
        if pid == 0:
            ours.close()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:  # else it died before the line above took hold
                _serve(theirs)
            os._exit(0)
        theirs.close()
        child, start_another = cls(pid), early_server.start_server

        def start(
            descriptor: int,
            modules: Sequence[str] = (),
            environment: Mapping[str, str] | None = None,
            *,
            parent: int | None = None,
        ) -> Any:
            early_server.start_server = start_another
            order = {
                "modules": list(modules),
                "environment": dict(os.environ if environment is None else environment),
                "folder": os.getcwd(),
                "parent": parent,
            }
            with ours:
                socket.send_fds(ours, [json.dumps(order).encode()], [descriptor])
            return child

        early_server.start_server = start
        os.register_at_fork(after_in_child=ours.close)


def _serve(connection: socket.socket) -> None:
    with connection:
        text, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 1)
    if not text:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    order = json.loads(text)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    for module in order["modules"]:
        importlib.import_module(module)
    from stratagem.processes import forkserver

    if order["parent"] is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    forkserver.main(descriptors[0])


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as own:
        _main(own, *sys.argv[2:])
