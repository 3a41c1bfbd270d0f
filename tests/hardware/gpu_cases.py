"""What stratagem asks of an accelerator beyond what strict devices can prove; see `target`, and docs/accelerators.md.

The first case must be the first: it looks at what has not been woken yet.
"""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.devices import kind_table
from stratagem.errors import PlacementWarning
from tests.hardware import target
from tests.hardware.target import KIND, MIB, name, needs, torch_device, torch_module

Part = sg.config.LogicalDeviceConfiguration


def take(num_mib: int, device: Any) -> torch.Tensor:
    return torch.empty(num_mib * MIB, dtype=torch.uint8, device=device)


# What torch says of the hardware


@needs()
def case_listing_wakes_no_driver_and_takes_no_memory() -> None:
    listed = sg.config.list_physical_devices(KIND)
    assert [each.name for each in listed] == [f"/physical_device:{KIND}:{index}" for index in range(len(listed))]
    assert [each.torch_device for each in sg.config.list_logical_devices(KIND)] == [
        torch_device(index) for index in range(len(listed))
    ]
    if target.IS_REAL and KIND != "MPS":
        assert not torch_module().is_initialized()


@needs()
def case_details_are_those_of_the_hardware() -> None:
    details = sg.config.get_device_details(name(0))
    properties = torch_module().get_device_properties(0)
    assert details.total_memory_bytes == properties.total_memory > 0
    assert details.device_name
    if target.IS_REAL and KIND == "GPU":
        assert details.compute_capability == torch.cuda.get_device_capability(0)
        assert details.num_cores == properties.multi_processor_count > 0


@needs()
def case_memory_in_use_and_its_peak_are_told() -> None:
    before = sg.config.get_memory_info(name(0))["current"]
    held = take(64, torch_device(0))
    assert sg.config.get_memory_info(name(0))["current"] - before >= held.numel()
    del held
    info = sg.config.get_memory_info(name(0))
    assert info["current"] - before < 64 * MIB <= info["peak"]
    sg.config.reset_memory_stats(name(0))
    assert sg.config.get_memory_info(name(0))["peak"] < 64 * MIB + before


@needs(real=True)
def case_memory_used_by_all_processes_is_told_or_unknown() -> None:
    held = take(64, torch_device(0))
    accelerator = kind_table.accelerator_of(KIND)
    assert accelerator is not None
    used = accelerator.memory_used(0)
    assert used is None or used >= held.numel()


# Limits


@needs()
def case_limit_of_a_share_holds_and_the_process_lives_on() -> None:
    sg.config.set_logical_device_configuration(name(0), [Part(memory_limit=512), Part(memory_limit=512)])
    with pytest.raises(sg.OutOfMemoryError, match=f"/device:{KIND}:1") as caught, sg.devices.serve(name(1)) as device:
        take(600, device.torch_device)
    assert (caught.value.device, caught.value.limit_bytes) == (f"/device:{KIND}:1", 512 * MIB)
    with sg.devices.serve(name(1)) as device:
        held = take(100, device.torch_device)
        assert sg.config.get_memory_info(name(1))["current"] >= held.numel()


@needs()
def case_limit_is_put_back_after_the_block() -> None:
    sg.config.set_logical_device_configuration(name(0), [Part(memory_limit=256)])
    with sg.devices.serve(name(0)) as device, pytest.raises(sg.OutOfMemoryError):
        take(300, device.torch_device)
    assert take(300, torch_device(0)).numel() == 300 * MIB


@needs(real=True)
def case_device_without_growth_takes_its_limit_at_the_start() -> None:
    sg.config.set_logical_device_configuration(name(0), [Part(memory_limit=256)])
    sg.config.set_memory_growth(name(0), False)
    with sg.devices.serve(name(0)) as device:
        assert torch_module().memory_reserved(0) >= 250 * MIB
        assert take(200, device.torch_device).numel() == 200 * MIB  # out of what was taken
    torch_module().empty_cache()


@needs()
def case_step_that_takes_too_much_is_named_with_its_device() -> None:
    sg.config.set_logical_device_configuration(name(0), [Part(memory_limit=512)])
    with sg.OneDeviceStrategy(name(0)) as strategy:
        with pytest.raises(sg.OutOfMemoryError, match=f"/device:{KIND}:0"):
            strategy.run(lambda: take(600, torch_device(0)).numel())
        assert strategy.run(lambda: take(10, torch_device(0)).numel()) == 10 * MIB


# The current device


@needs(2)
def case_served_device_is_the_current_one() -> None:
    with sg.devices.serve(name(1)):
        assert torch.accelerator.current_device_index() == 1
        assert torch.empty(2, device=torch_device(0).type).device == torch_device(1)
    assert torch.accelerator.current_device_index() == 0


@needs(real=True)
def case_visible_devices_are_renumbered() -> None:
    if KIND != "GPU":
        pytest.skip("CUDA_VISIBLE_DEVICES is CUDA's")
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = mask.split(",") if mask else list(map(str, range(len(sg.config.list_physical_devices(KIND)))))
    program = (
        "import stratagem as sg, torch; print([str(each.torch_device) for each in "
        "sg.config.list_logical_devices('GPU')], torch.ones(1, device='cuda').device)"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible[-1]}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "['cuda:0'] cuda:0", done.stderr


# Placement


def where(tensor: torch.Tensor) -> str:
    return sg.device_of(tensor).name.removeprefix("/device:")


@needs()
def case_operations_run_on_the_device_and_gradients_come_back() -> None:
    weight = torch.ones(3, requires_grad=True)
    with sg.device(name(0)):
        loss = (weight * torch.arange(3.0)).sum()
    assert loss.device == torch_device(0)
    assert where(loss) == f"{KIND}:0"
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0, 1, 2]
    assert weight.grad.is_cpu


@needs()
def case_halves_of_a_model_train_as_one() -> None:
    torch.manual_seed(0)
    model = sg.place(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), {"1": name(0), "2": name(0)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(torch.eye(4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    there = torch_device(0).type
    assert [parameter.device.type for parameter in model.parameters()] == ["cpu"] * 2 + [there] * 4


@needs()
def case_share_is_a_device_of_its_own() -> None:
    half = Part(memory_limit=64)
    sg.config.set_logical_device_configuration(name(0), [half, half])
    with sg.device(name(1)):
        x = torch.ones(2)
        with pytest.raises(sg.OutOfMemoryError, match=f"on /device:{KIND}:1"):
            torch.ones(80, 2**18)
    assert x.device == torch_device(0)
    assert where(x + 1) == f"{KIND}:1"


@needs()
def case_kernel_that_the_device_lacks_runs_on_the_host() -> None:
    if KIND != "GPU":
        pytest.skip("which kernels are missing is known of CUDA")
    sg.config.set_soft_device_placement(True)
    try:
        with sg.device(name(0)), pytest.warns(PlacementWarning, match="no kernel for Histogram"):
            counts = torch.histogram(torch.tensor([0.0, 1.0, 1.0]), 2).hist
    finally:
        sg.config.set_soft_device_placement(False)
    assert counts.is_cpu
    assert counts.tolist() == [1, 2]


@needs()
def case_copies_by_the_method_of_a_kind_are_known_to_the_log() -> None:
    row = kind_table.of_torch_type(torch_device(0).type)
    if row is None or row.tensor_method is None:
        pytest.skip(f"tensors have no method for a {KIND}")
    with sg.log_placement() as log, sg.device("cpu:0"):
        copied = getattr(torch.ones(3), row.tensor_method)()
    assert copied.device.type == torch_device(0).type
    assert any(f"{KIND}:0" in str(record) for record in log.records)


# Sessions, whose streams run beside each other


@needs()
def case_parts_of_a_graph_on_several_devices_agree() -> None:
    places = [each.name for each in sg.config.list_logical_devices(KIND)[:2]] * 2
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [64, 64])
        products = []
        for place in places[:2]:
            with sg.device(place):
                products.append(x @ x @ x)
        with sg.device("cpu:0"):
            total = products[0] + products[1]
    with sg.Session(graph) as session:
        for seed in range(20):
            given = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
            found = session.run(total, {x: given})
            torch.testing.assert_close(torch.as_tensor(found), 2 * given @ given @ given, rtol=1e-3, atol=1e-2)
