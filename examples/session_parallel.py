"""Divides work between two GPUs by hand: by operation (model parallelism), then by data (towers that learn together).

python examples/session_parallel.py
"""

import functools

import torch

import stratagem as sg

UNIFORM = functools.partial(torch.nn.init.uniform_, a=-1, b=1)
CONFIG = sg.SessionConfig(log_device_placement=True, allow_soft_placement=True)


def by_operation() -> None:
    """GPU 0 multiplies, GPU 1 adds."""
    with sg.Graph() as graph:
        a = sg.get_variable("a", [2, 2], initializer=UNIFORM)
        b = sg.get_variable("b", [2, 2], initializer=UNIFORM)
        c = []
        with sg.device("/gpu:0"):
            c.append(torch.matmul(a, b))
        with sg.device("/gpu:1"):
            c.append(a + b)
        with sg.device("/cpu:0"):
            total = sg.add_n(c)
    with sg.Session(graph, config=CONFIG) as session:
        first, second, found = session.run([a, b, total])
        print("model parallel:", torch.allclose(found, first @ second + first + second))


def by_data() -> None:
    """Tower i is responsible for batch i."""
    with sg.Graph() as graph:
        a = sg.get_variable("a", [2, 2, 3], initializer=UNIFORM)
        b = sg.get_variable("b", [2, 3, 2], initializer=UNIFORM)
        c = []
        for i, device in enumerate(["/gpu:0", "/gpu:1"]):
            with sg.device(device):
                c.append(torch.matmul(a[i], b[i]))
        with sg.device("/cpu:0"):
            total = sg.add_n(c)
    with sg.Session(graph, config=CONFIG) as session:
        first, second, found = session.run([a, b, total])
        print("data parallel:", torch.allclose(found, (first @ second).sum(0)))


def towers() -> None:
    """Parameters on the CPU, gradients on the GPUs, their mean and the update on the CPU."""
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]])
    with sg.Graph() as graph:
        inputs = sg.placeholder(torch.float32, [64, 3])
        targets = sg.placeholder(torch.float32, [64, 1])
        with sg.device("/cpu:0"):
            weights = sg.get_variable("weights", [3, 1], initializer=torch.nn.init.zeros_)
        losses, gradients = [], []
        for i, device in enumerate(["/gpu:0", "/gpu:1"]):
            with sg.device(device):
                rows = slice(32 * i, 32 * i + 32)
                losses.append(torch.nn.functional.mse_loss(inputs[rows] @ weights, targets[rows]))
                gradients += torch.autograd.grad(losses[-1], [weights])
        with sg.device("/cpu:0"):
            loss = sg.add_n(losses) / 2
            train = sg.assign(weights, weights - 0.1 * sg.add_n(gradients) / 2)
    with sg.Session(graph) as session:
        for step in range(101):
            value, _ = session.run([loss, train], {inputs: x, targets: y})
            if step % 50 == 0:
                print(f"towers: step {step}, loss {value:.4f}")
        print("weights:", [round(each, 2) for each in session.run(weights).flatten().tolist()])


def main() -> None:
    """Runs all three."""
    if len(sg.config.list_physical_devices("GPU")) < 2:
        sg.config.simulate_devices("GPU", 2)
    by_operation()
    by_data()
    towers()


if __name__ == "__main__":
    main()
