"""Reads and writes the addresses of tasks; the only parser of them.

An address is `host:port`, where the host is a name, an IPv4 address or an IPv6 address in brackets.
Does not look names up: what a name stands for is decided on the machine that uses it.
"""

import dataclasses
import ipaddress
import re
from typing import Final, Self, final

from stratagem.errors import ClusterSpecError

SCHEME: Final = "stratagem://"

_NAME: Final = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?")
_LIKE_IPV4: Final = re.compile(r"[0-9.]+")
_EXAMPLE: Final = "an address is such as '10.0.0.1:2222', 'worker0:2222' or '[fd00::1]:2222'"


@final
@dataclasses.dataclass(frozen=True, order=True)
class Address:
    """Where a task listens.

    Args:
        host: A name or an IP address, without brackets.
        port: From 1 to 65535.

    Raises:
        ClusterSpecError: The text is no address, or one that others cannot reach.

    Example:
        >>> Address.parse("[FD00::0001]:2222")
        Address('[fd00::1]:2222')
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `host:port`."""
        if not isinstance(text, str):
            raise ClusterSpecError(f"an address is a text, got {text!r}; {_EXAMPLE}")
        if "://" in text:
            raise ClusterSpecError(f"{text!r} has a scheme; write {text.partition('://')[2]!r}")
        host, colon, port = text.rpartition(":")
        if not colon or text.endswith("]"):
            raise ClusterSpecError(f'"{text}" has no port; {_EXAMPLE}')
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise ClusterSpecError(f'"{text}" has several colons; write IPv6 addresses in brackets: "[fd00::1]:2222"')
        return cls(_checked_host(host, text), checked_port(port, text))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __repr__(self) -> str:
        return f"Address({str(self)!r})"


def checked_port(port: str | int, context: str) -> int:
    """A number from 1 to 65535, from a number or its digits.

    Args:
        context: Where the number was found, for the message.
    """
    if not re.fullmatch(r"[0-9]{1,20}", str(port)):
        raise ClusterSpecError(f"{context!r}: port {port!r} is not a number from 1 to 65535")
    if not 1 <= int(port) <= 65535:
        raise ClusterSpecError(f"{context!r}: port {port} is not 1-65535")
    return int(port)


def _checked_host(host: str, text: str) -> str:
    bracketed = host.startswith("[")
    inner = host[1:-1] if bracketed else host
    if bracketed or _LIKE_IPV4.fullmatch(inner):
        try:
            ip = ipaddress.IPv6Address(inner) if bracketed else ipaddress.IPv4Address(inner)
        except ValueError:
            kind = "IPv6" if bracketed else "IPv4"
            raise ClusterSpecError(f"{text!r}: {inner!r} is not an {kind} address; {_EXAMPLE}") from None
        if ip.is_unspecified or ip.is_multicast:
            raise ClusterSpecError(
                f"{text!r} is not the address of one machine that others could reach; name the machine, and pass "
                f"allow_all_interfaces=True if the task has to listen on all its addresses"
            )
        return str(ip)
    if not _NAME.fullmatch(inner):
        raise ClusterSpecError(f"{text!r}: {inner!r} is not a host name; {_EXAMPLE}")
    return inner.lower()
