"""How much of a GPU's memory a program may take: growth, a limit, and what happens at the limit.

python examples/memory_options.py

On a machine without GPUs, two simulated ones of 100 MiB take their place.
"""

import torch

import stratagem as sg

MIB = 2**20


def main() -> None:
    """Limits one GPU to 40% of its memory, fills it, and goes over."""
    if not sg.config.list_physical_devices("GPU"):
        sg.config.simulate_devices("GPU", 2, memory_limit=100)
    gpu = sg.config.list_physical_devices("GPU")[0]

    sg.config.set_memory_growth(gpu, True)  # TensorFlow's allow_growth; here the default
    part = sg.config.LogicalDeviceConfiguration(memory_fraction=0.4)  # its per_process_gpu_memory_fraction
    sg.config.set_logical_device_configuration(gpu, [part])
    (device,) = (each for each in sg.config.list_logical_devices("GPU") if each.physical == gpu)
    limit = device.memory_limit_bytes
    print(f"{device.name} may take {limit / MIB:.0f} MiB, growth: {sg.config.get_memory_growth(gpu)}")

    with sg.device(device):
        half = torch.zeros(limit // 2, dtype=torch.uint8)
        print(f"in use: {sg.config.get_memory_info(device.name)['current'] / MIB:.0f} MiB")
        try:
            torch.cat([half, half])
        except sg.OutOfMemoryError as error:
            print(error)
        del half
        whole = torch.zeros(limit, dtype=torch.uint8)
        print(f"without the first one it fits: {whole.numel() / MIB:.0f} MiB")


if __name__ == "__main__":
    main()
