"""Gradients on their way to other machines, while the backward pass goes on."""

import os
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stratagem import _torch
from stratagem.collectives.exchange import WindowExchange
from stratagem.collectives.signals import Signals
from stratagem.processes.region import Region
from stratagem.variables.store import Store
from stratagem.variables.windows import Windows

WIDTH = 1000
LARGE = 4 * 2**19  # elements: some windows lie within a parameter of so many, whatever is before it


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
            row.add_(int(row.is_floating_point() or row.is_complex()))  # no gradient of it was late, or is sparse
            return bool(row.isfinite().all())

        return wait


def windows_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[Windows, OtherMachine, Store]:
    store = Store.take_in(list(enumerate(model.parameters())), dtype, {})
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
    used = nn.Sequential(nn.Linear(WIDTH, 10, bias=False), nn.Linear(10, 10, bias=False))
    last = nn.Linear(LARGE, 1, bias=False)  # of which the windows consist that go first
    windows, other, _ = windows_of(nn.Sequential(used, last))
    windows.begin(syncing=True, counts=True)
    used(torch.ones(2, WIDTH)).sum().backward()
    assert not other.sums
    assert all(each.grad is None for each in used.parameters())
    windows.abandon()
    assert all(each.grad is not None for each in used.parameters())


def test_gradients_that_fit_into_one_window_stay_where_they_are_until_the_pass_ends() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
    windows, other, _ = windows_of(model)
    windows.begin(syncing=True, counts=True)
    assert not any(any(_torch.gradient_hooks.hooks_of(each)) for each in model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    assert not other.sums
    own = {number: each.grad for number, each in enumerate(model.parameters()) if each.grad is not None}
    assert windows.sum(own).present == set(range(20))
    assert other.sums


def parameters_around_a_large_one() -> nn.ParameterList:
    """A small one, one that is copied to where its sum is made, and one that is summed where it is."""
    return nn.ParameterList([torch.zeros(10), torch.zeros(WIDTH, 50), torch.zeros(2, LARGE // 2)])


def loss_of(parameters: nn.ParameterList) -> torch.Tensor:
    """A loss whose gradients are 1, 2 and so on."""
    losses = [(each * number).sum() for number, each in enumerate(parameters, start=1)]
    return torch.stack(losses).sum()


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tensors}


def sums_after(windows: Windows) -> list[torch.Tensor]:
    """Ends a pass, as the ledger does."""
    summed = windows.sum(windows.taken())
    totals = list(windows.totals(sorted(summed.present)))
    windows.end()
    return totals


def test_large_gradient_becomes_its_sum() -> None:
    model = parameters_around_a_large_one()
    windows, other, _ = windows_of(model)
    windows.begin(syncing=True, counts=True)
    loss_of(model).backward()
    assert other.num_bytes > 4 * (LARGE - 2**19)  # while the pass went on
    sums = sums_after(windows)
    assert [each.unique().tolist() for each in sums] == [[2.0], [3.0], [4.0]]
    assert storages(sums[2:]) < storages(other.sums)
    del other.sums[:]
    assert _torch.storages.num_storage_users(sums[2]) == _torch.storages.NUM_OWN_USERS


def test_sums_that_are_made_elsewhere_take_no_shared_memory() -> None:
    model = parameters_around_a_large_one()
    windows, _, store = windows_of(model)
    (row,) = windows._rows
    for _ in range(2):
        windows.begin(syncing=True, counts=True)
        loss_of(model).backward()
        sums_after(windows)
        used = 512 * os.fstat(row.exchange._total.descriptor).st_blocks
        assert used <= store.region.num_bytes - 4 * 2**20  # of the large one two windows at least


def kept_by_a_hook(parameter: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    kept: list[torch.Tensor] = []
    seen = parameter.view(-1)
    seen.register_hook(kept.append)
    return (seen * 3).sum(), kept


def kept_as_an_array(parameter: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    array = np.full(tuple(parameter.shape), 3.0, np.float32)

    class FromArray(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, given: torch.Tensor) -> torch.Tensor:
            return given.sum()

        @staticmethod
        def backward(_: Any, __: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(array)

    return FromArray.apply(parameter), [torch.from_numpy(array)]


def kept_from_before(parameter: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    parameter.grad = kept = torch.ones_like(parameter)
    return (parameter * 2).sum(), [kept]


def kept_as_part_of_more(parameter: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    kept: list[torch.Tensor] = []
    more = torch.cat([parameter, torch.zeros(1, LARGE // 2)])
    more.register_hook(lambda gradient: kept.append(gradient[:2]))
    return (more * 3).sum(), kept


@pytest.mark.parametrize("keep", [kept_by_a_hook, kept_as_an_array, kept_from_before, kept_as_part_of_more])
def test_gradient_that_a_program_has_kept_is_not_summed_in_place(keep: Callable[..., Any]) -> None:
    model = parameters_around_a_large_one()
    windows, other, _ = windows_of(model)
    loss, kept = keep(model[2])
    windows.begin(syncing=True, counts=True)
    loss.backward()
    (total,) = sums_after(windows)[-1:]
    assert total.eq(4).all()
    assert [each.unique().tolist() for each in kept] == [[3.0]]
    assert not storages(kept) & (storages(other.sums) | storages([total]))


def test_gradient_that_is_only_marked_as_conjugate_is_summed_as_what_it_means() -> None:
    model = nn.ParameterList([torch.zeros(2, LARGE // 2, dtype=torch.complex64)])
    windows, _, _ = windows_of(model, torch.complex64)
    loss = (model[0].conj() * (1 + 2j)).sum().real
    (plain,) = torch.autograd.grad(loss, [model[0]], retain_graph=True)
    assert plain.is_conj()
    windows.begin(syncing=True, counts=True)
    loss.backward()
    (total,) = sums_after(windows)
    assert torch.equal(total, plain.resolve_conj() + 1)


def test_gradients_that_autograd_lays_into_the_same_memory_are_summed_each() -> None:
    model = nn.ParameterList([torch.zeros(2, LARGE // 2), torch.zeros(LARGE)])
    windows, _, _ = windows_of(model)
    windows.begin(syncing=True, counts=True)
    ((model[0].view(-1) + model[1].view(-1)) * 3).sum().backward()
    sums = sums_after(windows)
    assert [each.unique().tolist() for each in sums] == [[4.0], [4.0]]
    assert len(storages(sums)) == 2


def test_large_gradients_that_come_in_parts_are_all_summed() -> None:
    model = parameters_around_a_large_one()
    windows, other, _ = windows_of(model)
    windows.begin(syncing=True, counts=True)
    first, second = loss_of(model), loss_of(model)
    model[2].register_post_accumulate_grad_hook(lambda _: None)
    (first + second).backward()  # added by autograd
    num_sent = len(other.sums)
    assert num_sent > 1
    loss_of(model).backward()  # after it was sent
    sums = sums_after(windows)
    assert len(other.sums) > 2 * num_sent
    # The other machine, whose ones count in each sum, has one for what was late too.
    assert [each.unique().tolist() for each in sums] == [[5.0], [8.0], [11.0]]


def test_failed_pass_gives_back_large_gradients_that_were_not_sent() -> None:
    model = nn.ParameterList([torch.zeros(LARGE), torch.zeros(10)])
    windows, other, _ = windows_of(model)
    windows.begin(syncing=True, counts=True)
    (model[0] * 3).sum().backward()
    assert not other.sums  # the other one goes first
    assert model[0].grad is None
    windows.abandon()
    assert model[0].grad.unique().tolist() == [3.0]
    windows.begin(syncing=True, counts=True)
    loss_of(model).backward()
    assert [each.unique().tolist() for each in sums_after(windows)] == [[5.0], [3.0]]


def test_large_gradients_that_a_pass_has_not_sent_early_are_summed_in_copies() -> None:
    model = parameters_around_a_large_one()
    windows, _, _ = windows_of(model)
    windows.begin(syncing=False, counts=True)
    (model[2] * 3).sum().backward()
    own = {2: model[2].grad}
    summed = windows.sum(own)
    assert summed.present >= {2}
    (total,) = windows.totals([2])
    windows.end()
    assert total.unique().tolist() == [4.0]
    assert own[2].unique().tolist() == [3.0]
