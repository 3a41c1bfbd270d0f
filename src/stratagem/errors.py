"""Defines the errors that stratagem raises, as one family.

Every error says three things: the rule, what came, and what to do. Each is also the built-in
error that a Python user would expect (`ValueError`, `TypeError`, `RuntimeError`).
`OutOfMemoryError` lives in `devices.memory`, because it is a `torch.OutOfMemoryError` too and
this file must not import torch.
"""

import importlib
from typing import Any


class StratagemError(Exception):
    """The base of every error that stratagem raises on purpose."""


class StratagemWarning(UserWarning):
    """The base of every warning that stratagem gives."""


class UnknownNameError(StratagemError, AttributeError):
    """There is no such name. If TensorFlow has it, the error says what to write instead."""


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
    """Devices are available, but probably not as the program or its environment meant it."""


class PlacementError(DeviceError, RuntimeError):
    """An operation cannot run where it was placed."""


class PlacementWarning(DeviceWarning):
    """An operation runs on another device than the one it was placed on."""


class SharedMemoryError(StratagemError, OSError):
    """Shared memory could not be allocated."""


class ReplicaError(StratagemError, RuntimeError):
    """Something went wrong in a replica."""


class PreemptedExit(SystemExit):
    """SIGTERM ended a training after it was saved. Its exit code, 75, tells schedulers to start the program again."""


class LostError(StratagemError):
    """A process that a strategy needs died or stalled; `strategy.revive()` can replace it."""


class ReplicaDiedError(ReplicaError, LostError):
    """A replica's process ended."""


class ReplicaStalledError(ReplicaError, LostError):
    """The process of a replica is alive but makes no progress."""


class StrategyError(StratagemError, RuntimeError):
    """A strategy was used in a way or at a moment that it does not allow."""


class DriftError(StrategyError):
    """Replicas, which must have the same in every parameter, have written different values to one."""


class PerReplicaError(StrategyError, TypeError, AttributeError):
    """The values of all replicas were used as if they were one."""


class CollectiveError(StratagemError, RuntimeError):
    """Replicas did not take part in the same exchange."""


class NonFiniteGradientError(StratagemError, ArithmeticError):
    """Too many gradients in a row were not finite."""


class UnevenDataError(StratagemError, ValueError):
    """Data does not divide evenly over the replicas, and `uneven="error"` forbids that."""


class ClusterError(StratagemError):
    """Something about the tasks of a cluster is wrong."""


class ClusterSpecError(ClusterError, ValueError):
    """A description of a cluster, or of a task in it, breaks a rule."""


class ClusterJoinError(ClusterError, RuntimeError):
    """The tasks of a cluster did not all join, or do not fit together."""


class TaskLostError(ClusterError, RuntimeError):
    """A task of the cluster is gone."""


class WorkerError(ClusterError, RuntimeError):
    """Workers that train together did different things, or changed different values."""


class WorkerStalledError(WorkerError):
    """A worker is alive, but has not reached the point at which the others wait for it."""


class ClusterResourcesError(ClusterError, RuntimeError):
    """Ray does not have what the workers need."""


class RayMissingError(ClusterError, ImportError):
    """Ray is not installed, or too old."""


class ClusterTimeoutError(ClusterError, TimeoutError):
    """A task waited for something that did not arrive in time."""


class AddressInUseError(ClusterError, OSError):
    """Another program listens at the address of a task."""


class AddressError(ClusterError, OSError):
    """A task cannot listen at its address."""


class TokenError(ClusterError, OSError):
    """The file with the secret of the cluster cannot be trusted or read."""


class HandshakeError(ClusterError, RuntimeError):
    """The program that answers at an address is not a task of this cluster."""


class ProtocolError(ClusterError, RuntimeError):
    """A message of another task breaks the rules for messages."""


class LaunchError(ClusterError, RuntimeError):
    """A program cannot be started in the way that was asked for."""


class ClusterWarning(StratagemWarning):
    """A cluster works, but probably not as the program or its environment meant it."""


class GraphError(StratagemError, ValueError):
    """A graph cannot record an operation, or does not have what was asked for."""


class GraphTypeError(GraphError, TypeError):
    """An argument has a type that a graph cannot hold."""


class FeedError(GraphError):
    """A fed value does not fit the tensor of the graph."""


class SessionError(StratagemError, RuntimeError):
    """A session cannot run what it was asked to run."""


class ParameterError(StratagemError, ValueError):
    """A variable, gradient or option for a parameter server breaks a rule."""


class StepCancelledError(StratagemError, RuntimeError):
    """A scheduled step was never run, because another one had failed."""


class EndOfDataError(StratagemError, StopIteration):
    """A worker has read all of its data in this pass."""


class ParameterServerLostError(LostError, RuntimeError):
    """A parameter server is gone, and with it a part of the model."""


class CheckpointError(StratagemError, RuntimeError):
    """A checkpoint cannot be written, found or used."""


class CheckpointWriteError(CheckpointError, OSError):
    """A checkpoint could not be written to the disk; earlier checkpoints are unchanged."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint was damaged after it was written."""


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


def __getattr__(name: str) -> Any:
    known = [each for each in globals() if each.endswith(("Error", "Warning", "Exit"))]
    return importlib.import_module("stratagem._tensorflow_names").of_module("errors", name, known)  # which needs errors
