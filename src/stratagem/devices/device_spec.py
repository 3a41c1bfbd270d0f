"""Reads and writes device names; the only parser of them.

Understands TensorFlow's full form (`/job:worker/replica:0/task:1/device:GPU:0`), its short forms
(`/gpu:0`, `GPU:0`, partial names) and torch's (`cuda:0`). Which kinds there are, and how they are
spelt, is `kind_table`'s; which devices exist, `inventory`'s.
"""

import dataclasses
import difflib
import re
from typing import NoReturn, Self

from stratagem.devices import kind_table
from stratagem.errors import DeviceTypeError, UnknownDeviceError

_JOB = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_INDEX = re.compile(r"[0-9]{1,9}")
_ANY = "*"


def parse_kind(text: str) -> str:
    """Turns any spelling of a kind of device into its name.

    Example:
        >>> parse_kind("cuda")
        'GPU'
    """
    if not isinstance(text, str):
        raise DeviceTypeError(f"a kind of device is a text such as 'GPU', got {text!r}")
    kind = kind_table.spellings().get(text.strip().upper())
    if kind is None:
        if text.partition(":")[0].strip().upper() in kind_table.spellings():
            raise UnknownDeviceError(f"{text!r} is a device, not a kind; write {text.partition(':')[0]!r}")
        raise UnknownDeviceError(
            f"unknown kind of device {text!r}. Known kinds: {kind_table.described()}.{_suggestion(text)}"
        )
    return kind


@dataclasses.dataclass(frozen=True)
class DeviceSpec:
    """The name of a device, whole or in part; a part that is `None` means any.

    Args:
        job: The job in the cluster, such as `worker`.
        replica: The replica of that job.
        task: The task of that job.
        device_type: The kind of device, in any spelling (`gpu`, `cuda`, ...).
        device_index: Which of that kind.
    Raises:
        UnknownDeviceError: A part does not have the form that it must have.
    Example:
        >>> spec = DeviceSpec.from_string("cuda:0")
        >>> spec
        DeviceSpec('/device:GPU:0')
        >>> worker = DeviceSpec(job="worker", task=1)
        >>> worker.make_merged_spec(spec).to_string()
        '/job:worker/task:1/device:GPU:0'
    """

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    device_type: str | None = None
    device_index: int | None = None

    def __post_init__(self) -> None:
        if self.job is not None and not (isinstance(self.job, str) and _JOB.fullmatch(self.job)):
            raise UnknownDeviceError(
                f"job {self.job!r} is not a name: it starts with a letter and goes on with letters, digits, _ or -"
            )
        for part in ("replica", "task", "device_index"):
            number = getattr(self, part)
            if number is not None and not (type(number) is int and 0 <= number < 10**9):
                raise UnknownDeviceError(f"{part} must be a whole number from 0 up, got {number!r}")
        if self.device_type is not None:
            object.__setattr__(self, "device_type", parse_kind(self.device_type))

    @classmethod
    def from_string(cls, text: str) -> Self:
        """Reads a name in any of the known spellings; the empty text is the spec that fits all."""
        if not isinstance(text, str):
            raise DeviceTypeError(f"a device name is a text such as 'gpu:0', got {text!r}")
        found: dict[str, str | int | None] = {}
        for component in text.strip().removeprefix("/").split("/"):
            for part, value in _read_component(component, text).items():
                if part in found:
                    raise UnknownDeviceError(f"device {text!r} gives its {part} twice; give it once")
                found[part] = value
        return cls(**found)  # type: ignore[arg-type]  # the parts have the types of their fields

    def to_string(self) -> str:
        """The name in TensorFlow's form; `from_string` reads it back."""
        parts = [
            f"/{part}:{value}"
            for part, value in (("job", self.job), ("replica", self.replica), ("task", self.task))
            if value is not None
        ]
        if self.device_type is not None or self.device_index is not None:
            index = _ANY if self.device_index is None else self.device_index
            parts.append(f"/device:{self.device_type or _ANY}:{index}")
        return "".join(parts)

    def make_merged_spec(self, other: "DeviceSpec") -> "DeviceSpec":
        """This spec with every part that `other` gives taken from `other`."""
        if not isinstance(other, DeviceSpec):
            raise DeviceTypeError(f"a spec is merged with a DeviceSpec, got {other!r}; use DeviceSpec.from_string")
        given = {part: value for part, value in vars(other).items() if value is not None}
        return dataclasses.replace(self, **given)

    def __str__(self) -> str:
        return self.to_string()

    def __repr__(self) -> str:
        return f"DeviceSpec({self.to_string()!r})"


def _read_component(component: str, text: str) -> dict[str, str | int | None]:
    """The parts that one `/...` of a name gives."""
    if not component and text.strip() in ("", "/"):
        return {}
    key, *values = (word.strip() for word in component.split(":"))
    match key.lower(), values:
        case "job", [name]:
            return {"job": name}
        case ("replica" | "task") as part, [number]:
            return {part: _read_index(number, text)}
        case (("device" | "physical_device"), [kind, number]):
            return {"device_type": _read_kind(kind, text), "device_index": _read_index(number, text)}
        case (("device" | "physical_device"), [kind]):
            return {"device_type": _read_kind(kind, text)}
        case _, [number]:
            return {"device_type": _read_kind(key, text), "device_index": _read_index(number, text)}
        case _, []:
            return {"device_type": _read_kind(key, text)}
        case _:
            _refuse(text, f"{component!r} has too many colons.")


def _read_kind(word: str, text: str) -> str | None:
    if word == _ANY:
        return None
    kind = kind_table.spellings().get(word.upper())
    if kind is None:
        _refuse(text, f"Known kinds: {kind_table.described()}. Example: 'gpu:0'.{_suggestion(text)}")
    return kind


def _read_index(word: str, text: str) -> int | None:
    if word == _ANY:
        return None
    if not _INDEX.fullmatch(word):
        _refuse(text, f"{word!r} is not an index: write a whole number from 0 up, or * for any.")
    return int(word)


def _suggestion(text: str) -> str:
    """The likeliest name for a text such as `gpx:0` or `gpu1`, if any is likely."""
    match = re.fullmatch(r"([A-Za-z]+)[^A-Za-z0-9]*([0-9]*)", text.strip().rpartition("/")[2].removeprefix("device:"))
    close = difflib.get_close_matches(match[1].upper(), kind_table.spellings(), n=1, cutoff=0.6) if match else []
    if match is None or not close:
        return ""
    index = f":{match[2]}" if match[2] else ""
    return f" Did you mean '{close[0].lower()}{index}'?"


def _refuse(text: str, why: str) -> NoReturn:
    raise UnknownDeviceError(f"unknown device {text!r}. {why}")
