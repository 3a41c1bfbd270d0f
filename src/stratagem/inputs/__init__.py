"""How global batches come to the replicas."""

from stratagem.inputs.distribute import (
    Distributed,
    distribute,
    distribute_from_function,
    require_known_options,
    require_whole,
)
from stratagem.inputs.drawing import MOST_STEPS, Drawing
from stratagem.inputs.indexed import DistributedLoader
from stratagem.inputs.iterables import DistributedStream
from stratagem.inputs.reader import InputContext, InputHost, Pass, Told
from stratagem.inputs.splitting import BatchDim

__all__ = [
    "MOST_STEPS",
    "BatchDim",
    "Distributed",
    "DistributedLoader",
    "DistributedStream",
    "Drawing",
    "InputContext",
    "InputHost",
    "Pass",
    "Told",
    "distribute",
    "distribute_from_function",
    "require_known_options",
    "require_whole",
]
