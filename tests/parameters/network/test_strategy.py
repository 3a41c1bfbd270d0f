"""The strategy in a worker and an evaluator; servers in threads of this process."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem import _env
from stratagem.cluster import TFConfigResolver
from stratagem.errors import ClusterJoinError, ParameterError, StratagemWarning, StrategyError
from stratagem.parameters.consistency import Async, BoundedStaleness, Synchronous
from stratagem.parameters.network.options import ClusterOptions
from stratagem.parameters.network.server.pacing import Pacing
from stratagem.strategies.parameter_cluster import ClusterTask
from tests.parameters.network.cluster import Cluster

NewCluster = Callable[..., Cluster]
BATCHES = [torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def task(
    cluster: Cluster, job: str = "worker", index: int = 0, devices: list[str] | None = None, **options: Any
) -> ClusterTask:
    described = {"cluster": cluster.spec, "task": {"type": job, "index": index}}
    resolver = TFConfigResolver(json.dumps(described))
    return ClusterTask(resolver, ClusterOptions.of(join_timeout_s=20, **options), devices)


def build(strategy: Any, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(3)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = torch.optim.Adam(model.parameters(), **{"lr": 0.05, **options})
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    return model, optimizer, scheduler


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> Callable[..., torch.Tensor]:
    def step(inputs: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        return loss

    return step


def trained(strategy: Any, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    model, optimizer, scheduler = build(strategy)
    step = training_step(model, optimizer, scheduler)
    for batch in batches:
        strategy.run(step, args=(batch,))
    return [each.detach().clone() for each in model.parameters()]


def test_one_worker_equals_one_device_with_schedulers_and_clipping(new_cluster: NewCluster) -> None:
    with task(new_cluster(num_ps=2, num_workers=1)) as strategy:
        values = trained(strategy, BATCHES)
        assert strategy.version == len(BATCHES)
        assert strategy.staleness() == {0: {0: len(BATCHES)}}
    with sg.OneDeviceStrategy() as reference:
        expected = trained(reference, BATCHES)
    for value, own in zip(values, expected, strict=True):
        torch.testing.assert_close(value, own)


def test_one_worker_with_three_devices_equals_one_device(four_cpus: None, new_cluster: NewCluster) -> None:
    batches = [torch.randn(size, 6, generator=torch.Generator().manual_seed(size)) for size in (6, 5, 2, 7, 1)]

    def trained(strategy: Any) -> tuple[list[float], list[torch.Tensor], Any]:
        model, optimizer, scheduler = build(strategy)
        step = training_step(model, optimizer, scheduler)
        losses = [
            float(strategy.reduce("mean", strategy.run(step, args=(batch,)))) for batch in strategy.distribute(batches)
        ]
        return losses, [each.detach().clone() for each in model.parameters()], model.state_dict()

    with sg.OneDeviceStrategy() as reference:
        losses, values, _ = trained(reference)
    devices = ["cpu:0", "cpu:1", "cpu:2"]
    for consistency in (sg.Async(), sg.Synchronous()):
        cluster = new_cluster(num_ps=2, num_workers=1)
        with task(cluster, devices=devices, consistency=consistency) as strategy:
            assert strategy.num_replicas_in_sync == 3
            found, own, saved = trained(strategy)
            assert strategy.version == len(batches)
            assert len(strategy.local_results(strategy.run(lambda: torch.ones(1)))) == 3
            strategy.barrier()
        torch.testing.assert_close(found, losses)
        torch.testing.assert_close(own, values)
        torch.testing.assert_close(list(saved.values()), values)


def test_tasks_that_drive_several_devices_say_what_they_cannot_do(four_cpus: None, new_cluster: NewCluster) -> None:
    two = ["cpu:0", "cpu:1"]
    cluster = new_cluster()
    with task(cluster, devices=two) as strategy:
        with pytest.raises(
            ClusterJoinError, match=r"worker/0 uses 2 devices and worker/1 uses 1, but the data is divided"
        ):
            task(cluster, index=1, devices=["cpu:2"])
        with strategy.scope():
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(StrategyError, match="may call a closure several times"):
            strategy.run(lambda: optimizer.step(lambda: model(torch.ones(1, 2)).sum()))
    with task(new_cluster(num_workers=1), devices=two) as strategy:
        with strategy.scope():
            table = nn.Embedding(4, 2, sparse=True)
            optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        with pytest.raises(StrategyError, match="sparse embeddings need exactly one device in each worker task"):
            strategy.run(optimizer.zero_grad)


def test_each_worker_reduces_and_gathers_what_it_has_itself(new_cluster: NewCluster) -> None:
    with task(new_cluster(num_workers=2)) as strategy:
        model, *_ = build(strategy)
        result = strategy.run(lambda: torch.ones_like(model[0].bias[:2]))
        assert strategy.num_replicas_in_sync == 2
        assert strategy.reduce("sum", result).tolist() == strategy.gather(result).tolist() == [1, 1]
        with pytest.raises(StrategyError, match=r"strategy\.reduce\(\) was called inside replica 0"):
            strategy.run(lambda: strategy.reduce("sum", 1.0))


def test_state_goes_on_where_it_was_also_with_other_servers(new_cluster: NewCluster) -> None:
    with task(new_cluster(num_workers=1)) as strategy:
        model, optimizer, scheduler = build(strategy)
        step = training_step(model, optimizer, scheduler)
        for batch in BATCHES[:2]:
            strategy.run(step, args=(batch,))
        state = json.loads(json.dumps(strategy.state_dict(), default=lambda each: ["tensor", each.tolist()]))
        assert set(state) == {"version", "values", "optimizers"}
        state = strategy.state_dict()
        for batch in BATCHES[2:]:
            strategy.run(step, args=(batch,))
        expected = [each.detach().clone() for each in model.parameters()]
    with task(new_cluster(num_ps=2, num_workers=1), variable_partitioner=sg.FixedShardsPartitioner(2)) as strategy:
        model, optimizer, scheduler = build(strategy, lr=0.05)
        for _ in range(2):
            scheduler._step_count += 1
            scheduler.last_epoch += 1
        optimizer.param_groups[0]["lr"] = 0.005
        strategy.load_state_dict(state)
        step = training_step(model, optimizer, scheduler)
        for batch in BATCHES[2:]:
            strategy.run(step, args=(batch,))
        assert strategy.version == len(BATCHES)
        for value, own in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(value.detach(), own)
        with pytest.raises(StrategyError, match="before the first run"):
            strategy.load_state_dict(state)


def test_evaluator_takes_values_of_a_state_and_needs_no_server(new_cluster: NewCluster) -> None:
    cluster = new_cluster(num_workers=1)
    with task(cluster) as strategy:
        values = trained(strategy, BATCHES)
        state = strategy.state_dict()
        with task(cluster, "evaluator") as evaluator:
            model, _, _ = build(evaluator)
            evaluator.load_state_dict(state)
            assert all(torch.equal(one, other) for one, other in zip(model.parameters(), values, strict=True))
            assert evaluator.input_pipeline == (1, 0)
            assert not evaluator.is_chief
            with pytest.raises(StrategyError, match="no parameter servers to ask"):
                evaluator.state_dict()


def test_each_worker_gets_its_part_of_every_batch_in_one_order(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    seen = []
    for index in range(2):
        torch.manual_seed(7)
        with task(cluster, index=index) as strategy:
            data = strategy.distribute(torch.arange(20), global_batch_size=8, shuffle=True)
            seen.append([torch.cat(strategy.local_results(batch)).tolist() for batch in data])
            torch.rand(index)  # tasks draw different numbers in between
            seen[-1] += [torch.cat(strategy.local_results(batch)).tolist() for batch in data]
    first, second = seen
    for epoch in (slice(0, 3), slice(3, 6)):
        parts = [number for part in [*first[epoch], *second[epoch]] for number in part]
        assert sorted(parts) == list(range(20))
    assert first[:3] != first[3:]


def test_sparse_embedding_fetches_only_the_rows_of_a_batch(new_cluster: NewCluster) -> None:
    cluster = new_cluster(num_ps=2, num_workers=1)
    with task(cluster, variable_partitioner=sg.FixedShardsPartitioner(2)) as strategy:
        with strategy.scope():
            table = nn.Embedding(50, 3, sparse=True)
            optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        before = table.weight.detach().clone()

        def step(rows: torch.Tensor) -> None:
            optimizer.zero_grad()
            table(rows).sum().backward()
            optimizer.step()

        strategy.run(step, args=(torch.tensor([3, 40, 3]),))
        assert torch.equal(table.weight.detach(), before)  # what was pushed has not been fetched
        strategy.pull()
        table.state_dict()  # fetches all of it again
        changed = (table.weight.detach() != before).any(1).nonzero().flatten().tolist()
        assert changed == [3, 40]
        torch.testing.assert_close(table.weight[3].detach(), before[3] - 2)
    saved = table.state_dict()["weight"]  # of a plain module, now that the servers are gone
    assert torch.equal(table(torch.tensor([3])), saved[3:4])


def test_gradient_that_is_not_finite_reaches_no_server(new_cluster: NewCluster) -> None:
    with task(new_cluster(num_ps=2, num_workers=1)) as strategy:
        model, optimizer, scheduler = build(strategy)
        step = training_step(model, optimizer, scheduler)
        strategy.run(step, args=(BATCHES[0],))
        before = [each.detach().clone() for each in model.parameters()]
        with pytest.warns(StratagemWarning, match="non-finite gradient in replica 0"):
            strategy.run(step, args=(torch.full((4, 6), float("inf")),))
        strategy.pull()
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
        assert strategy.version == 1


def test_worker_without_rows_runs_on_one_that_reaches_no_server(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    with task(cluster) as first, task(cluster, index=1) as strategy:
        first.run(training_step(*build(first)), args=(BATCHES[0],))
        step = training_step(*build(strategy))

        def told(inputs: torch.Tensor) -> tuple[bool, int]:
            step(inputs)
            replica = sg.get_replica_context()
            return replica is not None and replica.has_examples, len(inputs)

        found = [strategy.run(told, args=(batch,)) for batch in strategy.distribute([BATCHES[0][:1], BATCHES[0][:2]])]
        assert found == [(False, 1), (True, 1)]
        assert strategy.version == 2


def test_step_outside_of_a_run_and_a_scope_without_optimizer_are_refused(new_cluster: NewCluster) -> None:
    with task(new_cluster(num_workers=1)) as strategy:
        with strategy.scope():
            nn.Linear(2, 2)
        with pytest.raises(StrategyError, match="make both inside"):
            strategy.run(lambda: None)
    with task(new_cluster(num_workers=1)) as strategy:
        model, optimizer, scheduler = build(strategy)
        strategy.run(training_step(model, optimizer, scheduler), args=(BATCHES[0],))
        with pytest.raises(StrategyError, match=r"outside strategy\.run"):
            optimizer.step()
    with pytest.raises(StrategyError, match=r"was closed at .*test_strategy"):
        strategy.run(lambda: None)


def make_scalar(strategy: Any, kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> tuple[Any, Any]:
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model, kind(model.parameters(), **{"lr": 1.0, **options})


def falling(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A step in which the weight falls by the learning rate."""

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    return step


def test_tasks_with_other_clusters_are_told(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    with task(cluster) as one:
        model, optimizer = make_scalar(one)
        one.run(falling(model, optimizer))
        cluster.spec["worker"].append("127.0.0.1:1")
        with task(cluster, index=2) as other:
            kept = make_scalar(other)
            with pytest.warns(
                StratagemWarning, match="worker/2 has a cluster of 3 training tasks, but the task .* one of 2"
            ):
                other.run(lambda: None)
        with task(cluster, index=2, consistency=BoundedStaleness(1)) as other:
            kept = make_scalar(other)
            with pytest.raises(ParameterError, match=r"Async\(\) there and BoundedStaleness\(max_staleness=1\) here"):
                other.run(lambda: None)
        del kept


def test_each_push_is_applied_with_the_rate_of_its_own_worker(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    with task(cluster) as one, task(cluster, index=1) as other:
        (model, optimizer), (theirs, their_optimizer) = make_scalar(one), make_scalar(other, lr=0.25)
        one.run(falling(model, optimizer))
        other.run(falling(theirs, their_optimizer))
        one.run(falling(model, optimizer))
        assert model.weight.item() == -2.25
        optimizer.param_groups[0]["lr"] = np.float64(0.5)  # as schedulers of NumPy's numbers make it
        one.run(falling(model, optimizer))
        assert model.weight.item() == -2.75


def test_staleness_is_shown_at_the_end_and_in_tensorboard(
    new_cluster: NewCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # only here: it takes seconds
    from torch.utils.tensorboard import SummaryWriter

    cluster = new_cluster()
    with task(cluster, verbose=True) as one, task(cluster, index=1) as other:
        steps = [falling(*make_scalar(each)) for each in (one, other)]
        one.run(steps[0])
        other.run(lambda: None)
        one.run(steps[0])
        other.run(steps[1])
        assert one.staleness() == {0: {0: 2}}
        assert other.staleness() == {1: {1: 1}}
        with SummaryWriter(tmp_path) as writer:
            other.write_staleness(writer, 3)
    assert capsys.readouterr().out.splitlines()[1:] == ["worker 0: 2 pushes, mean 0.00 (0: 2)"]
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [each.value for each in found.Scalars("staleness/worker 1, mean")] == [1.0]


def test_chief_that_has_not_pushed_saves_what_the_servers_have(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    with task(cluster) as chief, task(cluster, index=1) as other:
        model, optimizer = make_scalar(chief, momentum=0.5)
        chief.run(lambda: None)
        theirs = falling(*make_scalar(other, momentum=0.5))
        other.run(theirs)
        assert model.state_dict()["weight"].item() == -1
        assert optimizer.state_dict()["state"][0]["momentum_buffer"].item() == 1
        other.run(theirs)
        chief.pull()
        assert model.state_dict()["weight"].item() == -2.5
        assert optimizer.state_dict()["state"][0]["momentum_buffer"].item() == 1.5


def test_weights_are_loaded_before_the_first_run_or_when_it_is_over(new_cluster: NewCluster) -> None:
    with task(new_cluster(num_workers=1)) as strategy:
        model, optimizer = make_scalar(strategy)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model.load_state_dict(saved[0])
        strategy.run(falling(model, optimizer))
        for holder, state in zip((model, optimizer), saved, strict=True):
            with pytest.raises(StrategyError, match=r"call load_state_dict\(\) before the first run"):
                holder.load_state_dict(state)
    model.load_state_dict(saved[0])
    assert model.weight.item() == 0


def test_optimizers_that_servers_do_not_have_are_refused(new_cluster: NewCluster) -> None:
    own = type("SGD", (torch.optim.SGD,), {})
    with task(new_cluster(num_workers=1)) as strategy:
        model, optimizer = make_scalar(strategy, own)
        for _ in range(2):  # and the second time it is said again
            with pytest.raises(ParameterError, match=r"apply torch's own SGD, .*, got tests\..*SGD, whose code"):
                strategy.run(lambda: None)
    with task(new_cluster(), consistency=Synchronous(1)) as strategy:
        model, optimizer = make_scalar(strategy)
        with strategy.scope():
            optimizer = optimizer, torch.optim.SGD(model.parameters())
        with pytest.raises(StrategyError, match="use one optimizer, with a parameter group"):
            strategy.run(lambda: None)


def test_sparse_embedding_may_be_called_by_name(new_cluster: NewCluster) -> None:
    with task(new_cluster(num_workers=1)) as strategy:
        with strategy.scope():
            table = nn.Embedding(5, 2, sparse=True)
            optimizer = torch.optim.SGD(table.parameters(), lr=1.0)

        def step() -> None:
            table(input=torch.tensor([3])).sum().backward()
            optimizer.step()

        before = table.weight[3].detach().clone()
        strategy.run(step)
        strategy.pull()
        torch.testing.assert_close(table.weight[3].detach(), before - 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"torn_reads": True}, "torn_reads works with num_workers="),
        ({"torn_pushes": True}, "torn_pushes works with num_workers="),
        ({"consistency": 3}, r"consistency is Async\(\), BoundedStaleness\(k\)"),
        ({"stall_timeout_s": -1}, "stall_timeout_s is a number of seconds"),
        ({"consistency": Async(rate_of=lambda staleness: -1.0)}, r"got -1\.0 for a staleness of 0"),
        ({"on_nonfinite": "apply"}, "'skip' or 'raise'"),
        ({"join_timeout_s": 0}, "join_timeout_s is a number of seconds"),
    ],
)
def test_options_without_meaning_in_a_task_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        ClusterOptions.of(**options)


def test_options_are_translated() -> None:
    options = ClusterOptions.of(consistency=BoundedStaleness(2), compression="bf16")
    assert options.pacing([1, 2, 3]) == Pacing(BoundedStaleness(2), (1, 2, 3))
    assert options.compression == sg.Compression("bf16")
    assert ClusterOptions.of(consistency=Synchronous(1)).pacing([1, 2, 3]) == Pacing(Synchronous(1), (1, 2, 3))
    falling = ClusterOptions.of(consistency=Async(rate_of=lambda staleness: 1 / (1 + staleness))).pacing([1, 2, 3])
    sent = Pacing.from_body(falling.to_body())
    assert sent == falling
    rate_of = sent.consistency.rate_of
    assert rate_of is not None
    assert [rate_of(staleness) for staleness in (0, 1, 127, 1000)] == [1, 1 / 2, 1 / 128, 1 / 128]
    with pytest.raises(StrategyError, match="leaves none of 2 workers"):
        ClusterOptions.of(consistency=Synchronous(2)).pacing([1, 2])


def test_task_is_a_parameter_server_strategy_and_says_what_it_cannot_do(new_cluster: NewCluster) -> None:
    with task(new_cluster()) as strategy:
        assert isinstance(strategy, sg.ParameterServerStrategy)
        assert strategy.num_workers == 2
        with pytest.raises(StrategyError, match="no code is sent between machines"):
            sg.ClusterCoordinator(strategy)


def test_state_dicts_are_what_the_servers_have_and_go_on(new_cluster: NewCluster) -> None:
    def go(strategy: Any, batches: list[torch.Tensor], saved: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        model, optimizer, scheduler = build(strategy)
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        step = training_step(model, optimizer, scheduler)
        for batch in batches:
            strategy.run(step, args=(batch,))
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    with sg.OneDeviceStrategy() as reference:
        expected = go(reference, BATCHES[:2], go(reference, BATCHES[2:]))
    with task(new_cluster(num_ps=2, num_workers=1)) as strategy:
        first = go(strategy, BATCHES[2:])
        with pytest.raises(StrategyError, match="train one model"):
            go(strategy, BATCHES[:1])
    with task(new_cluster(num_workers=1)) as strategy:
        torch.testing.assert_close(go(strategy, BATCHES[:2], first), expected)


def test_strategy_without_number_of_workers_needs_a_cluster(monkeypatch: pytest.MonkeyPatch, token_file: Path) -> None:
    with pytest.raises(StrategyError, match="needs num_workers="):
        sg.ParameterServerStrategy()
    described = {"cluster": {"worker": ["127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv(_env.TF_CONFIG, json.dumps(described))
    with pytest.raises(StrategyError, match="a task of a cluster with the job ps"):
        sg.ParameterServerStrategy()
