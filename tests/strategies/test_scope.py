"""Where code is: in which scope, in which replica; and the life of strategies."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

import stratagem as sg
from stratagem.errors import StrategyError


def test_questions_outside_inside_a_scope_and_in_a_run(strategy: sg.MirroredStrategy) -> None:
    assert not sg.has_strategy()
    assert not sg.in_cross_replica_context()
    assert sg.get_strategy().num_replicas_in_sync == 1
    with strategy.scope() as entered:
        assert entered is strategy
        assert sg.has_strategy()
        assert sg.get_strategy() is strategy
        assert sg.in_cross_replica_context()
        assert sg.get_replica_context() is None

    def look() -> tuple[Any, ...]:
        context = sg.get_replica_context()
        assert context is not None
        world = sg.get_strategy().num_replicas_in_sync, sg.get_strategy().world_size, context.num_replicas_in_sync
        return context.replica_id_in_sync_group, sg.get_strategy().global_rank, sg.has_strategy(), *world

    first, second = strategy.local_results(strategy.run(look))
    assert first == (0, 0, True, 2, 2, 2)
    assert second == (1, 1, True, 2, 2, 2)
    assert strategy.run(sg.in_cross_replica_context).values == (False, False)


def test_collectives_of_a_replica(strategy: sg.MirroredStrategy) -> None:
    def exchange() -> Any:
        context = sg.get_replica_context()
        assert context is not None
        mine = torch.tensor([float(context.replica_id_in_sync_group + 1)])
        summed = context.all_reduce("sum", {"a": mine, "b": 2.0})
        gathered = context.all_gather(mine)
        merged = context.merge_call(lambda _, each: sum(each.values), args=(mine,))
        return summed["a"], summed["b"], gathered, merged

    for result in strategy.local_results(strategy.run(exchange)):
        assert [each.tolist() for each in result] == [[3.0], 4.0, [1.0, 2.0], [3.0]]


def test_the_program_is_its_own_replica_outside_all_strategies() -> None:
    context = sg.get_replica_context()
    assert context is not None
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync, context.has_examples) == (0, 1, True)
    assert context.strategy is sg.get_strategy()
    assert context.all_reduce("mean", [torch.tensor(2.0)]) == [2.0]
    assert context.all_gather(torch.tensor(2.0)).tolist() == [2.0]
    assert context.merge_call(lambda strategy, x: strategy.reduce("sum", x), args=(torch.tensor(2.0),)) == 2.0
    with context.weight(3):
        context.update(lambda: None)


def test_merged_calls_reduce_and_return_what_is_of_each_replica(strategy: sg.MirroredStrategy) -> None:
    def merged(merging: Any, x: sg.PerReplica, *, y: dict[str, sg.PerReplica]) -> Any:
        assert sg.in_cross_replica_context()
        assert sg.get_replica_context() is None
        assert sg.get_strategy() is merging
        assert merging.num_replicas_in_sync == 2
        parts = merging.local_results(x)
        return merging.reduce("mean", x), merging.gather(y), sg.PerReplica([each * 10 for each in parts]), len(parts)

    def step(x: torch.Tensor) -> Any:
        context = sg.get_replica_context()
        assert context is not None
        found = context.merge_call(merged, args=(x.mean(),), kwargs={"y": {"a": x}})
        assert not sg.in_cross_replica_context()
        assert sg.get_replica_context() is context
        with pytest.raises(StrategyError, match="inside replica"):
            context.merge_call(lambda strategy: strategy.run(int))
        return found

    batch = next(iter(strategy.distribute([torch.tensor([1.0, 2.0, 3.0])])))
    results = strategy.local_results(strategy.run(step, args=(batch,)))
    for mean, rows, own, number in results:
        assert mean == 2.0
        assert rows["a"].tolist() == [1.0, 2.0, 3.0]
        assert number == 2
        assert own.dim() == 0
    assert [own.item() for _, _, own, _ in results] == [15.0, 30.0]


def test_scopes_of_one_strategy_nest_and_can_be_entered_again(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        with strategy.scope():
            inner = nn.Linear(2, 1)
        outer = nn.Linear(2, 1)
    with strategy.scope():
        later = nn.Linear(2, 1)
    assert not sg.has_strategy()
    assert len(strategy.run(lambda: inner.bias + outer.bias + later.bias).values) == 2


def test_scope_of_another_strategy_inside_is_refused(strategy: sg.MirroredStrategy) -> None:
    with sg.MirroredStrategy(["cpu:2"]) as other, strategy.scope():
        with pytest.raises(StrategyError, match="scope of MirroredStrategy entered inside the scope of another"):
            other.scope().__enter__()
        assert sg.get_strategy() is strategy
    assert not sg.has_strategy()


def test_scope_left_by_an_error_puts_everything_back(strategy: sg.MirroredStrategy) -> None:
    before = nn.Module.__init__, nn.Parameter.__new__, torch.optim.Optimizer.__init__
    with pytest.raises(KeyError), strategy.scope(), strategy.scope():
        raise KeyError
    assert (nn.Module.__init__, nn.Parameter.__new__, torch.optim.Optimizer.__init__) == before
    assert not sg.has_strategy()


def test_closed_strategy_is_refused_and_closing_twice_is_not(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:2", "cpu:3"]) as strategy:
        with strategy.scope():
            model = nn.Linear(2, 1)
            optimizer = torch.optim.Adam(model.parameters())

        def step() -> None:
            model(torch.ones(2)).sum().backward()
            optimizer.step()

        strategy.run(step)
        strategy.close()
    strategy.close()
    for use in (
        lambda: strategy.run(os.getpid),
        lambda: strategy.scope().__enter__(),
        lambda: strategy.adopt(nn.Linear(1, 1)),
    ):
        with pytest.raises(StrategyError, match=r"MirroredStrategy was closed at .*test_scope.py:\d+; make a new one"):
            use()
    # What is left is plain torch.
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 2


def test_strategies_after_one_another(four_cpus: None) -> None:
    pids = set()
    for _ in range(2):
        with sg.MirroredStrategy(["cpu:2", "cpu:3"]) as strategy:
            pids.add(strategy.run(os.getpid)[1])
    assert len(pids) == 2


def test_two_strategies_take_turns(strategy: sg.MirroredStrategy) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    with sg.MirroredStrategy(["cpu:2", "cpu:3"]) as other:
        steps = []
        for each in (strategy, other):
            torch.manual_seed(3)
            with each.scope():
                model = nn.Linear(2, 1)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            steps.append((each, train(model, optimizer), model))
        losses = [
            [each.reduce("mean", each.run(step, args=(torch.ones(2, 2),))).item() for each, step, _ in steps]
            for _ in range(4)
        ]
        assert all(first == second for first, second in losses)
        with pytest.raises(StrategyError, match="belongs to another strategy"):
            other.run(lambda model=steps[0][2]: model(torch.ones(2)))
        assert strategy.run(lambda model=steps[0][2]: model(torch.ones(2))).values[1].shape == (1,)


def test_objects_that_the_program_drops_do_not_disturb(strategy: sg.MirroredStrategy) -> None:
    for number in range(5):
        with strategy.scope():
            model = nn.Linear(2, number + 1)
        assert strategy.run(lambda model=model: model(torch.ones(1, 2))).values[1].shape == (1, number + 1)


@pytest.mark.parametrize("wrap", [nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel])
def test_wrappers_of_torch_are_refused_with_what_to_do(strategy: sg.MirroredStrategy, wrap: Callable[..., Any]) -> None:
    with pytest.raises(StrategyError, match=f"^{wrap.__name__} was used .* Leave it out"), strategy.scope():
        wrap(nn.Linear(2, 1))
    other = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    wrapped = nn.DataParallel(nn.Linear(2, 1))
    with pytest.raises(StrategyError, match=r"^DataParallel was used .* Leave it out"):
        other.adopt(wrapped)
    with pytest.raises(StrategyError, match=r"^DataParallel was used .* Leave it out"):
        other.run(lambda: wrapped)
    other.close()


def test_sharding_a_model_of_a_strategy_is_refused(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = nn.Linear(2, 1)
        model.__class__ = type(
            "FSDPLinear", (FSDPModule, nn.Linear), {}
        )  # what fully_shard does, and needs a group for
        with pytest.raises(StrategyError, match=r"^fully_shard was used .* Leave it out"):
            strategy.run(int)


@pytest.mark.parametrize("make", [sg.OneDeviceStrategy, lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"])])
def test_errors_of_torch_that_ddp_programs_meet_say_what_to_write(
    four_cpus: None, make: Callable[[], sg.Strategy]
) -> None:
    with make() as strategy:
        with strategy.scope():
            model: Any = nn.Linear(2, 1)

        def of_no_sync() -> None:
            with model.no_sync():
                pass

        for step, kind, advice in (
            (of_no_sync, AttributeError, "with strategy.no_sync():"),
            (lambda: model.module(1), AttributeError, "write model for model.module"),
            (lambda: torch.distributed.all_reduce(torch.ones(1)), ValueError, 'all_reduce("sum", tensor)'),
        ):
            with pytest.raises(kind) as raised:
                strategy.run(step)
            assert advice in "\n".join(raised.value.__notes__)
        with pytest.raises(AttributeError) as raised:
            strategy.run(lambda: strategy.run.module)  # type: ignore[attr-defined]
        assert "model.module" not in "\n".join(getattr(raised.value, "__notes__", ()))
        with pytest.raises(ValueError, match="process group") as raised, strategy.scope():
            torch.distributed.barrier()
        assert "Leave out init_process_group" in "\n".join(raised.value.__notes__)
        with strategy.scope():
            strategy.run(lambda: None)


def test_module_has_the_class_it_was_given_in_every_replica(four_cpus: None) -> None:
    # As a cell of a notebook that runs again, or IPython's autoreload, does with the same name.
    source = "class Net(nn.Linear):\n    def forward(self, x): return nn.Linear.forward(self, x) * {}\n"

    def defined(factor: float) -> type[nn.Module]:
        names: dict[str, Any] = {"nn": nn, "__name__": "__main__"}
        exec(source.format(factor), names)  # noqa: S102
        return names["Net"]  # type: ignore[no-any-return]

    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = defined(1.0)(2, 1, bias=False)
            parametrized = nn.utils.parametrizations.orthogonal(nn.Linear(2, 2))
            nn.init.ones_(model.weight)  # type: ignore[arg-type]
        for factor in (1.0, 0.5, 2.0):
            object.__setattr__(model, "__class__", defined(factor))
            for _ in range(2):
                values = strategy.run(lambda: [model(torch.ones(2)).item(), type(parametrized).__name__])
                assert strategy.local_results(values) == ([2 * factor, "ParametrizedLinear"],) * 2


def test_optimizer_that_was_given_another_class_is_refused(four_cpus: None) -> None:
    class Other(torch.optim.SGD):
        pass

    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
        strategy.run(int)
        optimizer.__class__ = Other
        with pytest.raises(StrategyError, match=r"SGD has been given another class, .*Other.*load_state_dict"):
            strategy.run(int)


def test_replicas_connect_by_torch_whatever_the_default_dtype_is(four_cpus: None) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops="torch") as strategy:
            with strategy.scope():
                model = nn.Linear(2, 1)
            strategy.run(lambda: model(torch.ones(2)).sum().backward())
            assert all(each.grad is not None and each.grad.dtype == torch.float64 for each in model.parameters())
    finally:
        torch.set_default_dtype(torch.float32)
