"""Machines with addresses of their own on a network that a test can cut: namespaces joined by a switch.

Every machine is a network namespace with one cable to a switch in another. What runs on it is started
with `machine.prefix` before its command. Needs root.
"""

import contextlib
import functools
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

_PATIENCE_S = 20.0


@dataclass(frozen=True)
class Machine:
    """A machine that does not exist.

    Args:
        name: Its namespace.
        address: Its address on the common network.
        switch: The namespace of the switch.
        port: The end of its cable there.
    """

    name: str
    address: str
    switch: str
    port: str

    @property
    def prefix(self) -> list[str]:
        """Before a command, has it run on this machine."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        """Pulls its cable: nothing comes or goes."""
        _ip("-n", self.switch, "link", "set", self.port, "down")

    def deafen(self) -> None:
        """Nothing comes any more; what it sends still goes."""
        _run("ip", "netns", "exec", self.switch, "tc", "qdisc", "replace", "dev", self.port, "root", "blackhole")

    def silence(self) -> None:
        """Nothing goes any more; what is sent to it still comes."""
        _run(*self.prefix, "tc", "qdisc", "replace", "dev", "eth0", "root", "blackhole")

    def part_from(self, other: "Machine") -> None:
        """Nothing goes from here to one other machine any more; to the rest it does."""
        _ip("-n", self.name, "route", "add", "blackhole", other.address)

    def heal(self) -> None:
        """Undoes all of these but the last."""
        _ip("-n", self.switch, "link", "set", self.port, "up")
        for where, device in ((self.switch, self.port), (self.name, "eth0")):
            _run("ip", "netns", "exec", where, "tc", "qdisc", "del", "dev", device, "root", check=False)


@contextlib.contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """So many machines at 10.77.0.1, 10.77.0.2 and so on, gone at the end."""
    run = f"sg{secrets.token_hex(3)}"
    switch = f"{run}-switch"
    made = [Machine(f"{run}-{number}", f"10.77.0.{number}", switch, f"port{number}") for number in range(1, count + 1)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for machine in made:
            _plug_in(machine)
        yield made
    finally:
        for name in [switch, *(machine.name for machine in made)]:
            _ip("netns", "del", name, check=False)


@functools.cache
def why_none() -> str | None:
    """Why there can be no such machines here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "ip and tc are not installed"
    try:
        with machines(1) as (machine,):
            machine.deafen()
    except subprocess.CalledProcessError as error:
        return f"the system does not let us make network namespaces: {error.stderr}"
    return None


@pytest.fixture(scope="session")
def network() -> None:
    """Skips tests where there can be no machines."""
    if reason := why_none():
        pytest.skip(reason)


def _plug_in(machine: Machine) -> None:
    inside, port = ("-n", machine.name), ("-n", machine.switch)
    _ip("netns", "add", machine.name)
    _ip(*inside, "link", "add", "eth0", "type", "veth", "peer", "name", machine.port, "netns", machine.switch)
    _ip(*inside, "addr", "add", f"{machine.address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip(*inside, "link", "set", device, "up")
    _ip(*port, "link", "set", machine.port, "master", "bridge")
    _ip(*port, "link", "set", machine.port, "up")


def _ip(*arguments: str, check: bool = True) -> None:
    _run("ip", *arguments, check=check)


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True, text=True, timeout=_PATIENCE_S)
