"""Reads the environment; the only file that does.

Owns the names of the variables. What a value means is decided by the part that asks:
variables are read when they are needed, never at import, so that a program may set them first.
"""

import difflib
import os
from collections.abc import Mapping

SIMULATE = "STRATAGEM_SIMULATE"
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
KERAS_BACKEND = "KERAS_BACKEND"

_PREFIX = "STRATAGEM_"
_OWN = (SIMULATE,)


def simulate() -> str | None:
    """Which devices to simulate, for example `gpu:4`."""
    return os.environ.get(SIMULATE)


def cuda_visible_devices() -> str | None:
    """Which GPUs the CUDA driver shows to this process; unset means all, empty means none."""
    return os.environ.get(CUDA_VISIBLE_DEVICES)


def use_torch_for_keras() -> None:
    """Makes Keras, if it is imported later, run on torch: in children, whose program has chosen torch for it."""
    os.environ[KERAS_BACKEND] = "torch"


def misspelt(environment: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """Variables with stratagem's prefix that nothing reads, each with the likeliest meant one."""
    strangers = sorted(name for name in environment if name.startswith(_PREFIX) and name not in _OWN)
    return [(name, difflib.get_close_matches(name, _OWN, n=1, cutoff=0.0)[0]) for name in strangers]
