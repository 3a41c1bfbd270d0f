"""Describes accelerators that do not exist: shares of the CPU that behave like them.

Strict ones are devices of torch's own besides (`strict`).
Owns the form of `STRATAGEM_SIMULATE` and the rules for how many and how large.
Where they appear and how they are masked and divided is `inventory`'s and `division`'s.
"""

import dataclasses
from collections.abc import Iterable

from stratagem._env import SIMULATE
from stratagem.devices import kind_table
from stratagem.devices.device import MIB, DeviceDetails, check_memory_limit, mib
from stratagem.devices.device_spec import parse_kind
from stratagem.devices.kind_table import CPU
from stratagem.errors import DeviceConfigurationError, DeviceTypeError, EnvironmentVariableError, StratagemError


@dataclasses.dataclass(frozen=True)
class Simulation:
    """So many devices of one kind, with so much memory each.

    Args:
        kind: Which accelerators, such as `GPU`.
        count: How many.
        memory_limit: The memory of each in MiB; by default an even share of the machine's.
        strict: Whether they are devices of torch's own.
    """

    kind: str
    count: int
    memory_limit: float | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", parse_kind(self.kind))
        if self.kind == CPU:
            raise DeviceConfigurationError(
                "a CPU is divided, not simulated; use set_logical_device_configuration"
                "('cpu:0', [LogicalDeviceConfiguration()] * n)"
            )
        if type(self.count) is not int or self.count < 1:
            raise DeviceConfigurationError(
                f"the number of simulated devices must be a whole number from 1 up, got {self.count!r}"
            )
        check_memory_limit(self.memory_limit)
        if type(self.strict) is not bool:
            raise DeviceTypeError(f"strict is True or False, got {self.strict!r}")
        if self.strict and self.kind not in kind_table.strict_kinds():
            kinds = " or ".join(f"{each}s" for each in kind_table.strict_kinds())
            raise DeviceConfigurationError(f"strict devices are {kinds}, got {self.kind}; leave strict out")

    def details(self, host_memory_bytes: int, num_cores: int) -> DeviceDetails:
        """What each of the devices is, on a machine with so much memory and so many cores."""
        memory_bytes = host_memory_bytes // self.count if self.memory_limit is None else int(self.memory_limit * MIB)
        strict = " (strict)" if self.strict else ""
        return DeviceDetails(f"simulated {self.kind}{strict}", memory_bytes, num_cores=max(1, num_cores // self.count))


def check_fit(simulations: Iterable[Simulation], host_memory_bytes: int) -> None:
    """Refuses devices that have more memory than the machine, or next to none."""
    needed_bytes = 0
    for each in simulations:
        memory_bytes = each.details(host_memory_bytes, num_cores=1).total_memory_bytes
        if memory_bytes < MIB:
            raise DeviceConfigurationError(
                f"{each.count} simulated {each.kind}s would have less than 1 MiB each; simulate fewer"
            )
        needed_bytes += memory_bytes * each.count if each.memory_limit is not None else 0
        if needed_bytes > host_memory_bytes:
            raise DeviceConfigurationError(
                f"{each.count} simulated {each.kind}s of {mib(memory_bytes)} bring the memory of all simulated devices "
                f"to {mib(needed_bytes)}, this machine has {mib(host_memory_bytes)}; lower memory_limit or their number"
            )


def read_variable(text: str | None, host_memory_bytes: int) -> dict[str, Simulation]:
    """Reads `STRATAGEM_SIMULATE`: `KIND:COUNT` or `KIND:COUNT:MIB`, also with `:strict`, separated by commas.

    Example:
        >>> read_variable("gpu:4:512", host_memory_bytes=2**34)
        {'GPU': Simulation(kind='GPU', count=4, memory_limit=512, strict=False)}
    """
    simulations: dict[str, Simulation] = {}
    for entry in (text or "").split(","):
        if not entry.strip():
            continue
        try:
            kind, count, *rest = entry.split(":", 3)
            strict = [word.strip().lower() for word in rest[-1:]] == ["strict"]
            memory_limit = ":".join(rest[:-1] if strict else rest)
            simulation = Simulation(kind, int(count), int(memory_limit) if rest[strict:] else None, strict)
        except ValueError as error:
            why = f" ({error})" if isinstance(error, StratagemError) else ""
            raise EnvironmentVariableError(
                f"{SIMULATE}={text!r}: {entry.strip()!r} is not KIND:COUNT or KIND:COUNT:MIB{why}. "
                f"Example: {SIMULATE}=gpu:4, {SIMULATE}=gpu:4:512 or {SIMULATE}=gpu:4:strict"
            ) from error
        if simulation.kind in simulations:
            raise EnvironmentVariableError(f"{SIMULATE}={text!r} gives {simulation.kind} twice; give it once")
        simulations[simulation.kind] = simulation
    strict_kinds = [each.kind for each in simulations.values() if each.strict]
    if len(strict_kinds) > 1:
        raise EnvironmentVariableError(
            f"{SIMULATE}={text!r}: all strict devices of a process are of one kind, got {', '.join(strict_kinds)}; "
            f"leave strict out for the others"
        )
    try:
        check_fit(simulations.values(), host_memory_bytes)
    except DeviceConfigurationError as error:
        raise EnvironmentVariableError(f"{SIMULATE}={text!r}: {error}") from error
    return simulations
