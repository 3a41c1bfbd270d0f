"""One training program on one device, on many devices or on many machines, by choosing a strategy.

Names are loaded when they are first used, so that `import stratagem` is instant and starts nothing.
"""

import difflib
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem import cluster as cluster
    from stratagem import config as config
    from stratagem import devices as devices
    from stratagem import errors as errors
    from stratagem import estimator as estimator
    from stratagem.cluster import ClusterSpec as ClusterSpec
    from stratagem.cluster import Server as Server
    from stratagem.cluster.ray_cluster import RayCluster as RayCluster
    from stratagem.devices import DeviceSpec as DeviceSpec
    from stratagem.devices import LogicalDevice as LogicalDevice
    from stratagem.devices import OutOfMemoryError as OutOfMemoryError
    from stratagem.devices import PhysicalDevice as PhysicalDevice
    from stratagem.errors import StratagemError as StratagemError
    from stratagem.inputs import InputContext as InputContext
    from stratagem.replicas.values import PerReplica as PerReplica
    from stratagem.strategies.batch_norm import convert_sync_batchnorm as convert_sync_batchnorm
    from stratagem.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
    from stratagem.strategies.context import get_replica_context as get_replica_context
    from stratagem.strategies.context import has_strategy as has_strategy
    from stratagem.strategies.context import in_cross_replica_context as in_cross_replica_context
    from stratagem.strategies.losses import compute_average_loss as compute_average_loss
    from stratagem.strategies.mirrored import MirroredStrategy as MirroredStrategy
    from stratagem.strategies.multi_worker import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from stratagem.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
    from stratagem.strategies.one_device import get_strategy as get_strategy
    from stratagem.strategies.strategy import Strategy as Strategy
    from stratagem.training.averaging import ExponentialMovingAverage as ExponentialMovingAverage
    from stratagem.training.learning_rates import WarmUp as WarmUp
    from stratagem.training.learning_rates import scale_learning_rate as scale_learning_rate
    from stratagem.training.towers import average_gradients as average_gradients

__version__ = "0.1.0.dev0"

# What `sg.NAME` is: a module of its own, or a name inside one.
_MODULES = ("cluster", "config", "devices", "errors", "estimator")
_NAMES = {
    "CentralStorageStrategy": "strategies.central_storage",
    "ClusterSpec": "cluster",
    "DeviceSpec": "devices",
    "ExponentialMovingAverage": "training.averaging",
    "InputContext": "inputs",
    "LogicalDevice": "devices",
    "MirroredStrategy": "strategies.mirrored",
    "MultiWorkerMirroredStrategy": "strategies.multi_worker",
    "OneDeviceStrategy": "strategies.one_device",
    "OutOfMemoryError": "devices",
    "PerReplica": "replicas.values",
    "PhysicalDevice": "devices",
    "RayCluster": "cluster.ray_cluster",
    "Server": "cluster",
    "StratagemError": "errors",
    "Strategy": "strategies.strategy",
    "WarmUp": "training.learning_rates",
    "average_gradients": "training.towers",
    "compute_average_loss": "strategies.losses",
    "convert_sync_batchnorm": "strategies.batch_norm",
    "get_replica_context": "strategies.context",
    "get_strategy": "strategies.one_device",
    "has_strategy": "strategies.context",
    "in_cross_replica_context": "strategies.context",
    "scale_learning_rate": "training.learning_rates",
}

__all__ = [*_MODULES, *_NAMES, "__version__"]  # noqa: PLE0604  # all are names


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"stratagem.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"stratagem.{_NAMES[name]}"), name)
    close = difflib.get_close_matches(name, __all__, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(__all__)}"
    raise AttributeError(f"module 'stratagem' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted(__all__)
