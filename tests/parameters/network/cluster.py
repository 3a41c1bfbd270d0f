"""A cluster of parameter servers in threads, and a small model that workers train with them."""

import contextlib
import threading
from typing import Any

import torch
from torch import nn

from stratagem.parameters.network.client.parameter_client import ParameterClient
from stratagem.parameters.network.server.ps_server import ParameterServer
from stratagem.parameters.partitioning import FixedShardsPartitioner, make_plan
from stratagem.parameters.protocol import OptimizerSpec, ShardPlan, Variable, describe_optimizer
from tests.cluster.tasks import free_ports

PATIENCE_S = 20.0


class Cluster(contextlib.ExitStack):
    """Servers that serve; workers are made by `worker`."""

    def __init__(self, num_ps: int = 1, num_workers: int = 2, **options: Any) -> None:
        super().__init__()
        ports = [f"127.0.0.1:{port}" for port in free_ports(num_ps + num_workers)]
        self.spec = {"worker": ports[:num_workers], "ps": ports[num_workers:]}
        self.servers = [ParameterServer(self.spec, index, **options) for index in range(num_ps)]
        self._options = options
        self._threads = [self._started(server) for server in self.servers]

    def _started(self, server: ParameterServer) -> threading.Thread:
        thread = threading.Thread(target=server.serve, daemon=True)
        self.callback(server.close)
        server.start()
        thread.start()
        self.callback(thread.join, PATIENCE_S)
        self.callback(server.stop)
        return thread

    def renew(self, index: int) -> None:
        """Puts a server that knows nothing in the place of one."""
        self.servers[index].close()
        self.servers[index] = ParameterServer(self.spec, index, **self._options)
        self._threads[index] = self._started(self.servers[index])

    @property
    def port(self) -> int:
        """Of the first server."""
        return int(self.spec["ps"][0].rpartition(":")[2])

    def worker(self, index: int = 0, **options: Any) -> ParameterClient:
        """A client that has connected, and leaves with the test."""
        # Most tests are about what travels.
        options = {"join_timeout_s": PATIENCE_S, "shares_memory": False, **options}
        client = ParameterClient(self.spec, "worker", index, **options)
        self.callback(client.close)
        return client.connect()

    def trainer(self, index: int = 0, **options: Any) -> "Trainer":
        """A worker with the model, which worker 0 defines."""
        trainer = Trainer(self.worker(index, **options), len(self.servers))
        trainer.define(has_values=index == 0)
        return trainer

    def end(self) -> None:
        """Ends all servers, as if they had died."""
        for server in self.servers:
            server.close()

    def ended(self) -> bool:
        """Whether all servers have ended by themselves."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return not any(thread.is_alive() for thread in self._threads)


class Trainer:
    """A model with an optimizer, whose variables lie in parameter servers."""

    def __init__(self, client: ParameterClient, num_ps: int, *, cut: bool = False) -> None:
        torch.manual_seed(1)
        self.client = client
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.plan, self.spec = described(self.model, self.optimizer, num_ps, cut=cut)

    def define(self, *, has_values: bool = True, **options: Any) -> None:
        self.client.define(self.plan, [self.spec], self.values() if has_values else None, **options)
        self.pull()

    def values(self) -> dict[str, torch.Tensor]:
        return {name: each.detach() for name, each in self.model.named_parameters()}

    def copies(self) -> dict[str, torch.Tensor]:
        return {name: each.clone() for name, each in self.values().items()}

    def pull(self) -> None:
        self.client.wait(self.client.pull(self.values()))

    def gradients(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """Those of one batch."""
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        self.model.zero_grad()
        self.model(inputs).square().mean().backward()
        return {name: each.grad for name, each in self.model.named_parameters() if each.grad is not None}

    def step(self, seed: int = 0, **options: Any) -> list[Any]:
        return self.client.wait(self.client.push(self.gradients(seed), into=self.values(), **options))


def described(
    model: nn.Module, optimizer: torch.optim.Optimizer, num_ps: int, *, cut: bool = False
) -> tuple[ShardPlan, OptimizerSpec]:
    variables = [Variable(name, tuple(each.shape), each.dtype) for name, each in model.named_parameters()]
    plan = make_plan(variables, num_ps, FixedShardsPartitioner(num_ps) if cut else None)
    return plan, describe_optimizer(optimizer, {id(each): name for name, each in model.named_parameters()})


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
