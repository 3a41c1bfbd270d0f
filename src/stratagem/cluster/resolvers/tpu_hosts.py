"""Finds the hosts of a TPU in the variables that a TPU VM, or Kubernetes' device plugin for TPUs, sets."""

from collections.abc import Mapping
from typing import Final, final

from stratagem import _env
from stratagem.cluster.address import checked_port
from stratagem.cluster.resolvers.resolver import Resolver, own_port, read_number
from stratagem.cluster.spec import WORKER, ClusterSpec
from stratagem.errors import ClusterSpecError, EnvironmentVariableError

_PORT: Final = 8476
_HOSTS: Final = "TPU_WORKER_HOSTNAMES"
_IDS: Final = ("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID")
_LOCAL: Final = (None, "", "local")


@final
class TPUResolver(Resolver):
    """The hosts of the TPU that this program runs on: TensorFlow's `TPUClusterResolver`.

    One host alone is no cluster. Several each run the same program, one task each: `TPU_WORKER_HOSTNAMES` has their
    names and `TPU_WORKER_ID` says which of them this is.

    Args:
        tpu: `None`, an empty text or `local`: the TPU that this host belongs to. There is no other, as programs run
            on the hosts of their TPU.
        port: Where tasks listen; by default `STRATAGEM_PORT`, or 8476.

    Raises:
        ClusterSpecError: `tpu` names another one.
        EnvironmentVariableError: A variable is wrong or missing.
    Example:
        >>> TPUResolver().task_type  # on one host
    """

    def __init__(self, tpu: str | None = None, *, port: int | None = None) -> None:
        if tpu not in _LOCAL:
            raise ClusterSpecError(
                f"tpu is None, '' or 'local': a program runs on the hosts of its TPU, got {tpu!r}; log in to a host of "
                f"that TPU (gcloud compute tpus tpu-vm ssh NAME --worker=all) and start the program there"
            )
        variables = _env.tpu()
        hosts = _hosts(variables)
        if len(hosts) < 2:
            super().__init__("TPU", ClusterSpec({}), None, None)
            return
        name = next((each for each in _IDS if each in variables), _IDS[0])
        own = read_number(variables, name)
        if own >= len(hosts):
            raise EnvironmentVariableError(f"{name}={own}, but {_HOSTS}={variables[_HOSTS]!r} has {len(hosts)} hosts")
        chosen = own_port() if port is None else checked_port(port, "port")
        addresses = [f"{host}:{_PORT if chosen is None else chosen}" for host in hosts]
        super().__init__("TPU", ClusterSpec({WORKER: addresses}), WORKER, own)


def _hosts(variables: Mapping[str, str]) -> list[str]:
    text = variables.get(_HOSTS, "")
    hosts = [host.strip() for host in text.split(",")] if text.strip() else []
    if not all(hosts) or len(set(hosts)) < len(hosts):
        raise EnvironmentVariableError(
            f"{_HOSTS}={text!r} is a list of different host names with commas between them, such as 'host-0,host-1'"
        )
    return hosts
