"""The strategies that every contract suite runs over: a new one is a row here.

A strategy of several workers needs as many programs that do the same. Here the suite itself is the
program: a second pytest runs the same tests as the second worker, in step with this one.
"""

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem.cluster import token
from stratagem.cluster.resolvers.simple import SimpleResolver
from tests.cluster import nursery
from tests.hardware import target

_WORKER = "STRATAGEM_TEST_WORKER"
STRICT = "STRATAGEM_TESTSTRICT"
_PATIENCE_S = 120.0
# Where replicas have copies of their own they compare them in so many steps: what a contract does is no drift.
CHECKED: dict[str, Any] = {"check_copies_every": 5}

MakeStrategy = Callable[[pytest.FixtureRequest, Path], contextlib.AbstractContextManager[sg.Strategy]]


def alone(make: Callable[[], sg.Strategy]) -> MakeStrategy:
    """A strategy of this program alone."""
    return lambda request, folder: make()


def local_sgd(devices: list[str], **options: Any) -> sg.Strategy:
    """Local SGD that agrees after every step, which is where it can equal one device."""
    return sg.LocalSGDStrategy(1, devices=devices, **CHECKED, **options)


def workers(
    num_replicas: int, strategy: Callable[..., sg.Strategy] = sg.MultiWorkerMirroredStrategy, kind: str = "cpu"
) -> MakeStrategy:
    """This program as the first of two workers with so many replicas each."""

    @contextlib.contextmanager
    def make(request: pytest.FixtureRequest, folder: Path) -> Iterator[sg.Strategy]:
        given = json.loads(os.environ.get(_WORKER, "null"))
        index, cluster = (1, given["cluster"]) if given else (0, {"worker": [_free_address(), _free_address()]})
        token_file = given["token"] if given else str(folder / "token")
        with contextlib.ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            if not given:
                token.create(token_file)
                stack.enter_context(_second_worker(request, {"cluster": cluster, "token": token_file}, folder))
            patch.setenv("STRATAGEM_TOKEN_FILE", token_file)
            devices = [f"{kind}:{index * num_replicas + number}" for number in range(num_replicas)]
            yield stack.enter_context(
                strategy(
                    devices,
                    cluster_resolver=SimpleResolver(cluster, task_type="worker", task_id=index),
                    heartbeat_timeout_s=_PATIENCE_S,
                    worker_timeout_s=_PATIENCE_S,
                    join_timeout_s=_PATIENCE_S,
                    **({} if strategy is local_sgd else CHECKED),
                )
            )

    return make


CPU_ROWS: dict[str, MakeStrategy] = {
    "one device": alone(lambda: sg.OneDeviceStrategy("cpu:0")),
    "mirrored 1": alone(lambda: sg.MirroredStrategy(["cpu:0"])),
    "mirrored 2": alone(lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"])),
    "mirrored 4": alone(lambda: sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"])),
    "mirrored 2 torch": alone(lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops="torch", **CHECKED)),
    "mirrored 2 to one": alone(lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops="to_one", **CHECKED)),
    "central storage 3": alone(lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1", "cpu:2"])),
    "local sgd 2": alone(lambda: local_sgd(["cpu:0", "cpu:1"])),
    "parameter server 2": alone(lambda: sg.ParameterServerStrategy(2, consistency=sg.Synchronous())),
    "2 workers of 1": workers(1),
    "2 workers of 2": workers(2),
    "local sgd, 2 workers of 1": workers(1, local_sgd),
}


def strict(make: MakeStrategy, kind: str = "GPU", count: int = 4) -> MakeStrategy:
    """A strategy on strict devices, which a process keeps for life; see `test_strict_devices`.

    On real ones if the suite was started for them; see `tests/hardware`.
    """

    @contextlib.contextmanager
    def opened(request: pytest.FixtureRequest, folder: Path) -> Iterator[sg.Strategy]:
        if not target.IS_REAL:
            sg.config.simulate_devices(kind, count, strict=True)
        with make(request, folder) as strategy:
            with strategy.scope():
                weight = torch.nn.Parameter(torch.zeros(1))
            strategy.run(lambda: weight.sum().backward())  # the first sum connects devices of different workers
            yield strategy

    return opened


GPUS = [target.name(0), target.name(1)]
# In a program of their own.
STRICT_ROWS: dict[str, MakeStrategy] = {
    "strict one device": strict(alone(lambda: sg.OneDeviceStrategy(GPUS[1]))),
    "strict mirrored 2": strict(alone(lambda: sg.MirroredStrategy(GPUS, **CHECKED))),
    "strict mirrored 2 to one": strict(alone(lambda: sg.MirroredStrategy(GPUS, cross_device_ops="to_one", **CHECKED))),
    "strict central storage 2": strict(alone(lambda: sg.CentralStorageStrategy(GPUS, **CHECKED))),
    "strict local sgd 2": strict(alone(lambda: local_sgd(GPUS))),
    "strict parameter server 2": strict(
        alone(lambda: sg.ParameterServerStrategy(devices=GPUS, consistency=sg.Synchronous()))
    ),
    "strict tpu 2": strict(alone(sg.TPUStrategy), "TPU", 2),
    "strict 2 workers of 1": strict(workers(1, kind=target.KIND.lower())),
    "strict 2 workers of 2": strict(workers(2, kind=target.KIND.lower())),
}
if target.IS_REAL and target.KIND != "TPU":
    del STRICT_ROWS["strict tpu 2"]
ROWS = CPU_ROWS
# Where torch_xla computes: `make test-tpu`.
TPU_ROWS: dict[str, MakeStrategy] = {"tpu 4": alone(sg.TPUStrategy)}
ON_XLA = os.environ.get("PJRT_DEVICE") == "CPU" and importlib.util.find_spec("torch_xla") is not None
if STRICT in os.environ:
    ROWS = {name: make for name, make in STRICT_ROWS.items() if name == os.environ[STRICT]}
if ON_XLA:
    ROWS = TPU_ROWS
# Left to long runs: they differ from other rows in how many replicas there are, or in who adds, which the suite of
# collectives holds.
SELDOM = ("mirrored 1", "mirrored 2 to one")
# One row of each kind, for suites on top of what the whole suite of strategies has shown.
FEWER_ROWS = ("one device", "mirrored 2", "central storage 3", "local sgd 2", "2 workers of 2")
if STRICT in os.environ or ON_XLA:
    FEWER_ROWS = tuple(ROWS)
# A step sees the global batch, and all devices compute it together.
ONE_PROGRAM = tuple(TPU_ROWS)
# Every replica has variables of its own.
PRIVATE = (
    "mirrored 2 torch",
    "mirrored 2 to one",
    "local sgd 2",
    "local sgd, 2 workers of 1",
    *ONE_PROGRAM,
    *list(STRICT_ROWS)[1:],
)
# Gradients travel by torch.distributed.
CONNECTED = (
    "mirrored 2 torch",
    "strict mirrored 2",
    "strict central storage 2",
    "strict parameter server 2",
    "strict tpu 2",
)
# Every replica trains alone and agrees on weights after each step: equal while updates are linear in their gradients.
LOCAL = ("local sgd 2", "local sgd, 2 workers of 1", "strict local sgd 2")
# A run that fails in one worker ends the strategy in all.
WORKERS = (
    *("2 workers of 1", "2 workers of 2", "local sgd, 2 workers of 1"),
    *("strict 2 workers of 1", "strict 2 workers of 2"),
)


def opened(request: pytest.FixtureRequest, folder: Path) -> contextlib.AbstractContextManager[sg.Strategy]:
    """The strategy of a row, for the tests of a module."""
    return opened_row(ROWS[request.param], request, folder)


@contextlib.contextmanager
def opened_row(make: MakeStrategy, request: pytest.FixtureRequest, folder: Path) -> Iterator[sg.Strategy]:
    """The strategy that a row makes, ready for the first test."""
    with make(request, folder) as strategy:
        strategy.run(int)  # its replicas are there before the first test
        gc.collect()
        gc.freeze()  # workers collect garbage whenever something new is made in a scope
        yield strategy


@contextlib.contextmanager
def _second_worker(request: pytest.FixtureRequest, what: dict[str, object], folder: Path) -> Iterator[None]:
    """Runs the same tests in another process, forked from one that has imported what the tests of this module need."""
    request.getfixturevalue("forked_tasks")
    of_row = [item for item in request.session.items if any(each is request.param for each in _parameters(item))]
    chosen = [item.nodeid for item in of_row if item.path == request.path]
    soak = ["--soak"] if request.config.getoption("--soak") else []
    log = folder / "second.log"
    with log.open("w") as output:
        process = nursery.Program(
            # Hypothesis, which these tests do not use, would be imported at the end, for a second.
            ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *soak, *chosen],
            nursery=request.getfixturevalue("keras_programs") if hasattr(request.module, "keras") else None,
            cwd=request.config.rootpath,
            env={**os.environ, _WORKER: json.dumps(what)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
        code = process.wait(_PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert code == 0, f"the second worker failed:\n{log.read_text()[-5000:]}"


def _parameters(item: pytest.Item) -> list[object]:
    return list(item.callspec.params.values()) if hasattr(item, "callspec") else []


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"
