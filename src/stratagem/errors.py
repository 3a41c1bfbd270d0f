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


class UnknownNameError(StratagemError, AttributeError):
    """There is no such name; if it is one of TensorFlow's, the error says what to write instead."""


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


class PlacementError(DeviceError, RuntimeError):
    """An operation cannot run where it was placed."""


class PlacementWarning(DeviceWarning):
    """An operation runs elsewhere than it was placed."""


class SharedMemoryError(StratagemError, OSError):
    """Shared memory could not be had."""


class ReplicaError(StratagemError, RuntimeError):
    """Something went wrong in a replica."""


class PreemptedExit(SystemExit):
    """SIGTERM has ended a training, which is saved; with the exit code of a program that is to be started again."""


class LostError(StratagemError):
    """A process that a strategy cannot do without is gone or does not get on; with a new one it could go on."""


class ReplicaDiedError(ReplicaError, LostError):
    """A replica's process ended."""


class ReplicaStalledError(ReplicaError, LostError):
    """A replica lives but does not get on."""


class StrategyError(StratagemError, RuntimeError):
    """A strategy was used in a way or at a moment that it does not allow."""


class DriftError(StrategyError):
    """Replicas, which must have the same in every parameter, have written different values to one."""


class CollectiveError(StratagemError, RuntimeError):
    """Replicas did not take part in the same exchange."""


class NonFiniteGradientError(StratagemError, ArithmeticError):
    """Too many gradients in a row were not finite."""


class UnevenDataError(StratagemError, ValueError):
    """Data does not divide over the replicas as it was asked to."""


class ClusterError(StratagemError):
    """Something about the tasks of a cluster is wrong."""


class ClusterSpecError(ClusterError, ValueError):
    """A description of a cluster, or of a task in it, breaks a rule."""


class ClusterJoinError(ClusterError, RuntimeError):
    """The tasks of a cluster did not come together."""


class TaskLostError(ClusterError, RuntimeError):
    """A task of the cluster is gone."""


class WorkerError(ClusterError, RuntimeError):
    """Workers that train together do not do the same."""


class WorkerStalledError(WorkerError):
    """A worker lives, but has not come to where the others wait for it."""


class ClusterResourcesError(ClusterError, RuntimeError):
    """Ray does not have what the workers need."""


class RayMissingError(ClusterError, ImportError):
    """Ray is not installed, or too old."""


class ClusterTimeoutError(ClusterError, TimeoutError):
    """What a task waited for did not come in time."""


class AddressInUseError(ClusterError, OSError):
    """Another program listens at the address of a task."""


class AddressError(ClusterError, OSError):
    """A task cannot listen at its address."""


class TokenError(ClusterError, OSError):
    """The file with the secret of the cluster cannot be trusted or read."""


class HandshakeError(ClusterError, RuntimeError):
    """Who answers at an address is no task of this cluster."""


class ProtocolError(ClusterError, RuntimeError):
    """A message of another task breaks the rules for messages."""


class LaunchError(ClusterError, RuntimeError):
    """A program cannot be started in the way that was asked for."""


class ClusterWarning(StratagemWarning):
    """A cluster works, but not in the way that someone seems to have meant."""


class GraphError(StratagemError, ValueError):
    """A graph cannot hold what was to be recorded, or does not hold what was asked for."""


class GraphTypeError(GraphError, TypeError):
    """An argument has a type that a graph cannot hold."""


class FeedError(GraphError):
    """What was fed is not what the tensor of the graph takes."""


class SessionError(StratagemError, RuntimeError):
    """A session cannot run what it was asked to run."""


class ParameterError(StratagemError, ValueError):
    """What a parameter server was told breaks a rule."""


class StepCancelledError(StratagemError, RuntimeError):
    """A step that was scheduled was never run, because another one had failed."""


class EndOfDataError(StratagemError, StopIteration):
    """A worker has read all of its data in this pass."""


class ParameterServerLostError(LostError, RuntimeError):
    """A parameter server is gone, and with it a part of the model."""


class CheckpointError(StratagemError, RuntimeError):
    """A checkpoint cannot be written, found or used."""


class CheckpointWriteError(CheckpointError, OSError):
    """A checkpoint could not be brought to the disk; those before it are as they were."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is not what was written."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint is of another model."""


class EstimatorError(StratagemError, ValueError):
    """An Estimator, or what it was given, breaks a rule."""


def in_words(error: BaseException) -> str:
    """An error of the program's in one line, also if its own text cannot be had."""
    try:
        text = str(error)
    except Exception:
        text = "(its __str__ has failed)"
    return f"{type(error).__name__}: {text}".removesuffix(": ")
