"""Runs the examples of graphs and sessions as a user would, and checks what they show."""

import os
from pathlib import Path

import pytest

from stratagem import _env
from stratagem.cluster import token as tokens
from tests.cluster import nursery

EXAMPLES = Path(__file__).parents[1] / "examples"
TASK = "/job:localhost/replica:0/task:0/device"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("forked_tasks")]


def lines_of(name: str, **environment: str) -> list[str]:
    """What an example prints; it must succeed and complain about nothing."""
    done = nursery.run(["-W", "error", EXAMPLES / name], 110, {**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_log_has_the_lines_and_numbers_of_the_notes() -> None:
    lines = lines_of("session_log.py")
    mapping = ["Device mapping:", *(f"{TASK}:GPU:{i} -> device: {i}, name: simulated GPU" for i in range(4))]
    assert lines[:5] == mapping
    assert set(lines[5:12]) == {
        f"Const_3: {TASK}:GPU:3",
        f"Const_2: {TASK}:GPU:3",
        f"MatMul_1: {TASK}:GPU:3",
        f"Const_1: {TASK}:GPU:2",
        f"Const: {TASK}:GPU:2",
        f"MatMul: {TASK}:GPU:2",
        f"AddN: {TASK}:CPU:0",
    }
    assert lines[12:14] == ["tensor([[ 44.,  56.],", "        [ 98., 128.]])"]
    assert lines[14:19] == mapping
    assert set(lines[19:22]) == {f"a: (Const): {TASK}:CPU:0", f"b: (Const): {TASK}:CPU:0", f"Add: {TASK}:GPU:1"}
    assert lines[22:] == ["tensor([2., 4., 6.])"]


def test_three_products_run_on_three_devices() -> None:
    lines = lines_of("three_products.py")
    for index in range(3):
        assert f"a_{index}: (Variable): {TASK}:GPU:{index}" in lines
        name = "MatMul" if index == 0 else f"MatMul_{index}"
        assert f"{name}: {TASK}:GPU:{index}" in lines
    assert f"AddN: {TASK}:CPU:0" in lines
    assert lines[-1] == "as torch computes it: True"


def test_work_is_divided_by_operation_by_data_and_between_towers() -> None:
    lines = lines_of("session_parallel.py")
    assert f"MatMul: {TASK}:GPU:0" in lines
    assert f"Add: {TASK}:GPU:1" in lines
    assert f"MatMul_1: {TASK}:GPU:1" in lines
    assert "model parallel: True" in lines
    assert "data parallel: True" in lines
    assert lines[-1] == "weights: [1.0, -2.0, 0.5]"
    assert lines[-2] == "towers: step 100, loss 0.0000"


def test_settings_of_a_session_do_what_they_say() -> None:
    lines = lines_of("session_config.py")
    assert any(line.startswith("refused: a_gpu was placed on '/device:GPU:7', but ") for line in lines)
    assert f"a_gpu: (Variable): {TASK}:GPU:1" in lines
    assert "[0, 0]" in lines
    assert "with growth: 2097152 numbers" in lines
    assert lines[-1].startswith(f"with 40%: out of memory on {TASK}:GPU:0: ConcatV2 ")


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    tokens.create(tmp_path / "secrets" / "token")
    return str(tmp_path / "secrets" / "token")


def test_local_server_greets(token_file: str) -> None:
    assert lines_of("local_server.py", **{_env.TOKEN_FILE: token_file}) == ["hello, distributed stratagem"]


def test_cluster_trains_with_parameters_on_its_server(token_file: str) -> None:
    lines = lines_of("cluster_session.py", **{_env.TOKEN_FILE: token_file})
    assert "weights: (Variable): /job:ps/replica:0/task:0/device:CPU:0" in lines
    assert "MatMul: /job:worker/replica:0/task:0/device:CPU:0" in lines
    assert any(line.endswith(": /job:worker/replica:0/task:1/device:CPU:0") for line in lines)
    assert lines[-1] == "weights: [1.0, -2.0, 0.5]"
