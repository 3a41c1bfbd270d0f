"""Expands the short forms in which Slurm writes lists of hosts and of numbers of tasks."""

import itertools
import re
from typing import Final

from stratagem.errors import ClusterSpecError

_MOST_HOSTS: Final = 100_000
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT: Final = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")
_PART: Final = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


def expand_hosts(text: str) -> list[str]:
    """The hosts that a list such as `n[001-003,07],login1` stands for, in its order.

    Example:
        >>> expand_hosts("n[001-003,07],login1")
        ['n001', 'n002', 'n003', 'n07', 'login1']
        >>> expand_hosts("rack[0-1]-node[9-10].lan")
        ['rack0-node9.lan', 'rack0-node10.lan', 'rack1-node9.lan', 'rack1-node10.lan']
    """
    hosts: list[str] = []
    for entry in _split_outside_brackets(text):
        parts = [_expand_ranges(match[1], text) if match[2] is None else [match[2]] for match in _PART.finditer(entry)]
        if not entry or "".join(match[0] for match in _PART.finditer(entry)) != entry:
            raise ClusterSpecError(f"{text!r} is no list of hosts: {entry!r} in it is not such as 'n[001-003,07]'")
        count = 1
        for part in parts:
            count *= len(part)
        if len(hosts) + count > _MOST_HOSTS:
            raise ClusterSpecError(f"{text!r} stands for more than {_MOST_HOSTS} hosts")
        hosts += ["".join(pieces) for pieces in itertools.product(*parts)]
    return hosts


def expand_counts(text: str) -> list[int]:
    """The number of tasks on each host, from a list such as `2(x3),1`.

    Example:
        >>> expand_counts("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for entry in text.split(","):
        match = _COUNT.fullmatch(entry.strip())
        if match is None:
            raise ClusterSpecError(f"{text!r} is no list of numbers of tasks: {entry!r} in it is not such as '2(x3)'")
        counts += [int(match[1])] * int(match[2] or 1)
        if len(counts) > _MOST_HOSTS:
            raise ClusterSpecError(f"{text!r} stands for more than {_MOST_HOSTS} hosts")
    return counts


def _split_outside_brackets(text: str) -> list[str]:
    return re.split(r",(?![^\[]*\])", text.strip())


def _expand_ranges(text: str, whole: str) -> list[str]:
    """The numbers of `001-003,07`, each as wide as the first of its range is written."""
    found: list[str] = []
    for entry in text.split(","):
        match = _RANGE.fullmatch(entry)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ClusterSpecError(f"{whole!r} is no list of hosts: {entry!r} in it is not such as '001-003'")
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first >= _MOST_HOSTS:
            raise ClusterSpecError(f"{whole!r} stands for more than {_MOST_HOSTS} hosts")
        found += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return found
