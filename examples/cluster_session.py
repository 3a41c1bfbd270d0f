"""Runs one graph on a cluster: parameters on a parameter server, gradients on two workers, all of them real processes.

python examples/cluster_session.py

Started so, the program starts the tasks on this machine itself. On several machines, start on each
`python examples/cluster_session.py --cluster '{"worker": ["10.0.0.1:2222", ...], ...}' --job worker --task 0`.
"""

import argparse
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator

import torch

import stratagem as sg


def free_addresses(count: int) -> list[str]:
    """Addresses of this machine at which nobody listens."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in held]


@contextlib.contextmanager
def tasks_on_this_machine(cluster: sg.ClusterSpec) -> Iterator[None]:
    """Starts a process for each task but the first, and ends them."""
    others = [
        subprocess.Popen(
            [sys.executable, __file__, "--cluster", cluster.to_json(), "--job", task.job, "--task", str(task.index)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for task in cluster.tasks[1:]
    ]
    try:
        for each in others:
            each.stdout.readline()  # it listens
        yield
    finally:
        for each in others:
            each.terminate()
            each.communicate()


def train(target: str) -> None:
    """The graph, and a session on the cluster."""
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]])
    with sg.Graph() as graph:
        inputs = sg.placeholder(torch.float32, [64, 3])
        targets = sg.placeholder(torch.float32, [64, 1])
        with sg.device("/job:ps/task:0"):
            weights = sg.get_variable("weights", [3, 1], initializer=torch.nn.init.zeros_)
        losses, gradients = [], []
        for i in range(2):
            with sg.device(f"/job:worker/task:{i}"):
                rows = slice(32 * i, 32 * i + 32)
                losses.append(torch.nn.functional.mse_loss(inputs[rows] @ weights, targets[rows]))
                gradients += torch.autograd.grad(losses[-1], [weights])
        with sg.device("/job:ps/task:0"):
            loss = sg.add_n(losses) / 2
            step = sg.assign(weights, weights - 0.1 * sg.add_n(gradients) / 2)
    with sg.Session(target, graph, config=sg.SessionConfig(log_device_placement=True)) as session:
        for number in range(101):
            value, _ = session.run([loss, step], {inputs: x, targets: y})
            if number % 50 == 0:
                print(f"step {number}, loss {value:.4f}")
        print("weights:", [round(each, 2) for each in session.run(weights).flatten().tolist()])


def main() -> None:
    """Is one task of the cluster, or starts all and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=json.loads, help="all tasks, as JSON")
    parser.add_argument("--job", help="the job of this task")
    parser.add_argument("--task", type=int, help="its index")
    options = parser.parse_args()
    if options.cluster:
        server = sg.Server(options.cluster, job_name=options.job, task_index=options.task)
        print(f"{options.job}/{options.task} listens at {server.target}", flush=True)
        server.join()
        return
    first, second, third = free_addresses(3)
    cluster = sg.ClusterSpec({"worker": [first, second], "ps": [third]})
    with tasks_on_this_machine(cluster), sg.Server(cluster, job_name="worker", task_index=0) as server:
        train(server.target)


if __name__ == "__main__":
    main()
