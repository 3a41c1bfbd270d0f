"""Names of TensorFlow's: those with the same meaning lead to what stratagem has, the others say what to write instead.

All of them are here: what `sg.X`, `sg.config.X` and `strategy.X` do not find themselves is asked for in these tables.
The parts of a name that only say where TensorFlow keeps it (`compat`, `v1`, `experimental`, ...) count for nothing.
`docs/tensorflow_names.md` is the same for readers.
"""

import enum
import importlib
from typing import Any, Final, final

from stratagem.errors import UnknownNameError

_PLACES: Final = frozenset({"compat", "v1", "v2", "experimental", "python", "client"})

# What stratagem has under its own name at the top: `sg.distribute.get_strategy` is `sg.get_strategy`.
_AT_THE_TOP: Final = {
    "distribute": """CentralStorageStrategy InputContext MirroredStrategy MultiWorkerMirroredStrategy OneDeviceStrategy
        ParameterServerStrategy ReduceOp Server Strategy get_replica_context get_strategy has_strategy
        in_cross_replica_context""",
    "distribute.coordinator": "ClusterCoordinator RemoteValue",
    "distribute.partitioners": "FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner",
    "nn": "compute_average_loss scale_regularization_loss",
    "train": "ClusterSpec ExponentialMovingAverage Server",
    # Of `compat.v1`, which is no place.
    "": """DeviceSpec GPUOptions Graph Session TensorSpec add_n assign constant device get_default_graph get_variable
        global_variables_initializer placeholder reset_default_graph""",
}
_OF_CONFIG: Final = [
    "LogicalDeviceConfiguration",
    "VirtualDeviceConfiguration",
    "get_device_details",
    "get_logical_device_configuration",
    "get_memory_growth",
    "get_memory_info",
    "get_soft_device_placement",
    "get_visible_devices",
    "list_logical_devices",
    "list_physical_devices",
    "reset_memory_stats",
    "set_logical_device_configuration",
    "set_memory_growth",
    "set_soft_device_placement",
    "set_visible_devices",
]

SAME: Final = {
    f"{place}.{name}" if place else name: name for place, names in _AT_THE_TOP.items() for name in names.split()
} | {
    **{f"config.{name}": f"config.{name}" for name in _OF_CONFIG},
    "config.get_virtual_device_configuration": "config.get_logical_device_configuration",
    "config.set_virtual_device_configuration": "config.set_logical_device_configuration",
    "debugging.get_log_device_placement": "config.get_log_device_placement",
    "debugging.set_log_device_placement": "config.set_log_device_placement",
    "device_lib.list_local_devices": "config.list_logical_devices",
    "distribute.DistributedValues": "PerReplica",
    "distribute.cluster_resolver.ClusterResolver": "cluster.Resolver",
    "distribute.cluster_resolver.KubernetesClusterResolver": "cluster.KubernetesResolver",
    "distribute.cluster_resolver.SimpleClusterResolver": "cluster.SimpleResolver",
    "distribute.cluster_resolver.SlurmClusterResolver": "cluster.SlurmResolver",
    "distribute.cluster_resolver.TFConfigClusterResolver": "cluster.TFConfigResolver",
    "distribute.cluster_resolver.UnionResolver": "cluster.UnionResolver",
    "ConfigProto": "SessionConfig",
    "estimator": "estimator",
    "errors": "errors",
}
"""Names of TensorFlow's that work, without the parts that say where they are kept, and what they are in stratagem."""

OF_STRATEGIES: Final = {
    "distribute_datasets_from_function": "distribute_from_function",
    "experimental_distribute_dataset": "distribute",
    "experimental_distribute_datasets_from_function": "distribute_from_function",
    "experimental_local_results": "local_results",
    "experimental_run_v2": "run",
    "unwrap": "local_results",
}
"""Methods of TensorFlow's strategies, and what they are called here."""

_OPS: Final = "leave cross_device_ops out, or give it 'auto', 'shared_memory', 'torch' (NCCL on GPUs) or 'to_one'"
_COLLECTIVES: Final = "leave it out: gradients travel by NCCL between GPUs and by gloo or shared memory between CPUs"
_KERAS: Final = "use keras itself: `import keras`, with KERAS_BACKEND=torch"
_GRAPHS: Final = "programs run at once here, and graphs are recorded inside `with sg.Graph():`"

OTHERWISE: Final = {
    "GradientTape": "call loss.backward(); gradients of torch.autograd.grad are summed by the update, not by hand",
    "InteractiveSession": "write `with sg.Session(graph) as session:`",
    "Variable": "make a torch.nn.Parameter in strategy.scope(), or sg.get_variable in a graph",
    "VariableAggregation": "say sg.aggregate(module, buffer, 'sum' | 'mean' | 'first')",
    "VariableSynchronization": "leave it out: buffers are joined after each step",
    "config.get_memory_usage": "use sg.config.get_memory_info(device)['current']",
    "config.set_synchronous_execution": "use CUDA_LAUNCH_BLOCKING=1, or torch.cuda.synchronize()",
    "config.threading": "use torch.set_num_threads; a logical device has cores of its own",
    "config.experimental_connect_to_cluster": "start tasks with `stratagem run`; a strategy connects its own",
    "config.experimental_connect_to_host": "start tasks with `stratagem run`; a strategy connects its own",
    "config.optimizer": "use torch.compile(model)",
    "config.run_functions_eagerly": "leave it out: steps run at once",
    "config.set_optimizer_jit": "use torch.compile(model)",
    "data": "use torch.utils.data, arrays or any iterable of batches, and strategy.distribute(data)",
    "disable_eager_execution": _GRAPHS,
    "disable_v2_behavior": _GRAPHS,
    "enable_eager_execution": "leave it out: programs run at once here",
    "enable_v2_behavior": "leave it out",
    "distribute.CollectiveCommunication": _COLLECTIVES,
    "distribute.CommunicationImplementation": _COLLECTIVES,
    "distribute.CommunicationOptions": _COLLECTIVES,
    "distribute.CrossDeviceOps": _OPS,
    "distribute.DistributedDataset": "see what strategy.distribute(data) returns",
    "distribute.DistributedIterator": "use iter(strategy.distribute(data))",
    "distribute.HierarchicalCopyAllReduce": _OPS,
    "distribute.InputOptions": "give strategy.distribute its options by name",
    "distribute.InputReplicationMode": "use strategy.distribute_from_function(function)",
    "distribute.NcclAllReduce": _OPS,
    "distribute.PreemptionCheckpointHandler": "use sg.estimator.Estimator.train, which saves at SIGTERM",
    "distribute.ReductionToOneDevice": _OPS,
    "distribute.ReplicaContext": "use sg.get_replica_context()",
    "distribute.RunOptions": "leave it out",
    "distribute.StrategyExtended": "use the methods of the strategy",
    "distribute.TPUStrategy": "use sg.MirroredStrategy (there are no TPUs)",
    "distribute.ValueContext": "use sg.get_replica_context()",
    "distribute.cluster_resolver.GCEClusterResolver": "use sg.cluster.SimpleResolver with addresses",
    "distribute.cluster_resolver.TPUClusterResolver": "use sg.cluster.SimpleResolver (there are no TPUs)",
    "distribute.experimental_set_strategy": "write `with strategy.scope():`",
    "function": "leave it out: steps run at once; use torch.compile(model)",
    "keras": _KERAS,
    "losses": "use torch.nn.functional, or keras.losses",
    "optimizers": "use torch.optim, or keras.optimizers",
    "random": "use torch.manual_seed",
    "saved_model": "use torch.save, keras' model.save, or sg.estimator's export",
    "set_random_seed": "use torch.manual_seed",
    "summary": "use torch.utils.tensorboard, or sg.estimator, which writes summaries",
    "test.gpu_device_name": "use sg.config.list_logical_devices('GPU')",
    "test.is_built_with_cuda": "use torch.version.cuda",
    "test.is_gpu_available": "use sg.config.list_physical_devices('GPU')",
    "tpu": "use sg.MirroredStrategy (there are no TPUs)",
    "train.Checkpoint": "use torch.save(model.state_dict(), path), or sg.estimator",
    "train.CheckpointManager": "use torch.save(model.state_dict(), path), or sg.estimator",
    "train.MonitoredTrainingSession": "use sg.Session(server.target), or sg.estimator for hooks and checkpoints",
    "train.Supervisor": "use sg.Session(server.target), or sg.estimator for hooks and checkpoints",
    "train.SyncReplicasOptimizer": "use sg.ParameterServerStrategy(consistency=sg.Synchronous(backup_workers=1))",
    "train.replica_device_setter": "use sg.ParameterServerStrategy",
    "train.GradientDescentOptimizer": "use torch.optim.SGD",
}
"""Names of TensorFlow's that mean nothing here, and what to write instead."""

OTHERWISE_OF_STRATEGIES: Final = {
    "colocate_vars_with": "place variables with sg.device or sg.place",
    "configure": "give options to the constructor",
    "experimental_assign_to_logical_device": "place operations with sg.device",
    "experimental_distribute_values_from_function": "make an sg.PerReplica of the values",
    "experimental_make_numpy_dataset": "give arrays to strategy.distribute(arrays, global_batch_size=...)",
    "experimental_prefetch_to_device": "use strategy.distribute, which loads one batch ahead",
    "experimental_replicate_to_logical_devices": "place operations with sg.device",
    "experimental_run": "use strategy.run",
    "experimental_split_to_logical_devices": "place operations with sg.device",
    "extended": "use the methods of the strategy",
    "group": "return values from the function of strategy.run",
    "initialize": "leave it out",
    "make_dataset_iterator": "use iter(strategy.distribute(data))",
    "make_input_fn_iterator": "use strategy.distribute_from_function(function)",
    "update_config_proto": "give sg.SessionConfig to sg.Session",
}
"""Methods of TensorFlow's strategies that mean nothing here, and what to write instead."""


@final
class ReduceOp(enum.StrEnum):
    """TensorFlow's names of reductions; `"sum"` and `"mean"` are the same.

    Example:
        >>> ReduceOp.MEAN == "mean"
        True
    """

    SUM = "sum"
    MEAN = "mean"


def find(path: str) -> Any:
    """What TensorFlow's name, such as `distribute.experimental.TPUStrategy`, is in stratagem.

    Returns:
        The object; a `Names` for the beginning of such a name; `None` if TensorFlow has no such name.
    Raises:
        UnknownNameError: The name means nothing here; it says what to write.
    """
    key = _without_places(path)
    if f"distribute.{key}" in {**SAME, **OTHERWISE}:  # `sg` stands for `tf.distribute`, too
        key = f"distribute.{key}"
    if key in SAME:
        return _of_stratagem(SAME[key])
    if key in OTHERWISE:
        raise UnknownNameError(f"TensorFlow's {path} has no counterpart under its name; {OTHERWISE[key]}")
    last = path.rpartition(".")[2]
    if last in _PLACES or any(name.startswith(f"{key}.") for name in (*SAME, *OTHERWISE)):
        return Names(path)
    return None


def of_strategy(strategy: Any, name: str) -> Any:
    """A method of a strategy by TensorFlow's name.

    Raises:
        UnknownNameError: There is no such method; of TensorFlow's it says what to write.
    """
    if name in OF_STRATEGIES:
        return getattr(strategy, OF_STRATEGIES[name])
    kind = type(strategy).__name__
    if name in OTHERWISE_OF_STRATEGIES:
        raise UnknownNameError(f"{kind} has no {name!r}, which TensorFlow has; {OTHERWISE_OF_STRATEGIES[name]}")
    raise UnknownNameError(f"{kind!r} object has no attribute {name!r}")


@final
class Names:
    """The beginning of names of TensorFlow's, such as `sg.distribute` or `sg.compat.v1`.

    Args:
        path: Without `sg`.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        path = f"{self._path}.{name}"
        found = None if name.startswith("__") else find(path)
        if found is None:
            raise UnknownNameError(f"stratagem has no {path!r}; docs/tensorflow_names.md has the names that it knows")
        return found

    def __repr__(self) -> str:
        return f"<names of TensorFlow's: {self._path}>"


def _without_places(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _PLACES)


def _of_stratagem(path: str) -> Any:
    found: Any = importlib.import_module("stratagem")
    for part in path.split("."):
        found = getattr(found, part)
    return found
