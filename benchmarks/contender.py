"""Trains one model with one library in processes of its own, and prints what it measured as JSON.

Started by `training`; DDP through torchrun. Every contender sees the same weights and the same batch,
and one step is one global batch.
"""

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import turns
from benchmarks.models import EMPTY, WORKLOADS, Workload
from benchmarks.processes import descendants, loopback_bytes, processor_s, pss_mb

NUM_WARM_UP = 3
PREFIX = "FIGURES "
SYNC_EVERY = 10  # steps between two synchronisations of local SGD
STEPS_IN_A_CALL = 16

Figures = dict[str, Any]


def build(workload: Workload) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model with its optimizer, the same for everyone."""
    torch.manual_seed(0)
    model = workload.make_model()
    return model, make_optimizer(model)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all contenders."""
    return torch.optim.SGD([*model.parameters()] or [torch.nn.Parameter(torch.zeros(1))], lr=0.01, momentum=0.9)


def measure(
    step: Callable[[], float],
    num_steps: int,
    *,
    leads: bool = True,
    mean: Callable[[float], float] = lambda loss: loss,
    steps_in_a_call: int = 1,
) -> Figures:
    """Warms up, then times steps one by one, in as many rounds as there are.

    Args:
        step: Does one step and returns its loss.
        num_steps: How many to time in a round.
        leads: Whether this process speaks for the program.
        mean: Makes one loss of those of all processes.
        steps_in_a_call: How many steps a call of `step` does; figures are those of one.

    Returns:
        The figures of the last round.
    """
    step()
    first_step_s = time.time() - float(os.environ["BENCHMARK_STARTED"])  # when the command was started
    for _ in range(NUM_WARM_UP - 1):
        step()
    clocks = _clocks()
    parts = None if clocks is None else clocks.taken()
    pids = [os.getpid(), *descendants(os.getpid())]
    for answer in turns.rounds(leads=leads):
        step()  # whoever has waited for its turn has cold caches
        seconds, used_s, sent = [], processor_s(pids), loopback_bytes()
        for _ in range(num_steps):
            start = time.perf_counter()
            loss = step()
            seconds.append((time.perf_counter() - start) / steps_in_a_call)
        used_s = processor_s(pids) - used_s  # of this process and those that it drives
        figures = {
            "seconds": seconds,
            "first_step_s": first_step_s,
            "processor_s": used_s / num_steps / steps_in_a_call,
        }
        figures["loopback_mb"] = (
            (loopback_bytes() - sent) / 1e6 / num_steps / steps_in_a_call
        )  # of all processes of this machine
        figures["loss"] = mean(loss)
        if parts is not None:
            figures["parts_s"] = {part: value / (num_steps + 1) for part, value in parts.seconds.items()}
        answer(figures)
    return figures


def _clocks() -> Any:
    """Where the time of the parts of a step is taken, if that was asked for."""
    if "BENCHMARK_PARTS" not in os.environ:
        return None
    from benchmarks import parts  # noqa: PLC0415  # the others must not pay for it

    return parts


def memory(root: int) -> Figures:
    """What all processes of a run hold, from the one that the command started; now, between two steps."""
    pids = [root, *descendants(root)]
    return {"pss_mb": pss_mb(pids), "num_processes": len(pids)}


def single(workload: Workload, _: int) -> Figures:
    """Plain torch in one process on all cores."""
    model, optimizer = build(workload)
    step = _plain_step(workload, model, optimizer, *workload.make_batch())
    return measure(step, workload.num_steps) | memory(os.getpid())


def ddp(workload: Workload, size: int) -> Figures:
    """torch's DistributedDataParallel over gloo, under torchrun."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.set_num_threads(_num_threads(size))
    model, optimizer = build(workload)
    inputs, targets = (each.chunk(size)[rank] for each in workload.make_batch())
    parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def mean(loss: float) -> float:
        losses = torch.tensor(loss)
        torch.distributed.all_reduce(losses)
        return losses.item() / size

    step = _plain_step(workload, parallel, optimizer, inputs, targets)
    figures = measure(step, workload.num_steps, leads=rank == 0, mean=mean)
    if rank == 0:
        figures |= memory(os.getppid())  # torchrun
    torch.distributed.barrier()  # the others stay for as long as rank 0 counts their memory
    torch.distributed.destroy_process_group()
    return figures if rank == 0 else {}


def stratagem(workload: Workload, size: int) -> Figures:
    """MirroredStrategy on as many shares of the CPU."""
    import stratagem as sg  # noqa: PLC0415  # the others must not pay for it

    divide(sg, size)
    return launched(workload, size)


def launched(workload: Workload, _: int) -> Figures:
    """MirroredStrategy on the devices that `stratagem run --devices` has named."""
    import stratagem as sg  # noqa: PLC0415  # the others must not pay for it

    with sg.MirroredStrategy() as strategy:
        return measure(distributed_step(strategy, workload), workload.num_steps) | memory(os.getpid())


def one_device(workload: Workload, _: int) -> Figures:
    """OneDeviceStrategy."""
    import stratagem as sg  # noqa: PLC0415  # the others must not pay for it

    with sg.OneDeviceStrategy("cpu:0") as strategy:
        return measure(distributed_step(strategy, workload), workload.num_steps) | memory(os.getpid())


def several_steps(workload: Workload, size: int) -> Figures:
    """MirroredStrategy, with as many steps in one call as `STEPS_IN_A_CALL` says; the time of one."""
    import stratagem as sg  # noqa: PLC0415  # the others must not pay for it

    divide(sg, size)
    with sg.MirroredStrategy() as strategy:
        step = distributed_step(strategy, workload, STEPS_IN_A_CALL)
        return measure(step, workload.num_steps // 4, steps_in_a_call=STEPS_IN_A_CALL) | memory(os.getpid())


def parameter_server(workload: Workload, size: int) -> Figures:
    """ParameterServerStrategy with as many workers; a run gives one of them the whole batch, and is waited for."""
    import stratagem as sg  # noqa: PLC0415  # the others must not pay for it

    with sg.ParameterServerStrategy(size) as strategy:
        return measure(distributed_step(strategy, workload), workload.num_steps) | memory(os.getpid())


def central(workload: Workload, size: int) -> Figures:
    """CentralStorageStrategy on as many shares of the CPU."""
    import stratagem as sg  # noqa: PLC0415  # the others must not pay for it

    divide(sg, size)
    with sg.CentralStorageStrategy() as strategy:
        return measure(distributed_step(strategy, workload), workload.num_steps) | memory(os.getpid())


def workers(workload: Workload, _: int, exchange_dtype: str | None = None) -> Figures:
    """MultiWorkerMirroredStrategy, in each of the workers that `stratagem run` has started."""
    import stratagem as sg  # noqa: PLC0415  # the others must not pay for it

    options = {} if exchange_dtype is None else {"exchange_dtype": exchange_dtype}  # older revisions have none
    with sg.MultiWorkerMirroredStrategy(**options) as strategy:
        figures = measure(distributed_step(strategy, workload), workload.num_steps, leads=strategy.is_chief)
        if strategy.is_chief:
            figures |= memory(os.getppid())  # the launcher
        strategy.is_any(False)  # the others stay for as long as their memory is counted
        return figures if strategy.is_chief else {}


def local_sgd(workload: Workload, _: int) -> Figures:
    """LocalSGDStrategy, in each of the workers that `stratagem run` has started."""
    import stratagem as sg  # noqa: PLC0415  # the others must not pay for it

    with sg.LocalSGDStrategy(SYNC_EVERY) as strategy:
        steps = distributed_step(strategy, workload)

        def sync() -> float:  # as many steps as one synchronisation: each costs its share of it
            return [steps() for _ in range(SYNC_EVERY)][-1]

        num_syncs = -(-workload.num_steps // SYNC_EVERY)
        figures = measure(sync, num_syncs, leads=strategy.is_chief, steps_in_a_call=SYNC_EVERY)
        if strategy.is_chief:
            figures |= memory(os.getppid())  # the launcher
        strategy.is_any(False)  # the others stay for as long as their memory is counted
        return figures if strategy.is_chief else {}


def divide(sg: Any, size: int) -> None:
    """Makes as many logical devices of the CPU."""
    sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * size)


def train_step(
    workload: Workload, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The step that strategies run: one update for one batch."""

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = workload.loss(model, inputs, targets)
        loss.backward()
        optimizer.step()
        return loss

    return step


def distributed_step(strategy: Any, workload: Workload, num_steps: int | None = None) -> Callable[[], float]:
    """Does one step of a workload under a strategy, or several, and returns the loss of the last."""
    if workload is EMPTY:
        return lambda: float(strategy.run(_nothing, num_steps=num_steps) is None)
    with strategy.scope():
        model, optimizer = build(workload)
    batches = iter(strategy.distribute(_again(workload.make_batch())))

    train = train_step(workload, model, optimizer)

    def step() -> float:
        if num_steps is None:
            return float(strategy.reduce("mean", strategy.run(train, args=next(batches))))
        return float(strategy.reduce("mean", strategy.run(train, args=batches, num_steps=num_steps))[-1])

    return step


def _nothing() -> None:
    """A step that does nothing."""


def _plain_step(
    workload: Workload,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> Callable[[], float]:
    def step() -> float:
        optimizer.zero_grad()
        loss = workload.loss(model, inputs, targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step if workload is not EMPTY else lambda: 0.0


def _num_threads(size: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // size)


def _again(batch: tuple[torch.Tensor, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield batch


CONTENDERS: dict[str, Callable[[Workload, int], Figures]] = {
    "single": single,
    "ddp": ddp,
    "stratagem": stratagem,
    "launched": launched,
    "several_steps": several_steps,
    "one_device": one_device,
    "parameter_server": parameter_server,
    "central": central,
    "workers": workers,
    "workers_bf16": functools.partial(workers, exchange_dtype="bf16"),
    "local_sgd": local_sgd,
}


def main() -> None:
    """Runs the contender that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=list(CONTENDERS))
    parser.add_argument("model", choices=list(WORKLOADS))
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()
    figures = CONTENDERS[options.contender](WORKLOADS[options.model], options.replicas)
    if figures:
        print(PREFIX + json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
