"""TPUStrategy without torch_xla: what is said where there is no TPU, and simulated ones."""

import os
import sys
from pathlib import Path

import pytest
import torch

import stratagem as sg
from stratagem.devices.host import Host
from stratagem.devices.vendors import torch_xla, tpu_libraries
from stratagem.errors import DeviceConfigurationError, DeviceNotFoundError, EnvironmentVariableError, StrategyError
from tests.cluster import nursery

pytestmark = pytest.mark.usefixtures("forked_tasks")
has_xla = pytest.mark.skipif(torch_xla.is_installed(), reason="torch_xla is here")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "CLOUD_TPU_TASK_ID"):
        monkeypatch.delenv(name, raising=False)


@has_xla
def test_absence_names_both_libraries_and_how_to_install_them() -> None:
    assert sg.config.list_physical_devices("TPU") == []
    with pytest.raises(DeviceNotFoundError) as caught:
        sg.TPUStrategy()
    told = str(caught.value)
    assert "torch_tpu or torch_xla, and neither is installed" in told
    assert "0 TPU chip(s)" in told
    assert tpu_libraries.INSTALL in told
    assert "sg.config.simulate_devices('TPU', 2)" in told


def library(folder: Path, name: str, program: str, version: str) -> str:
    """A program that begins where a library of that name is installed."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(program)
    (folder / f"{name}-{version}.dist-info").mkdir()
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    return f"import sys; sys.path.insert(0, {str(folder)!r}); import stratagem as sg;"


def told_by(program: str, **variables: str) -> str:
    """The last line of a program that fails."""
    done = nursery.run(["-c", program], 50, {**os.environ, **variables})
    assert done.returncode == 1, done.stdout
    return str(done.stderr).strip().splitlines()[-1]


@has_xla
def test_torch_xla_without_a_tpu_says_what_was_looked_for(tmp_path: Path) -> None:
    begin = library(tmp_path, "torch_xla", "", "2.9.0")
    told = told_by(f"{begin} assert sg.config.list_physical_devices('TPU') == []; sg.TPUStrategy()")
    assert "torch_xla 2.9.0 is installed, and the PCI bus of this machine has 0 TPU chip(s)" in told
    assert "PJRT_DEVICE is not set" in told
    assert "PJRT_DEVICE=CPU CPU_NUM_DEVICES=4" in told


@has_xla
def test_torch_xla_for_another_torch_says_which_it_needs(tmp_path: Path) -> None:
    begin = library(tmp_path, "torch_xla", "raise ImportError('_XLAC.so: undefined symbol: _ZN5')", "2.9.0")
    told = told_by(f"{begin} sg.TPUStrategy()", PJRT_DEVICE="CPU")
    assert f"torch_xla 2.9.0 cannot be loaded beside torch {torch.__version__} (_XLAC.so: undefined symbol" in told
    assert "pip install torch==2.9.* torch_xla==2.9.*" in told


def test_torch_tpu_without_a_tpu_says_what_was_looked_for() -> None:
    program = """
import sys, types, torch
module = types.ModuleType("torch_tpu"); module.device_count = lambda: 0
torch.utils.rename_privateuse1_backend("tpu"); torch._register_device_module("tpu", module)
import stratagem as sg
assert sg.config.list_physical_devices("TPU") == []
sg.TPUStrategy()
"""
    told = told_by(program)
    assert "torch_tpu is loaded and finds none: torch.tpu.device_count() is 0" in told


def test_chips_are_found_on_the_bus(tmp_path: Path) -> None:
    ids = {"0": ("0x1ae0", "0x0063"), "1": ("0x1ae0", "0x0063"), "2": ("0x1ae0", "0x0042"), "3": ("0x10de", "0x0063")}
    for place, (vendor, device) in ids.items():
        folder = tmp_path / "sys/bus/pci/devices" / place
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    assert Host(tmp_path).num_tpu_chips() == 2
    assert "2 TPU chip(s)" in tpu_libraries.why_none(Host(tmp_path))


@pytest.mark.parametrize("text", ["", "0", "-1", "four", "1.5"])
def test_number_of_devices_of_the_cpu_is_a_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", text)
    monkeypatch.setattr(torch_xla, "is_installed", lambda: True)
    with pytest.raises(EnvironmentVariableError, match=f"CPU_NUM_DEVICES='{text}' is not a whole number from 1 up"):
        sg.config.list_physical_devices("TPU")


def test_devices_of_torch_xla_are_described_without_loading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    monkeypatch.setattr(torch_xla, "is_installed", lambda: True)
    monkeypatch.setattr(torch_xla, "load", lambda: None)
    assert [str(each.torch_device) for each in sg.config.list_logical_devices("TPU")] == ["xla:0", "xla:1"]
    assert sg.config.get_device_details("/physical_device:TPU:1").device_name == "XLA on the CPU"
    with pytest.raises(DeviceConfigurationError, match="memory of a TPU cannot be limited or divided"):
        sg.config.set_logical_device_configuration("tpu:0", [sg.config.LogicalDeviceConfiguration(memory_limit=64)])
    for make in (sg.MirroredStrategy, sg.CentralStorageStrategy, lambda: sg.ParameterServerStrategy(devices=["tpu:0"])):
        with pytest.raises(DeviceConfigurationError, match=r"compute one program together.*use sg.TPUStrategy\(\)"):
            make()
    assert sg.get_strategy().devices[0].name == "/device:TPU:0"
    assert "torch_xla" not in sys.modules or torch_xla.is_installed()


def test_simulated_tpus_have_a_replica_each(fork_server: None) -> None:
    sg.config.simulate_devices("TPU", 2)
    with sg.TPUStrategy(sg.cluster.TPUResolver()) as strategy:
        assert isinstance(strategy, sg.TPUStrategy)
        assert [each.name for each in strategy.devices] == ["/device:TPU:0", "/device:TPU:1"]
        assert strategy.num_replicas_in_sync == 2
        with strategy.scope():
            model = torch.nn.Linear(2, 1, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            torch.nn.init.zeros_(model.weight)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            return loss

        for batch in strategy.distribute([torch.arange(6.0).view(3, 2)]):
            strategy.run(step, args=(batch,))
        assert model.weight.tolist() == [[-2.0, -3.0]]
        with pytest.raises(StrategyError, match=r"scope of MirroredStrategy entered inside .* another TPUStrategy"):
            _enter_another(strategy)


def _enter_another(strategy: sg.Strategy) -> None:
    with strategy.scope(), sg.MirroredStrategy(["cpu:0"]) as other, other.scope():
        pass


@pytest.mark.parametrize("resolver", ["local", sg.cluster.SimpleResolver({"worker": ["a:1"]}), 3])
def test_resolver_is_one_of_tpus(resolver: object) -> None:
    with pytest.raises(StrategyError, match=r"resolver is a sg.cluster.TPUResolver, or left out.*got"):
        sg.TPUStrategy(resolver)  # type: ignore[arg-type]


def test_several_hosts_of_torch_tpu_are_those_of_another_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    sg.config.simulate_devices("TPU", 2)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "one,two")
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    with pytest.raises(StrategyError, match=r"one host.*2 worker, this is worker/0.*MultiWorkerMirroredStrategy"):
        sg.TPUStrategy(sg.cluster.TPUResolver())


def test_tensorflows_names_lead_here() -> None:
    assert sg.distribute.TPUStrategy is sg.TPUStrategy
    assert sg.distribute.experimental.TPUStrategy is sg.TPUStrategy
    assert sg.distribute.cluster_resolver.TPUClusterResolver is sg.cluster.TPUResolver
    with pytest.raises(sg.errors.UnknownNameError, match=r"leave it out: sg.TPUStrategy\(\) finds the TPUs"):
        sg.tpu.experimental.initialize_tpu_system(None)
