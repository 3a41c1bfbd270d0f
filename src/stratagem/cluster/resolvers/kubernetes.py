"""Finds the cluster from the host name of a pod: of a stateful set, or of a Job with indices.

Both number their pods, `trainer-0`, `trainer-1` and so on, under the name of a headless service.
Kubernetes does not tell a pod how many there are; the manifest must.
"""

import re
import socket
from typing import Final, final

from stratagem import _env
from stratagem.cluster.address import checked_port
from stratagem.cluster.resolvers.resolver import Resolver, own_port, read_number
from stratagem.cluster.spec import WORKER, ClusterSpec
from stratagem.errors import EnvironmentVariableError

_PORT: Final = 2222
_POD: Final = re.compile(r"(?P<name>[a-z0-9]([a-z0-9.-]*[a-z0-9])?)-(?P<index>[0-9]{1,6})")


@final
class KubernetesResolver(Resolver):
    """The pods of a stateful set or of an indexed Job as workers.

    Args:
        num_tasks: How many pods there are; by default `STRATAGEM_NUM_TASKS`.
        service: The headless service of the pods; by default `STRATAGEM_SERVICE`, or the one in the full name
            of this host.
        port: The port of each pod; by default `STRATAGEM_PORT`, or 2222.
        host_name: The name of this pod, `trainer-3` or `trainer-3.service`; by default that of this machine.

    Raises:
        EnvironmentVariableError: A number is missing, or does not fit the name of the host.

    Example:
        >>> KubernetesResolver(num_tasks=2, host_name="trainer-1.training").cluster_spec()
        ClusterSpec({'worker': ['trainer-0.training:2222', 'trainer-1.training:2222']})
    """

    def __init__(
        self,
        *,
        num_tasks: int | None = None,
        service: str | None = None,
        port: int | None = None,
        host_name: str | None = None,
    ) -> None:
        short, _, domain = (full_host_name() if host_name is None else host_name).lower().partition(".")
        size = _num_tasks() if num_tasks is None else num_tasks
        domain = service or _env.service() or domain
        match = _POD.fullmatch(short)
        if match is None:
            raise EnvironmentVariableError(
                f"the host name {short!r} does not end in the number of a pod, such as 'trainer-3'; use a stateful "
                f"set or a Job with completionMode: Indexed"
            )
        if not domain:
            raise EnvironmentVariableError(
                f"the host name {short!r} does not say its service; set subdomain in the manifest, or {_env.SERVICE}"
            )
        variables = _env.kubernetes()
        given = "JOB_COMPLETION_INDEX" in variables
        index = read_number(variables, "JOB_COMPLETION_INDEX") if given else int(match["index"])
        if index >= size:
            raise EnvironmentVariableError(f"this is pod {index}, but there are only {size} ({_env.NUM_TASKS})")
        chosen = own_port() if port is None else port
        number = _PORT if chosen is None else checked_port(chosen, "port")
        hosts = [f"{match['name']}-{each}.{domain}:{number}" for each in range(size)]
        super().__init__("Kubernetes", ClusterSpec({WORKER: hosts}), WORKER, index)


def full_host_name() -> str:
    """The name of this host with its domain, where it has one."""
    name = socket.gethostname()
    if "." in name:
        return name
    full = socket.getfqdn(name)
    return full if full.partition(".")[0] == name else name


def _num_tasks() -> int:
    text = _env.num_tasks()
    if text is None:
        raise EnvironmentVariableError(
            f"Kubernetes does not tell a pod how many there are; set {_env.NUM_TASKS} to the replicas or completions"
        )
    return read_number({_env.NUM_TASKS: text}, _env.NUM_TASKS, 1)
