"""What nested scopes ask for, without running anything."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch

import stratagem as sg
from stratagem.errors import DeviceTypeError, EnvironmentVariableError, UnknownDeviceError
from stratagem.placement.log import collectors, log_placement
from stratagem.placement.scopes import NOTHING, Operation, current_device, device, recording, spec_for, state

MATMUL = Operation("MatMul", "MatMul")


def test_scope_asks_for_its_device_until_it_ends() -> None:
    with device("cuda:1") as spec:
        assert str(spec) == "/device:GPU:1"
        assert spec_for(MATMUL) == spec == current_device()
    assert current_device() == NOTHING


def test_scopes_merge_part_by_part() -> None:
    with device("/job:worker/task:1"), device("/gpu:0"):
        assert str(current_device()) == "/job:worker/task:1/device:GPU:0"
    with device("/gpu:1"), device("/cpu"):
        assert str(current_device()) == "/device:CPU:*"
    with device("/gpu"), device("/device:*:2"):
        assert str(current_device()) == "/device:GPU:2"


def test_none_is_as_if_outside_every_scope() -> None:
    with device("/gpu:1"), device(None):
        assert current_device() == NOTHING
        with device("/cpu:0"):
            assert str(current_device()) == "/device:CPU:0"


def test_function_decides_by_operation_and_leaves_the_rest_to_the_scopes_around_it() -> None:
    with device("/gpu:1"), device(lambda operation: "/cpu:0" if operation.type == "MatMul" else None):
        assert str(spec_for(MATMUL)) == "/device:CPU:0"
        assert str(spec_for(Operation("Add", "Add"))) == "/device:GPU:1"
        with device("/gpu:3"):
            assert str(spec_for(MATMUL)) == "/device:GPU:3"


def test_scope_is_left_when_the_block_raises() -> None:
    def fail() -> None:
        with device("/gpu:1"):
            device("/cpu:0").__enter__()  # as a generator that was dropped inside its scope
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert current_device() == NOTHING


def test_scope_that_cannot_be_entered_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_SIMULATE", "gpu:many")
    with pytest.raises(EnvironmentVariableError, match="gpu:many"):
        device("/gpu:1").__enter__()
    with pytest.raises(EnvironmentVariableError, match="gpu:many"):
        log_placement().__enter__()
    monkeypatch.delenv("STRATAGEM_SIMULATE")
    assert current_device() == spec_for(MATMUL) == NOTHING
    assert not collectors
    sg.config.simulate_devices("GPU", 2)  # nothing is in use
    with device("/cpu:0"):
        assert torch.ones(2).sum() == 2


def test_generator_that_is_dropped_in_its_scope_leaves_the_scopes_around_it_alone() -> None:
    def numbers() -> Iterator[int]:
        with device("/gpu:1"):
            yield 1

    with device("/cpu:0"):
        generator = numbers()
        next(generator)
    with device("/gpu:2"):
        del generator
        assert str(current_device()) == "/device:GPU:2"


def test_scope_decorates_functions_and_can_be_entered_again() -> None:
    scope = device("/cpu:0")

    @scope
    def inside(depth: int) -> str:
        return str(current_device()) if depth == 0 else inside(depth - 1)

    with scope, scope:
        assert inside(2) == "/device:CPU:0"
    assert current_device() == NOTHING
    assert inside.__name__ == "inside"


def test_scope_is_of_its_own_thread() -> None:
    seen = []
    scope = device("/gpu:1")

    def other() -> None:
        seen.append(current_device())
        with scope:
            seen.append(current_device())

    with scope:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert str(current_device()) == "/device:GPU:1"
    assert list(map(str, seen)) == ["", "/device:GPU:1"]


def test_scopes_of_coroutines_are_their_own() -> None:
    """They take turns inside their scopes, and leave them in another order than they came."""
    sg.config.simulate_devices("GPU", 3)
    turn = asyncio.Event()

    async def placed(name: str, *, last: bool) -> list[str]:
        with device(name):
            before = sg.device_of(torch.ones(1)).name
            if last:
                await asyncio.sleep(0)
                turn.set()
                await asyncio.sleep(0)
            else:
                await turn.wait()
            return [before, sg.device_of(torch.ones(1)).name]

    async def unplaced() -> list[str]:
        await asyncio.sleep(0)
        return [sg.device_of(torch.ones(1)).name]

    async def all_of_them() -> list[list[str]]:
        with device("/gpu:2"):
            outer = asyncio.create_task(unplaced())
        found = await asyncio.gather(placed("/gpu:0", last=False), placed("/gpu:1", last=True), unplaced(), outer)
        return [*found, [sg.device_of(torch.ones(1)).name]]

    first, second, third, outer, after = asyncio.run(all_of_them())
    assert first == ["/device:GPU:0"] * 2
    assert second == ["/device:GPU:1"] * 2
    assert third == outer == after == ["/device:CPU:0"]  # what was left has ended, also for who began in it
    assert not state.open


def test_scope_that_another_coroutine_leaves_keeps_nothing_in_torch() -> None:
    scope = device("/cpu:0")

    async def enter() -> None:
        scope.__enter__()

    asyncio.run(enter())
    assert state.open
    scope.__exit__(None, None, None)
    assert not state.open
    assert current_device() == NOTHING


def test_operations_of_a_recorder_are_left_alone() -> None:
    with recording(), device("/gpu:7"):
        assert torch.ones(2).sum() == 2  # there is no such device, and nobody asks for it
        assert str(spec_for(MATMUL)) == "/device:GPU:7"
    assert state.recorders == 0


@pytest.mark.parametrize("target", ["/gpx:1", "gpu1", "/device:GPU:x", "/gpu:0/cpu:0"])
def test_scope_refuses_a_text_that_names_no_device(target: str) -> None:
    with pytest.raises(UnknownDeviceError, match="device"):
        device(target)


def test_scope_refuses_what_is_no_device() -> None:
    with pytest.raises(DeviceTypeError, match="got 3"):
        device(3)  # type: ignore[arg-type]
    with pytest.raises(DeviceTypeError, match="physical device; name a logical one"):
        device(sg.config.list_physical_devices("CPU")[0])
    with pytest.raises(DeviceTypeError, match="decorates a function"):
        device("/cpu:0")(3)  # type: ignore[arg-type]
    with pytest.raises(DeviceTypeError, match="is a generator or a coroutine"):

        @device("/cpu:0")
        async def later() -> None: ...

    with device(lambda _: lambda _: None), pytest.raises(DeviceTypeError, match="returns a device"):  # type: ignore[arg-type,return-value]
        spec_for(MATMUL)
