"""Tensors in memory that a worker and a server of one machine share."""

import contextlib
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem.errors import ParameterServerLostError, ProtocolError
from stratagem.parameters.consistency import BoundedStaleness
from stratagem.parameters.network import same_host_memory
from stratagem.parameters.network.compression import Compression
from stratagem.parameters.network.frames import FrameKind
from stratagem.parameters.network.same_host_memory import Nearby
from stratagem.parameters.network.server.pacing import Pacing
from stratagem.parameters.protocol import Piece, Variable, Verdict
from tests.parameters.network.attacker import Attacker
from tests.parameters.network.cluster import PATIENCE_S, Cluster, Trainer, same
from tests.parameters.network.test_attacks import PUSH, in_use, is_untouched

NewCluster = Callable[..., Cluster]
PIECES = [
    Piece(Variable("a", (3, 2), torch.float32), 0, 3),
    Piece(Variable("b", (5,), torch.float64), 0, 5),
    Piece(Variable("table", (9, 2), torch.float32, sparse=True), 0, 9),
    Piece(Variable("none", (0, 2), torch.float32), 0, 0),
]


def num_frames(cluster: Cluster) -> list[int]:
    """How many frames each server has had from its first client."""
    return [next(iter(server._sessions.values()))._opener._number for server in cluster.servers]


def test_steps_through_memory_equal_those_in_frames(new_cluster: NewCluster) -> None:
    trained = []
    for shares_memory in (True, False):
        cluster = new_cluster(num_ps=2, num_workers=1)
        trainer = cluster.trainer(shares_memory=shares_memory)
        assert len(trainer.client._nearby) == 2 * shares_memory
        for seed in range(3):
            assert {each.verdict for each in trainer.step(seed)} == {Verdict.APPLIED}
        trained.append(trainer.copies())
    assert same(*trained)


def test_second_push_that_nobody_waited_for_and_a_compressed_one_travel(new_cluster: NewCluster) -> None:
    quiet = {"heartbeat_s": 5.0, "num_missed": 3}  # no sign of life between the frames that are counted
    cluster, reference = new_cluster(num_workers=1), new_cluster(num_workers=1).trainer()
    trainer = cluster.trainer(shares_memory=True, **quiet)
    for each in (trainer, reference):
        both = [each.gradients(seed) for seed in (1, 2)]  # before answers change the values
        handles = [each.client.push(gradients) for gradients in both]
        for handle in handles:
            each.client.wait(handle)
        each.pull()
    assert same(trainer.copies(), reference.copies())
    (before,) = num_frames(cluster)
    trainer.step(3)
    assert num_frames(cluster) == [before + 1]  # it says what there is
    other = new_cluster(num_workers=1)
    compressed = other.trainer(shares_memory=True, compression=Compression("bf16"), **quiet)
    (before,) = num_frames(other)
    compressed.step(1)
    assert num_frames(other) == [before + 2]


@pytest.mark.parametrize("shares_memory", [True, False])
def test_older_values_never_come_after_newer_ones(new_cluster: NewCluster, shares_memory: bool) -> None:
    trainer = new_cluster(num_ps=2, num_workers=1).trainer(shares_memory=shares_memory)
    first = trainer.client.push(trainer.gradients(1), into=trainer.values())
    second = trainer.client.push(trainer.gradients(2), into=trainer.values())
    for handle in (second, first):
        assert {each.verdict for each in trainer.client.wait(handle)} == {Verdict.APPLIED}
    before = trainer.copies()
    trainer.pull()
    assert same(before, trainer.copies())


def test_memory_is_not_written_while_a_server_may_still_read_it(new_cluster: NewCluster) -> None:
    cluster = new_cluster(num_ps=2)
    pacing = Pacing(BoundedStaleness(0))
    fast, slow = (Trainer(cluster.worker(index, shares_memory=True, heartbeat_timeout_s=2.0), 2) for index in range(2))
    for place, each in enumerate((fast, slow)):
        each.define(has_values=place == 0, pacing=pacing)
    push = fast.client.push(fast.gradients(1), into=fast.values())  # is answered when the other has pushed too
    cluster.servers[1].stop()
    with pytest.raises(ParameterServerLostError, match="ps/1"):
        fast.client.wait(push)
    assert fast.client._nearby[0].is_used


def test_memory_is_given_back(new_cluster: NewCluster) -> None:
    def num_mapped() -> int:
        return Path("/proc/self/maps").read_text().count(same_host_memory._NAME)

    cluster = new_cluster(num_workers=1)
    gc.collect()  # that of other tests
    before = num_mapped()
    trainer = cluster.trainer(shares_memory=True)
    trainer.step(1)
    assert num_mapped() == before + 2  # the server's and the worker's
    trainer.client.close(is_done=True)
    assert cluster.ended()
    deadline = time.monotonic() + PATIENCE_S
    while num_mapped() > before and time.monotonic() < deadline:  # a thread of the client's may be ending
        gc.collect()
        time.sleep(0.01)
    assert num_mapped() == before


def test_worker_that_speaks_of_memory_that_it_has_not_shared_is_out(new_cluster: NewCluster) -> None:  # A6
    cluster = new_cluster()
    trainer = in_use(cluster)
    offer = {
        "pid": 1,
        "descriptor": 0,
        "num_bytes": same_host_memory._num_bytes(trainer.plan.shards[0]),
        "proof": "00" * 32,
    }
    with Attacker(cluster.spec) as attacker:
        attacker.attach(1)
        attacker.ask(FrameKind.SHARE, offer)
        assert attacker.answer()[1]["verdict"] == ""  # it is not there
        attacker.ask(FrameKind.PUSH, {**PUSH, "is_shared": True}, 2)
        assert attacker.is_out()
    with Attacker(cluster.spec) as attacker:
        attacker.attach(1)
        attacker.ask(FrameKind.SHARE, {**offer, "num_bytes": 2**62})
        assert attacker.is_out()
    assert is_untouched(trainer)


def test_memory_is_the_same_only_if_what_was_said_is_found_there() -> None:
    with contextlib.ExitStack() as stack:
        made = Nearby.made(PIECES, stack)
        assert made is not None
        own, said = made
        there = Nearby.found(said, PIECES)
        assert there is not None
        assert there.gradients.keys() == there.values.keys() == {"a", "b", "none"}
        own.gradients["b"].fill_(2)
        own.values["a"].fill_(3)
        assert there.gradients["b"].tolist() == [2.0] * 5
        assert float(there.values["a"].sum()) == 18
        assert float(there.gradients["a"].sum()) == 0
        assert Nearby.found({**said, "proof": "0" * 64}, PIECES) is None  # of another machine that has this process too
        assert Nearby.found({**said, "proof": ""}, PIECES) is None
        assert Nearby.found({**said, "pid": 2**31}, PIECES) is None
        with pytest.raises(ProtocolError, match="bytes here"):
            Nearby.found({**said, "num_bytes": 2**40}, PIECES)
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(said["descriptor"], 1)  # nobody can be made to touch what is not there
    assert Nearby.found(said, PIECES) is None  # the descriptor is closed


@pytest.mark.parametrize("is_memory", [False, True])
def test_file_in_the_place_of_memory_is_not_opened(tmp_path: Path, is_memory: bool) -> None:
    num_bytes = same_host_memory._num_bytes(PIECES)
    if is_memory:  # memory, but of somebody who could make it shorter
        descriptor = os.memfd_create(same_host_memory._NAME, os.MFD_CLOEXEC)
    else:
        descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(descriptor, num_bytes)
        said: dict[str, Any] = {"pid": os.getpid(), "descriptor": descriptor, "num_bytes": num_bytes}
        assert Nearby.found({**said, "proof": bytes(32).hex()}, PIECES) is None
    finally:
        os.close(descriptor)
    assert Nearby.found({**said, "proof": bytes(32).hex()}, PIECES) is None
