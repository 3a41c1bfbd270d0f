"""Operations whose device does not exist, or cannot compute them: an error, or the nearest device that can.

python examples/soft_placement.py
"""

import warnings

import torch

import stratagem as sg


@sg.device("/gpu:4")
def product() -> torch.Tensor:
    """A product on the fifth GPU."""
    a = torch.ones(2, 2)
    return a @ a


@sg.device("/gpu:0")
def histogram() -> torch.Tensor:
    """How often each value comes; torch has no kernel for that on GPUs."""
    values = torch.tensor([0.0, 1.0, 1.0, 3.0])
    return torch.histogram(values, bins=4).hist


def main() -> None:
    """Tries both, first without soft placement, then with it."""
    sg.config.simulate_devices("GPU", 2)
    for soft in (False, True):
        sg.config.set_soft_device_placement(soft)
        print(f"soft placement: {'on' if soft else 'off'}")
        for compute in (product, histogram):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                try:
                    result = compute()
                    print(f"  {compute.__name__}: {result.tolist()} on {sg.device_of(result).name}")
                except sg.StratagemError as error:
                    print(f"  {compute.__name__}: {type(error).__name__}: {error}")
            for warning in told:
                print(f"    told: {warning.message}")


if __name__ == "__main__":
    main()
