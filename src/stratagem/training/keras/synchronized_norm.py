"""`BatchNormalization(synchronized=True)` of Keras on torch: statistics of the global batch.

Keras has the argument for TensorFlow only. Connected by `connect`, in the main program as soon as it has imported both
Keras and stratagem, and in children. Outside replicas, or with one alone, such a layer is as any other.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
from keras.src.backend.torch import nn

from stratagem.engine.context import current_replica


@functools.cache
def connect() -> None:
    """Lets layers be synchronized, once for the process."""
    if keras.backend.backend() != "torch":
        return
    nn.moments = functools.partial(_moments, nn.moments)
    init = keras.layers.BatchNormalization.__init__

    @functools.wraps(init)
    def init_any(self: Any, *args: Any, synchronized: bool = False, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.synchronized = synchronized

    init_any.__signature__ = inspect.signature(init)  # type: ignore[attr-defined]  # Keras looks at it
    keras.layers.BatchNormalization.__init__ = init_any


def _moments(
    original: Callable[..., Any], x: Any, axes: Sequence[int], keepdims: bool = False, synchronized: bool = False
) -> Any:
    """Mean and variance, as Keras computes them, over the batches of all replicas."""
    replica = current_replica()
    if not synchronized or replica is None or replica.num_replicas_in_sync == 1:
        return original(x, axes, keepdims=keepdims)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    sums = torch.stack([wide.sum(dim=axes, keepdim=keepdims), wide.square().sum(dim=axes, keepdim=keepdims)])
    count = torch.tensor([float(math.prod(x.shape[axis] for axis in axes))], dtype=torch.float64, device=x.device)
    total = replica.all_reduce("sum", torch.cat([sums.double().flatten(), count]))
    mean, squares = (total[:-1] / total[-1].detach().clamp(min=1)).view(sums.shape).unbind()
    return mean.to(x.dtype), (squares - mean.square()).clamp(min=0).to(x.dtype)
