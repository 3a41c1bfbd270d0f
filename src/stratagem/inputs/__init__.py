"""How global batches come to the replicas."""

from stratagem.inputs.distribute import Distributed, distribute, distribute_from_function
from stratagem.inputs.indexed import DistributedLoader
from stratagem.inputs.iterables import DistributedStream
from stratagem.inputs.reader import InputContext, InputHost

__all__ = [
    "Distributed",
    "DistributedLoader",
    "DistributedStream",
    "InputContext",
    "InputHost",
    "distribute",
    "distribute_from_function",
]
