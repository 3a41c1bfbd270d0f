"""The generators of random numbers of this process, as values that a checkpoint keeps."""

import random
from typing import Any

import numpy as np
import torch


def current() -> dict[str, Any]:
    """Where the generators of torch (on the CPU), Python and numpy are."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(numbers), gauss),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
    }


def restore(state: dict[str, Any]) -> None:
    """Puts the generators back to where they were."""
    torch.manual_seed(0)  # a strategy takes notice of it, and seeds the replicas anew also if the state is the same
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))


def seed(number: int) -> None:
    """Starts all generators anew."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def draw() -> int:
    """Draws one number. Replicas are then seeded anew from the state that follows."""
    return int(torch.randint(2**62, ()).item())
