"""How global batches come to the replicas."""

from stratagem.inputs.distribute import Distributed, distribute, distribute_from_function
from stratagem.inputs.indexed import DistributedLoader
from stratagem.inputs.reader import Host, InputContext
from stratagem.inputs.streams import DistributedStream

__all__ = [
    "Distributed",
    "DistributedLoader",
    "DistributedStream",
    "Host",
    "InputContext",
    "distribute",
    "distribute_from_function",
]
