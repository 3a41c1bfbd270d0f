import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import stratagem as sg
from stratagem.devices.accelerators import TorchAccelerator
from stratagem.devices.host import Host
from stratagem.devices.inventory import Inventory
from stratagem.devices.serving import serve
from stratagem.errors import DevicesInUseError, DeviceWarning
from tests.fakes import GIB, FakeTorchCuda, fake_host

Part = sg.config.LogicalDeviceConfiguration
MIB = 2**20


@pytest.fixture
def small() -> str:
    """A share of the CPU with 256 MiB."""
    sg.config.set_logical_device_configuration("cpu:0", [Part(memory_limit=256), Part()])
    return "cpu:0"


def test_serving_uses_the_cores_and_threads_of_the_share_and_puts_them_back() -> None:
    sg.config.set_logical_device_configuration("cpu:0", [Part()] * len(os.sched_getaffinity(0)))
    before = os.sched_getaffinity(0), torch.get_num_threads()
    with serve("cpu:0") as device:
        assert os.sched_getaffinity(0) == set(device.cores)
        assert torch.get_num_threads() == device.num_threads == 1
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before


def test_serving_sets_threads_free_that_were_born_meanwhile() -> None:
    before = os.sched_getaffinity(0)
    sg.config.set_logical_device_configuration("cpu:0", [Part()] * len(before))
    stop, seen = threading.Event(), []
    with serve("cpu:0") as device:
        thread = threading.Thread(target=stop.wait, args=(30,))
        thread.start()
        seen.append(os.sched_getaffinity(thread.native_id))
    seen.append(os.sched_getaffinity(thread.native_id))
    stop.set()
    thread.join(30)
    assert seen == [set(device.cores), before]


@pytest.mark.parametrize("make", [lambda n: torch.empty(n, dtype=torch.uint8), lambda n: np.zeros(n, dtype=np.uint8)])
def test_going_over_the_limit_names_the_device_and_the_process_lives_on(small: str, make: object) -> None:
    with (
        pytest.raises(sg.OutOfMemoryError, match=r"/device:CPU:0: asked for 400 MiB .*, its limit is 256 MiB"),
        serve(small),
    ):
        make(400 * MIB)
    with serve(small):
        assert make(100 * MIB).shape == (100 * MIB,)
    assert make(400 * MIB).shape == (400 * MIB,), "the limit ends with the block"


def test_going_over_the_limit_is_what_handlers_of_torch_and_python_catch(small: str) -> None:
    with pytest.raises(torch.OutOfMemoryError), serve(small):
        bytearray(400 * MIB)
    with pytest.raises(MemoryError, match="asked for more memory"), serve(small):
        bytearray(400 * MIB)


def test_training_step_that_is_too_large_can_be_tried_again_smaller(small: str) -> None:
    def step(batch_size: int) -> float:
        model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
        loss = model(torch.ones(batch_size, 256)).sum()
        loss.backward()
        return float(loss.detach())

    batch_size, failures = 2**20, 0
    while True:
        try:
            with serve(small):
                step(batch_size)
            break
        except sg.OutOfMemoryError:
            batch_size, failures = batch_size // 4, failures + 1
    assert failures >= 1
    assert batch_size >= 2**8


def test_going_over_the_limit_can_be_caught_inside_the_block(small: str) -> None:
    with serve(small):
        try:
            torch.ones(400 * MIB, dtype=torch.uint8)
        except torch.OutOfMemoryError as error:
            caught = error
        assert torch.ones(10).sum() == 10
    assert isinstance(caught, sg.OutOfMemoryError)
    assert (caught.device, caught.limit_bytes, caught.requested_bytes) == ("/device:CPU:0", 256 * MIB, 400 * MIB)


def test_message_tells_what_was_in_use_when_memory_ran_out(small: str) -> None:
    with pytest.raises(sg.OutOfMemoryError, match=r"asked for 8 MiB with 2\d\d(\.\d)? MiB in use"), serve(small):
        [torch.ones(8 * MIB, dtype=torch.uint8) for _ in range(100)]
    with pytest.raises(sg.OutOfMemoryError, match=r"asked for more memory, its limit is 256 MiB"), serve(small):
        bytearray(400 * MIB)


def test_garbage_from_before_the_block_makes_no_room_in_it(small: str) -> None:
    garbage = [torch.ones(300 * MIB, dtype=torch.uint8)]
    garbage.append(garbage)  # only the collector can free it
    del garbage
    with pytest.raises(sg.OutOfMemoryError), serve(small):
        torch.ones(300 * MIB, dtype=torch.uint8)


def test_only_one_thread_serves_a_device(small: str) -> None:
    inside, leave, refused = threading.Event(), threading.Event(), []

    def other() -> None:
        with serve("cpu:1"):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(30)
    try:
        with serve(small):
            pass
    except DevicesInUseError as error:
        refused.append(error)
    leave.set()
    thread.join(30)
    assert len(refused) == 1
    with serve(small):
        pass


def test_limit_does_not_hide_other_errors(small: str) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught, serve(small):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not isinstance(caught.value, sg.OutOfMemoryError)


def test_simulated_gpu_has_no_more_memory_than_it_says() -> None:
    sg.config.simulate_devices("GPU", 2, memory_limit=128)
    with (
        pytest.raises(sg.OutOfMemoryError, match=r"/device:GPU:1: asked for 200 MiB .*, its limit is 128 MiB"),
        serve("cuda:1"),
    ):
        torch.empty(200 * MIB, dtype=torch.uint8)


def test_memory_readings_start_at_nothing_and_follow_what_is_held(small: str) -> None:
    with serve(small):
        assert sg.config.get_memory_info(small)["current"] < 8 * MIB
        held = torch.ones(100 * MIB, dtype=torch.uint8)
        info = sg.config.get_memory_info(small)
        assert 95 * MIB < info["current"] < 120 * MIB
        del held
        info = sg.config.get_memory_info(small)
        assert info["current"] < 20 * MIB
        assert info["peak"] > 95 * MIB
        sg.config.reset_memory_stats(small)
        assert sg.config.get_memory_info(small)["peak"] < 20 * MIB


def test_undivided_cpu_reads_the_whole_process() -> None:
    assert sg.config.get_memory_info("cpu:0")["current"] > 50 * MIB


def test_process_holds_nothing_on_a_device_that_it_does_not_serve(small: str) -> None:
    with serve(small):
        assert sg.config.get_memory_info("cpu:1") == {"current": 0, "peak": 0}
    sg.config.reset_memory_stats(small)
    assert sg.config.get_memory_info(small) == {"current": 0, "peak": 0}


@pytest.mark.parametrize(
    "words", ["std::bad_alloc", "[enforce fail a", "can't start new thread", "could not create a primitive"]
)
def test_every_word_for_a_failed_allocation_is_understood(small: str, words: str) -> None:
    with pytest.raises(sg.OutOfMemoryError, match="/device:CPU:0"), serve(small):
        raise RuntimeError(words)


def test_process_serves_one_device_at_a_time(small: str) -> None:
    with (
        serve("cpu:1"),
        pytest.raises(DevicesInUseError, match="already serves /device:CPU:1 and cannot serve /device:CPU:0 too"),
        serve(small),
    ):
        pytest.fail("two devices at once")
    with serve(small):
        pass


def test_without_growth_the_whole_limit_must_be_free_at_the_start(tmp_path: Path) -> None:
    inventory = Inventory(fake_host(tmp_path, {"proc/meminfo": "MemTotal: 1048576 kB\nMemAvailable: 1024 kB"}))
    inventory.simulate("GPU", 1, memory_limit=512)
    inventory.set_growth("gpu:0", False)
    with pytest.raises(sg.OutOfMemoryError, match="takes its limit of 512 MiB at the start, 1 MiB are free"):
        serve("gpu:0", inventory=inventory).__enter__()


def test_limit_that_cannot_be_enforced_warns(tmp_path: Path) -> None:
    inventory = Inventory(Host(tmp_path))
    inventory.configure("cpu:0", [Part(memory_limit=64)])
    with (
        pytest.warns(DeviceWarning, match="the memory limit of /device:CPU:0 is not enforced"),
        serve("cpu:0", inventory=inventory),
    ):
        pass


def test_real_gpu_is_limited_through_its_allocator_and_set_free_again(tmp_path: Path) -> None:
    fake = FakeTorchCuda(2, total_memory=16 * GIB)
    inventory = Inventory(fake_host(tmp_path), [TorchAccelerator("GPU", "meta", fake)])
    inventory.configure("gpu:1", [Part(memory_limit=4096), Part()])
    inventory.set_growth("gpu:1", False)
    with serve("gpu:1", inventory=inventory) as device:
        assert fake.fractions == {1: 0.25}
        assert fake.current == 1
        assert device.physical.name == "/physical_device:GPU:1"
    assert fake.fractions == {1: 1.0}
    fake.fractions[1] = 0.9
    with (
        serve("gpu:1", inventory=inventory),
        pytest.raises(DevicesInUseError, match="already serves /device:GPU:1"),
        serve("gpu:0", inventory=inventory),
    ):
        pytest.fail("two devices at once")
    assert fake.fractions == {1: 0.9}, "a limit of the user's own comes back"
    assert fake.current is None
    fake.allocated[1] = 3 * GIB
    with (
        pytest.raises(
            sg.OutOfMemoryError, match=r"/device:GPU:1: asked for 2 GiB with 3 GiB in use, its limit is 4 GiB"
        ),
        serve("gpu:1", inventory=inventory),
    ):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of ..."
        )
