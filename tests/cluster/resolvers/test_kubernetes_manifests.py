"""The manifests of `examples/kubernetes` are what the resolvers, and the rules for tokens, ask for.

Each command of a container is run here by a shell, in a folder that stands in for the root of its file system.
"""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stratagem.cluster import token

FOLDER = Path(__file__).parents[3] / "examples/kubernetes"
PROGRAM = """
import json, os, socket
pod = os.environ.get("POD")  # the name that a machine of its own would have
socket.gethostname = (lambda: pod) if pod else socket.gethostname
from stratagem.cluster import found, token
token.load()
resolver = found().resolver
print(json.dumps([resolver.task_type, resolver.task_id, resolver.cluster_spec().as_dict()]))
"""


def documents(name: str) -> list[dict[str, Any]]:
    return list(importlib.import_module("yaml").safe_load_all((FOLDER / name).read_text()))


def of_kind(name: str, kind: str) -> list[dict[str, Any]]:
    return [each for each in documents(name) if each["kind"] == kind]


def variables(job: dict[str, Any], index: int) -> dict[str, str]:
    """What Kubernetes sets in pod `index` of a Job, besides those of the manifest."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container.get("env", [])}
    return {**given, "KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": str(index)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system in which the token is what a mounted secret is: a link."""
    (tmp_path / "etc/stratagem/..data").mkdir(parents=True)
    (tmp_path / "tmp").mkdir()
    token.create(tmp_path / "made/token")
    secret = tmp_path / "etc/stratagem/..data/token"
    secret.write_bytes((tmp_path / "made/token").read_bytes())
    secret.chmod(0o644)
    (tmp_path / "etc/stratagem/token").symlink_to("..data/token")
    return tmp_path


def run_in(root: Path, script: str, environment: dict[str, str]) -> list[Any]:
    """What the program of a container finds, after the commands before it."""
    script = _inside(root, script)
    environment = {name: _inside(root, value) for name, value in environment.items()}
    (root / "train.py").write_text(PROGRAM)
    start, program, _ = script.partition("exec python /app/train.py --model-dir /checkpoints")
    assert program
    done = subprocess.run(
        ["sh", "-ec", f"{start}exec {sys.executable} {root}/train.py"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def _inside(root: Path, text: str) -> str:
    return re.sub(r"/(?:etc|tmp)/", lambda match: f"{root}{match[0]}", text)


def test_numbers_and_names_of_workers_agree() -> None:
    (service,), (job,) = of_kind("workers.yaml", "Service"), of_kind("workers.yaml", "Job")
    spec, pod = job["spec"], job["spec"]["template"]
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    assert spec["completions"] == spec["parallelism"] == int(variables(job, 0)["STRATAGEM_NUM_TASKS"])


def test_pods_of_the_workers_find_their_token_and_each_other(root: Path) -> None:
    (job,) = of_kind("workers.yaml", "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    *shell, script = container["command"]
    assert shell == ["sh", "-ec"]
    found = run_in(root, script, {**variables(job, 1), "POD": "trainer-1.trainer"})
    assert found == ["worker", 1, {"worker": [f"trainer-{index}.trainer:2222" for index in range(4)]}]


@pytest.mark.parametrize(("job_name", "index"), [("ps", 1), ("worker", 3)])
def test_pods_of_parameter_servers_find_their_token_and_each_other(root: Path, job_name: str, index: int) -> None:
    (config,) = of_kind("parameter_servers.yaml", "ConfigMap")
    (service,) = of_kind("parameter_servers.yaml", "Service")
    jobs = {each["metadata"]["name"]: each for each in of_kind("parameter_servers.yaml", "Job")}
    job = jobs[job_name]
    (root / "etc/cluster").mkdir()
    (root / "etc/cluster/cluster").write_text(config["data"]["cluster"])
    found = run_in(root, config["data"]["start.sh"], variables(job, index))
    hosts = {
        name: [f"{name}-{number}.{service['metadata']['name']}:2222" for number in range(each["spec"]["completions"])]
        for name, each in jobs.items()
    }
    assert found == [job_name, index, hosts]
    for each in jobs.values():
        assert each["spec"]["completions"] == each["spec"]["parallelism"]
        assert each["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
        assert each["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]
