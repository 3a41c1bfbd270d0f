"""Reads which devices a program is to run on: `STRATAGEM_DEVICES`, which `stratagem run --devices` sets.

Owns the form of the text. What it means for the devices of a process is `inventory`'s.
"""

import dataclasses
import re
from collections.abc import Mapping

from stratagem._env import DEVICES
from stratagem.devices.device_spec import parse_kind
from stratagem.devices.kind_table import CPU
from stratagem.errors import DeviceConfigurationError, EnvironmentVariableError, StratagemError

_ALL = "all"
_COUNT = re.compile(r"[1-9][0-9]{0,3}")


@dataclasses.dataclass(frozen=True)
class DeviceRequest:
    """So many devices of each kind, and none of a kind that is not named; the CPU is always there.

    Args:
        text: What the user wrote.
        counts: How many of each kind; `None` for all that exist.
    """

    text: str
    counts: Mapping[str, int | None]

    @property
    def num_cpus(self) -> int | None:
        """Into how many logical devices the CPU is to be divided; `None` where that was not said."""
        return self.counts.get(CPU)


def parse(text: str) -> DeviceRequest:
    """Reads `KIND:COUNT` or `KIND:all`, separated by commas.

    Raises:
        DeviceConfigurationError: The text has another form.
    Example:
        >>> parse("gpu:all,cpu:4").counts
        {'GPU': None, 'CPU': 4}
    """
    counts: dict[str, int | None] = {}
    for entry in text.split(","):
        word, _, number = (part.strip() for part in entry.partition(":"))
        try:
            kind = parse_kind(word)
        except StratagemError as error:
            raise DeviceConfigurationError(f"{entry.strip()!r} is not KIND:COUNT or KIND:all ({error})") from None
        if kind in counts:
            raise DeviceConfigurationError(f"{kind} is given twice; give it once")
        if not (_COUNT.fullmatch(number) or (number == _ALL and kind != CPU)):
            form = "cpu:COUNT, for so many shares of the cores" if kind == CPU else f"{word}:COUNT or {word}:all"
            raise DeviceConfigurationError(f"{entry.strip()!r} is not {form}, with a COUNT from 1 to 9999")
        counts[kind] = None if number == _ALL else int(number)
    return DeviceRequest(text, counts)


def read_variable(text: str | None) -> DeviceRequest | None:
    """What `STRATAGEM_DEVICES` asks for, if it is set."""
    if text is None or not text.strip():
        return None
    try:
        return parse(text)
    except DeviceConfigurationError as error:
        raise EnvironmentVariableError(f"{DEVICES}={text!r}: {error}. Example: {DEVICES}=cpu:4") from None
