"""The small parts: names of distributed objects, what a scope notes, what changes, values of all replicas."""

import collections
import copy
import gc
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stratagem.errors import StrategyError
from stratagem.objects import per_replica, state_diff
from stratagem.objects.per_replica import PerReplica
from stratagem.objects.tracking import Tracker
from stratagem.processes import losses, packing
from stratagem.processes.registry import Registry

# Registry


def test_registry_in_the_controller_does_not_keep_objects_alive() -> None:
    registry, model = Registry(keeps=False), nn.Linear(1, 1)
    registry.add(1, model)
    assert registry.reference(model) == 1
    assert registry.resolve(1) is model
    assert model in registry
    assert registry.live() == {1: model}
    assert registry.take_dropped() == []
    del model
    gc.collect()
    assert registry.live() == {}
    assert registry.take_dropped() == [1]
    assert registry.take_dropped() == []


def test_registry_in_a_child_keeps_objects_until_told() -> None:
    registry = Registry(keeps=True)
    registry.add(1, nn.Linear(1, 1))
    gc.collect()
    model = registry.resolve(1)
    registry.remove(1)
    assert model not in registry
    assert registry.reference(model) is None


def test_a_new_object_in_the_place_of_a_dropped_one_is_not_taken_for_it() -> None:
    registry = Registry(keeps=False)
    for name in range(50):
        registry.add(name, nn.Identity())
        assert registry.reference(nn.Identity()) is None
    assert registry.take_dropped() == list(range(50))


# What a scope notes


def test_tracker_notes_what_is_made_inside_only() -> None:
    before = nn.Module.__init__, nn.Parameter.__new__, torch.optim.Optimizer.__init__
    tracker = Tracker()
    nn.Linear(1, 1)
    with tracker.watch():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert (nn.Module.__init__, nn.Parameter.__new__, torch.optim.Optimizer.__init__) == before
    made = tracker.take()
    assert {id(each) for each in made} == {id(each) for each in (model, *model.parameters(), optimizer, scheduler)}
    assert tracker.take() == []


def test_tracker_puts_constructors_back_after_an_error() -> None:
    before = nn.Module.__init__, nn.Parameter.__new__, torch.amp.GradScaler.__init__
    with pytest.raises(ValueError, match="x"), Tracker().watch():
        raise ValueError("x")
    assert (nn.Module.__init__, nn.Parameter.__new__, torch.amp.GradScaler.__init__) == before


def test_tracker_finds_copies_in_what_was_made() -> None:
    tracker, outside = Tracker(), nn.Sequential(nn.BatchNorm1d(2))
    with tracker.watch():
        average = torch.optim.swa_utils.AveragedModel(outside)
    made = {id(each) for each in tracker.take()}
    assert {id(each) for each in [*average.modules(), *average.parameters()]} <= made
    assert not {id(each) for each in outside.modules()} & made


def test_tracker_refuses_what_another_has_until_that_lets_go() -> None:
    first, second, model = Tracker(), Tracker(), nn.Linear(1, 1)
    first.note(model)
    for refused in (model, nn.Sequential(model), torch.optim.SGD(model.parameters(), lr=1)):
        if isinstance(refused, torch.optim.Optimizer):
            first.note(refused)
        with pytest.raises(StrategyError, match="belongs to another strategy, which is still open"):
            second.note(refused)
    assert second.take() == []
    assert len(first.pending_parameters()) == 2
    first.let_go()
    assert first.pending_parameters() == []
    second.note(model)
    assert len(second.take()) == 3


def test_tracker_gives_each_object_once() -> None:
    tracker, model = Tracker(), nn.Linear(1, 1)
    tracker.note(model)
    tracker.note(model)
    assert len(tracker.take()) == 3
    tracker.note(model)
    assert tracker.take() == []
    tracker.note(nn.Linear(1, 1))
    gc.collect()
    assert tracker.take() == []


# What changes between runs


def described(named: dict[int, Any]) -> Any:
    return state_diff.snapshot(named, {id(obj): name for name, obj in named.items()})


def passed_on(change: Any, objects: list[Any], others: list[Any]) -> None:
    named = dict(enumerate(objects))
    before = described(named)
    change(*objects)
    changes = state_diff.difference(before, described(named))
    state_diff.apply(changes, dict(enumerate(others)).__getitem__)


def test_flags_and_options_are_passed_on() -> None:
    model = nn.Dropout(0.1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1), foreach=False)
    other, other_optimizer = copy.deepcopy(model), copy.deepcopy(optimizer)

    def change(model: Any, optimizer: Any) -> None:
        model.eval()
        optimizer.param_groups[0]["lr"].fill_(0.5)

    passed_on(change, [model, optimizer], [other, other_optimizer])
    assert not other.training
    assert other_optimizer.param_groups[0]["lr"] == 0.5


def test_replaced_parts_are_passed_on() -> None:
    def parts() -> list[Any]:
        first, second = nn.Linear(2, 2), nn.Linear(2, 5)
        return [nn.Sequential(first), first, second]

    ours, others = parts(), parts()
    passed_on(lambda model, _, second: model.__setitem__(0, second), ours, others)
    assert others[0][0] is others[2]


def test_parts_are_taken_out_put_in_order_and_left_alone_when_unknown() -> None:
    def parts() -> list[Any]:
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        return [nn.Sequential(first, second), first, second]

    def change(model: Any, first: Any, second: Any) -> None:
        model[0], model[1] = second, nn.Identity()
        first.bias = None

    ours, others = parts(), parts()
    others_second = others[0][1]
    passed_on(change, ours, others)
    assert list(others[0]) == [others[2], others_second]
    assert others[1].bias is None
    passed_on(lambda model, *_: model.__delitem__(1), ours, others)
    assert list(others[0]) == [others[2]]


def test_groups_of_an_optimizer_come_and_go() -> None:
    def parts() -> list[Any]:
        parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
        return [torch.optim.SGD(parameters[:1], lr=0.1), *parameters]

    ours, others = parts(), parts()
    passed_on(lambda optimizer, _, second: optimizer.add_param_group({"params": [second], "lr": 0.5}), ours, others)
    assert [group["lr"] for group in others[0].param_groups] == [0.1, 0.5]
    assert others[0].param_groups[1]["params"][0] is others[2]
    passed_on(lambda optimizer, *_: optimizer.param_groups.pop(0), ours, others)
    assert [group["params"][0] is others[2] for group in others[0].param_groups] == [True]


def test_nothing_changed_is_nothing_passed_on() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    named = dict(enumerate([model, *model, optimizer, *model.parameters()]))
    assert state_diff.difference(described(named), described(named)) == {}


# Values of all replicas


class Kept:
    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.next_number = 0


def arrived(packed: Any) -> Any:
    sent = packing.pack(packed)
    return packing.unpack(sent.data, [bytearray(each) for each in sent.buffers], lambda _: None)


def test_large_results_are_fetched_only_when_asked_for() -> None:
    kept, fetched = Kept(), []

    def fetch(rank: int, number: int) -> Any:
        fetched.append((rank, number))
        return kept.values[number]

    answers = [
        arrived(per_replica.pack_result({"large": torch.full((50_000,), 2.0), "small": torch.ones(3)}, kept))
        for _ in range(2)
    ]
    joined = per_replica.join_results([{"large": torch.ones(50_000), "small": torch.ones(3)}, *answers], None, fetch)
    assert repr(joined["large"]).count("...") >= 2
    assert joined["small"].values[2].tolist() == [1, 1, 1]
    assert not fetched
    assert joined["large"][2].sum() == 100_000
    assert fetched == [(2, 2)]
    assert len(joined["large"].values) == 3
    assert fetched == [(2, 2), (1, 1)]
    assert joined["large"].values[1] is joined["large"][1]
    assert len(fetched) == 2


Pair = collections.namedtuple("Pair", "a b")


def test_results_of_any_nesting_are_joined() -> None:
    result = {"pair": Pair(1, [torch.ones(1), None]), "text": "x", "shape": torch.ones(2, 3).shape}
    packed = arrived(per_replica.pack_result(result, Kept()))
    joined = per_replica.join_results([per_replica.kept_result(result), packed], (1, 2), lambda *_: None)
    assert isinstance(joined["pair"], Pair)
    assert joined["pair"].b[1].values == (None, None)
    assert joined["text"].values == ("x", "x")
    assert joined["text"].counts == (1, 2)
    assert joined["shape"][1].values == (3, 3)


def test_results_do_not_change_later() -> None:
    weight, large = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(50_000))
    kept = Kept()
    packed = arrived(per_replica.pack_result((weight, large), kept))
    joined = per_replica.join_results(
        [per_replica.kept_result((weight, large)), packed], None, lambda _, number: kept.values[number]
    )
    with torch.no_grad():
        weight.fill_(1)
        large.fill_(1)
    for values in joined:
        for each in values.values:
            assert each.sum() == 0
            assert not each.requires_grad


def test_fresh_large_results_are_not_copied_and_shared_ones_are() -> None:
    fresh, held = torch.zeros(50_000), nn.Linear(300, 300, bias=False)
    outcome = held(torch.ones(300, 300))
    shared = [held.weight, held.weight.t(), held.weight.data, held.weight.detach()]
    joined = per_replica.join_results([per_replica.kept_result([fresh, outcome, *shared])], None, lambda *_: None)
    address = [each[0].data_ptr() for each in joined]
    assert address[:2] == [fresh.data_ptr(), outcome.data_ptr()]
    assert held.weight.data_ptr() not in address


@pytest.mark.parametrize(
    "use",
    [
        lambda value: value.item(),
        lambda value: value.backward(),
        lambda value: f"{value:.3f}",
        float,
        int,
        lambda value: value + 1,
        lambda value: 2 * value,
        lambda value: value < 1,
        lambda value: torch.ones(2) + value,
        torch.exp,
        lambda value: torch.stack([value, value]),
        np.asarray,
    ],
)
def test_values_of_all_replicas_are_not_taken_for_one(use: Any) -> None:
    value = PerReplica([torch.tensor(1.0), torch.tensor(3.0)])
    with pytest.raises(StrategyError, match=r"strategy.reduce\('mean', value\).*local_results.*strategy.run") as raised:
        use(value)
    assert isinstance(raised.value, TypeError)


def test_values_of_all_replicas_can_be_copied_printed_and_asked_about() -> None:
    value = PerReplica([torch.tensor(1.0), 2], (1, 1))
    for same in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):  # noqa: S301  # made here
        assert same.values == value.values
        assert same.counts == value.counts
    assert f"{value}" == str(value) == "PerReplica(tensor(1.), 2)"
    assert not hasattr(value, "shape")
    assert not isinstance(value, torch.Tensor)
    assert torch.utils._pytree.tree_leaves({"a": value}) == [value]
    assert list(value) == [1, 2]


def test_different_structures_are_named() -> None:
    with pytest.raises(StrategyError, match=r"replica 0 returned \{'loss', 'acc'\}, replica 1 returned \{'loss'\}"):
        per_replica.join_results([{"loss": 1, "acc": 2}, {"loss": 1}], None, lambda *_: None)


def test_reductions() -> None:
    value = PerReplica([torch.tensor([1.0, 4.0]), torch.tensor([3.0, 0.0])], (3, 1))
    assert per_replica.reduce("sum", value, weighted=True).tolist() == [4, 4]
    assert per_replica.reduce("mean", value, weighted=True).tolist() == [1.5, 3]
    assert per_replica.reduce("mean", value, weighted=False).tolist() == [2, 2]
    assert per_replica.reduce("max", value, weighted=True).tolist() == [3, 4]
    assert per_replica.reduce("min", value, weighted=True).tolist() == [1, 0]


def test_replicas_without_examples_count_for_nothing() -> None:
    value = PerReplica([torch.tensor(2.0), torch.tensor(float("nan"))], (4, 0))
    for op in ("sum", "mean", "max", "min"):
        assert per_replica.reduce(op, value, weighted=True) == 2
    assert per_replica.reduce("mean", value, weighted=False) == 2


@pytest.mark.parametrize("each", [True, 2, 2.5, 1j, torch.tensor(3, dtype=torch.int32), torch.tensor(0.5).bfloat16()])
def test_mean_of_every_kind_of_number(each: Any) -> None:
    mean = per_replica.reduce("mean", PerReplica([each, each]), weighted=True)
    assert mean == torch.as_tensor(each)


def test_gather_fills_up_what_is_shorter_or_names_the_shapes() -> None:
    value = PerReplica([torch.ones(2, 3), torch.ones(1, 5), torch.ones(1, 1)], (2, 1, 0))
    with pytest.raises(StrategyError, match=r"axis 0 .* \(2, 3\), \(1, 5\); gather\(value, pad=0\)"):
        per_replica.gather(value, 0)
    assert per_replica.gather(value, 0, pad=-1).tolist() == [[1, 1, 1, -1, -1]] * 2 + [[1] * 5]
    across = PerReplica([torch.ones(2, 1, 3), torch.ones(4, 2, 3)])
    assert per_replica.gather(across, 1, pad=0).shape == per_replica.gather(across, -2, pad=0).shape == (4, 3, 3)
    with pytest.raises(StrategyError, match="as many axes"):
        per_replica.gather(PerReplica([torch.ones(2), torch.ones(2, 2)]), 0, pad=0)


def test_gather_of_lists_is_a_list() -> None:
    assert per_replica.gather(PerReplica([["a", "b"], ["c"], ["a"]], (2, 1, 0)), 0) == ["a", "b", "c"]


def test_sparse_tensors_are_joined_and_added() -> None:
    one, two = torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()
    joined = per_replica.gather(PerReplica([one, two]), 0)
    assert joined.is_sparse
    assert joined.to_dense().tolist() == [[1, 0], [0, 1], [1, 1], [1, 1]]
    assert per_replica.reduce("sum", PerReplica([one, two]), weighted=True).to_dense().tolist() == [[2, 1], [1, 2]]
    mean = per_replica.reduce("mean", PerReplica([one, two], (3, 1)), weighted=True)
    assert mean.to_dense().tolist() == [[1, 0.25], [0.25, 1]]
    assert per_replica.reduce("max", PerReplica([one, two]), weighted=True).tolist() == [[1, 1], [1, 1]]


def test_nested_tensors_are_joined_by_their_rows() -> None:
    parts = [torch.nested.nested_tensor([torch.ones(size)], layout=torch.jagged) for size in (2, 3)]
    assert [len(row) for row in per_replica.gather(PerReplica(parts), 0).unbind()] == [2, 3]
    with pytest.raises(StrategyError, match="nested tensors; use gather"):
        per_replica.reduce("sum", PerReplica(parts), weighted=True)


def test_what_cannot_be_reduced_is_named() -> None:
    with pytest.raises(StrategyError, match="no reduction named 'avg'; known: sum, mean, max, min"):
        per_replica.reduce("avg", PerReplica([1.0]), weighted=True)
    with pytest.raises(StrategyError, match="str 'ok'; return tensors or numbers"):
        per_replica.reduce("mean", PerReplica(["ok", "ok"]), weighted=True)
    with pytest.raises(StrategyError, match=r"replicas returned \(1,\), \(2,\); use gather"):
        per_replica.reduce("sum", PerReplica([torch.ones(1), torch.ones(2)]), weighted=True)
    with pytest.raises(StrategyError, match="cannot gather NoneType None"):
        per_replica.gather(PerReplica([None]), 0)


def test_gather_along_axes_and_of_numbers() -> None:
    value = PerReplica([torch.ones(2, 1), torch.zeros(2, 3)])
    assert per_replica.gather(value, 1).shape == (2, 4)
    assert per_replica.gather(value, -1).shape == (2, 4)
    assert per_replica.gather(PerReplica([1.0, torch.tensor(2.0)]), 0).tolist() == [1, 2]


# How a process ended


@pytest.mark.parametrize(
    ("status", "words"),
    [(None, "ended"), (9, "was killed by SIGKILL"), (3 << 8, "ended with code 3"), (63, "signal 63")],
)
def test_how_a_process_ended_in_words(status: int | None, words: str) -> None:
    assert words in losses.describe_status(status)
