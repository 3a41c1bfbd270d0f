"""Compares what two tasks say of themselves when they meet, and names the first difference."""

import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from stratagem import __version__
from stratagem.cluster.membership.member_messages import MOST_BYTES, Body, shortened
from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.errors import ClusterSpecError, ProtocolError

_MOST_SIGNATURE_BYTES: Final = MOST_BYTES // 2
_ABSENT: Final = object()


@final
@dataclasses.dataclass(frozen=True)
class Introduction:
    """What a task says of itself when it joins a cluster.

    Args:
        task: Its name.
        spec: The cluster that it knows.
        jobs: Which jobs take part in it.
        versions: Of what matters for working together.
        signature: What else all tasks must agree on.
        machine: The name of its machine.
        pid: Its process there.
        incarnation: Random, so that a task which starts anew is not taken for its predecessor.
    """

    task: str
    spec: ClusterSpec
    jobs: tuple[str, ...]
    versions: Mapping[str, str]
    signature: Mapping[str, Any]
    machine: str
    pid: int
    incarnation: str

    @classmethod
    def of_this_process(
        cls, task: Task, spec: ClusterSpec, jobs: Sequence[str], signature: Mapping[str, Any] | None
    ) -> "Introduction":
        """What this process says as that task.

        Raises:
            ClusterSpecError: The signature is no JSON, or too large to be sent.
        """
        return cls(
            task.name,
            spec,
            tuple(jobs),
            _versions(),
            _as_json(signature or {}),
            shortened(socket.gethostname()),
            os.getpid(),
            secrets.token_hex(16),
        )

    def to_body(self) -> Body:
        """As a message."""
        return {
            "task": self.task,
            "cluster": self.spec.as_dict(),
            "jobs": list(self.jobs),
            "versions": dict(self.versions),
            "signature": dict(self.signature),
            "machine": self.machine,
            "pid": self.pid,
            "incarnation": self.incarnation,
        }

    @classmethod
    def from_body(cls, body: Body) -> "Introduction":
        """From a message.

        Raises:
            ProtocolError: It describes no cluster.
        """
        try:
            spec = ClusterSpec(body["cluster"])
        except ClusterSpecError as error:
            raise ProtocolError(f"a task sent a cluster that is not valid: {error}") from None
        versions = {str(name): str(version) for name, version in body["versions"].items()}
        return cls(
            body["task"],
            spec,
            tuple(body["jobs"]),
            versions,
            body["signature"],
            body["machine"],
            body["pid"],
            body["incarnation"],
        )


def disagreement(one: Introduction, other: Introduction) -> str | None:
    """The first thing on which two tasks disagree, with both sides; None if there is none."""
    tasks = f"{one.task} and {other.task}"
    if difference := one.spec.first_difference(other.spec):
        return f"{tasks} disagree on the cluster: {difference}; give all tasks the same cluster"
    for name in dict.fromkeys([*one.versions, *other.versions]):
        mine, theirs = one.versions.get(name, "none"), other.versions.get(name, "none")
        if mine != theirs:
            return f"{one.task} runs {name} {mine}, {other.task} {theirs}; install one version everywhere"
    if one.jobs != other.jobs:
        return f"{tasks} disagree on who takes part: {', '.join(one.jobs)} vs {', '.join(other.jobs)}"
    found = _first_difference(one.signature, other.signature, ())
    if found is None:
        return None
    path, mine, theirs = found
    return f"{tasks} disagree on {'.'.join(path)}: {_shown(mine)} vs {_shown(theirs)}; run the same program on both"


def _first_difference(one: Any, other: Any, path: tuple[str, ...]) -> tuple[tuple[str, ...], Any, Any] | None:
    """The way to the first difference of two values of JSON, and both sides."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in dict.fromkeys([*one, *other]):
            if found := _first_difference(one.get(name, _ABSENT), other.get(name, _ABSENT), (*path, name)):
                return found
        return None
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for position, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            if found := _first_difference(mine, theirs, (*path, str(position))):
                return found
        return None
    # 1 == True and 1 == 1.0 in Python, not here.
    return None if type(one) is type(other) and one == other else (path, one, other)


def _shown(value: Any) -> str:
    text = "nothing" if value is _ABSENT else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _as_json(signature: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        text = json.dumps(signature, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ClusterSpecError(f"a signature is made of texts, numbers, lists and mappings of JSON: {error}") from None
    if len(text) > _MOST_SIGNATURE_BYTES:
        raise ClusterSpecError(
            f"the signature takes {len(text)} bytes, at most {_MOST_SIGNATURE_BYTES} are sent; compare a hash of it"
        )
    value: Mapping[str, Any] = json.loads(text)
    return value


@functools.cache
def _versions() -> Mapping[str, str]:
    # From its metadata: torch itself takes long to load, and its tasks need not have done so yet.
    torch = importlib.metadata.version("torch")
    return {"stratagem": __version__, "torch": torch, "python": ".".join(platform.python_version_tuple()[:2])}
