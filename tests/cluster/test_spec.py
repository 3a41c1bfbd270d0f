import dataclasses
import ipaddress
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem.cluster.address import Address
from stratagem.cluster.spec import JOBS, Task
from stratagem.errors import ClusterSpecError

names = st.sampled_from(["localhost", "tf-worker0", "node_1.lan", "a.b.example.org", "x"])
ipv4 = st.integers(1, 2**24 - 1).map(lambda number: f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
ipv6 = st.integers(1, 2**64 - 1).map(lambda number: f"[{ipaddress.IPv6Address((0xFD00 << 112) + number)}]")
addresses = st.builds("{}:{}".format, names | ipv4 | ipv6, st.integers(1, 65535))


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    pool = draw(st.lists(addresses, unique=True, min_size=1, max_size=12))
    cluster: dict[str, Any] = {}
    for job in ("worker", "ps", "local"):
        taken = [pool.pop() for _ in range(min(len(pool), draw(st.integers(0, 4))))]
        if draw(st.booleans()):
            cluster[job] = taken
        else:
            indices = draw(st.lists(st.integers(0, 99), unique=True, min_size=len(taken), max_size=len(taken)))
            cluster[job] = dict(zip(indices, taken, strict=True))
    return cluster


@settings(deadline=None)
@given(clusters())
def test_spec_is_read_back_from_what_it_writes(cluster: dict[str, Any]) -> None:
    spec = sg.ClusterSpec(cluster)
    for copy in (sg.ClusterSpec(spec), sg.ClusterSpec(spec.as_dict()), sg.ClusterSpec(spec.to_json())):
        assert copy == spec
        assert hash(copy) == hash(spec)
        assert copy.first_difference(spec) is None
    assert bool(spec) == any(cluster.values())


@settings(deadline=None)
@given(clusters())
def test_spec_has_every_task_that_was_given_and_no_other(cluster: dict[str, Any]) -> None:
    spec = sg.ClusterSpec(cluster)
    given = {
        (job, index): str(Address.parse(text))
        for job, tasks in cluster.items()
        for index, text in (tasks.items() if isinstance(tasks, dict) else enumerate(tasks))
    }
    assert {(task.job, task.index): str(task.address) for task in spec.tasks} == given
    assert spec.jobs == [job for job in JOBS if cluster.get(job)]
    for job in spec.jobs:
        assert spec.num_tasks(job) == len(cluster[job])
        assert spec.task_indices(job) == sorted(index for each, index in given if each == job)
        assert len(spec.job_tasks(job)) == 1 + max(spec.task_indices(job))
        for index in spec.task_indices(job):
            assert spec.task_address(job, index) == spec.job_tasks(job)[index] == given[job, index]


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_an_address_or_a_clear_error(text: str) -> None:
    try:
        address = Address.parse(text)
    except ClusterSpecError:
        return
    assert Address.parse(str(address)) == address


@settings(deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=3)))
def test_any_value_is_a_cluster_or_a_clear_error(value: Any) -> None:
    for cluster in (value, {"worker": value}, {"worker": {"0": value}}, json.dumps(value)):
        try:
            spec = sg.ClusterSpec(cluster)
        except ClusterSpecError:
            continue
        assert sg.ClusterSpec(spec.to_json()) == spec


def test_spec_orders_tasks_with_the_host_first() -> None:
    spec = sg.ClusterSpec({"ps": ["p:1"], "worker": ["w0:1", "w1:1"], "chief": ["c:1"]})
    assert [task.name for task in spec.tasks] == ["chief/0", "worker/0", "worker/1", "ps/0"]
    assert spec == sg.ClusterSpec({"chief": ["c:1"], "worker": {"1": "w1:1", "0": "w0:1"}, "ps": ["p:1"]})


def test_spec_cannot_be_changed() -> None:
    spec = sg.ClusterSpec({"worker": ["a:1"]})
    spec.as_dict()["worker"] = ["b:1"]
    spec.jobs.append("ps")
    assert spec == sg.ClusterSpec({"worker": ["a:1"]})
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.tasks = ()  # type: ignore[misc]


def test_task_without_address_takes_part_but_cannot_be_reached() -> None:
    spec = sg.ClusterSpec({"worker": ["a:1", None]})
    assert spec.num_tasks("worker") == 2
    assert spec.task("worker", 1) == Task("worker", 1, None)
    assert sg.ClusterSpec(spec.to_json()) == spec
    with pytest.raises(ClusterSpecError, match=r"worker/1 takes part, but its address is not known: .* worker/0 \(a:1"):
        spec.task_address("worker", 1)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (
            {"worker": ["10.0.0.1:2222"], "ps": ["10.0.0.1:2222"]},
            "address 10.0.0.1:2222 is given for worker/0 and ps/0",
        ),
        ({"worker": ["A.b:1", "a.B:1"]}, "address a.b:1 is given for worker/0 and worker/1"),
        ({"worker": ["[::1]:1", "[0::0:1]:1"]}, "address [::1]:1 is given for worker/0 and worker/1"),
        ({"worker": ["10.0.0.1"]}, 'worker/0: "10.0.0.1" has no port'),
        ({"worker": ["[::1]"]}, 'worker/0: "[::1]" has no port'),
        ({"worker": ["a:1", "b:70000"]}, "worker/1: 'b:70000': port 70000 is not 1-65535"),
        ({"worker": ["a:0"]}, "port 0 is not 1-65535"),
        ({"worker": ["a:x"]}, "port 'x' is not a number from 1 to 65535"),
        ({"worker": ["a:"]}, "port '' is not a number"),
        ({"worker": ["::1:22"]}, 'write IPv6 addresses in brackets: "[fd00::1]:2222"'),
        ({"worker": ["[::g]:2"]}, "'::g' is not an IPv6 address"),
        ({"worker": ["10.0.0.256:2"]}, "'10.0.0.256' is not an IPv4 address"),
        ({"worker": ["0.0.0.0:2"]}, "not the address of one machine"),
        ({"worker": ["[::]:2"]}, "not the address of one machine"),
        ({"worker": ["a b:1"]}, "'a b' is not a host name"),
        ({"worker": [":1"]}, "'' is not a host name"),
        ({"worker": ["grpc://a:1"]}, "has a scheme; write 'a:1'"),
        ({"worker": [5]}, "an address is a text, got 5"),
        ({"worker": "a:1"}, "write one address as a list too"),
        ({"worker": {"x": "a:1"}}, "got 'x'"),
        ({"worker": {-1: "a:1"}}, "got -1"),
        ({"worker": {True: "a:1"}}, "got True"),
        ({"worker": {1: "a:1", "1": "b:1"}}, "worker/1 is given twice"),
        ({"worker": [None, "a:1"]}, "worker/0 is the first task, to which the others connect; give its address"),
        ({"wroker": ["a:1"]}, "unknown job 'wroker'. Known jobs: chief, master, worker, ps, evaluator, local. Did you"),
        ({"trainer": ["a:1"]}, "unknown job 'trainer'. Known jobs: chief"),
        ({5: ["a:1"]}, "unknown job 5"),
        ({"chief": ["a:1", "b:1"]}, "a cluster has one chief at most, got chief/1 (b:1)"),
        ({"chief": ["a:1"], "master": ["b:1"]}, "two names of one job"),
        (5, "a cluster is a mapping from jobs to addresses, such as {'worker': ['10.0.0.1:2222']}, got 5"),
        ('{"worker" ["a:1"]}', 'the cluster is not valid JSON: line 1 column 11: expected ":" (near \''),
        ('{"worker": ["a:1" "b:1"]}', 'column 19: expected "," (near \''),
        ('{"worker": ["a:1"], "worker": []}', "the name 'worker' is given twice"),
        ('{"worker": NaN}', "NaN is no number of JSON"),
        ("[" * 100_000, "it is nested too deep"),
        ('{"worker": ' + "1" * 10_000 + "}", "a number in it is too long"),
    ],
)
def test_spec_refuses_and_says_why(cluster: Any, message: str) -> None:
    with pytest.raises(ClusterSpecError) as caught:
        sg.ClusterSpec(cluster)
    assert message in str(caught.value)


def test_spec_names_the_tasks_that_exist() -> None:
    spec = sg.ClusterSpec({"worker": {0: "a:1", 2: "b:1"}})
    with pytest.raises(ClusterSpecError, match="task worker/1 does not exist; cluster has worker/0, worker/2"):
        spec.task_address("worker", 1)
    with pytest.raises(ClusterSpecError, match="no job 'ps'; it has worker"):
        spec.num_tasks("ps")


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        ({"ps": ["a:1", "b:1"]}, {"ps": ["a:1"]}, "ps count 2 vs 1 (first difference: ps/1)"),
        ({"worker": ["a:1"]}, {"worker": ["a:1"], "ps": ["b:1"]}, "ps count 0 vs 1 (first difference: ps/0)"),
        ({"worker": ["a:1", "b:1"]}, {"worker": ["a:1", "b:2"]}, "worker/1 at b:1 vs b:2"),
        ({"worker": ["a:1", None]}, {"worker": ["a:1", "b:2"]}, "worker/1 at no address vs b:2"),
        (
            {"worker": {0: "a:1", 1: "b:1"}},
            {"worker": {0: "a:1", 2: "b:1"}},
            "worker count 2 vs 2 (first difference: wor",
        ),
    ],
)
def test_first_difference_of_two_specs_is_named(one: Any, other: Any, difference: str) -> None:
    found = sg.ClusterSpec(one).first_difference(sg.ClusterSpec(other))
    assert found is not None
    assert difference in found
