"""Workers that Ray starts: on two real nodes of one cluster on this machine, and on a Ray that stratagem starts."""

import contextlib
import gc
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem import _env
from stratagem.cluster import token as tokens
from stratagem.cluster.ray import ray_session
from stratagem.collectives.torch_distributed import TorchDistributed
from stratagem.errors import (
    ClusterError,
    ClusterResourcesError,
    ClusterSpecError,
    ClusterWarning,
    CollectiveError,
    LaunchError,
    RayMissingError,
    ReplicaDiedError,
    StratagemWarning,
    StrategyError,
)
from tests.contracts.test_strategies import (
    test_accumulation_without_sync_equals_one_device,
    test_optimizer_equals_one_device_with_uneven_batches,
    test_shared_frozen_and_unused_parameters_equal_one_device,
)
from tests.faults.test_restarts import Kill, data, make, weights
from tests.guards import guarded

# Some tests of the contract, for the strategy below.
__all__ = [
    "test_accumulation_without_sync_equals_one_device",
    "test_optimizer_equals_one_device_with_uneven_batches",
    "test_shared_frozen_and_unused_parameters_equal_one_device",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(150),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]

EXAMPLES = Path(__file__).parents[3] / "examples"
NODE = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 80 * 2**20}
# How soon Ray declares a node dead whose processes are gone.
SOON = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 2}
PATIENCE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def sigterm_as_before() -> Iterator[None]:
    """Ray answers SIGTERM itself once it was started, and goes on to do so: tests after these send it to themselves."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Ray's own sockets come and go while this process is connected to it, and tests add nodes to its cluster."""
    with guarded("sockets", "processes"):
        yield


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, fork_server: None) -> Iterator[Any]:
    """A Ray cluster of two nodes that asks for a token, to which this process is connected."""
    token = tmp_path_factory.mktemp("ray") / "secrets" / "token"
    tokens.create(token)
    before = connections(os.getpid())
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the names of sockets must be short
    with guarded("sockets"), _env.without_what_ray_sets(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv(_env.RAY_NICENESS, "0")  # else its workers get next to nothing of a machine that others use too
        import ray
        from ray._private.authentication_test_utils import reset_auth_token_state
        from ray.cluster_utils import Cluster

        reset_auth_token_state()  # it may have been imported before
        cluster = Cluster(True, head_node_args={**NODE, "include_dashboard": False, "_system_config": SOON})
        try:
            cluster.add_node(**NODE)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            patch.undo()
            reset_auth_token_state()
            # Workers end when they notice that their raylet has; on a busy machine that takes a while.
            await_none("processes of Ray", lambda: with_variable("RAY_TMPDIR", folder))
            shutil.rmtree(folder, ignore_errors=True)
    await_none("connections over the network", lambda: connections(os.getpid()) - before)


def on_ray(**options: Any) -> sg.MultiWorkerMirroredStrategy:
    given = {"num_workers": 2, "placement": "SPREAD"} | options
    return sg.MultiWorkerMirroredStrategy(cluster=sg.RayCluster(**given), join_timeout_s=PATIENCE_S)


@pytest.fixture(scope="module", params=["ray 2"])
def strategy(nodes: Any, four_cpus: None) -> Iterator[sg.MultiWorkerMirroredStrategy]:
    with on_ray() as made:
        made.run(int)
        yield made


def replica() -> int:
    return sg.get_replica_context().replica_id_in_sync_group  # type: ignore[union-attr]


def node_here() -> str:
    return ray_session.load().get_runtime_context().get_node_id()  # type: ignore[no-any-return]


def build(strategy: sg.Strategy) -> Callable[[], int]:
    with strategy.scope():
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> int:
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        return os.getpid()

    return step


def test_one_program_drives_replicas_on_both_nodes(strategy: sg.MultiWorkerMirroredStrategy, nodes: Any) -> None:
    assert strategy.num_replicas_in_sync == 2
    assert (strategy.is_chief, strategy.replicas_here, strategy.input_pipeline) == (True, range(2), (1, 0))
    found = strategy.local_results(strategy.run(lambda: (replica(), os.getpid(), node_here())))
    assert found[0][:2] == (0, os.getpid())
    assert found[1][0] == 1
    assert {node for _, _, node in found} == {node.node_id for node in nodes.list_all_nodes()}


def test_state_is_whole_and_travels_both_ways(strategy: sg.MultiWorkerMirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))  # more than Ray puts into a message itself
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(inputs: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        return model[0].weight.detach().clone()

    (batch,) = strategy.distribute([torch.randn(8, 300)])
    ours, theirs = strategy.local_results(strategy.run(step, args=(batch,)))
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, model.state_dict()["0.weight"])
    assert [set(each) for each in optimizer.state_dict()["state"].values()] == [{"step", "exp_avg", "exp_avg_sq"}] * 4
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    for seen in strategy.local_results(strategy.run(lambda: {**model.state_dict()})):
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in seen.items())


def test_what_a_replica_prints_and_raises_comes_here_and_the_strategy_goes_on(
    nodes: Any, four_cpus: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(number: int) -> None:
        print(f"hello from {replica()}")
        if replica() == number:
            raise ValueError("bad row 812")
        sg.get_replica_context().all_reduce("sum", torch.ones(1))  # type: ignore[union-attr]

    def too_often(number: int) -> None:
        for _ in range(2 if replica() == number else 1):
            sg.get_replica_context().all_reduce("sum", torch.ones(1))  # type: ignore[union-attr]

    with on_ray() as strategy:
        step = build(strategy)
        for number in (0, 1):
            with pytest.raises(CollectiveError, match="replica 0 and replica 1 do not take part in the same exchange"):
                strategy.run(too_often, args=(number,))
            with pytest.raises(ValueError, match=r"^bad row 812") as caught:
                strategy.run(fail, args=(number,))
        assert "raised in replica 1:" in caught.value.__notes__[0]
        assert capsys.readouterr().out.splitlines().count("[replica 1] hello from 1") == 2
        assert len(set(strategy.run(step).values)) == 2
    with pytest.raises(StrategyError, match="was closed at"):
        strategy.run(step)
    assert ray_session.load().is_initialized(), "a Ray that was there is left"


def test_dropped_strategy_waits_for_nobody_in_the_thread_that_collects_it(nodes: Any, four_cpus: None) -> None:
    for closes in (True, False):
        dropped = [on_ray()]
        reference = weakref.ref(dropped[0])
        dropped[0].run(int)
        if closes:
            dropped[0].close()
        collecting = threading.Thread(target=lambda held=dropped: (held.clear(), gc.collect()))

        def step(thread: threading.Thread = collecting) -> None:  # has the turn, and waits for the thread
            thread.start()
            thread.join(PATIENCE_S)

        with sg.MirroredStrategy(["cpu:0"]) as other:
            other.run(step)
            assert not collecting.is_alive()
        assert reference() is None


def test_replica_that_cannot_connect_says_why_at_once(nodes: Any, four_cpus: None) -> None:
    def cut_off() -> None:
        if replica() == 1:
            TorchDistributed.start = no_route  # type: ignore[method-assign]
        raise ValueError("so that replicas connect anew")

    def no_route(*_: Any) -> None:
        raise OSError("no route to the others")

    with on_ray() as strategy:
        with pytest.raises(ValueError, match="connect anew"):
            strategy.run(cut_off)
        with pytest.raises(OSError, match="no route to the others"):
            strategy.run(int)
        with pytest.raises(StrategyError, match=r"was closed at .* because OSError: no route"):
            strategy.run(int)


def test_training_goes_on_from_its_last_checkpoint_when_an_actor_is_killed(
    nodes: Any, four_cpus: None, tmp_path: Path
) -> None:
    with on_ray() as strategy:
        undisturbed = make(tmp_path / "undisturbed", strategy, restart="never")
        undisturbed.train(data, max_steps=5)
        kill = Kill(strategy, 4)
        estimator = make(tmp_path / "disturbed", strategy)
        where = r"pid \d+ on [0-9.]+, node [0-9a-f]{8}"
        with pytest.warns(StratagemWarning, match=rf"replica 1 \({where}\) was lost in run .* restarted from step 3"):
            estimator.train(data, hooks=[kill], max_steps=5)
        assert len(kill.killed) == 1, "the fault happened"
        assert all(map(torch.equal, weights(estimator), weights(undisturbed)))


def kill_node(cluster: Any) -> None:
    """All processes of the second node die, as when its machine loses power."""
    (node,) = cluster.worker_nodes
    raylet = node.all_processes["raylet"][0].process.pid
    children = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
    cluster.remove_node(node, allow_graceful=False)
    for pid in map(int, children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_node_that_dies_is_named_and_another_takes_its_place(nodes: Any, four_cpus: None) -> None:
    (node,) = nodes.worker_nodes
    with on_ray() as strategy:
        step = build(strategy)
        pid = strategy.run(step).values[1]
        kill_node(nodes)
        with pytest.raises(ReplicaDiedError) as caught:  # noqa: PT012
            while True:
                strategy.run(step)
        assert re.match(rf"replica 1 \(pid {pid} on [0-9.]+, node {node.node_id[:8]}\) was lost", str(caught.value))
        with pytest.raises(StrategyError, match=r"was closed at .* because ReplicaDiedError: replica 1"):
            strategy.run(step)
        nodes.add_node(**NODE)
        strategy.revive()
        again = build(strategy)
        assert len({pid, *strategy.run(again).values}) == 3


def test_more_workers_than_ray_has_room_for(nodes: Any) -> None:
    with pytest.raises(ClusterResourcesError) as caught:
        on_ray(num_workers=9, placement_timeout_s=0.2)
    message = str(caught.value)
    assert message.startswith("Ray has no room for 9 workers, 9 of 1 CPU each (SPREAD) within 0.2 s: ")
    assert len(re.findall(r"[0-9.]+ \(node [0-9a-f]{8}\) has 2 CPU, 1 GPU", message)) == 2
    assert "CPU, 2 GPU is free" in message
    assert message.endswith("ask for fewer num_workers or less of cpus_per_worker and gpus_per_worker, or raise "
                            "placement_timeout_s")  # fmt: skip


def test_each_worker_computes_on_the_gpu_that_ray_gives_it(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sg.config.simulate_devices("GPU", 1)
    simulated = {"env_vars": {_env.SIMULATE: "gpu:1"}}
    with on_ray(gpus_per_worker=1, runtime_env=simulated) as strategy:
        seen = strategy.local_results(
            strategy.run(lambda: (sg.get_strategy().devices[replica()].name, os.environ.get("CUDA_VISIBLE_DEVICES")))
        )
        assert seen[1] == ("/device:GPU:0", "0")
        assert [device.name for device in strategy.devices] == ["/device:GPU:0"] * 2
        assert ray_session.load().available_resources().get("GPU", 0) == 0, "that of the program itself too"


PROGRAM = """
import json, os, sys
import ray, stratagem as sg, torch

config = json.loads(os.environ["TF_CONFIG"])
strategy = sg.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

def step(inputs):
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()

torch.nn.init.zeros_(model.weight)
for batch in strategy.distribute([torch.ones(4, 2)]):
    strategy.run(step, args=(batch,))
shown = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
ranks = [os.environ[name] for name in shown]
print(json.dumps([config["task"], *ranks, model.weight.tolist(), sys.argv[1:]]), flush=True)
if sys.argv[1:] == ["fail"] and config["task"]["index"] == 1:
    raise ValueError("bad row 812")
strategy.close()
"""


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "stratagem", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=folder)


def test_run_with_ray_starts_a_worker_on_each_node(nodes: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ["--cpus-per-worker", "1", "--gpus-per-worker", "0", "--show", "all", "--log-dir", "logs"]
    done = run(tmp_path, "--ray", nodes.address, *options, "train.py", "fail")
    assert done.returncode == 1
    told = dict(re.findall(r"^\[(worker/\d)\] (\[.*\])$", done.stdout, re.MULTILINE))
    lines = {name: json.loads(text) for name, text in told.items()}
    for index in range(2):
        task = {"type": "worker", "index": index}
        assert lines[f"worker/{index}"] == [task, str(index), "0", "2", "1", str(index), "2", [[-1.0, -1.0]], ["fail"]]
    assert re.search(r"^stratagem: worker/1 on [0-9.]+ failed: ValueError: bad row 812", done.stderr, re.MULTILINE)
    assert "ValueError: bad row 812" in (tmp_path / "logs" / "worker-1.log").read_text()


def test_example_starts_a_ray_of_its_own_that_lets_nobody_else_in(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "ray_cluster.py"), "--epochs", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "HOME": str(home)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "2 replicas\n"
    found = [each for pid in at_home(home) - {process.pid} for each in connections(pid)]
    listening = [address for address, state, _ in found if state == "0A"]
    (folder,) = {folder for pid in at_home(home) for folder in folders_of_ray(pid)}
    way_in = folder.parent.stat()
    out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (0, "")
    losses = [float(each) for each in re.findall(r"epoch +\d: loss (\S+),", out)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 3
    assert len(listening) > 3
    assert set(listening) <= LOOPBACK, "nothing of Ray listens where other machines could reach it"
    token = home / ".ray" / "auth_token"
    assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    await_none("processes of Ray", lambda: at_home(home))
    assert (way_in.st_mode & 0o777, way_in.st_uid) == (0o700, os.getuid()), "nobody else comes to what Ray has on disk"
    assert not folder.parent.exists()


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def at_home(home: Path) -> set[int]:
    """The processes that have inherited a home."""
    return with_variable("HOME", str(home))


def with_variable(name: str, value: str) -> set[int]:
    """The processes that were started with a variable in their environment."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{name}={value}".encode() in file.read_bytes().split(b"\0"):
                found.add(int(file.parent.name))
    return found


def folders_of_ray(pid: int) -> list[Path]:
    """The folder that the raylet among processes was started with."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        named = [word.partition("=")[2] for word in words if word.startswith("--temp_dir=")]
        return [Path(name) for name in named if words[0].endswith("raylet")]
    return []


def connections(pid: int) -> set[tuple[str, str, str]]:
    """The TCP sockets of a process: own address, state and number, in the words of /proc/net."""
    with contextlib.suppress(OSError):
        links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
        rows = [
            row.split()
            for table in ("tcp", "tcp6")
            for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        ]
        return {(row[1].partition(":")[0], row[3], row[9]) for row in rows if f"socket:[{row[9]}]" in links}
    return set()


def await_none(what: str, look: Callable[[], set[Any]]) -> None:
    """Waits until nothing of a kind is left."""
    deadline = time.monotonic() + PATIENCE_S
    while left := look():
        assert time.monotonic() < deadline, f"{what} are left: {left}"
        time.sleep(0.05)


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 0}, r"num_workers is a whole number from 1 up, got 0"),
        ({"num_workers": 2.0}, r"num_workers is a whole number from 1 up, got 2.0"),
        ({"num_workers": 2, "cpus_per_worker": -1}, r"cpus_per_worker is a number from 0 up, got -1"),
        (
            {"num_workers": 2, "gpus_per_worker": 4},
            r"from 0 to 1, since a worker has one replica, got 4; for more GPUs",
        ),
        ({"num_workers": 2, "placement": "pack"}, r"one of PACK, SPREAD, STRICT_PACK, STRICT_SPREAD, got 'pack'"),
        ({"num_workers": 2, "placement_timeout_s": 0}, r"a number of seconds above 0, got 0"),
        ({"num_workers": 2, "runtime_env": "pip"}, r"runtime_env is a mapping, such as .*, got 'pip'"),
        ({"num_workers": 2, "address": ""}, r"address is host:port of Ray's head, or 'auto', got ''"),
        ({"num_workers": 2, "address": "ray://h:1"}, r"'ray://h:1' is for programs outside the cluster"),
    ],
)
def test_a_wrong_cluster_is_refused_when_it_is_described(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterSpecError, match=message):
        sg.RayCluster(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": 4}, r"cluster is an sg.RayCluster, got 4"),
        ({"cluster": sg.RayCluster(2), "devices": ["cpu:0"]}, r"leave out devices and cluster_resolver"),
        ({"cluster": sg.RayCluster(2), "cross_device_ops": "shared_memory"}, r"cross_device_ops is 'torch', got 'sh"),
        ({"cluster": sg.RayCluster(2), "gradients": "max"}, r"gradients is one of 'mean', 'sum', got 'max'"),
    ],
)
def test_a_wrong_strategy_is_refused_before_ray_is_touched(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        sg.MultiWorkerMirroredStrategy(**options)


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    ray_session.load.cache_clear()
    with pytest.raises(RayMissingError, match=r"run pip install 'stratagem\[ray\]'"):
        on_ray()
    ray_session.load.cache_clear()


def test_an_address_where_no_ray_is_or_another_is_refused(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match=r"connected to Ray at .* already, and address='127.0.0.1:9' is another"):
        on_ray(address="127.0.0.1:9")
    alone = {name: value for name, value in os.environ.items() if name != _env.RAY_ADDRESS}
    code = "import stratagem as sg; sg.MultiWorkerMirroredStrategy(cluster=sg.RayCluster(2, address='127.0.0.1:9'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False, env=alone
    )
    assert "ClusterError: no Ray answers at '127.0.0.1:9': Connection refused. Name the head" in done.stderr


def test_ray_is_loaded_when_it_is_used_and_not_before() -> None:
    code = "import sys, stratagem as sg; sg.RayCluster(2), sg.MultiWorkerMirroredStrategy; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout == "False\n"


def test_a_cluster_that_asks_for_no_token_is_warned_of() -> None:
    with pytest.warns(
        ClusterWarning, match="the Ray cluster at 10.0.0.1 does not ask for a token: anyone who can reach its ports"
    ):
        ray_session.warn_if_open(False, "10.0.0.1")


def test_run_with_ray_refuses_what_cannot_be(tmp_path: Path) -> None:
    from stratagem.cluster.launch.plan import Machine, Order
    from stratagem.cluster.launch.user_program import UserProgram
    from stratagem.cluster.ray.ray_launcher import RayOrder, make_ray_plan

    (tmp_path / "train.py").touch()
    program = UserProgram(str(tmp_path / "train.py"))
    with pytest.raises(LaunchError, match="--cpus-per-worker must be a number from 0 up, got -1"):
        RayOrder(cpus_per_worker=-1)
    with pytest.raises(LaunchError, match="--nnodes is for machines that are started one by one"):
        make_ray_plan(Order(program, num_workers=1, machine=Machine(0, 2, "127.0.0.1:1")))
    assert make_ray_plan(Order(program)).names() == ["worker/0"]
    assert (
        "--cpus-per-worker and --gpus-per-worker go with --ray" in run(tmp_path, "--cpus-per-worker", "1", "t").stderr
    )
    told = run(tmp_path, "--ray", "--dry-run", "--workers", "2", "train.py", "--ray", "x").stdout
    assert re.search(r"would run: .* train.py --ray x", told)
