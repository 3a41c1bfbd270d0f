"""Finds the cluster in the variables that torchrun sets, and others in its manner.

They say how many tasks there are, which this is and where the first one is, not where the others
are: those have no address, and connect to the first.
"""

from typing import Final, final

from stratagem import _env
from stratagem.cluster.address import Address, checked_port
from stratagem.cluster.resolvers.resolver import Resolver, own_port, read_number
from stratagem.cluster.spec import WORKER, ClusterSpec
from stratagem.errors import ClusterSpecError, EnvironmentVariableError

_NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Below the ports that systems hand out for a moment, so that nobody is there by chance.
_FIRST_PORT, _NUM_PORTS = 15_000, 16_000


@final
class TorchrunResolver(Resolver):
    """The workers of torchrun, or of a launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Args:
        port: The port of the first worker. By default `STRATAGEM_PORT`; or MASTER_PORT; or, if torchrun's own store
            listens there already, a port computed from it.

    Raises:
        EnvironmentVariableError: A variable is missing or wrong.
    """

    def __init__(self, *, port: int | None = None) -> None:
        given = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | _env.torchrun()
        missing = [name for name in _NEEDED if not given.get(name)]
        if missing:
            raise EnvironmentVariableError(
                f"torchrun sets {', '.join(_NEEDED)}; {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
                f"set. Start the program by torchrun, or set all of them"
            )
        size, rank = read_number(given, "WORLD_SIZE", 1), read_number(given, "RANK")
        if rank >= size:
            raise EnvironmentVariableError(f"RANK={rank} is not below WORLD_SIZE={size}; ranks are 0 to {size - 1}")
        local = (read_number(given, "LOCAL_RANK"), read_number(given, "LOCAL_WORLD_SIZE", 1))
        first = _first_address(given, own_port() if port is None else port)
        spec = ClusterSpec({WORKER: [first] + [None] * (size - 1)})
        super().__init__("torchrun's variables", spec, WORKER, rank, local=local, master=first)


def _first_address(variables: dict[str, str], port: int | None) -> str:
    host, text = variables["MASTER_ADDR"], variables["MASTER_PORT"]
    try:
        master_port = checked_port(text, f"MASTER_PORT={text}")
        if port is None:
            taken = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            port = _FIRST_PORT + master_port % _NUM_PORTS if taken else master_port
        return str(Address.parse(f"[{host}]:{port}" if ":" in host else f"{host}:{port}"))
    except ClusterSpecError as error:
        raise EnvironmentVariableError(f"MASTER_ADDR={host!r}, MASTER_PORT={text!r}: {error}") from None
