"""How a process gets strict devices: when it asks, from outside, late, or not at all."""

import os
import subprocess
import sys

import pytest

import stratagem as sg
from stratagem.devices.inventory import Inventory
from stratagem.devices.simulated import Simulation, read_variable
from tests.cluster import nursery

pytestmark = pytest.mark.timeout(60)


def run(program: str) -> str:
    done = nursery.run(["-W", "error", "-c", program], 50)
    assert done.returncode == 0, done.stderr
    return str(done.stdout).strip()


def test_variable_asks_for_strict_devices() -> None:
    memory = 2**34
    assert read_variable("gpu:4:strict", memory) == {"GPU": Simulation("GPU", 4, None, strict=True)}
    assert read_variable("GPU:4:512:Strict", memory) == {"GPU": Simulation("GPU", 4, 512, strict=True)}
    assert read_variable("gpu:4:512", memory) == {"GPU": Simulation("GPU", 4, 512)}
    assert read_variable("tpu:2:strict", memory) == {"TPU": Simulation("TPU", 2, None, strict=True)}
    for wrong in ("gpu:4:strictly", "gpu:4:512:512", "gpu:strict", "gpu:4:strict:512", "xpu:2:strict"):
        with pytest.raises(sg.errors.EnvironmentVariableError, match="STRATAGEM_SIMULATE="):
            read_variable(wrong, memory)


def test_only_gpus_and_tpus_can_be_strict(inventory: Inventory) -> None:
    with pytest.raises(sg.errors.DeviceConfigurationError, match="strict devices are GPUs or TPUs, got XPU"):
        sg.config.simulate_devices("XPU", 2, strict=True)
    with pytest.raises(sg.errors.DeviceTypeError, match="strict is True or False, got 'yes'"):
        sg.config.simulate_devices("GPU", 2, strict="yes")  # type: ignore[arg-type]
    assert not inventory.simulated_kinds()


@pytest.mark.slow
def test_variable_makes_them_known_before_the_program_names_one() -> None:
    program = "import stratagem, torch; print(torch.ones(2, device='gpu:3').device, torch.accelerator.device_count())"
    environment = {**os.environ, "STRATAGEM_SIMULATE": "gpu:4:strict"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout.strip() == "gpu:3 4", done.stderr


@pytest.mark.slow
def test_another_backend_in_the_private_slot_is_named(forked_tasks: None) -> None:
    said = run(
        "import torch, stratagem as sg\n"
        "torch.utils.rename_privateuse1_backend('mine')\n"
        "try:\n"
        "    sg.config.simulate_devices('GPU', 2, strict=True)\n"
        "except sg.errors.DeviceConfigurationError as error:\n"
        "    print(error)\n"
        "print(sg.config.list_physical_devices('GPU'))\n"
    )
    assert "torch's private slot for backends, which 'mine' holds in this process" in said
    assert said.endswith("[]")


@pytest.mark.slow
def test_strict_devices_come_too_late_while_others_are_in_use(forked_tasks: None) -> None:
    said = run(
        "import contextlib, torch, stratagem as sg\n"
        "sg.config.simulate_devices('GPU', 2)\n"
        "def scope_of(strategy):\n"
        "    stack = contextlib.ExitStack()\n"
        "    stack.enter_context(stack.enter_context(strategy).scope())\n"
        "    return stack\n"
        "for opened in (\n"
        "    lambda: scope_of(sg.OneDeviceStrategy('gpu:1')),\n"
        "    lambda: scope_of(sg.MirroredStrategy(['gpu:0', 'gpu:1'])),\n"
        "    lambda: sg.device('gpu:1'),\n"
        "    lambda: sg.devices.serve('cpu:0'),\n"
        "):\n"
        "    with opened():\n"
        "        try:\n"
        "            sg.config.simulate_devices('GPU', 2, strict=True)\n"
        "        except sg.errors.DevicesInUseError as error:\n"
        "            print(str(error).partition(' at ')[0])\n"
        "print(hasattr(torch, 'gpu'), torch.accelerator.is_available())\n"
    )
    late = "simulate_devices('GPU', 2) came too late: devices are in use by"
    assert said.splitlines() == [
        f"{late} OneDeviceStrategy()",
        f"{late} MirroredStrategy()",
        f"{late} sg.device()",
        f"{late} serve('/device:CPU:0')",
        "False False",
    ]


def test_variable_with_two_strict_kinds_is_refused() -> None:
    with pytest.raises(
        sg.errors.EnvironmentVariableError, match=r"strict devices of a process are of one kind.*GPU, TPU"
    ):
        read_variable("gpu:2:strict,tpu:2:strict", 2**34)
    assert len(read_variable("gpu:2:strict,tpu:2", 2**34)) == 2


@pytest.mark.slow
def test_variable_is_named_where_another_backend_has_the_private_slot(forked_tasks: None) -> None:
    said = run(
        "import os, torch\n"
        "torch.utils.rename_privateuse1_backend('mine')\n"
        "os.environ['STRATAGEM_SIMULATE'] = 'gpu:2:strict'\n"
        "import stratagem as sg\n"
        "try:\n"
        "    sg.devices.this_process().make_strict()\n"
        "except sg.errors.EnvironmentVariableError as error:\n"
        "    print(error)\n"
    )
    assert said.startswith(
        "STRATAGEM_SIMULATE='gpu:2:strict': strict devices need torch's private slot for backends, which 'mine'"
    )


@pytest.mark.slow
def test_backward_pass_before_does_no_harm(forked_tasks: None) -> None:
    said = run(
        "import threading, torch, stratagem as sg\n"
        "torch.ones(1, requires_grad=True).sum().backward()\n"
        "sg.config.simulate_devices('GPU', 3, strict=True)\n"
        "weight = torch.ones(2, device='gpu:2', requires_grad=True)\n"
        "weight.register_hook(lambda grad: print(threading.current_thread() is threading.main_thread()))\n"
        "(weight * 2).sum().backward()\n"
        "print(weight.grad.tolist(), weight.grad.device)\n"
    )
    assert said.splitlines() == ["True", "[2.0, 2.0] gpu:2"]


@pytest.mark.slow
def test_without_strict_torch_is_left_alone(forked_tasks: None) -> None:
    said = run(
        "import torch, stratagem as sg\n"
        "before = torch.Tensor.to, torch.tensor, torch.Stream, torch.autograd.Variable._execution_engine\n"
        "sg.config.simulate_devices('GPU', 3)\n"
        "print([str(each.torch_device) for each in sg.config.list_logical_devices('GPU')])\n"
        "print(before == (torch.Tensor.to, torch.tensor, torch.Stream, torch.autograd.Variable._execution_engine))\n"
        "print(hasattr(torch, 'gpu'), torch.accelerator.is_available())\n"
    )
    assert said.splitlines() == ["['cpu', 'cpu', 'cpu']", "True", "False False"]
