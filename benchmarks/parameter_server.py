"""Compares the parameter server of one machine with Hogwild and with one on torch.distributed.rpc.

Two workers and one shard, on 2 cores, a thread each, half a batch in each step of a worker; examples per second of
the same models, in turns.
Also what a step costs with a large table, and a plot of how the kinds of consistency fare when one of
two workers is three times slower than the other.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc

import stratagem as sg
from benchmarks.contender import make_optimizer, train_step
from benchmarks.measure import RESULTS
from benchmarks.models import WORKLOADS
from benchmarks.processes import run
from benchmarks.tables import TARGET_COLUMNS, Target, markdown, show

mpl.use("Agg")

NUM_WORKERS = 2
NUM_WARM_UP = 4
PREFIX = "FIGURES "
MODELS = ("mlp", "cnn", "transformer", "wide")
CONTENDERS = ("stratagem", "torn reads", "hogwild", "rpc")
_TIMEOUT_S = 180.0
_TABLES = {"20 thousand": 20_000, "2 million": 2_000_000}
_AGAINST_HOGWILD = {"mlp": 0.8, "cnn": 0.8, "transformer": 0.8}
_AGAINST_RPC = {"mlp": 1.4, "wide": 2.0}


def part_of_batch(name: str, number: int) -> tuple[torch.Tensor, ...]:
    """What a worker has of a batch, as in the benchmark of synchronous strategies."""
    return tuple(each.chunk(NUM_WORKERS)[number] for each in WORKLOADS[name].make_batch())


def alone_on_a_core(rank: int) -> None:
    """Gives a worker a core and a thread, as stratagem's have."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)


# The contenders: each returns how many steps its workers did in a second


def with_stratagem(name: str, num_steps: int, **options: Any) -> float:
    """The strategy itself."""
    workload = WORKLOADS[name]
    with sg.ParameterServerStrategy(NUM_WORKERS, **options) as strategy:
        with strategy.scope():
            model = workload.make_model()
            optimizer = make_optimizer(model)
        batch = part_of_batch(name, 0)

        return _timed(strategy, train_step(workload, model, optimizer), batch, num_steps)


def _timed(strategy: sg.ParameterServerStrategy, step: Callable[..., Any], args: Any, num_steps: int) -> float:
    for _ in range(NUM_WARM_UP * NUM_WORKERS):
        strategy.run(step, args=args)
    strategy.workers.settle()
    start = time.perf_counter()
    for _ in range(num_steps):
        strategy.run(step, args=args)
    strategy.workers.settle()
    return num_steps / (time.perf_counter() - start)


def _hogwild_worker(rank: int, name: str, model: nn.Module, num_steps: int, times: Any, barrier: Any) -> None:
    alone_on_a_core(rank)
    workload = WORKLOADS[name]
    optimizer, batch = make_optimizer(model), part_of_batch(name, rank)
    for number in range(NUM_WARM_UP + num_steps):
        if number == NUM_WARM_UP:
            barrier.wait()
            start = time.perf_counter()
        optimizer.zero_grad()
        workload.loss(model, *batch).backward()
        optimizer.step()
    barrier.wait()
    times.put(time.perf_counter() - start)


def with_hogwild(name: str, num_steps: int) -> float:
    """Processes that write to the same parameters, without any lock: the upper bound."""
    context = mp.get_context("spawn")
    model, times, barrier = WORKLOADS[name].make_model().share_memory(), context.Queue(), context.Barrier(NUM_WORKERS)
    each = num_steps // NUM_WORKERS
    workers = [
        context.Process(target=_hogwild_worker, args=(rank, name, model, each, times, barrier))
        for rank in range(NUM_WORKERS)
    ]
    for worker in workers:
        worker.start()
    seconds = max(times.get() for _ in workers)
    for worker in workers:
        worker.join()
    return each * NUM_WORKERS / seconds


class RpcServer:
    """A parameter server in the way of PyTorch's tutorial: workers send gradients and get parameters."""

    held: "RpcServer"

    def __init__(self, name: str) -> None:
        self.model = WORKLOADS[name].make_model()
        self.optimizer = make_optimizer(self.model)
        self.lock = threading.Lock()

    @staticmethod
    def fetch() -> list[torch.Tensor]:
        """The parameters."""
        return [each.detach() for each in RpcServer.held.model.parameters()]

    @staticmethod
    def push(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Applies gradients; returns the parameters."""
        held = RpcServer.held
        with held.lock:
            for parameter, gradient in zip(held.model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            held.optimizer.step()
            return RpcServer.fetch()


def _rpc_process(rank: int, name: str, num_steps: int, times: Any, barrier: Any, port: int) -> None:
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"})
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=_TIMEOUT_S)
    torch.set_num_threads(1)
    if rank == NUM_WORKERS:
        RpcServer.held = RpcServer(name)
    else:
        alone_on_a_core(rank)
    rpc.init_rpc(f"task{rank}", rank=rank, world_size=NUM_WORKERS + 1, rpc_backend_options=options)
    if rank < NUM_WORKERS:
        server, workload = f"task{NUM_WORKERS}", WORKLOADS[name]
        model, batch = workload.make_model(), part_of_batch(name, rank)
        values = rpc.rpc_sync(server, RpcServer.fetch)
        for number in range(NUM_WARM_UP + num_steps):
            if number == NUM_WARM_UP:
                barrier.wait()
                start = time.perf_counter()
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.data = value
                parameter.grad = None
            workload.loss(model, *batch).backward()
            values = rpc.rpc_sync(server, RpcServer.push, args=([each.grad for each in model.parameters()],))
        barrier.wait()
        times.put(time.perf_counter() - start)
    rpc.shutdown()


def with_rpc(name: str, num_steps: int) -> float:
    """A server process and workers that speak to it by torch.distributed.rpc."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    times, barrier, each = context.Queue(), context.Barrier(NUM_WORKERS), num_steps // NUM_WORKERS
    processes = [
        context.Process(target=_rpc_process, args=(rank, name, each, times, barrier, port))
        for rank in range(NUM_WORKERS + 1)
    ]
    for process in processes:
        process.start()
    seconds = max(times.get() for _ in range(NUM_WORKERS))
    for process in processes:
        process.join()
    return each * NUM_WORKERS / seconds


def with_table(num_rows: int, num_steps: int) -> float:
    """An embedding with sparse gradients, of which each batch touches 1,000 rows."""
    with sg.ParameterServerStrategy(NUM_WORKERS) as strategy:
        with strategy.scope():
            table = nn.Embedding(num_rows, 64, sparse=True, _weight=torch.zeros(num_rows, 64))
            head = nn.Linear(64, 10)
            optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.01)

        def step(num_rows: int) -> torch.Tensor:
            optimizer.zero_grad()
            rows = torch.randint(num_rows, (1000,))
            loss = nn.functional.cross_entropy(head(table(rows)), rows % 10)
            loss.backward()
            optimizer.step()
            return loss

        return _timed(strategy, step, (num_rows,), num_steps)


# With one worker slowed down

_DELAY_S = 0.03
_KINDS: dict[str, Callable[[], Any]] = {
    "synchronous": sg.Synchronous,
    "1 backup worker": lambda: sg.Synchronous(backup_workers=1),
    "bounded, k = 2": lambda: sg.BoundedStaleness(2),
    "asynchronous": sg.Async,
}


def with_a_slow_worker(kind: str, seconds: float) -> dict[str, Any]:
    """The loss over time of four workers, of which one takes three times as long as the others."""
    torch.manual_seed(0)
    inputs = torch.randn(4096, 32)
    targets = (inputs @ torch.randn(32, 10)).argmax(1)
    with sg.ParameterServerStrategy(4, consistency=_KINDS[kind]()) as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * strategy.num_replicas_in_sync)
        slow = max(pid for _ in range(8) for pid in strategy.local_results(strategy.run(_slow_getpid)))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            time.sleep(_DELAY_S * (3 if os.getpid() == slow else 1))  # for computation, which would need 4 cores
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        float(strategy.reduce("mean", strategy.run(step, args=(inputs[:64], targets[:64]))))  # all is there by then
        size = 64 * strategy.num_replicas_in_sync
        start, num_examples, points = time.perf_counter(), 0, []
        while True:
            for x, y in strategy.distribute((inputs, targets), global_batch_size=size, shuffle=True):
                strategy.run(step, args=(x, y))
                num_examples += size
                now = time.perf_counter() - start
                if not points or now - points[-1][0] > seconds / 25:
                    with torch.no_grad():  # on whatever the values are: nobody waits for it
                        hidden = torch.relu(nn.functional.linear(inputs, model[0].weight, model[0].bias))
                        outputs = nn.functional.linear(hidden, model[2].weight, model[2].bias)
                    points.append((now, nn.functional.cross_entropy(outputs, targets).item()))
                if now > seconds:
                    dropped = 64 * int(strategy.workers.board.num_dropped.sum()) if "backup" in kind else 0
                    return {"points": points, "examples_per_s": (num_examples - dropped) / now}


def _slow_getpid() -> int:
    time.sleep(0.05)  # so that each worker gets one
    return os.getpid()


def measure(contender: str, what: str, num_steps: float) -> Any:
    """Runs one contender in processes of its own."""
    command = [sys.executable, "-m", "benchmarks.parameter_server", "--contender", contender]
    output = run([*command, "--what", what, "--steps", str(num_steps)], environment=os.environ, timeout_s=_TIMEOUT_S)
    lines = [line for line in output.splitlines() if line.startswith(PREFIX)]
    return json.loads(lines[0].removeprefix(PREFIX))


def contend(contender: str, what: str, num_steps: float) -> Any:
    """What a process of its own is started for."""
    if contender == "slow":
        return with_a_slow_worker(what, num_steps)
    if contender == "table":
        return with_table(_TABLES[what], int(num_steps))
    if contender == "hogwild":
        return with_hogwild(what, int(num_steps))
    if contender == "rpc":
        return with_rpc(what, int(num_steps))
    return with_stratagem(what, int(num_steps), torn_reads=contender == "torn reads")


def judge(measured: dict[str, dict[str, list[float]]]) -> list[Target]:
    """The ratios that are to be reached."""
    targets = []
    for model, found in measured.items():
        ours = found["stratagem"]
        for peer, bounds in (("hogwild", _AGAINST_HOGWILD), ("rpc", _AGAINST_RPC)):
            ratios = [own / theirs for own, theirs in zip(ours, found[peer], strict=True)]
            spread = min(ratios), max(ratios)
            targets.append(Target(f"{model}: over {peer}", statistics.median(ratios), bounds.get(model), spread=spread))
    return targets


def draw(curves: dict[str, Any], path: Path) -> None:
    """The loss over time, and the throughput, with one worker slowed down."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained", width_ratios=[2, 1])
    colours = ["#c9ced6", "#e09f3e", "#1d6fa3", "#22262b"]
    for (kind, curve), colour in zip(curves.items(), colours, strict=True):
        left.plot(*zip(*curve["points"], strict=True), label=kind, color=colour, linewidth=2)
    left.set(xlabel="seconds", ylabel="loss over all examples", yscale="log")
    left.legend(frameon=False)
    names = list(curves)
    right.barh(names, [curves[name]["examples_per_s"] for name in names], color=colours)
    right.invert_yaxis()
    right.set_xlabel("examples per second")
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Four workers, one of them three times slower", fontweight="bold")
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)


def main() -> None:
    """Measures, judges, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each curve with a slow worker")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--what", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        print(PREFIX + json.dumps(contend(options.contender, options.what, options.steps)), flush=True)
        return
    measured: dict[str, dict[str, list[float]]] = {model: {each: [] for each in CONTENDERS} for model in MODELS}
    tables: dict[str, list[float]] = {name: [] for name in _TABLES}
    for number in range(options.rounds):
        for model in MODELS:
            for contender in CONTENDERS if number % 2 == 0 else reversed(CONTENDERS):
                rate = measure(contender, model, 2 * WORKLOADS[model].num_steps)
                measured[model][contender].append(rate * len(part_of_batch(model, 0)[0]))
        for name in _TABLES:
            tables[name].append(1000 / measure("table", name, 300))
    curves = {kind: measure("slow", kind, options.seconds) for kind in _KINDS}
    targets = judge(measured)
    ratio = statistics.median(tables["2 million"]) / statistics.median(tables["20 thousand"])
    targets.append(Target("a step with 2 million rows, over 20 thousand", ratio, 1.5, at_most=True))
    columns = ("model", *(f"{each}, examples/s" for each in CONTENDERS))
    rows = [
        [model, *(f"{statistics.median(each):.0f}" for each in found.values())] for model, found in measured.items()
    ]
    show("Parameter server on one machine, 2 workers", columns, rows)
    show("Targets", TARGET_COLUMNS, [target.cells() for target in targets])
    RESULTS.mkdir(exist_ok=True)
    content = {
        "measured": measured,
        "tables_ms": tables,
        "slow": curves,
        "targets": [target.as_json() for target in targets],
    }
    (RESULTS / "parameter_server.json").write_text(json.dumps(content, indent=2) + "\n")
    text = markdown(columns, rows) + "\n\n" + markdown(TARGET_COLUMNS, [target.cells() for target in targets])
    (RESULTS / "parameter_server.md").write_text(text + "\n")
    draw(curves, RESULTS / "parameter_server.png")


if __name__ == "__main__":
    main()
