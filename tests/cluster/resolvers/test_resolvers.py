"""Each resolver against the variables that the real starters set."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem.cluster.resolvers import detection, kubernetes
from stratagem.cluster.resolvers.host_lists import expand_counts, expand_hosts
from stratagem.errors import ClusterSpecError, EnvironmentVariableError

TWO_WORKERS = {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_all(**variables: Any) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value if isinstance(value, str) else json.dumps(value))

    return set_all


# TF_CONFIG


def test_tf_config_of_kubeflow_is_understood(environment: Any) -> None:
    environment(
        TF_CONFIG={
            "cluster": {
                "chief": ["mnist-chief-0.kubeflow.svc:2222"],
                "ps": ["mnist-ps-0.kubeflow.svc:2222"],
                "worker": ["mnist-worker-0.kubeflow.svc:2222", "mnist-worker-1.kubeflow.svc:2222"],
            },
            "task": {"type": "worker", "index": 1},
            "environment": "cloud",
        }
    )
    found = sg.cluster.TFConfigResolver()
    assert found.cluster_spec().num_tasks("worker") == 2
    assert (found.task_type, found.task_id) == ("worker", 1)
    assert found.master() == "stratagem://mnist-worker-1.kubeflow.svc:2222"
    assert found.master("ps", 0) == "stratagem://mnist-ps-0.kubeflow.svc:2222"
    assert found.describe() == (
        "TF_CONFIG: a cluster of 1 chief, 2 worker, 1 ps, this is worker/1; "
        "the first task is chief/0 (mnist-chief-0.kubeflow.svc:2222)"
    )


def test_tf_config_may_leave_the_evaluator_out_of_the_cluster(environment: Any) -> None:
    environment(TF_CONFIG={"cluster": TWO_WORKERS, "task": {"type": "evaluator", "index": 0}})
    assert sg.cluster.TFConfigResolver().task_type == "evaluator"


def test_tf_config_tells_tasks_of_one_machine_apart(environment: Any) -> None:
    hosts = ["a:1", "b:1", "a:2", "b:2", "a:3"]
    environment(TF_CONFIG={"cluster": {"worker": hosts}, "task": {"type": "worker", "index": 2}})
    found = sg.cluster.TFConfigResolver()
    assert (found.local_id, found.num_local_tasks) == (1, 3)
    cluster = {"worker": ["a:1", "b:1"], "chief": ["a:2"], "ps": ["a:3"]}
    places = {("worker", 0): (1, 2), ("chief", 0): (0, 2), ("ps", 0): (0, 1), ("worker", 1): (0, 1)}
    for (job, index), place in places.items():
        found = sg.cluster.SimpleResolver(cluster, task_type=job, task_id=index)
        assert (found.local_id, found.num_local_tasks) == place


@pytest.mark.parametrize("text", ["", "  ", "{}", '{"cluster": {}}', '{"task": {"type": "worker", "index": 0}}'])
def test_tf_config_without_cluster_means_that_the_program_runs_alone(environment: Any, text: str) -> None:
    environment(TF_CONFIG=text)
    found = sg.cluster.TFConfigResolver()
    assert not found.cluster_spec()
    assert found.master() == ""
    assert detection.found().resolver is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"cluster": {"worker": ["a:1" "b:1"]}, "task": 1}',
            'TF_CONFIG is not valid JSON: line 1 column 31: expected "," (near \'er": ["a:1" "b:1"]}, "ta\')',
        ),
        ('{"cluster": {"worker" ["a:1"]}}', 'line 1 column 23: expected ":"'),
        ("{'cluster': {}}", "line 1 column 2: expected a name in double quotes"),
        ('{"cluster": }', "line 1 column 13: expected a value"),
        ("[]", 'TF_CONFIG is an object with "cluster" and "task", got []'),
        ('{"cluster": {"worker": ["a:1", "b:1"]}}', "TF_CONFIG has no task; add"),
        ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"}}', "a task looks like"),
        (
            '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 5}}',
            "TF_CONFIG: task worker/5 does not exist; cluster has worker/0, worker/1",
        ),
        (
            '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "ps", "index": 0}}',
            "TF_CONFIG: task ps/0 does not exist; cluster has worker/0, worker/1",
        ),
        (
            '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": "1"}}',
            "TF_CONFIG: the index of a task is a whole number, got '1'; cluster has worker/0, worker/1",
        ),
        (
            '{"cluster": {"worker": ["10.0.0.1:2222"], "ps": ["10.0.0.1:2222"]}}',
            "TF_CONFIG: address 10.0.0.1:2222 is given for worker/0 and ps/0",
        ),
        ('{"cluster": {"worker": ["10.0.0.1"]}}', '"10.0.0.1" has no port'),
        ('{"cluster": {"worker": ["a:70000"]}}', "port 70000 is not 1-65535"),
    ],
)
def test_bad_tf_config_is_explained(environment: Any, text: str, message: str) -> None:
    environment(TF_CONFIG=text)
    for call in (sg.cluster.TFConfigResolver, detection.found):
        with pytest.raises(ClusterSpecError) as caught:
            call()
        assert message in str(caught.value)


# torchrun

TORCHRUN = {
    "LOCAL_RANK": "1",
    "RANK": "3",
    "GROUP_RANK": "1",
    "ROLE_RANK": "3",
    "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "46331",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_ERROR_FILE": "/tmp/error.json",
}


def test_torchrun_variables_are_understood(environment: Any) -> None:
    environment(**TORCHRUN)
    found = sg.cluster.TorchrunResolver()
    assert (found.task_type, found.task_id) == ("worker", 3)
    assert (found.local_id, found.num_local_tasks) == (1, 2)
    spec = found.cluster_spec()
    assert spec.num_tasks("worker") == 4
    assert spec.job_tasks("worker") == ["node0:29331", None, None, None]
    assert found.master() == "stratagem://node0:29331"


def test_master_port_itself_is_used_where_no_agent_has_it(environment: Any) -> None:
    environment(RANK="0", WORLD_SIZE="2", MASTER_ADDR="fd00::1", MASTER_PORT="29500")
    found = sg.cluster.TorchrunResolver()
    assert found.cluster_spec().job_tasks("worker") == ["[fd00::1]:29500", None]
    assert (found.local_id, found.num_local_tasks) == (0, 1)
    environment(STRATAGEM_PORT="7000")
    assert sg.cluster.TorchrunResolver().cluster_spec().task_address("worker", 0) == "[fd00::1]:7000"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4; ranks are 0 to 3"),
        ({"RANK": "x"}, "RANK='x' is not a whole number from 0 up"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not a whole number from 1 up"),
        ({"MASTER_PORT": "99999"}, "port 99999 is not 1-65535"),
        ({"MASTER_ADDR": "a b"}, "'a b' is no host name"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"STRATAGEM_PORT": "0"}, "port 0 is not 1-65535"),
    ],
)
def test_bad_torchrun_variables_are_explained(environment: Any, change: dict[str, str], message: str) -> None:
    environment(**(TORCHRUN | change))
    with pytest.raises((EnvironmentVariableError, ClusterSpecError)) as caught:
        sg.cluster.TorchrunResolver()
    assert message in str(caught.value)


# Slurm

SLURM = {
    "SLURM_JOB_ID": "200505",
    "SLURM_JOB_NODELIST": "gnode[10,20,25,37]",
    "SLURM_TASKS_PER_NODE": "1(x4)",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gnode[10,20,25]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_GPUS_ON_NODE": "4",
}


def test_slurm_step_is_understood(environment: Any) -> None:
    environment(**SLURM)
    found = sg.cluster.SlurmResolver()
    base = 15_000 + 505 * 16
    assert found.cluster_spec().job_tasks("worker") == [
        f"gnode10:{base}",
        f"gnode10:{base + 1}",
        f"gnode20:{base}",
        f"gnode20:{base + 1}",
        f"gnode25:{base}",
    ]
    assert (found.task_type, found.task_id) == ("worker", 3)
    assert (found.local_id, found.num_local_tasks) == (1, 2)
    assert found.num_accelerators() == {"GPU": 2}


def test_slurm_deals_tasks_in_the_order_that_it_says(environment: Any) -> None:
    environment(**SLURM, SLURM_DISTRIBUTION="cyclic:block")
    found = sg.cluster.SlurmResolver(port_base=8888)
    assert [str(each).partition(":")[0] for each in found.cluster_spec().job_tasks("worker")] == [
        "gnode10",
        "gnode20",
        "gnode25",
        "gnode10",
        "gnode20",
    ]
    assert (found.local_id, found.num_local_tasks) == (1, 2)
    environment(SLURM_DISTRIBUTION="plane=2")
    hosts = [str(each).partition(":")[0] for each in sg.cluster.SlurmResolver().cluster_spec().job_tasks("worker")]
    assert hosts == ["gnode10", "gnode10", "gnode20", "gnode20", "gnode25"]


def test_slurm_tasks_become_the_jobs_that_are_asked_for(environment: Any) -> None:
    environment(**SLURM)
    found = sg.cluster.SlurmResolver(jobs={"ps": 2, "worker": 3}, port_base=8888, gpus_per_task=1)
    assert found.cluster_spec().as_dict() == {
        "worker": ["gnode20:8888", "gnode20:8889", "gnode25:8888"],
        "ps": ["gnode10:8888", "gnode10:8889"],
    }
    assert (found.task_type, found.task_id) == ("worker", 1)
    assert found.num_accelerators() == {"GPU": 1}
    with pytest.raises(ClusterSpecError, match="has 3 tasks, Slurm has started 5"):
        sg.cluster.SlurmResolver(jobs={"worker": 3})


@pytest.mark.parametrize(
    ("text", "per_task"), [("2", {"GPU": 2}), ("a100:2", {"GPU": 2}), ("a100:1,h100:2", {"GPU": 3}), ("0", {})]
)
def test_slurm_says_how_many_gpus_a_task_has(environment: Any, text: str, per_task: dict[str, int]) -> None:
    environment(**SLURM, SLURM_GPUS_PER_TASK=text)
    assert sg.cluster.SlurmResolver().num_accelerators() == per_task


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_STEP_NODELIST": "n[1-"}, "is no list of hosts"),
        ({"SLURM_STEP_NODELIST": "n[3-1]"}, "'3-1' in it is not such as '001-003'"),
        ({"SLURM_STEP_NODELIST": "n[0-999999999]"}, "more than 100000 hosts"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x9"}, "is no list of numbers of tasks"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x9)"}, "gives the tasks of 9 hosts"),
        ({"SLURM_PROCID": "5"}, "SLURM_PROCID=5, but the step has 5 tasks"),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, "SLURM_DISTRIBUTION='arbitrary' is not block, cyclic or plane"),
        ({"SLURM_GPUS_PER_TASK": "many"}, "SLURM_GPUS_PER_TASK='many' is not a number of GPUs"),
    ],
)
def test_bad_slurm_variables_are_explained(environment: Any, change: dict[str, str], message: str) -> None:
    environment(**(SLURM | change))
    with pytest.raises((EnvironmentVariableError, ClusterSpecError)) as caught:
        sg.cluster.SlurmResolver()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[001-003,07],login1", ["n001", "n002", "n003", "n07", "login1"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[01-02]-ib", ["r1n01-ib", "r1n02-ib", "r2n01-ib", "r2n02-ib"]),
        ("a,b[1],c", ["a", "b1", "c"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_host_lists_are_expanded(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@settings(deadline=None)
@given(st.integers(0, 9999), st.integers(0, 40), st.integers(1, 6))
def test_ranges_of_hosts_keep_their_width(first: int, more: int, width: int) -> None:
    hosts = expand_hosts(f"n[{first:0{width}}-{first + more}]x")
    assert hosts == [f"n{number:0{width}}x" for number in range(first, first + more + 1)]


@settings(deadline=None)
@given(st.text(alphabet="n0123456789[]-,x()", max_size=20))
def test_any_text_is_a_host_list_or_a_clear_error(text: str) -> None:
    for expand in (expand_hosts, expand_counts):
        try:
            expand(text)
        except ClusterSpecError:
            continue


# Kubernetes


def test_pod_of_a_stateful_set_is_understood(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    environment(KUBERNETES_SERVICE_HOST="10.96.0.1", STRATAGEM_NUM_TASKS="4")
    name = "trainer-3.training.ml.svc.cluster.local"
    monkeypatch.setattr(kubernetes.socket, "gethostname", lambda: "trainer-3")
    monkeypatch.setattr(kubernetes.socket, "getfqdn", lambda _: name)
    found = detection.found().resolver
    assert isinstance(found, sg.cluster.KubernetesResolver)
    assert (found.task_type, found.task_id) == ("worker", 3)
    assert found.cluster_spec().task_address("worker", 0) == "trainer-0.training.ml.svc.cluster.local:2222"
    assert found.cluster_spec().num_tasks("worker") == 4


def test_pod_of_an_indexed_job_is_understood(environment: Any) -> None:
    environment(
        KUBERNETES_SERVICE_HOST="10.96.0.1",
        JOB_COMPLETION_INDEX="1",
        STRATAGEM_NUM_TASKS="3",
        STRATAGEM_SERVICE="headless-svc",
        STRATAGEM_PORT="3333",
    )
    found = sg.cluster.KubernetesResolver(host_name="example-job-1")
    assert found.cluster_spec().job_tasks("worker") == [f"example-job-{i}.headless-svc:3333" for i in range(3)]
    assert found.task_id == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"host_name": "trainer.svc", "num_tasks": 2}, "'trainer' does not end in the number of a pod"),
        (
            {"host_name": "trainer-1", "num_tasks": 2},
            "does not say its service; set subdomain in the manifest, or STRAT",
        ),
        ({"host_name": "trainer-7.svc", "num_tasks": 2}, "this is pod 7, but there are only 2 (STRATAGEM_NUM_TASKS)"),
        ({"host_name": "trainer-1.svc"}, "set STRATAGEM_NUM_TASKS to the replicas or completions"),
    ],
)
def test_bad_pods_are_explained(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentVariableError) as caught:
        sg.cluster.KubernetesResolver(**arguments)
    assert message in str(caught.value)


# Told by the program


def test_simple_resolver_says_what_it_was_told() -> None:
    found = sg.cluster.SimpleResolver(TWO_WORKERS, task_type="worker", task_id=1, num_accelerators={"GPU": 8})
    assert found.cluster_spec() == sg.ClusterSpec(TWO_WORKERS)
    assert found.master() == "stratagem://10.0.0.2:2222"
    assert found.num_accelerators() == {"GPU": 8}
    assert sg.cluster.SimpleResolver(TWO_WORKERS, master="a:1").master() == "stratagem://a:1"
    with pytest.raises(ClusterSpecError, match="the program: task worker/2 does not exist"):
        sg.cluster.SimpleResolver(TWO_WORKERS, task_type="worker", task_id=2)
    with pytest.raises(ClusterSpecError, match="a task has a type and an index"):
        sg.cluster.SimpleResolver(TWO_WORKERS, task_type="worker")


def test_union_joins_the_tasks_of_several() -> None:
    workers = sg.cluster.SimpleResolver(TWO_WORKERS, task_type="worker", task_id=1, num_accelerators={"GPU": 1})
    servers = sg.cluster.SimpleResolver({"ps": {1: "c:1"}, "worker": {1: "10.0.0.2:2222"}})
    found = sg.cluster.UnionResolver(servers, workers)
    assert found.cluster_spec() == sg.ClusterSpec(TWO_WORKERS | {"ps": {1: "c:1"}})
    assert (found.task_type, found.task_id) == ("worker", 1)
    assert found.num_accelerators() == {"GPU": 1}
    other = sg.cluster.SimpleResolver({"worker": ["d:1"]})
    with pytest.raises(ClusterSpecError, match=r"worker/0 is at 10.0.0.1:2222 for one resolver and at d:1 for another"):
        sg.cluster.UnionResolver(workers, other)
    with pytest.raises(ClusterSpecError, match="got none"):
        sg.cluster.UnionResolver()


def test_accelerators_are_those_of_this_process_where_nobody_says() -> None:
    sg.config.simulate_devices("GPU", 3, memory_limit=64)
    assert sg.cluster.SimpleResolver(TWO_WORKERS).num_accelerators() == {"GPU": 3}


# Which one


def test_nothing_is_found_where_nobody_has_set_anything() -> None:
    found = detection.found()
    assert found.resolver is None
    assert found.explain().splitlines() == [
        "TF_CONFIG: not set",
        "torchrun's variables: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set",
        "Slurm's variables: SLURM_JOB_ID not set",
        "Kubernetes' variables: KUBERNETES_SERVICE_HOST not set",
        "no cluster: the program runs alone",
    ]


def test_first_starter_that_is_there_counts(environment: Any) -> None:
    environment(**SLURM)
    assert isinstance(detection.found().resolver, sg.cluster.SlurmResolver)
    environment(**TORCHRUN)
    assert isinstance(detection.found().resolver, sg.cluster.TorchrunResolver)
    environment(TF_CONFIG={"cluster": TWO_WORKERS, "task": {"type": "worker", "index": 0}})
    found = detection.found()
    assert isinstance(found.resolver, sg.cluster.TFConfigResolver)
    assert found.looked_at == ("TF_CONFIG: found",)


def test_batch_script_and_single_pod_run_alone(environment: Any) -> None:
    environment(**{name: value for name, value in SLURM.items() if "STEP" not in name}, KUBERNETES_SERVICE_HOST="a")
    found = detection.found()
    assert found.resolver is None
    assert "Slurm's variables: inside a job, but not started by srun" in found.explain()
    assert "Kubernetes' variables: in a pod, but STRATAGEM_NUM_TASKS is not set" in found.explain()


def test_hosts_of_a_tpu_are_workers(environment: Any) -> None:
    environment(TPU_WORKER_HOSTNAMES="t-0, t-1,t-2", TPU_WORKER_ID="1")
    found = sg.cluster.TPUResolver()
    assert found.cluster_spec().as_dict() == {"worker": ["t-0:8476", "t-1:8476", "t-2:8476"]}
    assert (found.task_type, found.task_id, found.master()) == ("worker", 1, "stratagem://t-1:8476")
    assert sg.cluster.TPUResolver("local", port=9000).cluster_spec().task_address("worker", 2) == "t-2:9000"


@pytest.mark.parametrize("variables", [{}, {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}])
def test_one_host_of_a_tpu_is_no_cluster(environment: Any, variables: dict[str, str]) -> None:
    environment(**variables)
    found = sg.cluster.TPUResolver("")
    assert not found.cluster_spec()
    assert (found.task_type, found.master()) == (None, "")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID is not set"),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "x"}, "TPU_WORKER_ID='x' is not a whole number from 0 up"),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "CLOUD_TPU_TASK_ID": "2"}, "CLOUD_TPU_TASK_ID=2, but .* has 2 hosts"),
        ({"TPU_WORKER_HOSTNAMES": "a,,b", "TPU_WORKER_ID": "0"}, "is a list of different host names"),
        ({"TPU_WORKER_HOSTNAMES": "a,a", "TPU_WORKER_ID": "0"}, "is a list of different host names"),
    ],
)
def test_wrong_variables_of_a_tpu_are_named(environment: Any, variables: dict[str, str], message: str) -> None:
    environment(**variables)
    with pytest.raises(EnvironmentVariableError, match=message):
        sg.cluster.TPUResolver()


def test_tpu_elsewhere_is_refused(environment: Any) -> None:
    with pytest.raises(ClusterSpecError, match="a program runs on the hosts of its TPU, got 'my-tpu'"):
        sg.cluster.TPUResolver("my-tpu")
