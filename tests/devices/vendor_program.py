"""A program on the devices of a vendor that stratagem has no row for; see `vendor_backend`."""

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.devices import kind_table
from tests.devices import vendor_backend


def _trained(strategy: sg.Strategy) -> list[torch.Tensor]:
    with strategy, strategy.scope():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: torch.Tensor) -> str:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            return str(x.device)

        batch = torch.arange(21.0).view(7, 3) / 10
        places = [strategy.local_results(strategy.run(step, args=each)) for each in strategy.distribute([(batch,)] * 3)]
        assert places[0] == tuple(str(each.torch_device) for each in strategy.devices), places
        return [each.detach().cpu().clone() for each in model.parameters()]


def main() -> None:
    torch.set_num_threads(1)
    assert [each.name for each in sg.config.list_physical_devices("acme")] == [
        "/physical_device:ACME:0",
        "/physical_device:ACME:1",
    ]
    assert sg.config.list_logical_devices("ACME")[1].torch_device == torch.device("acme", 1)
    assert kind_table.by_preference()[-2:] == ("ACME", "CPU")
    assert sg.config.get_device_details("acme:0").total_memory_bytes == 2**31
    held = torch.zeros(1000, device="acme:1")
    assert sg.config.get_memory_info("acme:1")["current"] == held.numel() * 4
    assert "acme" in kind_table.autocast_types()
    with sg.device("acme:1"):
        assert str(torch.ones(2).device) == "acme:1"
    assert getattr(getattr(kind_table.of_torch_type("acme"), "group", None), "name", None) == "acmeccl"

    expected = _trained(sg.OneDeviceStrategy("cpu:0"))
    for strategy in (sg.OneDeviceStrategy("acme:1"), sg.MirroredStrategy(["acme:0", "acme:1"])):
        for ours, theirs in zip(_trained(strategy), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    with pytest.raises(sg.errors.DeviceConfigurationError, match="which 'acme' holds in this process"):
        sg.config.simulate_devices("GPU", 2, strict=True)
    print("all of it works")


if __name__ == "__main__":
    assert vendor_backend.TYPE == "acme"
    main()
