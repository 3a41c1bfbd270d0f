"""Products on two GPUs, summed on the CPU, with a line for every operation: where it runs.

python examples/placement_log.py [--save placement.html]

On a machine with fewer than four GPUs, simulated ones take their place.
"""

import argparse

import torch

import stratagem as sg


def main() -> None:
    """Runs the products twice: with lines on the screen, and with a log as data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="FILE", help="a picture: .html or .png")
    options = parser.parse_args()
    if len(sg.config.list_physical_devices("GPU")) < 4:
        sg.config.simulate_devices("GPU", 4)

    sg.config.set_log_device_placement(True)
    print(products_of(["/device:GPU:2", "/device:GPU:3"]))
    sg.config.set_log_device_placement(False)

    with sg.log_placement() as log:
        products_of(["/gpu:0", "/gpu:1", "/gpu:2"])
    print()
    print(log.table())
    if options.save:
        print(f"\nthe picture is in {log.save(options.save)}")


def products_of(devices: list[str]) -> torch.Tensor:
    """The same product on every device, and their sum on the CPU."""
    products = []
    for device in devices:
        with sg.device(device):
            a = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
            b = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
            products.append(torch.matmul(a, b))
    with sg.device("/cpu:0"):
        return sg.add_n(products)


if __name__ == "__main__":
    main()
