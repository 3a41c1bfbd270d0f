"""Gradients on their way to other machines, while the backward pass goes on."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from stratagem.collectives.exchange import WindowExchange
from stratagem.collectives.signals import Signals
from stratagem.processes.region import Region
from stratagem.variables.store import Store
from stratagem.variables.windows import Windows

WIDTH = 1000


class OtherMachine:
    """Another machine, whose gradients are all one."""

    def __init__(self) -> None:
        self.sums: list[torch.Tensor] = []
        self.num_bytes = 0
        self.watch: Callable[[], None] = int

    def start_sum(self, row: torch.Tensor, _: torch.dtype) -> Callable[[], bool]:
        self.sums.append(row)
        self.num_bytes += row.nbytes
        self.watch()

        def wait() -> bool:
            row.add_(int(row.is_floating_point()))  # no gradient of it was late, or is sparse
            return bool(row.isfinite().all())

        return wait


def windows_of(model: nn.Module) -> tuple[Windows, OtherMachine, Store]:
    store = Store.take_in(list(enumerate(model.parameters())), torch.float32, {})
    slots = Region.create(WindowExchange.num_slot_bytes(store.num_elements, len(store.placements), store.dtype, 1))
    control = Region.create(Signals.num_bytes(1))
    signals = Signals(control, 0, 1)
    signals.reset()
    exchange = WindowExchange(
        *(slots, Region.create(store.region.num_bytes), store.dtype),
        *([(each.offset, each.numel) for each in store.placements], store.num_elements, signals),
        further=True,
        forms=[(each.shape, each.stride) for each in store.placements],
    )
    other = OtherMachine()
    recipe = SimpleNamespace(size=1, num_machines=2, travels_as=lambda dtype: dtype)
    replica: Any = SimpleNamespace(recipe=recipe, signals=signals, between=other)
    windows = Windows(replica)
    windows.add(store, exchange)
    return windows, other, store


def run_pass(windows: Windows, model: nn.Module, factor: float = 1.0) -> Any:
    windows.begin(syncing=True, counts=True)
    (model(torch.ones(2, WIDTH)).sum() * factor).backward()
    own = {number: each.grad for number, each in enumerate(model.parameters()) if each.grad is not None}
    return windows.sum(own | dict(windows.taken()))


def test_gradients_are_given_up_once_they_are_on_their_way() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    windows, other, _ = windows_of(model)
    held = []
    other.watch = lambda: held.append(sum(each.nbytes for each in windows._early._arrived.values()))
    windows.begin(syncing=True, counts=True)
    model(torch.ones(2, WIDTH)).sum().backward()
    assert other.num_bytes > 5 * 4 * WIDTH * WIDTH  # while the pass went on: all but the last window
    assert max(held) == 0
    summed = windows.sum(windows.taken())
    assert windows._early.taken() == {}
    assert all(each.grad is None for each in model.parameters())
    assert summed.present == set(range(6))
    assert summed.is_finite


def test_sums_are_those_of_gradients_that_were_given_up() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model(torch.ones(2, WIDTH)).sum().backward()
    expected = [each.grad.clone() + 1 for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    windows, _, _ = windows_of(model)
    assert run_pass(windows, model).is_finite
    for ours, theirs in zip(windows.totals(range(8)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradient_that_was_not_finite_when_it_was_given_up_is_known() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    windows, _, _ = windows_of(model)
    windows.begin(syncing=True, counts=True)
    (model(torch.ones(2, WIDTH)).sum() * float("inf")).backward()
    taken = dict(windows.taken())
    assert set(taken) == set(range(4))
    assert not any(bool(each.isfinite().all()) for each in taken.values())
    assert not windows.sum(taken).is_finite


def test_failed_pass_gives_back_what_was_not_sent() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 10, bias=False), nn.Linear(10, 10, bias=False))
    windows, other, _ = windows_of(model)
    windows.begin(syncing=True, counts=True)
    model(torch.ones(2, WIDTH)).sum().backward()
    assert not other.sums  # all of it fits into one window
    assert all(each.grad is None for each in model.parameters())
    windows.abandon()
    assert all(each.grad is not None for each in model.parameters())
