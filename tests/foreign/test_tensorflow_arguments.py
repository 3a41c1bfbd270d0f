"""Arguments that TensorFlow's programs write out: its defaults are taken, other values say what to write."""

from typing import Any

import pytest

import stratagem as sg
from stratagem.errors import ClusterSpecError, EstimatorError, StrategyError

ADDRESSES = {"worker": ["127.0.0.1:1"]}


def data() -> Any:
    """An input function, which is not called."""


def test_defaults_of_strategies_are_taken(four_cpus: None) -> None:
    for strategy in (
        sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=None),
        sg.MultiWorkerMirroredStrategy(cluster_resolver=None, communication_options=None, devices=["cpu:0"]),
        sg.CentralStorageStrategy(compute_devices=["cpu:0"], parameter_device=None),
        sg.ParameterServerStrategy(num_workers=1, cluster_resolver=None, variable_partitioner=None),
    ):
        strategy.close()


def test_defaults_of_resolvers_are_taken() -> None:
    resolvers = sg.distribute.cluster_resolver
    for rpc_layer in (None, "grpc"):
        simple = resolvers.SimpleClusterResolver(
            ADDRESSES, master="", task_type="worker", task_id=0, environment="", rpc_layer=rpc_layer
        )
        assert simple.master() == "stratagem://127.0.0.1:1"
        assert resolvers.TFConfigClusterResolver("{}", rpc_layer=rpc_layer, environment=None).task_type is None


def test_defaults_of_estimators_are_taken() -> None:
    config = sg.estimator.RunConfig(tf_random_seed=3, session_config=None)
    assert config.random_seed == config.tf_random_seed == config.replace(keep_checkpoint_max=2).random_seed == 3
    assert config.replace(random_seed=4).tf_random_seed == config.replace(tf_random_seed=4).random_seed == 4
    assert sg.estimator.EvalSpec(data, hooks=None, exporters=None, start_delay_secs=120, throttle_secs=600).hooks == ()
    assert sg.estimator.TrainSpec(data, hooks=None, saving_listeners=None).saving_listeners == ()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: sg.MultiWorkerMirroredStrategy(communication_options="nccl"),
            StrategyError,
            "communication_options .* got 'nccl'; leave it out: cross_device_ops",
        ),
        (
            lambda: sg.MultiWorkerMirroredStrategy(sg.cluster.SimpleResolver(ADDRESSES)),
            StrategyError,
            "give it as cluster_resolver=resolver",
        ),
        (
            lambda: sg.ParameterServerStrategy(num_workers=1, variable_partitioner=sg.FixedShardsPartitioner(2)),
            StrategyError,
            "variable_partitioner is for tasks of a cluster",
        ),
        (
            lambda: sg.ParameterServerStrategy(sg.cluster.TFConfigResolver("{}")),
            StrategyError,
            "in a task of a cluster with the job ps: stratagem run --workers 2 --ps 1, or TF_CONFIG",
        ),
        (
            lambda: sg.cluster.SimpleResolver(ADDRESSES, rpc_layer="http"),
            ClusterSpecError,
            "rpc_layer .* got 'http'; leave it out",
        ),
        (
            lambda: sg.cluster.TFConfigResolver("{}", environment="google"),
            ClusterSpecError,
            "environment .* got 'google'; leave it out",
        ),
        (
            lambda: sg.estimator.RunConfig(session_config=sg.SessionConfig()),
            EstimatorError,
            r"session_config .* set devices with sg\.config",
        ),
        (
            lambda: sg.estimator.RunConfig(tf_random_seed=3, random_seed=4),
            EstimatorError,
            "got both: 3 and 4; give one",
        ),
        (lambda: sg.estimator.RunConfig(tf_random_seed=1.5), EstimatorError, "random_seed is an int"),
        (
            lambda: sg.estimator.EvalSpec(data, exporters=["latest"]),
            EstimatorError,
            r"exporters .* call estimator\.export\(folder\)",
        ),
        (lambda: sg.estimator.EvalSpec(data, start_delay_secs=-1), EstimatorError, "start_delay_secs"),
    ],
)
def test_other_values_say_what_to_write(make: Any, error: type[Exception], message: str, four_cpus: None) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("kind", ["MultiWorkerMirroredStrategy", "LocalSGDStrategy"])
def test_lone_program_is_its_own_chief_as_tensorflows_guides_ask(kind: str, four_cpus: None) -> None:
    def is_chief(task_type: str | None, task_id: int | None) -> bool:  # of "Multi-worker training with Keras"
        return task_type is None or task_type == "chief" or (task_type == "worker" and task_id == 0)

    with getattr(sg, kind)(devices=["cpu:0"]) as strategy:
        resolver = strategy.cluster_resolver
        assert is_chief(resolver.task_type, resolver.task_id) is strategy.is_chief is True
        assert "chief" not in resolver.cluster_spec().jobs
    with getattr(sg, kind)(devices=["cpu:0"]):  # two lone programs are no cluster
        pass
