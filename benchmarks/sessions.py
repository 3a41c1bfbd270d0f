"""Compares a session whose graph lies on two shares of the CPU with the same graph on one share; judges the targets."""

import argparse
import json
import time
from collections.abc import Callable, Sequence

import torch

import stratagem as sg
from benchmarks.measure import RESULTS, Reading, interleaved, report
from benchmarks.tables import TARGET_COLUMNS, Target, show

_AT_LEAST = 1.7
_SHARES = {"one share": ("/cpu:0", "/cpu:0"), "two shares": ("/cpu:0", "/cpu:1")}


def products(devices: Sequence[str]) -> tuple[sg.Graph, torch.Tensor]:
    """Products of large matrices that do not depend on each other, and their sum."""
    with sg.Graph() as graph:
        found = []
        for device in devices:
            with sg.device(device):
                found.append(sg.constant(torch.randn(1500, 1500)) @ sg.constant(torch.randn(1500, 1500)))
        with sg.device("/cpu:0"):
            return graph, sg.add_n(found)


def towers(devices: Sequence[str]) -> tuple[sg.Graph, torch.Tensor]:
    """A training step of a perceptron: each tower has half of the batch, the first share averages and updates."""
    with sg.Graph() as graph:
        with sg.device("/cpu:0"):
            shapes = [(512, 784), (512, 512), (10, 512)]
            weights = [sg.get_variable(f"w{number}", shape) for number, shape in enumerate(shapes)]
        gradients = []
        for device in devices:
            with sg.device(device):
                hidden = sg.constant(torch.randn(1024, 784))
                for weight in weights[:-1]:
                    hidden = torch.relu(hidden @ weight.T)
                labels = sg.constant(torch.randint(10, (1024,)))
                loss = torch.nn.functional.cross_entropy(hidden @ weights[-1].T, labels)
                gradients.append(torch.autograd.grad(loss, weights))
        with sg.device("/cpu:0"):
            means = [sg.add_n(each) / len(devices) for each in zip(*gradients, strict=True)]
            updates = [sg.assign(weight, weight - 0.01 * mean) for weight, mean in zip(weights, means, strict=True)]
            return graph, sg.add_n([each.sum() for each in updates])


def seconds_of(session: sg.Session, fetch: torch.Tensor, num_runs: int) -> float:
    """How long one run takes."""
    start = time.perf_counter()
    for _ in range(num_runs):
        session.run(fetch)
    return (time.perf_counter() - start) / num_runs


def measure(name: str, build: Callable[[Sequence[str]], tuple[sg.Graph, torch.Tensor]], num_rounds: int) -> Target:
    """The ratio of two shares to one."""
    sessions = {}
    for shares, devices in _SHARES.items():
        graph, fetch = build(devices)
        sessions[shares] = (sg.Session(graph), fetch)
    contenders = {
        shares: lambda session=session, fetch=fetch: seconds_of(session, fetch, num_runs=5)
        for shares, (session, fetch) in sessions.items()
    }
    readings: dict[str, Reading] = interleaved(contenders, num_rounds)
    for session, _ in sessions.values():
        session.close()
    report(f"sessions {name}", readings, reference="one share")
    one, two = (readings[shares] for shares in _SHARES)
    rounds = sorted(slow / fast for slow, fast in zip(one.seconds, two.seconds, strict=True))
    return Target(
        f"{name}: speed of two shares over one", one.median_s / two.median_s, _AT_LEAST, False, (rounds[0], rounds[-1])
    )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    share = sg.config.LogicalDeviceConfiguration(num_cores=1)
    sg.config.set_logical_device_configuration("cpu:0", [share, share])
    torch.manual_seed(0)
    targets = [measure(name, build, options.rounds) for name, build in (("products", products), ("towers", towers))]
    show("Sessions", TARGET_COLUMNS, [target.cells() for target in targets])
    RESULTS.mkdir(exist_ok=True)
    content = {"num_rounds": options.rounds, "targets": [target.as_json() for target in targets]}
    (RESULTS / "sessions.json").write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    main()
