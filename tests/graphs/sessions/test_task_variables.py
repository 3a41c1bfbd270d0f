"""What a task keeps for sessions: nobody can spoil what others use."""

import pytest
import torch

from stratagem.devices.device_spec import DeviceSpec
from stratagem.devices.inventory import Inventory
from stratagem.errors import SessionError
from stratagem.graphs.nodes import Node, NodeKind
from stratagem.graphs.sessions.compute import Device
from stratagem.graphs.sessions.node_devices import NodePlace
from stratagem.graphs.sessions.task_variables import TaskVariables

HERE, THERE = (NodePlace("ps", 0, "CPU", index) for index in range(2))


def variable(*shape: int, name: str = "w") -> Node:
    meta = torch.empty(shape, device="meta")
    return Node(0, NodeKind.VARIABLE, name, "Variable", spec=DeviceSpec(), line="", outputs=(meta,))


@pytest.fixture
def kept(inventory: Inventory) -> tuple[TaskVariables, Device]:
    variables = TaskVariables()
    return variables, Device(inventory.resolve("cpu:0"), HERE.name, variables=variables.on(HERE))


def test_value_of_another_form_is_refused_and_changes_nothing(kept: tuple[TaskVariables, Device]) -> None:
    variables, device = kept
    one, other = (variables.declare(variable(2, name=name), HERE) for name in "ab")
    for each in (one, other):
        variables.begin(each, torch.ones(2), device, anew=False)
    for wrong in (torch.ones(3), torch.ones(2, dtype=torch.float64)):
        with pytest.raises(SessionError, match=r"variable 'b' is \(2,\) float32, it cannot become"):
            variables.commit(device, {one: torch.zeros(2), other: wrong}, [])
    assert all(torch.equal(device.read(each), torch.ones(2)) for each in (one, other))


def test_first_value_is_that_of_the_first_session(kept: tuple[TaskVariables, Device]) -> None:
    variables, device = kept
    one, other = variables.declare(variable(2), HERE), variables.declare(variable(2), HERE)
    assert one is other
    assert not variables.has_value(one)
    for value, anew in ((torch.ones(2), False), (torch.zeros(2), False)):
        variables.begin(one, value, device, anew=anew)
    assert torch.equal(device.read(one), torch.ones(2))
    variables.begin(other, torch.zeros(2), device, anew=True)
    assert torch.equal(device.read(one), torch.zeros(2))


def test_declaration_of_a_session_that_went_at_once_binds_nobody(kept: tuple[TaskVariables, Device]) -> None:
    variables, device = kept
    gone = variables.declare(variable(2), HERE)
    other = variables.declare(variable(3), THERE)
    assert variables.home(other) == THERE
    with pytest.raises(SessionError, match="not there any more"):
        variables.begin(gone, torch.ones(2), device, anew=False)


def test_nothing_can_be_done_to_what_was_reset(kept: tuple[TaskVariables, Device]) -> None:
    variables, device = kept
    one = variables.declare(variable(2), HERE)
    variables.begin(one, torch.ones(2), device, anew=False)
    variables.reset(["another"])
    assert variables.has_value(one)
    variables.reset(None)
    for call in (lambda: device.read(one), lambda: variables.commit(device, {one: torch.ones(2)}, [])):
        with pytest.raises(SessionError, match="another program has reset it; make a new session"):
            call()
    assert variables.on(HERE) == {}
