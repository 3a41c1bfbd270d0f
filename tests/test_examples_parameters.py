"""Runs the examples of the parameter server on one machine, and checks what they show."""

import re

import pytest

from tests.cluster import nursery
from tests.test_examples import epochs_of, run_example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.usefixtures("forked_tasks")]


def test_local_training_survives_a_killed_worker_and_learns() -> None:
    text = run_example("parameter_server_local.py", "--epochs", "4")
    losses, accuracies = epochs_of(text)
    assert len(losses) == 4
    assert accuracies[-1] > 90
    assert "killed a worker" in text
    # 4 epochs of 44 batches: a push for each, none lost and none twice.
    assert sum(map(int, re.findall(r"worker \d+: (\d+) pushes", text))) == 4 * 44


def test_keras_learns_and_pushes_once_for_each_batch(keras_programs: nursery.Nursery) -> None:
    text = run_example("parameter_server_keras.py", "--epochs", "2", keras_programs=keras_programs)
    losses, accuracies = epochs_of(text)
    assert losses[1] < losses[0]
    assert accuracies[-1] > 75
    assert sum(map(int, re.findall(r"worker \d+: (\d+) pushes", text))) == 2 * 44


def test_embeddings_learn() -> None:
    text = run_example("parameter_server_embeddings.py", "--rows", "100000", "--steps", "120")
    first, last = map(float, re.findall(r"loss of the first steps (\S+), of the last (\S+)", text)[0])
    assert last < 0.7 * first
