"""Names of TensorFlow's: they work, or say what to write instead. Numbers are those of TensorFlow 2.15."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem import _tensorflow_names as names
from stratagem.errors import StrategyError, UnknownNameError
from tests.foreign.programs import SELDOM, Program, Programs, Runner
from tests.training.estimators import make

PAGE = Path(__file__).parents[2] / "docs" / "tensorflow_names.md"


def rows() -> Iterator[tuple[str, str]]:
    """The rows of the tables on the page."""
    for line in PAGE.read_text().splitlines():
        if match := re.fullmatch(r"\| `(.+?)` \| (.+) \|", line):
            yield match[1], match[2].replace("\\|", "|")


def named(path: str) -> Any:
    found: Any = sg
    for part in path.split(".")[1:]:
        found = getattr(found, part)
    return found


def test_every_name_works_or_says_what_to_write_as_the_page_has_it(four_cpus: None, tmp_path: Path) -> None:
    strategy = sg.OneDeviceStrategy()
    objects = {"strategy": strategy, "estimator": make(tmp_path)}
    for tensorflow, here in rows():
        owner, _, name = tensorflow.partition(".")
        if owner == "tf" and here.startswith("`"):
            assert named(tensorflow) is named(here.strip("`")), tensorflow
        elif here.startswith("`"):
            assert getattr(strategy, name) == getattr(strategy, here.strip("`").partition(".")[2]), tensorflow
        else:
            with pytest.raises(UnknownNameError, match=re.escape(here)):
                named(tensorflow) if owner == "tf" else getattr(objects[owner], name)


def test_the_page_has_all_names() -> None:
    known = {
        **{f"tf.{name}": f"`sg.{here}`" for name, here in names.SAME.items()},
        **{f"strategy.{name}": f"`strategy.{here}`" for name, here in names.OF_STRATEGIES.items()},
        **{f"tf.{name}": here for name, here in names.OTHERWISE.items()},
        **{f"strategy.{name}": here for name, here in names.OTHERWISE_OF_STRATEGIES.items()},
        **{f"estimator.{name}": here for name, here in names.OTHERWISE_OF_ESTIMATORS.items()},
    }
    assert dict(rows()) == known


def test_where_tensorflow_keeps_a_name_does_not_matter() -> None:
    assert sg.compat.v1.ConfigProto is sg.ConfigProto is sg.SessionConfig
    assert sg.compat.v1.Session is sg.Session
    assert sg.config.experimental.set_memory_growth is sg.config.set_memory_growth
    assert sg.config.experimental.VirtualDeviceConfiguration is sg.config.LogicalDeviceConfiguration
    assert sg.distribute.experimental.MultiWorkerMirroredStrategy is sg.MultiWorkerMirroredStrategy
    assert sg.python.client.device_lib.list_local_devices is sg.config.list_logical_devices
    assert sg.compat.v1.train.Server is sg.Server
    with pytest.raises(UnknownNameError, match=r"use sg\.get_replica_context"):
        sg.ValueContext  # noqa: B018  # as `tf.distribute.ValueContext`
    with pytest.raises(UnknownNameError, match="leave cross_device_ops out"):
        sg.MirroredStrategy(cross_device_ops=sg.NcclAllReduce(num_packs=2))


def test_what_tensorflow_has_not_either_is_an_error_as_before() -> None:
    for owner in (sg, sg.config, sg.distribute, sg.OneDeviceStrategy()):
        with pytest.raises(AttributeError, match="no_such_name"):
            owner.no_such_name  # noqa: B018  # it is asked for
        assert not hasattr(owner, "__wrapped__")
    for wrong, meant in {
        "MirorredStrategy": "'MirroredStrategy'",
        "config.set_memory_grwth": "'set_memory_growth'",
        "config.experimental.set_memory_grwth": "'set_memory_growth'",
        "distribute.MirroredStrateg": "'MirroredStrategy'",
        "compat.v1.train.AdamOptimiser": "'AdamOptimizer'",
    }.items():
        with pytest.raises(UnknownNameError, match=f"did you mean {meant}"):
            named(f"sg.{wrong}")
    for wrong, meant in {
        "exprimental_run_v2": "experimental_run_v2",
        "num_replica_in_sync": "num_replicas_in_sync",
    }.items():
        with pytest.raises(UnknownNameError, match=f"did you mean '{meant}'"):
            getattr(sg.OneDeviceStrategy(), wrong)


@pytest.mark.parametrize("name", ["matmul", "float32", "randn"])
@pytest.mark.parametrize("place", ["", "compat.v1."])
def test_what_torch_has_under_the_name_is_used_from_there(place: str, name: str) -> None:
    with pytest.raises(UnknownNameError, match=rf"use torch\.{name}"):
        named(f"sg.{place}{name}")


def test_functions_of_tensorflows_nn_are_those_of_torch() -> None:
    with pytest.raises(UnknownNameError, match=r"use torch\.nn\.functional\.relu"):
        sg.nn.relu  # noqa: B018  # it is asked for


@pytest.mark.parametrize("place", ["", "cluster.", "distribute.cluster_resolver."])
def test_resolvers_are_found_by_tensorflows_names_wherever_they_are_looked_for(place: str) -> None:
    assert named(f"sg.{place}TPUClusterResolver") is sg.cluster.TPUResolver
    assert named(f"sg.{place}TFConfigClusterResolver") is sg.cluster.TFConfigResolver
    with pytest.raises(UnknownNameError, match=r"use sg\.cluster\.SimpleResolver with addresses"):
        named(f"sg.{place}GCEClusterResolver")


def test_names_of_errors_that_are_advised_exist() -> None:
    for advice in (*names.OTHERWISE.values(), *names.OTHERWISE_OF_ESTIMATORS.values()):
        for path in re.findall(r"\bsg(?:\.\w+)+", advice):
            named(path)


@pytest.mark.parametrize(
    "path", ["config.simulate_devices", "estimator.Estimator", "cluster.TFConfigResolver", "metrics.MeanSquaredError"]
)
def test_what_a_public_module_has_under_the_name_is_used_from_there(path: str) -> None:
    with pytest.raises(UnknownNameError, match=rf"; use sg\.{path}$"):
        getattr(sg, path.rpartition(".")[2])


def test_devices_are_divided_by_their_old_names(four_cpus: None) -> None:
    assert len(sg.config.experimental.list_logical_devices("CPU")) == 4
    assert [each.device_type for each in sg.device_lib.list_local_devices()][:1] == ["CPU"]
    cpu = sg.config.experimental.list_physical_devices("CPU")[0]
    assert len(sg.config.experimental.get_virtual_device_configuration(cpu)) == 4
    before = sg.debugging.get_log_device_placement()
    sg.debugging.set_log_device_placement(before)


programs = Programs(seldom=(*SELDOM, "mirrored 3 torch", "2 workers of 1"))


@programs(linear=True)
def a_loop_with_names_of_tensorflow(on: Runner) -> Any:
    """`per_replica.sum()` over rows, as its guides write it."""
    x = torch.arange(14.0).reshape(7, 2)
    if on.strategy is None:
        return x.sum(), x.mean(0), x.sum(0), x.amax(1), (x + 1).sum()
    (batch,) = next(iter(on.strategy.experimental_distribute_dataset([(x,)])))
    told = on.strategy.experimental_run_v2(lambda rows: (rows.sum(), rows), args=(batch,))
    total, rows = told[0], told[1]
    assert sum(map(len, on.strategy.experimental_local_results(rows))) in (7, 3, 4)  # of one worker, or of two
    assert on.strategy.cluster_resolver is None or on.strategy.cluster_resolver.task_type in (None, "worker")

    def joined(rows: torch.Tensor) -> torch.Tensor:
        own = (rows + 1).sum()
        return own if sg.get_replica_context().num_replicas_in_sync == 1 else summed("SUM", own)

    def summed(op: str, own: torch.Tensor) -> torch.Tensor:
        replica = sg.get_replica_context()
        return replica.all_reduce(sg.ReduceOp.SUM, own) / 2 + replica.all_reduce(op, own) / 2

    again = on.strategy.run(joined, args=(batch,))
    return (
        on.strategy.reduce(sg.ReduceOp.SUM, total, axis=None),
        on.strategy.reduce("MEAN", rows, axis=0),
        on.strategy.reduce(sg.distribute.ReduceOp.SUM, rows, axis=0),
        on.strategy.gather(on.strategy.run(lambda rows: rows.amax(1), args=(batch,))),
        on.strategy.local_results(again)[0],
    )


@pytest.mark.parametrize("program", list(programs), ids=repr)
def test_loops_are_those_of_tensorflow(program: Program, row: sg.Strategy) -> None:
    program.check(row)


def test_reductions_say_what_is_wrong(four_cpus: None) -> None:
    strategy = sg.OneDeviceStrategy()
    with pytest.raises(StrategyError, match="no reduction named 'PRODUCT'"):
        strategy.reduce("PRODUCT", torch.ones(2))
    with pytest.raises(StrategyError, match="axis is None or the number of an axis, got 'rows'"):
        strategy.reduce("sum", torch.ones(2), axis="rows")  # type: ignore[arg-type]


def test_reduce_along_an_axis_is_that_of_tensorflow(four_cpus: None) -> None:
    """The example of `tf.distribute.Strategy.reduce`: values 0 .. 3 of four replicas, and rows of different numbers."""
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        batch = next(iter(strategy.distribute([torch.arange(8.0).reshape(4, 2)])))
        assert strategy.reduce("MEAN", batch, axis=0).tolist() == [3.0, 4.0]
        assert strategy.reduce("SUM", batch, axis=0).tolist() == [12.0, 16.0]
        assert strategy.reduce("SUM", batch, axis=None).tolist() == [[4.0, 6.0], [8.0, 10.0]]
        uneven = next(iter(strategy.distribute([torch.tensor([1, 2, 6])])))
        assert float(strategy.reduce("MEAN", uneven, axis=0)) == 3.0  # not the mean of two means, 3.75
        assert strategy.reduce("max", uneven, axis=0) == 6


@pytest.mark.parametrize("op", ["SUM", "sum", sg.ReduceOp.SUM])
def test_reductions_in_merged_calls_have_every_name(four_cpus: None, op: Any) -> None:
    def step() -> Any:
        context = sg.get_replica_context()
        own = torch.tensor(float(context.replica_id_in_sync_group + 1))
        return context.merge_call(
            lambda strategy, value: (strategy.reduce(op, value, axis=None), strategy.reduce("MEAN", value)), args=(own,)
        )

    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        total, mean = strategy.run(step)
        assert (float(total[1]), float(mean[1])) == (3.0, 1.5)
