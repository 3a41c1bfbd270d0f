"""The settings of a session, with TensorFlow's names.

Owns which there are, what values they take, and what a program hears that writes another name. Those for devices are
read by `local_devices`.
"""

import dataclasses
import difflib
import numbers
import os
import re
from collections.abc import Mapping
from typing import Any, Final, Self

from stratagem.devices.device_spec import parse_kind
from stratagem.devices.kind_table import CPU
from stratagem.errors import DeviceConfigurationError, DeviceTypeError

_MOST_THREADS: Final = 1024
_MOST_DEVICES: Final = 1024
# What TensorFlow has beside these. They tune its runtime; nothing here reads them.
_ONLY_TENSORFLOW: Final = frozenset(
    """
    allocator_type cluster_def deferred_deletion_bytes device_filters experimental force_gpu_compatible graph_options
    operation_timeout_in_ms placement_period polling_active_delay_usecs polling_inactive_delay_msecs rpc_options
    session_inter_op_thread_pool share_cluster_devices_in_session use_per_session_threads
    """.split()  # noqa: SIM905  # names read better so
)


class _StrictOptions:
    """Takes the names that it has and no others, in the constructor and afterwards."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        for name in given:
            cls._require_known(name)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        self._require_known(name)
        super().__setattr__(name, value)

    @classmethod
    def _require_known(cls, name: str) -> None:
        known = cls.__match_args__  # type: ignore[attr-defined]
        if name in known:
            return
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"
        if name in _ONLY_TENSORFLOW:
            hint = f"TensorFlow's has no counterpart here, leave it out; it has {', '.join(known)}"
        raise DeviceConfigurationError(f"sg.{cls.__name__} has no setting {name!r}; {hint}")


@dataclasses.dataclass
class GPUOptions(_StrictOptions):
    """Says which GPUs a session uses, and how much of their memory.

    Args:
        allow_growth: Whether memory is taken when it is needed, or all of it at the start; by default the setting of
            `sg.config.set_memory_growth`, which is when needed.
        per_process_gpu_memory_fraction: The part of each GPU's memory that may be used, above 0 and at most 1.
        visible_device_list: The GPUs of the session, by their numbers among the visible ones: with `"2,0"` the
            GPU 2 is the session's `/gpu:0`, and GPU 0 is its `/gpu:1`; by default all.
    Raises:
        DeviceConfigurationError: There is no setting of that name.
    Example:
        >>> GPUOptions(visible_device_list="2,0").visible
        [2, 0]
    """

    allow_growth: bool | None = None
    per_process_gpu_memory_fraction: float | None = None
    visible_device_list: str = ""

    @property
    def visible(self) -> list[int]:
        """The numbers in `visible_device_list`."""
        return [int(each) for each in self.visible_device_list.split(",") if self.visible_device_list.strip()]

    def check(self) -> None:
        """Refuses what no session can have."""
        if self.allow_growth is not None and type(self.allow_growth) is not bool:
            raise DeviceTypeError(f"allow_growth is True or False, got {self.allow_growth!r}")
        fraction = self.per_process_gpu_memory_fraction
        if fraction is not None and not (
            isinstance(fraction, numbers.Real) and not isinstance(fraction, bool) and 0 < fraction <= 1
        ):
            raise DeviceConfigurationError(
                f"per_process_gpu_memory_fraction must be above 0 and at most 1, got {fraction!r}"
            )
        listed = self.visible_device_list
        if not isinstance(listed, str) or not re.fullmatch(r"\s*(\d{1,6}\s*(,\s*\d{1,6}\s*)*)?", listed):
            raise DeviceConfigurationError(f"visible_device_list is a text such as '0,2', got {listed!r}")
        if len(set(self.visible)) < len(self.visible):
            raise DeviceConfigurationError(f"visible_device_list names each GPU once, got {listed!r}")


@dataclasses.dataclass
class SessionConfig(_StrictOptions):
    """Says how a session runs graphs. It is read when the session is made.

    Args:
        log_device_placement: Whether to print where each operation runs.
        allow_soft_placement: Whether operations that are placed on a device that does not exist run on the nearest one;
            by default the setting of `sg.config.set_soft_device_placement`.
        gpu_options: Which GPUs, and their memory.
        device_count: The most devices of each kind that the session uses: `{"GPU": 0}` hides all GPUs. With more CPUs
            than exist, these share the cores, as in TensorFlow.
        intra_op_parallelism_threads: The number of threads of one operation; 0 for one per core of its device.
        inter_op_parallelism_threads: The number of devices that compute at the same time; 0 for all.
        isolate_session_state: Whether this session has its own variables on a cluster, which end with it.
        token_file: The file with the secret of the cluster, for sessions on a cluster; by default as for `sg.Server`.
    Raises:
        DeviceConfigurationError: There is no setting of that name.
    Example:
        >>> config = SessionConfig(log_device_placement=True)
        >>> config.gpu_options.allow_growth = True
    """

    log_device_placement: bool = False
    allow_soft_placement: bool | None = None
    gpu_options: GPUOptions = dataclasses.field(default_factory=GPUOptions)
    device_count: Mapping[str, int] = dataclasses.field(default_factory=dict)
    intra_op_parallelism_threads: int = 0
    inter_op_parallelism_threads: int = 0
    isolate_session_state: bool = False
    token_file: str | os.PathLike[str] | None = None

    def check(self) -> None:
        """Refuses what no session can have."""
        for name in ("log_device_placement", "allow_soft_placement", "isolate_session_state"):
            value = getattr(self, name)
            if type(value) is not bool and not (value is None and name == "allow_soft_placement"):
                raise DeviceTypeError(f"{name} is True or False, got {value!r}")
        for name in ("intra_op_parallelism_threads", "inter_op_parallelism_threads"):
            if type(value := getattr(self, name)) is not int or not 0 <= value <= _MOST_THREADS:
                raise DeviceConfigurationError(f"{name} is a number from 0 to {_MOST_THREADS}, got {value!r}")
        if not isinstance(self.device_count, Mapping):
            raise DeviceTypeError(f"device_count is a dict such as {{'GPU': 1}}, got {self.device_count!r}")
        for kind, count in self.device_count.items():
            least = 1 if parse_kind(kind) == CPU else 0
            if type(count) is not int or not least <= count <= _MOST_DEVICES:
                raise DeviceConfigurationError(
                    f"device_count[{kind!r}] is a number from {least} to {_MOST_DEVICES}, got {count!r}"
                )
        if not isinstance(self.gpu_options, GPUOptions):
            raise DeviceTypeError(f"gpu_options are sg.GPUOptions(...), got {self.gpu_options!r}")
        self.gpu_options.check()
