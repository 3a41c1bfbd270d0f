"""Who takes part: the tasks of a cluster, how they find each other and stay in touch.

- `spec`, `address`: all tasks, and where each listens
- `resolver`: finds who has started this process; `tf_config`, `torchrun`, `slurm` with `host_lists`,
  `kubernetes`, `simple`; `contract`: what all of them do
- `token`, `channel`, `messages`, `strict_json`: the secret, and messages that only those who have it can send
- `server`, `listening`, `io_thread`: a task answers at its address, in a thread of its own
- `membership`: tasks meet, share values and notice who is gone; `keeper` and `follower` are its two sides,
  `agreement`, `members` and `values` their parts
- `store`: the values as a store of torch
- `sessions`, `session_connection`: graphs on the tasks of a cluster; `session_service`: the side of the task. These and
  `store` load torch, and are not loaded here
"""

from stratagem.cluster.membership.members import Member, TaskLost
from stratagem.cluster.membership.membership import Membership
from stratagem.cluster.resolvers.detection import Found, found
from stratagem.cluster.resolvers.kubernetes import KubernetesResolver
from stratagem.cluster.resolvers.resolver import Resolver
from stratagem.cluster.resolvers.simple import SimpleResolver, UnionResolver
from stratagem.cluster.resolvers.slurm import SlurmResolver
from stratagem.cluster.resolvers.tf_config import TFConfigResolver
from stratagem.cluster.resolvers.torchrun import TorchrunResolver
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
    "Task",
    "TaskLost",
    "TorchrunResolver",
    "UnionResolver",
    "found",
]
