"""Who takes part in a training, and how tasks find each other and stay in touch.

Public as `sg.cluster`: the resolvers, `Membership`, `found`. `docs/architecture.md` has a line for each file.
"""

from typing import Any

from stratagem import _tensorflow_names
from stratagem.cluster.membership.members import Member, TaskLost
from stratagem.cluster.membership.membership import Membership
from stratagem.cluster.resolvers.detection import Found, found
from stratagem.cluster.resolvers.kubernetes import KubernetesResolver
from stratagem.cluster.resolvers.resolver import Resolver
from stratagem.cluster.resolvers.simple import SimpleResolver, UnionResolver
from stratagem.cluster.resolvers.slurm import SlurmResolver
from stratagem.cluster.resolvers.tf_config import TFConfigResolver
from stratagem.cluster.resolvers.torchrun import TorchrunResolver
from stratagem.cluster.resolvers.tpu_hosts import TPUResolver
from stratagem.cluster.server import Server
from stratagem.cluster.spec import ClusterSpec, Task

__all__ = [
    "ClusterSpec",
    "Found",
    "KubernetesResolver",
    "Member",
    "Membership",
    "Resolver",
    "Server",
    "SimpleResolver",
    "SlurmResolver",
    "TFConfigResolver",
    "TPUResolver",
    "Task",
    "TaskLost",
    "TorchrunResolver",
    "UnionResolver",
    "found",
]


def __getattr__(name: str) -> Any:
    return _tensorflow_names.of_module("cluster", name, __all__, place="distribute.cluster_resolver")
