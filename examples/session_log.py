"""Records two products on two GPUs and their sum on the CPU, runs them in a session, and shows where each ran.

python examples/session_log.py
"""

import torch

import stratagem as sg


def main() -> None:
    """Runs the programs of the notes."""
    if len(sg.config.list_physical_devices("GPU")) < 4:
        sg.config.simulate_devices("GPU", 4)

    products = []
    for device in ["/device:GPU:2", "/device:GPU:3"]:
        with sg.device(device):
            a = sg.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[2, 3])
            b = sg.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[3, 2])
            products.append(torch.matmul(a, b))
    with sg.device("/cpu:0"):
        total = sg.add_n(products)
    with sg.Session(config=sg.SessionConfig(log_device_placement=True)) as session:
        print(session.run(total))

    sg.reset_default_graph()
    with sg.device("/cpu:0"):
        a = sg.constant([1.0, 2.0, 3.0], shape=[3], name="a")
        b = sg.constant([1.0, 2.0, 3.0], shape=[3], name="b")
    with sg.device("/gpu:1"):
        c = a + b
    with sg.Session(config=sg.SessionConfig(log_device_placement=True)) as session:
        print(session.run(c))


if __name__ == "__main__":
    main()
