"""Google's TPUs, by whichever of its two libraries this program has: `torch_tpu`, or the older `torch_xla`.

With `torch_tpu` each is a device of torch's own, with `torch_xla` all compute one program together.
"""

from typing import Final

import torch

from stratagem import _env
from stratagem.devices.accelerators import Accelerator
from stratagem.devices.host import Host
from stratagem.devices.vendors import torch_tpu, torch_xla

INSTALL: Final = "pip install torch_tpu (torch 2.12 to 2.15), or pip install 'torch==2.9.*' 'torch_xla[tpu]==2.9.*'"


def is_built() -> bool:
    """Whether this program has what lets torch see them."""
    return torch_tpu.is_built() or torch_xla.is_installed()


def accelerator(kind: str) -> Accelerator:
    """Those of this machine."""
    if torch_xla.is_installed() and not torch_tpu.is_built():
        return torch_xla.XlaAccelerator(kind)
    return torch_tpu.accelerator(kind)


def why_none(host: Host) -> str:
    """Why there is none, and what to do."""
    chips = host.num_tpu_chips()
    looked = f"the PCI bus of this machine has {chips} TPU chip(s)"
    if torch_tpu.is_built():
        return f"torch_tpu is loaded and finds none: torch.tpu.device_count() is 0, and {looked}"
    if not torch_xla.is_installed():
        return (
            f"torch sees a TPU through torch_tpu or torch_xla, and neither is installed beside torch "
            f"{torch.__version__}; {looked}. Install one: {INSTALL}"
        )
    asked = _env.pjrt_device()
    said = f"{_env.PJRT_DEVICE} is not set" if asked is None else f"{_env.PJRT_DEVICE} is {asked!r}"
    return (
        f"torch_xla {torch_xla.version()} is installed, and {looked}, while {said}. To try a program on the CPU, "
        f"let torch_xla divide it: {_env.PJRT_DEVICE}=CPU {_env.CPU_NUM_DEVICES}=4"
    )
