"""What every test gets: the guards, a fresh configuration, and a machine without surprises."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest

import stratagem as sg
from stratagem import _env
from stratagem.devices import inventory as inventory_module
from stratagem.devices.device import LogicalDeviceConfiguration
from stratagem.devices.inventory import Inventory
from stratagem.processes import launcher
from tests.cluster import nursery
from tests.guards import adopt_orphans, nothing_left_behind
from tests.hardware import target
from tests.selection import Selection, pytest_addoption
from tests.timing import Timing

__all__ = ["nothing_left_behind", "pytest_addoption"]

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported anywhere


def pytest_configure(config: pytest.Config) -> None:
    adopt_orphans()
    config.pluginmanager.register(Timing())
    config.pluginmanager.register(Selection(config))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell: tests press Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Their files first: two processes share the tests by file, and a long one at the end would keep one of them alone.
_LONGEST = (
    *("tests/test_examples.py", "tests/cluster/ray/test_ray.py", "tests/contracts/test_strategies.py"),
    *(
        "tests/faults/test_workers.py",
        "tests/parameters/network/test_launch.py",
        "tests/faults/test_worker_restarts.py",
    ),
    *(
        "tests/training/keras/test_fit.py",
        "tests/test_examples_cluster_ps.py",
        "tests/cluster/membership/test_membership.py",
    ),
    *("tests/faults/test_torch_distributed.py", "tests/faults/test_local_replicas.py"),
    *("tests/cluster/launch/test_machines.py", "tests/parameters/network/test_faults.py"),
)


# Files that start programs, or wait for faults to be noticed, without the fixtures that say so.
_SLOW_FILES = ("test_children", "test_batch_norm", "test_cluster_session", "test_faults", "test_launch", "test_token")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start replica processes are slow; `make check` leaves them out."""
    ranks = {name: rank for rank, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))
    folders = ("contracts", "foreign", "faults", "collectives", "engine", "strategies", "variables")
    for item in items:
        if (
            "fork_server" in getattr(item, "fixturenames", ())
            or item.path.parent.name in folders
            or item.path.stem in _SLOW_FILES
            or item.path.stem.startswith("test_examples")
        ):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[None]:
    """Keeps one fork server for all tests: starting one takes seconds, forking from it does not."""
    launcher.acquire()
    yield
    launcher.release()


@pytest.fixture(scope="session")
def forked_tasks() -> Iterator[None]:
    """Lets tasks of clusters be forked from one process, for the same reason."""
    with nursery.opened():
        yield


@pytest.fixture(scope="session")
def keras_programs() -> Iterator[nursery.Nursery]:
    """Where programs that use Keras are forked from; no other has it unasked."""
    made = nursery.Nursery.start("keras", "stratagem.training.keras.keras_objects", "stratagem.training.keras.steps")
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def little_garbage() -> None:
    """Lets the garbage collector look only through what the tests of a module make.

    All that torch and Keras have takes it a third of a second, and workers, graphs and tests ask for it very often.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def four_cpus(fork_server: None) -> Iterator[None]:
    """Divides the CPU into four logical devices for the tests of a module."""
    with pytest.MonkeyPatch.context() as patch:
        fresh = Inventory()
        fresh.configure("cpu:0", [LogicalDeviceConfiguration()] * 4)
        patch.setattr(inventory_module, "_THIS_PROCESS", fresh)
        yield


@pytest.fixture(autouse=True)
def inventory(nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Inventory:
    """The inventory of this process, as it is in a program that has just begun."""
    for variable in (_env.SIMULATE, _env.DEVICES, _env.CUDA_VISIBLE_DEVICES):
        if not (target.IS_REAL and variable == _env.CUDA_VISIBLE_DEVICES):  # which real GPUs the tests may use
            monkeypatch.delenv(variable, raising=False)
    if "four_cpus" in request.fixturenames:
        return inventory_module.this_process()
    fresh = Inventory()
    monkeypatch.setattr(inventory_module, "_THIS_PROCESS", fresh)
    return fresh


@pytest.fixture(scope="module")
def strategy(four_cpus: None) -> Iterator[sg.MirroredStrategy]:
    """Two replicas, for all tests of a module; those that end their replicas make their own."""
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], stall_timeout_s=20.0) as made:
        with made.scope():
            pass
        yield made
