"""The settings of a session, with TensorFlow's names."""

import dataclasses
import numbers
import os

from stratagem.errors import DeviceConfigurationError, DeviceTypeError


@dataclasses.dataclass
class GPUOptions:
    """How much memory of the GPUs a session may use.

    Args:
        allow_growth: Whether memory is taken when it is needed, or as much as is allowed at the start; by default as
            `sg.config.set_memory_growth` says, which is when needed.
        per_process_gpu_memory_fraction: The part of each GPU's memory that may be used, above 0 and at most 1.
    """

    allow_growth: bool | None = None
    per_process_gpu_memory_fraction: float | None = None

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


@dataclasses.dataclass
class SessionConfig:
    """How a session runs graphs; read when the session is made.

    Args:
        log_device_placement: Whether to print where each operation runs.
        allow_soft_placement: Whether what is placed on a device that does not exist runs on the nearest one; by default
            as `sg.config.set_soft_device_placement` says.
        gpu_options: The memory of GPUs.
        token_file: Where the secret of the cluster is, for sessions on one; by default as for `sg.Server`.
    Example:
        >>> config = SessionConfig(log_device_placement=True)
        >>> config.gpu_options.allow_growth = True
    """

    log_device_placement: bool = False
    allow_soft_placement: bool | None = None
    gpu_options: GPUOptions = dataclasses.field(default_factory=GPUOptions)
    token_file: str | os.PathLike[str] | None = None

    def check(self) -> None:
        """Refuses what no session can have."""
        for name in ("log_device_placement", "allow_soft_placement"):
            value = getattr(self, name)
            if type(value) is not bool and not (value is None and name == "allow_soft_placement"):
                raise DeviceTypeError(f"{name} is True or False, got {value!r}")
        if not isinstance(self.gpu_options, GPUOptions):
            raise DeviceTypeError(f"gpu_options are sg.GPUOptions(...), got {self.gpu_options!r}")
        self.gpu_options.check()
