"""Compares the parameter server of one machine with Hogwild and with one on torch.distributed.rpc.

Two workers and one shard, on 2 cores, a thread each, half a batch in each step of a worker; examples per second of
the same models, in turns (`turns`). "Torn" is the strategy with Hogwild's freedoms: reads and pushes may be half done.
Also what a step costs with a large table, and a plot of how the kinds of consistency fare when one of
two workers is three times slower than the other.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc

import stratagem as sg
from benchmarks import turns
from benchmarks.contender import make_optimizer, train_step
from benchmarks.measure import RESULTS
from benchmarks.models import WORKLOADS
from benchmarks.processes import run
from benchmarks.tables import TARGET_COLUMNS, Target, markdown, ratio_of, show
from benchmarks.training import environment

mpl.use("Agg")

NUM_WORKERS = 2
NUM_WARM_UP = 4
PREFIX = "FIGURES "
MODELS = ("mlp", "cnn", "transformer", "wide")
CONTENDERS = ("stratagem", "torn", "hogwild", "rpc")
_TIMEOUT_S = 180.0
_TABLES = {"20 thousand": 20_000, "2 million": 2_000_000}
_AGAINST_HOGWILD = {"mlp": 0.95, "cnn": 0.95, "transformer": 0.95}
_AGAINST_RPC = {"mlp": 1.5, "wide": 2.0}


def part_of_batch(name: str, number: int) -> tuple[torch.Tensor, ...]:
    """What a worker has of a batch, as in the benchmark of synchronous strategies."""
    return tuple(each.chunk(NUM_WORKERS)[number] for each in WORKLOADS[name].make_batch())


def alone_on_a_core(rank: int) -> None:
    """Gives a worker a core and a thread, as stratagem's have."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)


# The contenders: each says, whenever it is its turn, how many steps its workers did in a second


def with_stratagem(name: str, num_steps: int, **options: Any) -> None:
    """The strategy itself."""
    workload = WORKLOADS[name]
    with sg.ParameterServerStrategy(NUM_WORKERS, **options) as strategy:
        with strategy.scope():
            model = workload.make_model()
            optimizer = make_optimizer(model)
        batch = part_of_batch(name, 0)

        _measure(strategy, train_step(workload, model, optimizer), batch, num_steps)


def _measure(strategy: sg.ParameterServerStrategy, step: Callable[..., Any], args: Any, num_steps: int) -> None:
    for _ in range(NUM_WARM_UP * NUM_WORKERS):
        strategy.run(step, args=args)
    strategy.workers.settle()
    for answer in turns.rounds():
        start = time.perf_counter()
        for _ in range(num_steps):
            strategy.run(step, args=args)
        strategy.workers.settle()
        answer({"steps_per_s": num_steps / (time.perf_counter() - start)})


def _in_turns(step: Callable[[], None], num_steps: int, times: Any, barrier: Any) -> None:
    """In a worker of a peer: takes steps whenever it is the turn of its program."""
    for _ in range(NUM_WARM_UP):
        step()
    times.put(0.0)  # it is ready
    for _ in range(turns.num_rounds()):
        barrier.wait()
        start = time.perf_counter()
        for _ in range(num_steps):
            step()
        times.put(time.perf_counter() - start)
        barrier.wait()


def _with_processes(process: Callable[..., None], number: int, num_steps: int, *given: Any) -> None:
    """A peer whose workers are processes, as many as there are workers or one more.

    They are stopped while others measure: those of rpc look for messages without a rest, each on a core.
    """
    context = mp.get_context("spawn")
    times, barrier, each = context.Queue(), context.Barrier(NUM_WORKERS + 1), num_steps // NUM_WORKERS
    processes = [
        context.Process(target=process, args=(rank, each, times, barrier, *given), daemon=True)
        for rank in range(number)
    ]
    for each_process in processes:
        each_process.start()
    for _ in range(NUM_WORKERS):
        times.get(timeout=_TIMEOUT_S)
    _signal(processes, signal.SIGSTOP)
    for answer in turns.rounds():
        _signal(processes, signal.SIGCONT)
        barrier.wait(_TIMEOUT_S)
        seconds = max(times.get(timeout=_TIMEOUT_S) for _ in range(NUM_WORKERS))
        barrier.wait(_TIMEOUT_S)
        _signal(processes, signal.SIGSTOP)
        answer({"steps_per_s": each * NUM_WORKERS / seconds})
    _signal(processes, signal.SIGCONT)
    for each_process in processes:
        each_process.join(_TIMEOUT_S)


def _signal(processes: Sequence[Any], number: int) -> None:
    for process in processes:
        os.kill(process.pid, number)


def _hogwild_worker(rank: int, num_steps: int, times: Any, barrier: Any, name: str, model: nn.Module) -> None:
    alone_on_a_core(rank)
    workload = WORKLOADS[name]
    optimizer, batch = make_optimizer(model), part_of_batch(name, rank)

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(model, *batch).backward()
        optimizer.step()

    _in_turns(step, num_steps, times, barrier)


def with_hogwild(name: str, num_steps: int) -> None:
    """Processes that write to the same parameters, without any lock: the upper bound."""
    _with_processes(_hogwild_worker, NUM_WORKERS, num_steps, name, WORKLOADS[name].make_model().share_memory())


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


def _rpc_process(rank: int, num_steps: int, times: Any, barrier: Any, name: str, port: int) -> None:
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
        values = [rpc.rpc_sync(server, RpcServer.fetch)]

        def step() -> None:
            for parameter, value in zip(model.parameters(), values.pop(), strict=True):
                parameter.data = value
                parameter.grad = None
            workload.loss(model, *batch).backward()
            values.append(rpc.rpc_sync(server, RpcServer.push, args=([each.grad for each in model.parameters()],)))

        _in_turns(step, num_steps, times, barrier)
    rpc.shutdown()


def with_rpc(name: str, num_steps: int) -> None:
    """A server process and workers that speak to it by torch.distributed.rpc."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    _with_processes(_rpc_process, NUM_WORKERS + 1, num_steps, name, port)


def with_table(num_rows: int, num_steps: int) -> None:
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

        _measure(strategy, step, (num_rows,), num_steps)


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


def command(contender: str, what: str, num_steps: float) -> list[str]:
    """What is started for a contender, in processes of its own."""
    program = [sys.executable, "-m", "benchmarks.parameter_server", "--contender", contender]
    return [*program, "--what", what, "--steps", str(num_steps)]


def in_turns(commands: dict[str, list[str]], num_rounds: int) -> dict[str, list[float]]:
    """How many steps each did in a second, in all rounds."""
    found = turns.take_turns(commands, num_rounds, environment())
    return {name: [each["steps_per_s"] for each in rounds] for name, rounds in found.items()}


def slowed_down(kind: str, seconds: float) -> Any:
    """The curve of one kind of consistency."""
    output = run(command("slow", kind, seconds), environment=os.environ, timeout_s=_TIMEOUT_S)
    lines = [line for line in output.splitlines() if line.startswith(PREFIX)]
    return json.loads(lines[0].removeprefix(PREFIX))


def contend(contender: str, what: str, num_steps: float) -> None:
    """What a process of its own is started for."""
    if contender == "slow":
        print(PREFIX + json.dumps(with_a_slow_worker(what, num_steps)), flush=True)
    elif contender == "table":
        with_table(_TABLES[what], int(num_steps))
    elif contender == "hogwild":
        with_hogwild(what, int(num_steps))
    elif contender == "rpc":
        with_rpc(what, int(num_steps))
    else:
        with_stratagem(what, int(num_steps), torn_reads=contender == "torn", torn_pushes=contender == "torn")


def judge(measured: dict[str, dict[str, list[float]]]) -> list[Target]:
    """The ratios that are to be reached."""
    targets = []
    for model, found in measured.items():
        for peer, bounds in (("hogwild", _AGAINST_HOGWILD), ("rpc", _AGAINST_RPC)):
            targets.append(ratio_of(f"{model}: over {peer}", found["stratagem"], found[peer], bounds.get(model)))
        targets.append(ratio_of(f"{model}: torn, over hogwild", found["torn"], found["hogwild"]))
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each curve with a slow worker")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--what", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        contend(options.contender, options.what, options.steps)
        return
    measured: dict[str, dict[str, list[float]]] = {}
    for model in MODELS:
        num_examples, num_steps = len(part_of_batch(model, 0)[0]), 2 * WORKLOADS[model].num_steps
        found = in_turns({each: command(each, model, num_steps) for each in CONTENDERS}, options.rounds)
        measured[model] = {name: [rate * num_examples for rate in rates] for name, rates in found.items()}
    rates = in_turns({name: command("table", name, 300) for name in _TABLES}, options.rounds)
    tables = {name: [1000 / rate for rate in own] for name, own in rates.items()}
    curves = {kind: slowed_down(kind, options.seconds) for kind in _KINDS}
    few, many = tables.values()
    rows_ratio = ratio_of("a step with 2 million rows, over 20 thousand", many, few, 1.5, at_most=True)
    targets = [*judge(measured), rows_ratio]
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
