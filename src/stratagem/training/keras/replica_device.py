"""Lets Keras compute on the device of a replica.

Keras has a device of its own, which it chooses when it is imported: a GPU if torch finds one. It moves to it whatever
a layer is given, weights too. Without this, replicas on the CPU of a machine with GPUs would compute on a GPU, and
those on an accelerator that Keras does not know, on the CPU.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
from keras.src.backend.common import global_state

from stratagem.placement import home

_ATTRIBUTE = "torch_device"


@functools.cache
def connect() -> None:
    """Lets Keras follow, once for the process."""
    home.let_follow(_on)


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    # The kind alone: Keras compares it with "cpu" and "cuda", and which of them is current is torch's to know.
    # Not by `keras.device`, which reads "gpu" as CUDA's.
    before = global_state.get_global_attribute(_ATTRIBUTE, None)
    global_state.set_global_attribute(_ATTRIBUTE, device.type)
    try:
        yield
    finally:
        global_state.set_global_attribute(_ATTRIBUTE, before)
