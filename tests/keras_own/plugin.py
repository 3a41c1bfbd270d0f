"""A plugin of pytest for Keras' own tests: each runs plain, or inside a scope of two replicas.

Keras' tests come with its wheel, but without their conftest; what they ask of it is here.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import cloudpickle
import pytest

import stratagem as sg

_MARKS = ("requires_trainable_backend: Keras on torch is one", "multi_device: several devices of Keras' own")


# Files of tests import them for some of their tests. Those need them, the others do not.
_LIBRARIES = ("tensorflow", "jax", "scipy", "pandas", "grain")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("keras")
    group.addoption("--outcomes", type=Path, required=True, help="the file for what became of each test")
    group.addoption("--scope", action="store_true", help="run each test inside a scope of two replicas")


def pytest_configure(config: pytest.Config) -> None:
    for mark in _MARKS:
        config.addinivalue_line("markers", mark)
    conftest: Any = types.ModuleType("conftest")
    conftest.skip_if_backend = _skip_if_backend
    sys.modules["conftest"] = conftest
    config.pluginmanager.register(Absent())
    config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))
    if config.getoption("--scope"):
        config.pluginmanager.register(InScope())


def _skip_if_backend(backend: str, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(backend == "torch", reason=reason)


@final
class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives empty modules for libraries that are not installed, to files of tests alone."""

    def __init__(self) -> None:
        self._names = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[Any]:
        _look_for_libraries()
        sys.meta_path.append(self)
        try:
            return (yield)
        finally:
            sys.meta_path.remove(self)
            for name in [each for each in sys.modules if self._is_absent(each)]:
                del sys.modules[name]

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if self._is_absent(fullname) else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Has nothing to add."""

    def _is_absent(self, name: str) -> bool:
        return name.partition(".")[0] in self._names


def _look_for_libraries() -> None:
    """Lets Keras see which libraries there are while it can still see that others are not."""
    from keras.src.utils import module_utils

    for each in vars(module_utils).values():
        if isinstance(each, module_utils.LazyModule):
            each.available  # noqa: B018


@final
class Outcomes:
    """Writes down what became of each test, one JSON object in a line, as soon as it is known.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome == "failed":
            self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        error = "" if report.outcome == "passed" else str(report.longrepr).strip().splitlines()[-1]
        with self._path.open("a") as file:
            print(json.dumps({"test": report.nodeid, "outcome": report.outcome, "error": error}), file=file)


@final
class InScope:
    """Enters a scope around each test; one strategy serves them all, until a test ends its replicas."""

    def __init__(self) -> None:
        sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * 2)
        self._strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"], stall_timeout_s=60.0)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for module in {item.module for item in session.items if isinstance(item, pytest.Function)}:
            cloudpickle.register_pickle_by_value(module)  # as a program of a user, though it lies in Keras

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        if not self._strategy.is_open:
            self._strategy.revive()
        with self._strategy.scope():
            return (yield)

    def pytest_unconfigure(self) -> None:
        self._strategy.close()
