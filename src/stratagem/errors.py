"""Defines the errors that stratagem raises, as one family.

Every error says three things: the rule, what came, and what to do. Each is also the built-in
error that a Python user would expect (`ValueError`, `TypeError`, `RuntimeError`).
`OutOfMemoryError` lives in `devices.memory`, because it is a `torch.OutOfMemoryError` too and
this file must not import torch.
"""


class StratagemError(Exception):
    """The base of every error that stratagem raises on purpose."""


class StratagemWarning(UserWarning):
    """The base of every warning that stratagem gives."""


class DeviceError(StratagemError):
    """Something about devices is wrong: a name, a choice, a limit or the moment."""


class UnknownDeviceError(DeviceError, ValueError):
    """The text is not the name of any device, on this machine or another."""


class DeviceNotFoundError(DeviceError, ValueError):
    """The name is well formed, but this process has no such device."""


class DeviceConfigurationError(DeviceError, ValueError):
    """A list of devices, a division or a limit breaks a rule."""


class DeviceTypeError(DeviceError, TypeError):
    """An argument has a type that cannot describe devices."""


class DevicesInUseError(DeviceError, RuntimeError):
    """Devices are in use, so that they can no longer (or not yet) be changed."""


class EnvironmentVariableError(StratagemError, ValueError):
    """An environment variable that stratagem reads does not have the right form."""


class DeviceWarning(StratagemWarning):
    """Devices are available, but not in the way that someone seems to have meant."""


class SharedMemoryError(StratagemError, OSError):
    """Shared memory could not be had."""


class ReplicaError(StratagemError, RuntimeError):
    """Something went wrong in a replica."""


class ReplicaDiedError(ReplicaError):
    """A replica's process ended."""


class ReplicaStalledError(ReplicaError):
    """A replica lives but does not get on."""


class StrategyError(StratagemError, RuntimeError):
    """A strategy was used in a way or at a moment that it does not allow."""


class CollectiveError(StratagemError, RuntimeError):
    """Replicas did not take part in the same exchange."""


class NonFiniteGradientError(StratagemError, ArithmeticError):
    """Too many gradients in a row were not finite."""


class UnevenDataError(StratagemError, ValueError):
    """Data does not divide over the replicas as it was asked to."""
