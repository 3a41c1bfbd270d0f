"""Names of TensorFlow's: those with the same meaning lead to what stratagem has, the others say what to write instead.

All of them are here: what `sg.X`, a public module, a strategy or an Estimator do not find themselves is asked for in
these tables.
The parts of a name that only say where TensorFlow keeps it (`compat`, `v1`, `experimental`, ...) count for nothing.
`docs/tensorflow_names.md` is the same for readers.
"""

import difflib
import enum
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final, final

from stratagem.errors import UnknownNameError

_PLACES: Final = frozenset({"compat", "contrib", "v1", "v2", "experimental", "python", "client"})

# What stratagem has under its own name at the top: `sg.distribute.get_strategy` is `sg.get_strategy`.
_AT_THE_TOP: Final = {
    "distribute": """CentralStorageStrategy InputContext MirroredStrategy MultiWorkerMirroredStrategy OneDeviceStrategy
        ParameterServerStrategy ReduceOp Server Strategy TPUStrategy get_replica_context get_strategy has_strategy
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
    "LogicalDevice",
    "LogicalDeviceConfiguration",
    "PhysicalDevice",
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
    "distribute.CollectiveAllReduceStrategy": "MultiWorkerMirroredStrategy",
    "distribute.DistributedValues": "PerReplica",
    "distribute.DistributionStrategy": "Strategy",
    "distribute.get_distribution_strategy": "get_strategy",
    "distribute.has_distribution_strategy": "has_strategy",
    "distribute.cluster_resolver.ClusterResolver": "cluster.Resolver",
    "distribute.cluster_resolver.KubernetesClusterResolver": "cluster.KubernetesResolver",
    "distribute.cluster_resolver.SimpleClusterResolver": "cluster.SimpleResolver",
    "distribute.cluster_resolver.SlurmClusterResolver": "cluster.SlurmResolver",
    "distribute.cluster_resolver.TFConfigClusterResolver": "cluster.TFConfigResolver",
    "distribute.cluster_resolver.TPUClusterResolver": "cluster.TPUResolver",
    "distribute.cluster_resolver.UnionResolver": "cluster.UnionResolver",
    "ConfigProto": "SessionConfig",
    "initialize_all_variables": "global_variables_initializer",
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
_CONNECTS: Final = "start tasks with `stratagem run`; a strategy connects its own"
_EAGER: Final = "leave it out: steps run at once"
_COMPILED: Final = "use torch.compile(model)"
_RECORDED: Final = (
    "leave it out: operations run in the order in which they are written, and a session runs what a fetch needs"
)
_SAVED: Final = "use torch.save(model.state_dict(), path), or sg.estimator"
_HOOKED: Final = "write it in the loop around strategy.run, or use sg.estimator, which saves, logs and evaluates"
_SESSIONS: Final = "use sg.Session(server.target), or sg.estimator for hooks and checkpoints"
_STEPS: Final = "count steps in the program; sg.estimator keeps a global step in its checkpoints"
_RATES: Final = "use torch.optim.lr_scheduler, or sg.scale_learning_rate and sg.WarmUp"
_QUEUED: Final = "use torch.utils.data.DataLoader, and strategy.distribute(loader)"
_RECORDS: Final = "read records with a torch.utils.data.Dataset, or give a tf.data dataset to strategy.distribute"
_THREADS: Final = "use torch.set_num_threads; a logical device has cores of its own"
_TF32: Final = "use torch.set_float32_matmul_precision"

_TRACED: Final = "in a graph, record the whole training step with sg.trace"
_STEPPED: Final = "in a graph, call loss.backward() and optimizer.step(), and fetch graph.updates"

# Of `tf.train`, mostly of version 1: many names for few things.
_TRAINING: Final = {
    "AdadeltaOptimizer": f"use torch.optim.Adadelta; {_TRACED}",
    "AdagradOptimizer": f"use torch.optim.Adagrad; {_TRACED}",
    "AdamOptimizer": f"use torch.optim.Adam; {_TRACED}",
    "GradientDescentOptimizer": f"use torch.optim.SGD; {_STEPPED}",
    "MomentumOptimizer": f"use torch.optim.SGD(momentum=...); {_TRACED}",
    "Optimizer": f"use torch.optim.Optimizer; {_TRACED}",
    "RMSPropOptimizer": f"use torch.optim.RMSprop; {_TRACED}",
    **dict.fromkeys(
        ("AdagradDAOptimizer", "FtrlOptimizer", "ProximalAdagradOptimizer", "ProximalGradientDescentOptimizer"),
        "use an optimizer of torch.optim or keras.optimizers",
    ),
    **dict.fromkeys(
        (
            *(
                "Checkpoint",
                "CheckpointManager",
                "CheckpointOptions",
                "CheckpointView",
                "Saver",
                "get_checkpoint_mtimes",
            ),
            *("checkpoint_exists", "checkpoints_iterator", "export_meta_graph", "get_checkpoint_state"),
            *("generate_checkpoint_state_proto", "import_meta_graph", "init_from_checkpoint", "latest_checkpoint"),
            *("list_variables", "load_checkpoint", "load_variable", "remove_checkpoint", "update_checkpoint_state"),
            *("warm_start", "write_graph"),
        ),
        _SAVED,
    ),
    **dict.fromkeys(
        (
            *("CheckpointSaverHook", "CheckpointSaverListener", "FeedFnHook", "FinalOpsHook", "GlobalStepWaiterHook"),
            *("LoggingTensorHook", "NanTensorHook", "ProfilerHook", "SecondOrStepTimer", "SessionRunArgs"),
            *("SessionRunContext", "SessionRunHook", "SessionRunValues", "StepCounterHook", "StopAtStepHook"),
            "SummarySaverHook",
        ),
        _HOOKED,
    ),
    **dict.fromkeys(
        (
            *("ChiefSessionCreator", "MonitoredSession", "MonitoredTrainingSession", "Scaffold", "SessionCreator"),
            *("SessionManager", "SingularMonitoredSession", "Supervisor", "WorkerSessionCreator"),
        ),
        _SESSIONS,
    ),
    **dict.fromkeys(
        (
            *("assert_global_step", "basic_train_loop", "create_global_step", "get_global_step", "global_step"),
            "get_or_create_global_step",
        ),
        _STEPS,
    ),
    **dict.fromkeys(
        (
            *("cosine_decay", "cosine_decay_restarts", "exponential_decay", "inverse_time_decay"),
            *("linear_cosine_decay", "natural_exp_decay", "noisy_linear_cosine_decay", "piecewise_constant"),
            *("piecewise_constant_decay", "polynomial_decay"),
        ),
        _RATES,
    ),
    **dict.fromkeys(
        (
            *("Coordinator", "LooperThread", "QueueRunner", "add_queue_runner", "batch", "batch_join"),
            *("input_producer", "limit_epochs", "match_filenames_once", "maybe_batch", "maybe_batch_join"),
            *("maybe_shuffle_batch", "maybe_shuffle_batch_join", "queue_runner", "range_input_producer"),
            *("shuffle_batch", "shuffle_batch_join", "slice_input_producer", "start_queue_runners"),
            "string_input_producer",
        ),
        _QUEUED,
    ),
    **dict.fromkeys(
        (
            *("BytesList", "Example", "Feature", "FeatureList", "FeatureLists", "Features", "FloatList", "Int64List"),
            "SequenceExample",
        ),
        _RECORDS,
    ),
    **dict.fromkeys(("ClusterDef", "JobDef", "ServerDef"), "use sg.ClusterSpec"),
    "VocabInfo": _SAVED,
    "SyncReplicasOptimizer": "use sg.ParameterServerStrategy(consistency=sg.Synchronous(backup_workers=1))",
    "replica_device_setter": "use sg.ParameterServerStrategy, or sg.spread_variables in `with sg.device(...)`",
}
_ERRORS: Final = {
    "AbortedError": "catch sg.errors.LostError for a process of this machine, sg.errors.TaskLostError for a task",
    "AlreadyExistsError": "catch FileExistsError, or sg.errors.AddressInUseError",
    "CancelledError": "catch sg.errors.StepCancelledError",
    "DataLossError": "catch sg.errors.CheckpointCorruptError",
    "DeadlineExceededError": "catch TimeoutError: sg.errors.ClusterTimeoutError is one",
    "FailedPreconditionError": "catch RuntimeError: sg.errors.SessionError and sg.errors.StrategyError are such",
    "InternalError": "catch sg.StratagemError, or RuntimeError for errors of torch",
    "InvalidArgumentError": "catch ValueError: sg.errors.GraphError, sg.errors.FeedError and kin are such",
    "NotFoundError": "catch sg.errors.DeviceNotFoundError, sg.errors.CheckpointError or FileNotFoundError",
    "OpError": "catch sg.StratagemError, the base of all errors of stratagem, or RuntimeError for errors of torch",
    "OutOfRangeError": "write a for loop, which ends with the data; or catch sg.errors.EndOfDataError",
    "PermissionDeniedError": "catch PermissionError",
    "ResourceExhaustedError": "catch torch.OutOfMemoryError: sg.OutOfMemoryError is one",
    "UnauthenticatedError": "catch sg.errors.HandshakeError, or sg.errors.TokenError",
    "UnavailableError": "catch sg.errors.TaskLostError for a task, sg.errors.LostError for a process of this machine",
    "UnimplementedError": "catch NotImplementedError",
    "UnknownError": "catch sg.StratagemError, or RuntimeError for errors of torch",
}
_CANNED: Final = "write a model_fn with a torch module, or use sg.estimator.model_to_estimator(keras_model)"
_EXPORTED: Final = "call estimator.export(folder) after the training"
_INPUTS: Final = (
    "return sg.estimator.Input((x, y), global_batch_size=..., shuffle=..., num_epochs=...) from the input function"
)
_ESTIMATORS: Final = {
    **dict.fromkeys(
        (
            *("BaselineClassifier", "BaselineEstimator", "BaselineRegressor", "BoostedTreesClassifier"),
            *("BoostedTreesEstimator", "BoostedTreesRegressor", "DNNClassifier", "DNNEstimator"),
            *("DNNLinearCombinedClassifier", "DNNLinearCombinedEstimator", "DNNLinearCombinedRegressor"),
            *("DNNRegressor", "LinearClassifier", "LinearEstimator", "LinearRegressor"),
        ),
        _CANNED,
    ),
    **dict.fromkeys(("BestExporter", "Exporter", "FinalExporter", "LatestExporter"), _EXPORTED),
    **dict.fromkeys(("inputs.numpy_input_fn", "inputs.pandas_input_fn"), _INPUTS),
    **dict.fromkeys(("BinaryClassHead", "Head", "MultiClassHead", "RegressionHead"), _CANNED),
    "add_metrics": "give EstimatorSpec its eval_metric_ops",
    "export": "use estimator.export(folder)",
    "TPUEstimator": "use sg.estimator.Estimator with RunConfig(train_distribute=sg.TPUStrategy())",
    "TPUEstimatorSpec": "use sg.estimator.EstimatorSpec",
    "classifier_parse_example_spec": _RECORDS,
    "regressor_parse_example_spec": _RECORDS,
}
_METRICS: Final = {
    **{
        name: f"use keras.metrics.{name}, which works in steps of a strategy, too"
        for name in (
            *("AUC", "BinaryCrossentropy", "BinaryIoU", "CategoricalCrossentropy", "CategoricalHinge"),
            *("CosineSimilarity", "F1Score", "FBetaScore", "FalseNegatives", "FalsePositives", "Hinge", "IoU"),
            *("KLDivergence", "LogCoshError", "MeanAbsolutePercentageError", "MeanIoU", "MeanMetricWrapper"),
            *("MeanSquaredLogarithmicError", "OneHotIoU", "OneHotMeanIoU", "Poisson", "Precision"),
            *("PrecisionAtRecall", "R2Score", "Recall", "RecallAtPrecision", "SensitivityAtSpecificity"),
            *("SparseCategoricalCrossentropy", "SparseTopKCategoricalAccuracy", "SpecificityAtSensitivity"),
            *("SquaredHinge", "TopKCategoricalAccuracy", "TrueNegatives", "TruePositives"),
        )
    },
    # Of version 1.
    "accuracy": "use sg.metrics.Accuracy",
    "auc": "use keras.metrics.AUC",
    "mean": "use sg.metrics.Mean",
    "mean_absolute_error": "use sg.metrics.MeanAbsoluteError",
    "mean_squared_error": "use sg.metrics.MeanSquaredError",
    "precision": "use keras.metrics.Precision",
    "recall": "use keras.metrics.Recall",
    "root_mean_squared_error": "use sg.metrics.RootMeanSquaredError",
}
# Functions that fill a tensor, for `sg.get_variable(initializer=)`.
_INITIALIZERS: Final = {
    "constant_initializer": "give the value itself: sg.get_variable(name, initializer=0.5)",
    "glorot_normal_initializer": "use torch.nn.init.xavier_normal_",
    "glorot_uniform_initializer": "use torch.nn.init.xavier_uniform_",
    "initializers": "use the functions of torch.nn.init, such as torch.nn.init.zeros_",
    "ones_initializer": "use torch.nn.init.ones_",
    "orthogonal_initializer": "use torch.nn.init.orthogonal_",
    "random_normal_initializer": "use torch.nn.init.normal_",
    "random_uniform_initializer": "use torch.nn.init.uniform_",
    "truncated_normal_initializer": "use torch.nn.init.trunc_normal_",
    "variance_scaling_initializer": "use torch.nn.init.kaiming_normal_",
    "zeros_initializer": "use torch.nn.init.zeros_",
}
_GRAPHS: Final = "programs run at once here, and graphs are recorded inside `with sg.Graph():`"

OTHERWISE: Final = {
    "GraphOptions": "leave it out",
    "Module": "use torch.nn.Module",
    "OptimizerOptions": "leave it out",
    "RunMetadata": "use `with sg.log_placement() as log:`, or torch.profiler",
    "Tensor": "use torch.Tensor",
    "control_dependencies": _RECORDED,
    "convert_to_tensor": "use torch.as_tensor",
    "cast": "use tensor.to(dtype)",
    "executing_eagerly": "leave it out: programs run at once here",
    "get_collection": "use graph.variables and graph.nodes",
    "get_logger": "use Python's logging",
    "global_variables": "use graph.variables",
    "gradients": "use torch.autograd.grad",
    "group": _RECORDED,
    "init_scope": "leave it out",
    "local_variables_initializer": "use sg.global_variables_initializer()",
    "logging": "use Python's logging",
    "name_scope": "leave it out; sg.placeholder, sg.constant and sg.get_variable take a name",
    "no_op": _RECORDED,
    "profiler": "use torch.profiler",
    "reduce_max": "use torch.amax",
    "reduce_mean": "use torch.mean",
    "reduce_min": "use torch.amin",
    "reduce_sum": "use torch.sum",
    "trainable_variables": "use model.parameters(), or graph.variables",
    "variable_scope": "leave it out; sg.get_variable takes the whole name",
    "test.is_built_with_gpu_support": "use sg.config.list_physical_devices('GPU')",
    "test.is_built_with_rocm": "use torch.version.hip",
    "GradientTape": "call loss.backward(); gradients of torch.autograd.grad are summed by the update, not by hand",
    "InteractiveSession": "write `with sg.Session(graph) as session:`",
    "Variable": "make a torch.nn.Parameter in strategy.scope(), or sg.get_variable in a graph",
    "VariableAggregation": "say sg.aggregate(module, buffer, 'sum' | 'mean' | 'first')",
    "VariableSynchronization": "leave it out: buffers are joined after each step",
    "config.get_memory_usage": "use sg.config.get_memory_info(device)['current']",
    "config.set_synchronous_execution": "use CUDA_LAUNCH_BLOCKING=1, or torch.cuda.synchronize()",
    "config.get_synchronous_execution": "use CUDA_LAUNCH_BLOCKING=1, or torch.cuda.synchronize()",
    "config.threading": _THREADS,
    "config.ClusterDeviceFilters": _CONNECTS,
    "config.disable_mlir_bridge": _COMPILED,
    "config.disable_mlir_graph_optimization": _COMPILED,
    "config.enable_mlir_bridge": _COMPILED,
    "config.enable_mlir_graph_optimization": _COMPILED,
    "config.enable_op_determinism": "use torch.use_deterministic_algorithms(True)",
    "config.enable_tensor_float_32_execution": _TF32,
    "config.tensor_float_32_execution_enabled": "use torch.get_float32_matmul_precision",
    "config.experimental_connect_to_cluster": _CONNECTS,
    "config.experimental_connect_to_host": _CONNECTS,
    "config.experimental_functions_run_eagerly": _EAGER,
    "config.experimental_list_devices": "use sg.config.list_logical_devices()",
    "config.experimental_run_functions_eagerly": _EAGER,
    "config.functions_run_eagerly": _EAGER,
    "config.get_device_policy": "leave it out: with sg.device inputs are copied to the device of their operation",
    "config.set_device_policy": "leave it out: with sg.device inputs are copied to the device of their operation",
    "config.optimizer": _COMPILED,
    "config.run_functions_eagerly": _EAGER,
    "config.set_optimizer_jit": _COMPILED,
    "data": "use torch.utils.data, arrays or any iterable of batches, and strategy.distribute(data)",
    "disable_eager_execution": _GRAPHS,
    "disable_v2_behavior": _GRAPHS,
    "enable_eager_execution": "leave it out: programs run at once here",
    "enable_v2_behavior": "leave it out",
    "distribute.AllReduceCrossDeviceOps": _OPS,
    "distribute.CollectiveCommunication": _COLLECTIVES,
    "distribute.CollectiveHints": _COLLECTIVES,
    "distribute.DistributeConfig": "use sg.estimator.RunConfig(train_distribute=strategy)",
    "distribute.MultiWorkerAllReduce": _OPS,
    "distribute.TerminationConfig": "use sg.estimator.Estimator.train, which saves at SIGTERM",
    "distribute.UpdateContext": "use sg.get_replica_context()",
    "distribute.coordinator.PerWorkerValue": "see what create_per_worker_dataset returns",
    "distribute.coordinator.PerWorkerValues": "see what create_per_worker_dataset returns",
    "distribute.get_cross_replica_context": "use sg.get_strategy()",
    "distribute.get_loss_reduction": "leave it out, or use sg.compute_average_loss",
    "distribute.partitioners.Partitioner": "give variable_partitioner= one of sg.MinSizePartitioner and kin",
    "distribute.rpc": "no code is sent between machines; use sg.Session(server.target), or Ray",
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
    "distribute.ValueContext": "use sg.get_replica_context()",
    "distribute.cluster_resolver.GCEClusterResolver": "use sg.cluster.SimpleResolver with addresses",
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
    "tpu": "leave it out: sg.TPUStrategy() finds the TPUs and starts them",
    "layers": "use the modules of torch.nn",
    "math": "use torch, and torch.special",
    "random_normal": "use torch.randn",
    "random_uniform": "use torch.rand",
    "truncated_normal": "use torch.nn.init.trunc_normal_",
    **_INITIALIZERS,
    **{f"errors.{name}": advice for name, advice in _ERRORS.items()},
    **{f"estimator.{name}": advice for name, advice in _ESTIMATORS.items()},
    **{f"metrics.{name}": advice for name, advice in _METRICS.items()},
    **{f"train.{name}": advice for name, advice in _TRAINING.items()},
}
"""Names of TensorFlow's that mean nothing here, and what to write instead."""

_WRITTEN: Final = (
    "write to variables in the main program, `with torch.no_grad(): variable.add_(1)`; all replicas see it"
)

OTHERWISE_OF_STRATEGIES: Final = {
    "between_graph": "leave it out",
    "broadcast": "return the value from the function of strategy.run, or use all_gather of sg.get_replica_context()",
    "call_for_each_replica": "use strategy.run",
    "call_for_each_tower": "use strategy.run",
    "create_variable": "make a torch.nn.Parameter in strategy.scope()",
    "distribute_dataset": "use strategy.distribute(data)",
    "experimental_between_graph": "leave it out",
    "experimental_require_static_shapes": "leave it out",
    "experimental_should_init": "use strategy.is_chief",
    "parameter_devices": "use strategy.devices",
    "read_var": "read the parameter itself",
    "should_checkpoint": "use strategy.is_chief",
    "should_save_summary": "use strategy.is_chief",
    "update": _WRITTEN,
    "update_non_slot": _WRITTEN,
    "value_container": "read the parameter itself",
    "worker_devices": "use strategy.devices",
    "colocate_vars_with": "place variables with sg.device or sg.place",
    "configure": "give options to the constructor",
    "experimental_assign_to_logical_device": "place operations with sg.device",
    "experimental_distribute_values_from_function": "make an sg.PerReplica of the values",
    "experimental_make_numpy_dataset": "give arrays to strategy.distribute(arrays, global_batch_size=...)",
    "experimental_prefetch_to_device": "use strategy.distribute, which loads one batch ahead",
    "experimental_replicate_to_logical_devices": "place operations with sg.device",
    "experimental_run": "use strategy.run",
    "experimental_split_to_logical_devices": "place operations with sg.device",
    "extended": f"use the methods of the strategy; for extended.update, {_WRITTEN}",
    "group": "return values from the function of strategy.run",
    "initialize": "leave it out",
    "make_dataset_iterator": "use iter(strategy.distribute(data))",
    "make_input_fn_iterator": "use strategy.distribute_from_function(function)",
    "update_config_proto": "give sg.SessionConfig to sg.Session",
}
"""Methods of TensorFlow's strategies that mean nothing here, and what to write instead."""

OTHERWISE_OF_ESTIMATORS: Final = {
    "eval_dir": "summaries of evaluations are in the folder 'eval' of model_dir, 'eval_NAME' for evaluate(name=NAME)",
    "experimental_export_all_saved_models": "use estimator.export(folder)",
    "export_saved_model": "use estimator.export(folder)",
    "export_savedmodel": "use estimator.export(folder)",
}
"""Methods of TensorFlow's Estimators that mean nothing here, and what to write instead."""


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
    for place in ("distribute", "distribute.cluster_resolver"):  # `sg` stands for these, too
        if f"{place}.{key}" in {**SAME, **OTHERWISE}:
            key = f"{place}.{key}"
            break
    if key in SAME:
        return _of_stratagem(SAME[key])
    if key in OTHERWISE:
        raise UnknownNameError(f"TensorFlow's {path} has no counterpart under its name; {OTHERWISE[key]}")
    last = path.rpartition(".")[2]
    if last in _PLACES or any(name.startswith(f"{key}.") for name in (*SAME, *OTHERWISE)):
        return Names(path)
    return None


def of_module(module: str, name: str, known: Iterable[str], *, place: str | None = None) -> Any:
    """What `sg.MODULE.NAME` is, where the module has no such name itself.

    Args:
        module: The module, without `stratagem`.
        name: The name.
        known: Those that the module has.
        place: Where TensorFlow keeps such names, if not in a module of that name.

    Raises:
        UnknownNameError: There is no such name; of TensorFlow's it says what to write.
    """
    if not name.startswith("__") and (found := find(f"{place or module}.{name}")) is not None:
        return found
    raise unknown(f"module 'stratagem.{module}'", name, known)


def of_strategy(strategy: Any, name: str) -> Any:
    """A method of a strategy by TensorFlow's name.

    Raises:
        UnknownNameError: There is no such method; of TensorFlow's it says what to write.
    """
    if name in OF_STRATEGIES:
        return getattr(strategy, OF_STRATEGIES[name])
    raise _no_method(strategy, name, OTHERWISE_OF_STRATEGIES, OF_STRATEGIES)


def of_estimator(estimator: Any, name: str) -> UnknownNameError:
    """The error of a method that an Estimator does not have; of TensorFlow's it says what to write."""
    return _no_method(estimator, name, OTHERWISE_OF_ESTIMATORS)


def _no_method(owner: Any, name: str, otherwise: Mapping[str, str], more: Iterable[str] = ()) -> UnknownNameError:
    kind = type(owner).__name__
    if name in otherwise:
        return UnknownNameError(f"{kind} has no {name!r}, which TensorFlow has; {otherwise[name]}")
    known = [each for each in (*dir(type(owner)), *more) if not each.startswith("_")]
    return unknown(f"{kind!r} object", name, known)


def unknown(owner: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """The error of a name that neither stratagem nor these tables have.

    Args:
        owner: Whose name it was to be.
        name: The name.
        known: Those that there are.
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return UnknownNameError(f"{owner} has no attribute {name!r}{hint}")


def unknown_at_the_top(name: str, known: Iterable[str], modules: Iterable[str]) -> UnknownNameError:
    """The error of `sg.X`: what a public module or torch has under that name is used from there.

    Args:
        name: The name.
        known: Those that there are.
        modules: The public modules.
    """
    if importlib.util.find_spec(f"stratagem.{name}") is not None:  # Python asks before it imports a folder or file
        return UnknownNameError(f"module 'stratagem' has no attribute {name!r}")
    torch = sys.modules.get("torch")
    for module in modules if not name.startswith("_") else ():
        if name in vars(importlib.import_module(f"stratagem.{module}")).get("__all__", ()):
            return UnknownNameError(f"module 'stratagem' has no attribute {name!r}; use sg.{module}.{name}")
    if torch is not None and not name.startswith("_") and name in vars(torch):  # `matmul`, `float32`
        return UnknownNameError(f"module 'stratagem' has no attribute {name!r}; use torch.{name}")
    return unknown("module 'stratagem'", name, known)


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
            prefix = f"{_without_places(self._path)}.".removeprefix(".")
            if not prefix and not name.startswith("_"):  # where TensorFlow keeps a name counts for nothing
                return getattr(importlib.import_module("stratagem"), name)
            functional = sys.modules.get("torch.nn.functional") if prefix == "nn." else None
            if functional is not None and not name.startswith("_") and hasattr(functional, name):
                raise UnknownNameError(f"'stratagem.{self._path}' has no {name!r}; use torch.nn.functional.{name}")
            known = [each.removeprefix(prefix) for each in (*SAME, *OTHERWISE) if each.startswith(prefix)]
            raise unknown(f"'stratagem.{self._path}'", name, known)
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
