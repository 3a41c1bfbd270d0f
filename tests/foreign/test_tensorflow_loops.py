"""TensorFlow's guides on custom loops and distributed input, written again as their users would here.

"Custom training with tf.distribute.Strategy", "Distributed training with TensorFlow", "Distributed input". What they
give is compared with plain torch, or plain Keras, on the whole batch.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import stratagem as sg
from tests.foreign.parts import made, mlp, vectors
from tests.foreign.programs import SELDOM, Program, Programs, Runner

programs = Programs(seldom=SELDOM)

BATCH = vectors(7)
GLOBAL_BATCH = len(BATCH[0])
FEW = tuple(each[:1] for each in BATCH)  # replicas go without


def is_plain(on: Runner) -> bool:
    return on.strategy is None


# Losses


@programs(linear=True)
def the_loss_of_the_guide(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def compute_loss(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
        per_example = functional.cross_entropy(predictions, labels, reduction="none")
        loss = sg.compute_average_loss(per_example, global_batch_size=GLOBAL_BATCH)
        return loss + sg.scale_regularization_loss([each.square().sum() * 0.01 for each in model.parameters()])

    def train_step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = compute_loss(labels, model(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    losses = [on.sum(on(train_step, *batch)) for batch in (BATCH, BATCH, FEW)]
    return losses, dict(model.named_parameters())


@programs(linear=True)
def losses_of_both_kinds_in_one_step(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        output = model(x)
        mean = functional.cross_entropy(output, y)
        part = sg.compute_average_loss(output.square().sum(dim=1), global_batch_size=10)
        (mean + 2 * part).backward(retain_graph=True)
        weighted = sg.compute_average_loss(output.abs(), sample_weight=y + 0.5, global_batch_size=GLOBAL_BATCH)
        weighted.backward()
        optimizer.step()
        return mean, part, weighted

    results = [on(step, *batch) for batch in (BATCH, FEW, BATCH)]
    return [(on.mean(mean), on.sum((part, other))) for mean, part, other in results], dict(model.named_parameters())


@programs(linear=True)
def the_size_of_the_global_batch_by_default(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = sg.compute_average_loss(functional.cross_entropy(model(x), y, reduction="none"))
        loss.backward()
        optimizer.step()
        return loss

    return [on.sum(on(step, *batch)) for batch in (BATCH, FEW)], dict(model.named_parameters())


@programs(without=("local sgd 2",))
def gradients_that_the_step_takes_itself(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        per_example = functional.cross_entropy(model(x), y, reduction="none")
        loss = sg.compute_average_loss(per_example, global_batch_size=GLOBAL_BATCH)
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    return [on.sum(on(step, *BATCH)) for _ in range(2)], dict(model.named_parameters())


@programs(without=("local sgd 2",))
def gradients_of_the_functional_kind(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        weights = dict(model.named_parameters())

        def loss_of(weights: dict[str, torch.Tensor]) -> torch.Tensor:
            per_example = functional.cross_entropy(torch.func.functional_call(model, weights, x), y, reduction="none")
            return sg.compute_average_loss(per_example, global_batch_size=GLOBAL_BATCH)

        gradients, loss = torch.func.grad_and_value(loss_of)(weights)
        for name, parameter in weights.items():
            parameter.grad = gradients[name]
        optimizer.step()
        return loss

    losses = [on.sum(on(step, *batch)) for batch in (BATCH, FEW)]
    return losses, dict(model.named_parameters())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own, of what jvp loads
def test_other_transforms_of_the_loss(four_cpus: None) -> None:
    def step(x: torch.Tensor) -> Any:
        def loss_of(scale: torch.Tensor) -> torch.Tensor:
            return sg.compute_average_loss(x * scale * scale, global_batch_size=4)

        one = torch.tensor(1.0)
        slope = torch.func.jvp(loss_of, (one,), (one,))[1]
        return slope, torch.func.vmap(loss_of)(torch.tensor([1.0, 2.0]))

    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        batch = next(iter(strategy.distribute([torch.tensor([1.0, 2.0, 5.0])])))
        slope, many = strategy.reduce("sum", strategy.run(step, args=(batch,)))
    assert (slope.item(), many.tolist()) == (4.0, [2.0, 8.0])


@programs(without=("local sgd 2",))
def a_weight_of_tokens_beside_the_loss(on: Runner) -> Any:
    model, optimizer = made(on, mlp, optimizer=torch.optim.Adam)
    targets = torch.tensor([0, -100, 2, 0, -100, 1, 1])

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        output = model(x)
        tokens = functional.cross_entropy(output, y)
        part = sg.compute_average_loss(output.square().mean(dim=1), global_batch_size=GLOBAL_BATCH)
        if not is_plain(on):
            sg.get_replica_context().weight((y != -100).sum())
        (tokens + part).backward()
        optimizer.step()
        return part

    return [on.sum(on(step, BATCH[0], targets)) for _ in range(2)], dict(model.named_parameters())


@pytest.mark.soak
@pytest.mark.parametrize("gradients", ["mean", "sum"])
def test_the_loss_of_four_replicas_is_that_of_one(four_cpus: None, gradients: str) -> None:
    program = next(each for each in programs if each.body is the_loss_of_the_guide)
    with sg.MirroredStrategy([f"cpu:{number}" for number in range(4)], gradients=gradients) as strategy:
        program.check(strategy)


# Iterators, distributed input, merged calls

ROWS_OF_DATA = vectors(24)


def trained(on: Runner, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    def train_step(inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        features, labels = inputs
        optimizer.zero_grad()
        per_example = functional.cross_entropy(model(features), labels, reduction="none")
        loss = sg.compute_average_loss(per_example, global_batch_size=12)
        loss.backward()
        optimizer.step()
        return loss

    return on.sum(train_step(batch) if on.strategy is None else on.strategy.run(train_step, args=(batch,)))


def global_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(*(each.split(10) for each in ROWS_OF_DATA), strict=True))  # the last one has 4 rows


@programs(linear=True)
def iterators_are_asked_until_they_end(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    losses = []
    if on.strategy is None:
        losses = [trained(on, model, optimizer, batch) for batch in global_batches()]
    else:
        iterator = iter(on.strategy.distribute(iter(global_batches()), prefetch=True))
        losses = [trained(on, model, optimizer, iterator.get_next())]
        while (optional := iterator.get_next_as_optional()).has_value():
            losses.append(trained(on, model, optimizer, optional.get_value()))
    return losses, dict(model.named_parameters())


@programs(linear=True)
def several_steps_in_one_call_with_metrics_in_the_step(on: Runner) -> Any:
    """As the guide on TPUs has it: `train_multiple_steps(iterator, steps)`."""
    model, optimizer = made(on, mlp)
    with on.scope():
        training_loss, training_accuracy = sg.metrics.Mean(), sg.metrics.SparseCategoricalAccuracy()

    def step_fn(inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        features, labels = inputs
        optimizer.zero_grad()
        logits = model(features)
        loss = functional.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        training_loss.update_state(loss)
        training_accuracy.update_state(labels, logits)
        return loss

    def train_multiple_steps(iterator: Any, steps: int) -> list[Any]:
        if on.strategy is None:
            return [step_fn(batch) for _, batch in zip(range(steps), iterator, strict=False)]
        return on.strategy.run(step_fn, args=(iterator,), num_steps=steps)

    data = global_batches() * 2
    iterator = iter(data if on.strategy is None else on.strategy.distribute(data))
    told = []
    for _ in range(2):
        losses = [on.mean(each) for each in train_multiple_steps(iterator, len(data) // 2)]
        told.append((losses, training_loss.result(), training_accuracy.result()))
        training_loss.reset_state()
        training_accuracy.reset_state()
    return told, dict(model.named_parameters())


@programs(linear=True)
def each_input_pipeline_makes_its_own_batches(on: Runner) -> Any:
    def dataset_fn(context: sg.InputContext) -> Any:
        size = context.get_per_replica_batch_size(12)
        own = [each[context.input_pipeline_id :: context.num_input_pipelines] for each in ROWS_OF_DATA]
        return list(zip(*(each.split(size) for each in own), strict=True))

    model, optimizer = made(on, mlp)
    data = dataset_fn(sg.InputContext()) if on.strategy is None else on.strategy.distribute_from_function(dataset_fn)
    return [trained(on, model, optimizer, batch) for batch in data], dict(model.named_parameters())


@programs()
def replicas_merge_what_they_have(on: Runner) -> Any:
    def merge(strategy: Any, value: Any, *, rows: Any) -> Any:
        return strategy.reduce("mean", value), strategy.gather(rows)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        context = sg.get_replica_context()
        return context.merge_call(merge, args=(x.mean(),), kwargs={"rows": y}), context.all_reduce("sum", y.sum())

    return [on.first(on(step, *batch)) for batch in (BATCH, FEW)]


@pytest.mark.parametrize("program", list(programs), ids=repr)
def test_program_equals_plain_torch(row: sg.Strategy, program: Program) -> None:
    program.check(row)


@pytest.mark.parametrize("consistency", [sg.Async(), sg.Synchronous(backup_workers=1)], ids=["async", "backup"])
def test_workers_that_push_learn_from_the_average_loss(four_cpus: None, consistency: Any) -> None:
    with sg.ParameterServerStrategy(2, consistency=consistency) as strategy:
        with strategy.scope():
            model = nn.Linear(1, 1, bias=False)
            nn.init.ones_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.25)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = sg.compute_average_loss(model(x), global_batch_size=4)
            loss = loss + sg.scale_regularization_loss(model.weight.sum())
            loss.backward()
            optimizer.step()
            return loss

        # All rows are alike: whoever is in time has the mean of them.
        for batch in strategy.distribute([torch.ones(4, 1)]):
            strategy.local_results(strategy.run(step, args=(batch,)))
    assert model.weight.item() == 0.5
