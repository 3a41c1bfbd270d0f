"""One training program on one device, on many devices or on many machines, by choosing a strategy.

Names are loaded when they are first used, so that `import stratagem` is instant and starts nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from stratagem import _env, _integrations, _tensorflow_names

if TYPE_CHECKING:
    from stratagem import cluster as cluster
    from stratagem import config as config
    from stratagem import devices as devices
    from stratagem import errors as errors
    from stratagem import estimator as estimator
    from stratagem import metrics as metrics
    from stratagem._tensorflow_names import ReduceOp as ReduceOp
    from stratagem.cluster import ClusterSpec as ClusterSpec
    from stratagem.cluster import Server as Server
    from stratagem.cluster.ray.ray_cluster import RayCluster as RayCluster
    from stratagem.devices import DeviceSpec as DeviceSpec
    from stratagem.devices import LogicalDevice as LogicalDevice
    from stratagem.devices import OutOfMemoryError as OutOfMemoryError
    from stratagem.devices import PhysicalDevice as PhysicalDevice
    from stratagem.engine.context import has_strategy as has_strategy
    from stratagem.engine.context import in_cross_replica_context as in_cross_replica_context
    from stratagem.errors import StratagemError as StratagemError
    from stratagem.graphs.graph import Graph as Graph
    from stratagem.graphs.graph import add_n as add_n
    from stratagem.graphs.graph import assign as assign
    from stratagem.graphs.graph import constant as constant
    from stratagem.graphs.graph import container as container
    from stratagem.graphs.graph import get_default_graph as get_default_graph
    from stratagem.graphs.graph import get_variable as get_variable
    from stratagem.graphs.graph import global_variables_initializer as global_variables_initializer
    from stratagem.graphs.graph import placeholder as placeholder
    from stratagem.graphs.graph import reset_default_graph as reset_default_graph
    from stratagem.graphs.sessions.cluster_session import Session as Session
    from stratagem.graphs.sessions.session_config import GPUOptions as GPUOptions
    from stratagem.graphs.sessions.session_config import SessionConfig as SessionConfig
    from stratagem.graphs.trace import TensorSpec as TensorSpec
    from stratagem.graphs.trace import trace as trace
    from stratagem.inputs import InputContext as InputContext
    from stratagem.objects.per_replica import PerReplica as PerReplica
    from stratagem.parameters.consistency import Async as Async
    from stratagem.parameters.consistency import BoundedStaleness as BoundedStaleness
    from stratagem.parameters.consistency import Synchronous as Synchronous
    from stratagem.parameters.network.compression import Compression as Compression
    from stratagem.parameters.partitioning import FixedShardsPartitioner as FixedShardsPartitioner
    from stratagem.parameters.partitioning import MaxSizePartitioner as MaxSizePartitioner
    from stratagem.parameters.partitioning import MinSizePartitioner as MinSizePartitioner
    from stratagem.placement import device as device
    from stratagem.placement import device_of as device_of
    from stratagem.placement import log_placement as log_placement
    from stratagem.placement import place as place
    from stratagem.placement import spread_variables as spread_variables
    from stratagem.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
    from stratagem.strategies.coordinator import ClusterCoordinator as ClusterCoordinator
    from stratagem.strategies.coordinator import RemoteValue as RemoteValue
    from stratagem.strategies.local_sgd import LocalSGDStrategy as LocalSGDStrategy
    from stratagem.strategies.mirrored import MirroredStrategy as MirroredStrategy
    from stratagem.strategies.multi_worker import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from stratagem.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
    from stratagem.strategies.one_device import get_replica_context as get_replica_context
    from stratagem.strategies.one_device import get_strategy as get_strategy
    from stratagem.strategies.parameter_server import ParameterServerStrategy as ParameterServerStrategy
    from stratagem.strategies.strategy import Strategy as Strategy
    from stratagem.strategies.tpu import TPUStrategy as TPUStrategy
    from stratagem.training.average_loss import compute_average_loss as compute_average_loss
    from stratagem.training.average_loss import scale_regularization_loss as scale_regularization_loss
    from stratagem.training.averaging import ExponentialMovingAverage as ExponentialMovingAverage
    from stratagem.training.batch_norm import convert_sync_batchnorm as convert_sync_batchnorm
    from stratagem.training.learning_rates import WarmUp as WarmUp
    from stratagem.training.learning_rates import scale_learning_rate as scale_learning_rate
    from stratagem.training.towers import average_gradients as average_gradients
    from stratagem.variables.aggregation import aggregate as aggregate

__version__ = "0.1.0"

# What `sg.NAME` is: a module of its own, or a name inside one.
_MODULES = ("cluster", "config", "devices", "errors", "estimator", "metrics")
_NAMES = {
    "Async": "parameters.consistency",
    "BoundedStaleness": "parameters.consistency",
    "CentralStorageStrategy": "strategies.central_storage",
    "ClusterCoordinator": "strategies.coordinator",
    "ClusterSpec": "cluster",
    "Compression": "parameters.network.compression",
    "DeviceSpec": "devices",
    "ExponentialMovingAverage": "training.averaging",
    "FixedShardsPartitioner": "parameters.partitioning",
    "GPUOptions": "graphs.sessions.session_config",
    "Graph": "graphs.graph",
    "InputContext": "inputs",
    "LocalSGDStrategy": "strategies.local_sgd",
    "LogicalDevice": "devices",
    "MaxSizePartitioner": "parameters.partitioning",
    "MinSizePartitioner": "parameters.partitioning",
    "MirroredStrategy": "strategies.mirrored",
    "MultiWorkerMirroredStrategy": "strategies.multi_worker",
    "OneDeviceStrategy": "strategies.one_device",
    "OutOfMemoryError": "devices",
    "ParameterServerStrategy": "strategies.parameter_server",
    "PerReplica": "objects.per_replica",
    "PhysicalDevice": "devices",
    "ReduceOp": "_tensorflow_names",
    "RayCluster": "cluster.ray.ray_cluster",
    "RemoteValue": "strategies.coordinator",
    "Server": "cluster",
    "Session": "graphs.sessions.cluster_session",
    "SessionConfig": "graphs.sessions.session_config",
    "StratagemError": "errors",
    "Strategy": "strategies.strategy",
    "Synchronous": "parameters.consistency",
    "TPUStrategy": "strategies.tpu",
    "WarmUp": "training.learning_rates",
    "add_n": "graphs.graph",
    "aggregate": "variables.aggregation",
    "assign": "graphs.graph",
    "average_gradients": "training.towers",
    "compute_average_loss": "training.average_loss",
    "constant": "graphs.graph",
    "container": "graphs.graph",
    "convert_sync_batchnorm": "training.batch_norm",
    "device": "placement",
    "device_of": "placement",
    "get_default_graph": "graphs.graph",
    "get_replica_context": "strategies.one_device",
    "get_strategy": "strategies.one_device",
    "get_variable": "graphs.graph",
    "global_variables_initializer": "graphs.graph",
    "has_strategy": "engine.context",
    "in_cross_replica_context": "engine.context",
    "log_placement": "placement",
    "place": "placement",
    "placeholder": "graphs.graph",
    "reset_default_graph": "graphs.graph",
    "scale_learning_rate": "training.learning_rates",
    "scale_regularization_loss": "training.average_loss",
    "spread_variables": "placement",
    "TensorSpec": "graphs.trace",
    "trace": "graphs.trace",
}

__all__ = [*_MODULES, *_NAMES, "__version__"]  # noqa: PLE0604  # all are names

_integrations.prepare()
if _env.asks_for_strict_devices():  # torch must know them before the program names one
    importlib.import_module("stratagem.devices.inventory").this_process().make_strict()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"stratagem.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"stratagem.{_NAMES[name]}"), name)
    if (found := _tensorflow_names.find(name)) is not None:
        return found
    raise _tensorflow_names.unknown_at_the_top(name, __all__, _MODULES)


def __dir__() -> list[str]:
    return sorted(__all__)
