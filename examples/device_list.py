"""Which devices there are, which of them a program sees, and how they are numbered.

python examples/device_list.py
CUDA_VISIBLE_DEVICES=4,5,6,7 python examples/device_list.py     # numbered from 0 again

On a machine without GPUs, eight simulated ones take their place.
"""

import stratagem as sg


def main() -> None:
    """Lists, hides and divides devices."""
    if not sg.config.list_physical_devices("GPU"):
        sg.config.simulate_devices("GPU", 8, memory_limit=256)

    print("the GPUs that this process sees:")
    for name in (device.name for device in sg.config.list_logical_devices("GPU")):
        print(f"  {name}")

    gpus = sg.config.list_physical_devices("GPU")
    sg.config.set_visible_devices(gpus[:2], "GPU")
    print("after set_visible_devices:", ", ".join(device.name for device in sg.config.list_logical_devices("GPU")))

    half = sg.config.LogicalDeviceConfiguration(memory_fraction=0.5)
    sg.config.set_logical_device_configuration(gpus[0], [half, half])
    print("after dividing the first:", ", ".join(device.name for device in sg.config.list_logical_devices("GPU")))
    for device in sg.config.list_logical_devices():
        print(f"  {device.name} is a share of {device.physical.name}")


if __name__ == "__main__":
    main()
