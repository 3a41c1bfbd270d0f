"""What every test gets: the guards, a fresh configuration, and a machine without surprises."""

import pytest

from stratagem import _env
from stratagem.devices import inventory as inventory_module
from stratagem.devices.inventory import Inventory
from tests.guards import adopt_orphans, nothing_left_behind

__all__ = ["nothing_left_behind"]


def pytest_configure() -> None:
    adopt_orphans()


@pytest.fixture(autouse=True)
def inventory(nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """The inventory of this process, as it is in a program that has just begun."""
    for variable in (_env.SIMULATE, _env.CUDA_VISIBLE_DEVICES):
        monkeypatch.delenv(variable, raising=False)
    fresh = Inventory()
    monkeypatch.setattr(inventory_module, "_THIS_PROCESS", fresh)
    return fresh
