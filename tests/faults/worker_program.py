"""A worker of a cluster in a process of its own, which trains as it is told line by line (see `task_program`)."""

import os
import signal
from typing import Any

import torch
from torch import nn

import stratagem as sg
from stratagem.cluster.resolvers.simple import SimpleResolver
from stratagem.collectives import sockets
from tests.cluster import task_program

NUM_FEATURES, GLOBAL_BATCH = 6, 12


def make_model(width: int = 16) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(NUM_FEATURES, width), nn.Tanh(), nn.Linear(width, 3))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(GLOBAL_BATCH, NUM_FEATURES, generator=generator)
    return inputs, torch.randint(3, (GLOBAL_BATCH,), generator=generator)


class Worker:
    """What the lines work with."""

    strategy: Any = None
    model: Any = None
    num_steps = 0


worker = Worker()


def begin(cluster: Any, index: int, num_replicas: int = 1, width: int = 16, **options: Any) -> str:
    torch.set_num_threads(1)
    share = sg.config.LogicalDeviceConfiguration()
    sg.config.set_logical_device_configuration("cpu:0", [share] * num_replicas)
    resolver = SimpleResolver(cluster, task_type="worker", task_id=index)
    worker.strategy = sg.MultiWorkerMirroredStrategy(cluster_resolver=resolver, **options)
    with worker.strategy.scope():
        worker.model = make_model(width)
        worker.optimizer = torch.optim.SGD(worker.model.parameters(), lr=0.1, momentum=0.9)
    return "begun"


def step(inputs: torch.Tensor, targets: torch.Tensor, fail_in: int | None = None) -> torch.Tensor:
    worker.optimizer.zero_grad()
    loss = nn.functional.cross_entropy(worker.model(inputs), targets)
    if fail_in is not None and sg.get_replica_context().replica_id_in_sync_group == fail_in:
        raise ValueError("bad row 812")
    loss.backward()
    worker.optimizer.step()
    return loss


def train(num_steps: int, fail_in: int | None = None) -> list[float]:
    """Trains so many steps; the losses."""
    strategy, losses = worker.strategy, []
    for number in range(num_steps):
        (distributed,) = strategy.distribute([batch(worker.num_steps + number)])
        loss = strategy.run(step, args=(*distributed, fail_in))
        worker.last_step = number
        losses.append(strategy.reduce("mean", loss).item())
    worker.num_steps += num_steps
    return losses


def train_at_a_rate_of_ones_own() -> None:
    """Lets each worker take a learning rate from its own rows, inside the step."""

    def own_rate(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        worker.optimizer.param_groups[0]["lr"] = 0.01 * float(inputs.abs().sum())
        step(inputs, targets)

    for number in range(3):
        (distributed,) = worker.strategy.distribute([batch(number)])
        worker.strategy.run(own_rate, args=distributed)


class TwoTypes(nn.Module):
    """Parameters of two types, which are exchanged one after the other; some of unusual shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(NUM_FEATURES, 300), nn.Linear(300, 3, dtype=torch.float64)
        self.scale, self.nothing = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(300, NUM_FEATURES).t())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.narrow(inputs) * self.scale + inputs @ self.turned + self.nothing.sum()
        return self.wide(torch.tanh(hidden).double())


def make_other_model() -> nn.Module:
    torch.manual_seed(2)
    return TwoTypes()


def clamping_step(model: nn.Module, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Writes to weights besides the update."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.narrow.weight.clamp_(-0.2, 0.2)
    return loss


def train_other(num_steps: int) -> list[list[float]]:
    """Trains another model, and returns its weights."""
    strategy = worker.strategy
    with strategy.scope():
        model = make_other_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number in range(num_steps):
        (distributed,) = strategy.distribute([batch(number)])
        strategy.run(clamping_step, args=(model, optimizer, *distributed))
    return [each.detach().flatten().tolist() for each in model.parameters()]


def train_large(num_steps: int) -> list[float]:
    """Trains a model whose gradients take several windows on their way; sums over each of its weights."""
    strategy = worker.strategy
    with strategy.scope():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(NUM_FEATURES, 200_000), nn.Tanh(), nn.Linear(200_000, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(num_steps):
        (distributed,) = strategy.distribute([batch(number)])
        strategy.run(large_step, args=(model, optimizer, *distributed))
    return sums_over(model)


def large_step(model: nn.Module, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def sums_over(model: nn.Module) -> list[float]:
    return [
        (each.detach().double() * torch.linspace(1, 2, each.numel()).view(each.shape)).sum().item()
        for each in model.parameters()
    ]


def swallow_a_failed_pass(failing: int) -> str:
    """Goes on after a backward pass that failed in one worker, when gradients were on their way."""

    def fail(_: Any) -> None:
        raise ValueError("in the middle")

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        worker.optimizer.zero_grad()
        hidden = worker.model[0](inputs)
        if sg.get_replica_context().replica_id_in_sync_group == failing:
            hidden.register_hook(fail)
        try:
            nn.functional.cross_entropy(worker.model[2](worker.model[1](hidden)), targets).backward()
        except ValueError:
            nn.functional.cross_entropy(worker.model(inputs), targets).backward()
        worker.optimizer.step()

    (distributed,) = worker.strategy.distribute([batch(0)])
    worker.strategy.run(step, args=distributed)
    return "went on"


def train_until_failure() -> list[Any]:
    """Trains until something happens: how many steps were finished, the error, and the weights after it."""
    worker.last_step = -1
    try:
        train(1_000_000)
    except Exception as error:
        return [worker.last_step + 1, type(error).__name__, str(error), weights()]
    return []


def weights() -> list[list[float]]:
    return [each.detach().flatten().tolist() for each in worker.model.parameters()]


def notice_cuts_after(seconds: float) -> None:
    """So that a test need not wait as long as a user would."""
    sockets._CUT_OFF_S = seconds


def kill_own_replica() -> None:
    """Kills the child that is replica 1 of this worker."""
    children = worker.strategy._replicas._group.members
    os.kill(children[1].pid, signal.SIGKILL)


def close() -> str:
    worker.strategy.close()
    return "closed"


if __name__ == "__main__":
    task_program.main(globals())
