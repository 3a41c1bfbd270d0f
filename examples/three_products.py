"""Multiplies matrices on three GPUs and adds the products on the CPU: the work of each device by hand.

python examples/three_products.py
"""

import functools

import torch

import stratagem as sg


def main() -> None:
    """Runs the program of the notes."""
    if len(sg.config.list_physical_devices("GPU")) < 3:
        sg.config.simulate_devices("GPU", 3)
    uniform = functools.partial(torch.nn.init.uniform_, a=-1, b=1)

    c = []
    for i, device in enumerate(["/gpu:0", "/gpu:1", "/gpu:2"]):
        with sg.device(device):
            a = sg.get_variable(f"a_{i}", [2, 3], initializer=uniform)
            b = sg.get_variable(f"b_{i}", [3, 2], initializer=uniform)
            c.append(torch.matmul(a, b))
    with sg.device("/cpu:0"):
        total = sg.add_n(c)

    with sg.Session(config=sg.SessionConfig(log_device_placement=True)) as session:
        session.run(sg.global_variables_initializer())
        print(session.run(total))

        names = [f"{letter}_{i}" for i in range(3) for letter in "ab"]
        values = session.run(names)
        expected = sum(one @ two for one, two in zip(values[::2], values[1::2], strict=True))
        print("as torch computes it:", torch.allclose(session.run(total), expected))


if __name__ == "__main__":
    main()
