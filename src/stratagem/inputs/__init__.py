"""How global batches come to the replicas."""

from stratagem.inputs.distribute import Distributed, distribute, distribute_from_function, require_whole
from stratagem.inputs.indexed import DistributedLoader
from stratagem.inputs.iterables import DistributedStream
from stratagem.inputs.reader import InputContext, InputHost, Pass, Told
from stratagem.inputs.splitting import BatchDim

__all__ = [
    "BatchDim",
    "Distributed",
    "DistributedLoader",
    "DistributedStream",
    "InputContext",
    "InputHost",
    "Pass",
    "Told",
    "distribute",
    "distribute_from_function",
    "require_whole",
]
