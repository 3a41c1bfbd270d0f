"""The attacks A1 to A15 that concern the channel of parameter servers; every one leaves the others untouched."""

import contextlib
import logging
import os
import pickle
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zmq

from stratagem.cluster import token as tokens
from stratagem.errors import ParameterServerLostError, StratagemError
from stratagem.parameters.network import bodies, frames, zmq_password, zmq_sockets
from stratagem.parameters.network.client.parameter_client import ParameterClient
from stratagem.parameters.network.frames import CHUNK_BYTES, FrameKind, Greeting
from stratagem.parameters.network.server.ps_server import _MOST_STRANGERS
from stratagem.parameters.partitioning import make_plan
from stratagem.parameters.protocol import OptimizerSpec, Variable, describe_optimizer
from tests.cluster.tasks import listening_at
from tests.parameters.network.attacker import Attacker, eventually
from tests.parameters.network.cluster import PATIENCE_S, Cluster, Trainer, described, same

NewCluster = Callable[..., Cluster]

PUSH = {
    "number": 1,
    "version": 0,
    "clock": 1,
    "optimizer": 0,
    "weight": 1,
    "is_shared": False,
    "options": None,
    "gradients": [["2.bias", None, ""]],
    "assigned": [],
    "then_pull": False,
}


class Canary:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return open, (self._path, "w")


def in_use(cluster: Cluster) -> Trainer:
    """A worker that trains while somebody attacks."""
    trainer = cluster.trainer(0)
    trainer.step(0)
    return trainer


def is_untouched(trainer: Trainer, num_steps: int = 1) -> bool:
    """Whether the servers still have what the worker had after its last step, and serve it."""
    before = trainer.copies()
    trainer.pull()
    return same(trainer.copies(), before) and {each.version for each in trainer.step(1)} == {num_steps + 1}


def test_pickle_in_the_place_of_every_message_is_never_opened(new_cluster: NewCluster, tmp_path: Path) -> None:  # A1
    cluster = new_cluster()
    trainer = in_use(cluster)
    bomb = pickle.dumps(Canary(tmp_path / "canary"))
    refused = 0
    for kind in FrameKind:
        with Attacker(cluster.spec) as attacker:
            attacker.attach(1)
            attacker.say(kind, bomb, request=2)
            assert attacker.is_out()
            refused += 2
        assert eventually(lambda: cluster.servers[0].num_refused >= refused)  # noqa: B023
    with Attacker(cluster.spec) as stranger:
        stranger.send(bomb)
        stranger.send(bomb.ljust(frames.GREETING_BYTES, b"\0")[: frames.GREETING_BYTES])
        stranger.send(frames.Header(FrameKind.PULL, 0, 0, 0, len(bomb)).pack() + bomb + bytes(16))
        assert eventually(lambda: cluster.servers[0].num_refused >= refused + 3)
    assert not (tmp_path / "canary").exists()
    assert is_untouched(trainer)


def test_replayed_and_reflected_frames_are_refused(new_cluster: NewCluster) -> None:  # A2
    cluster = new_cluster(num_ps=1)
    trainer = in_use(cluster)
    with Attacker(cluster.spec) as honest:
        honest.attach(1)
        honest.ask(FrameKind.DEFINE, definition(trainer), 2)
        assert honest.answer()[0] == FrameKind.DONE
        honest.ask(FrameKind.PUSH, PUSH, 3)
        honest.say(FrameKind.DATA, struct.pack("2f", 1.0, 1.0), request=3)
        assert honest.answer() == (FrameKind.DONE, bodies.done(version=2, verdict="applied", staleness=1))
        record = list(honest.sent)
        with Attacker(cluster.spec) as other:  # all of it again, on a connection of its own
            for frame in record:
                other.send(frame)
            assert frames.parse_greeting(other.receive())[0] == Greeting.CHALLENGE
            assert frames.parse_greeting(other.receive())[0] == Greeting.REFUSED
        honest.send(record[-1])  # the push again, on the same connection
        assert honest.is_out()
    with Attacker(cluster.spec) as mirror:
        mirror.log_in()
        frame = mirror.receive()  # a sign of life
        mirror.send(frame)
        mirror.opener.open(frame, mirror.opener.parse(frame))
        assert mirror.is_out()
    trainer.pull()
    assert is_untouched(trainer, num_steps=2)


def test_push_to_another_server_is_refused(new_cluster: NewCluster) -> None:  # A2, A7
    cluster = new_cluster(num_ps=2)
    trainer = in_use(cluster)
    elsewhere = next(number for number, pieces in enumerate(trainer.plan.shards) if "2.bias" not in map(_name, pieces))
    with Attacker(cluster.spec, elsewhere) as attacker:
        attacker.attach(1)
        attacker.ask(FrameKind.PUSH, PUSH)
        attacker.say(FrameKind.DATA, struct.pack("2f", 1.0, 1.0), request=1)
        assert attacker.is_out()
    assert is_untouched(trainer)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 10**6}, "version 1000000 is not one of 0 to 1"),
        ({"number": 5}, "pushes come in order"),
        ({"number": 0}, ""),
        ({"optimizer": 3}, "no optimizer 3"),
        ({"options": [{"lr": 10**9, "nothing": 1}]}, "no option 'nothing'"),
        ({"options": [{"lr": "x"}]}, "option lr='x'"),
        ({"gradients": [], "assigned": ["2.bias"]}, "'2.bias' is trained"),
    ],
)
def test_push_of_a_worker_that_lies_changes_nothing(
    new_cluster: NewCluster, change: dict[str, object], reason: str
) -> None:  # A7
    cluster = new_cluster()
    trainer = in_use(cluster)
    with Attacker(cluster.spec) as attacker:
        attacker.attach(1)
        attacker.ask(FrameKind.DEFINE, definition(trainer), 2)
        assert attacker.answer()[0] == FrameKind.DONE
        attacker.ask(FrameKind.PUSH, {**PUSH, **change}, 3)
        attacker.say(FrameKind.DATA, struct.pack("2f", 1.0, 1.0), request=3)
        kind, body = attacker.answer()
        assert kind == FrameKind.DONE
        assert body["verdict"] in ("refused", "duplicate")
        assert reason in body["reason"]
    assert is_untouched(trainer)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (FrameKind.PUSH, {**PUSH, "gradients": [["nothing", None, ""]]}),
        (FrameKind.PUSH, {**PUSH, "gradients": [["2.bias", 2**40, ""]]}),
        (FrameKind.PUSH, {**PUSH, "gradients": [["2.bias", None, "zip"]]}),
        (FrameKind.PULL, {"names": None, "rows": [["2.bias", 2**60]]}),
        (FrameKind.LOAD, {"version": 1, "saved": [[0, "x", "like", [4]]]}),
        (FrameKind.LOAD, {"version": 1, "saved": [[0, "x", "like", [0] * 100]]}),
    ],
)
def test_sizes_that_a_shard_does_not_have_are_refused(
    new_cluster: NewCluster, kind: FrameKind, body: dict[str, object]
) -> None:  # A4, A7
    cluster = new_cluster()
    trainer = in_use(cluster)
    with Attacker(cluster.spec) as attacker:
        attacker.attach(1)
        attacker.ask(kind, body)
        assert attacker.is_out()
    assert is_untouched(trainer)


def test_request_before_an_introduction_or_an_answer_is_refused(new_cluster: NewCluster) -> None:  # A8
    cluster = new_cluster()
    trainer = in_use(cluster)
    with Attacker(cluster.spec) as nameless:
        nameless.log_in()
        nameless.ask(FrameKind.PULL, {"names": None, "rows": []})
        assert nameless.is_out()
    with Attacker(cluster.spec) as hasty:
        hasty.attach(1)
        for request in (2, 3, 4, 5):
            hasty.say(FrameKind.PULL, b'{"names":null,"rows":[]}', request=request)
        assert eventually(lambda: cluster.servers[0].num_refused >= 2)
    assert is_untouched(trainer)


@pytest.mark.parametrize("kind", [FrameKind.DONE, FrameKind.FAILED, FrameKind.FENCED])
def test_what_only_servers_say_is_refused_from_a_client(new_cluster: NewCluster, kind: FrameKind) -> None:  # A6
    cluster = new_cluster()
    trainer = in_use(cluster)
    body = bodies.done() if kind == FrameKind.DONE else {"why": "", "retry": True}
    with Attacker(cluster.spec) as attacker:
        attacker.attach(1)
        attacker.ask(kind, {"why": ""} if kind == FrameKind.FENCED else body)
        assert attacker.is_out()
    assert is_untouched(trainer)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32)
SOCKET_TYPE = b"\x0bSocket-Type\x00\x00\x00\x06DEALER"


def _command(content: bytes) -> bytes:
    return bytes([4, len(content)]) + content


def _hello(password: bytes = b"") -> bytes:
    """The start of a connection in ZeroMQ's protocol, with the right password if no other is given."""
    password = password or zmq_password.password(tokens.load())
    return GREETING + _command(b"\x05HELLO\x09stratagem" + bytes([len(password)]) + password)


def _enter(raw: socket.socket) -> None:
    """Passes the door, so that messages are taken."""
    raw.sendall(_hello())
    received = b""
    while b"WELCOME" not in received:
        received += (more := raw.recv(4096))
        assert more, "not let in"
    raw.sendall(_command(b"\x08INITIATE" + SOCKET_TYPE))


def _part(length: int, flags: int) -> bytes:
    """The start of a part of a message; 1 in the flags says that more follow, 2 that its length has 8 bytes."""
    return bytes([flags]) + struct.pack(">Q", length & (2**64 - 1))


def _until_cut_off(raw: socket.socket) -> bool:
    raw.settimeout(PATIENCE_S)
    try:
        while raw.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("length", [2**63, 2**32, -1, 2**30, frames.MOST_FRAME_BYTES + 1])
def test_absurd_lengths_are_refused_before_memory_is_taken(new_cluster: NewCluster, length: int) -> None:  # A4
    cluster = new_cluster()
    trainer = in_use(cluster)
    before = _resident_bytes()
    for is_inside in (True, False):
        with socket.create_connection(("127.0.0.1", cluster.port), PATIENCE_S) as raw:
            _enter(raw) if is_inside else raw.sendall(GREETING)
            raw.sendall(_part(length, 2) + b"x")
            assert _until_cut_off(raw)
    assert _resident_bytes() - before < 10 * 2**20
    assert is_untouched(trainer)


@pytest.mark.parametrize("opening", ["no password", "another password", "another mechanism", "none"])
def test_stranger_cannot_fill_the_memory_with_a_message_that_never_ends(
    new_cluster: NewCluster, opening: str
) -> None:  # A5
    """ZeroMQ would keep all parts until the last one comes."""
    cluster = new_cluster()
    trainer = in_use(cluster)
    start = {
        "no password": GREETING,
        "another password": _hello(b"0" * 64),
        "another mechanism": GREETING.replace(b"PLAIN", b"NULL\0") + _command(b"\x05READY" + SOCKET_TYPE),
        "none": b"",
    }[opening]
    part = _part(200_000, 3) + bytes(200_000)
    before, num_sent = _resident_bytes(), 0
    with socket.create_connection(("127.0.0.1", cluster.port), PATIENCE_S) as raw:
        with contextlib.suppress(ConnectionError):
            raw.sendall(start)
            for _ in range(500):
                raw.sendall(part)
                num_sent += 1
        assert num_sent < 100  # what the system's buffers took before the connection was ended
        assert _resident_bytes() - before < 30 * 2**20
    assert is_untouched(trainer)


def test_floods_of_connections_and_handshakes_keep_nobody_out(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:  # A5
    monkeypatch.setattr(zmq_sockets, "_HANDSHAKE_MS", 1000)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], 16_384), limits[1]))
    cluster = new_cluster()
    trainer = in_use(cluster)
    address = ("127.0.0.1", cluster.port)
    idle = min(5000, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 3000) // 2)  # both ends are in this process
    hello = frames.greeting(Greeting.HELLO, bytes(32))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        opened = [stack.enter_context(socket.create_connection(address, PATIENCE_S)) for _ in range(idle)]
        for number in range(1000):
            opened.append(stack.enter_context(socket.create_connection(address, PATIENCE_S)))
            if number < 900:
                opened[-1].sendall(_hello()[: 20 + number % 100])  # at any point of the password
            else:
                _enter(opened[-1])
                opened[-1].sendall(bytes([0, len(hello)]) + hello)
        assert eventually(lambda: len(cluster.servers[0]._strangers) == _MOST_STRANGERS)
        assert is_untouched(trainer)
        assert cluster.trainer(1).step(3)
        for each in (opened[0], opened[idle - 1], opened[idle]):
            assert _until_cut_off(each)


def test_servers_and_clients_listen_on_loopback_only(new_cluster: NewCluster) -> None:  # A9
    before = listening_at(os.getpid())
    cluster = new_cluster(num_ps=2)
    cluster.trainer(0)
    new = listening_at(os.getpid()) - before
    assert len(new) == 2
    assert all(place.startswith("0100007f:") for place in new), new


def test_token_is_in_no_message_and_no_log(
    new_cluster: NewCluster, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:  # A13
    caplog.set_level(logging.DEBUG)
    cluster = new_cluster()
    trainer = in_use(cluster)
    with Attacker(cluster.spec) as attacker:
        attacker.attach(1)
        attacker.say(FrameKind.PULL, b"nonsense")
        assert attacker.is_out()
    cluster.end()
    with pytest.raises(ParameterServerLostError, match=r"4 of 4 parameters: 0\.weight, 0\.bias, 2\.weight, ") as caught:
        trainer.pull()
    secret = token_file.read_text().strip()
    assert secret not in caplog.text + str(caught.value) + repr(trainer.client) + repr(cluster.servers[0])
    assert secret not in Path(f"/proc/{os.getpid()}/cmdline").read_text()
    assert "refused a message" in caplog.text


def test_reader_that_never_reads_is_dropped_and_nobody_waits_for_it(  # A15
    new_cluster: NewCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stratagem.cluster")
    cluster = new_cluster(slow_reader_s=0.5)
    client = cluster.worker(0)
    large = {"large": torch.zeros(16 * 2**20)}
    parameter = torch.nn.Parameter(torch.zeros(1))
    plan = make_plan([Variable("large", (16 * 2**20,), torch.float32)], 1)
    spec = describe_optimizer(torch.optim.SGD([parameter], lr=0.1), {id(parameter): "large"})
    client.define(plan, [spec], large)
    server = cluster.servers[0]
    with Attacker(cluster.spec, queue=1) as sloth:
        sloth.attach(1)
        sloth.ask(FrameKind.PULL, {"names": None, "rows": []}, 2)
        assert eventually(lambda: len(server._sessions) == 2)
        began = time.monotonic()
        client.wait(client.pull(large))
        assert time.monotonic() - began < PATIENCE_S
        beats = 0
        while len(server._sessions) == 2 and time.monotonic() - began < PATIENCE_S:
            beats += 1
            sloth.say(FrameKind.BEAT, b"{}")  # it lives, and does not read
            time.sleep(0.1)
        assert len(server._sessions) == 1
        # Not of the server: a sign of life that came too late has been answered, and the sloth is forgotten.
        assert eventually(lambda: "is lost: it has not read what it asked for" in caplog.text)
    client.wait(client.pull(large))


def test_reader_that_is_slow_gets_all_in_the_end(new_cluster: NewCluster) -> None:
    cluster = new_cluster(heartbeat_s=0.01, num_missed=1000)
    client = cluster.worker(0)
    large = {"large": torch.arange(16 * 2**20, dtype=torch.float32)}
    plan = make_plan([Variable("large", (16 * 2**20,), torch.float32)], 1)
    client.define(plan, [OptimizerSpec("SGD", ((("large",), {"lr": 0.1}),))], large)
    (session,) = cluster.servers[0]._sessions.values()
    with Attacker(cluster.spec, queue=1) as reader:
        reader.attach(1)
        reader.ask(FrameKind.PULL, {"names": None, "rows": []}, 2)
        slow = next(each for each in list(cluster.servers[0]._sessions.values()) if each is not session)
        assert eventually(lambda: slow.has_frames)
        time.sleep(1.0)  # a hundred signs of life, for which there is no room
        assert reader.answer()[0] == FrameKind.DONE
        got = bytearray()
        while len(got) < large["large"].nbytes:
            kind, content = reader.answer()
            assert kind == FrameKind.DATA
            got += content
    assert torch.equal(torch.frombuffer(got, dtype=torch.float32), large["large"])


def test_sender_that_never_sends_what_it_announced_is_dropped(new_cluster: NewCluster) -> None:  # A15
    cluster = new_cluster(slow_reader_s=0.3)
    trainer = in_use(cluster)
    with Attacker(cluster.spec) as sloth:
        sloth.attach(1)
        sloth.ask(FrameKind.PUSH, PUSH)
        assert eventually(lambda: len(cluster.servers[0]._sessions) == 1)
        assert "not sent what it announced" in next(iter(cluster.servers[0]._fenced.values())).why_fenced
    assert is_untouched(trainer)


def definition(trainer: Trainer) -> dict[str, object]:
    """What an honest worker says of its variables."""
    return {
        **bodies.plan_to_body(trainer.plan),
        "shard": 0,
        "optimizers": [bodies.optimizer_to_body(trainer.spec)],
        "pacing": ["Async", [], [], [], 60.0],
        "has_values": False,
        "is_open": True,
    }


def test_client_refuses_a_server_that_lies(token_file: Path) -> None:
    """A server that has only the password, and plays the handshake back, learns nothing and is not believed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.set(zmq.LINGER, 0)
    entrance = zmq_password.Door(context, tokens.load())
    entrance.guard(router)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    client = ParameterClient({"worker": ["127.0.0.1:1"], "ps": [f"127.0.0.1:{port}"]}, "worker", 0, join_timeout_s=5)
    try:

        def lie() -> None:
            for answer in (Greeting.CHALLENGE, Greeting.WELCOME):
                if eventually(lambda: bool(entrance.answer() or router.poll(0))):
                    identity, frame = router.recv_multipart()
                    router.send_multipart([identity, frames.greeting(answer, frames.parse_greeting(frame)[1])])

        lying = threading.Thread(target=lie)
        lying.start()
        with pytest.raises(StratagemError, match="another token"):
            client.connect()
        lying.join(PATIENCE_S)
    finally:
        entrance.close()
        router.close()
        context.term()


def _name(piece: object) -> str:
    return piece.name  # type: ignore[attr-defined, no-any-return]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("place", [frames.HEADER_BYTES, -1])
def test_changed_answer_never_shows_in_parameters(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:  # A3
    trainer = Trainer((cluster := new_cluster()).worker(0), 1)
    trainer.model = torch.nn.Sequential(torch.nn.Linear(CHUNK_BYTES // 2, 1, bias=False))  # two frames
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    trainer.plan, trainer.spec = described(trainer.model, trainer.optimizer, 1)
    trainer.define()
    before = trainer.copies()
    (session,) = cluster.servers[0]._sessions.values()
    seal = session._sealer.seal

    def changed(kind: FrameKind, content: bytes, **header: int) -> bytearray:
        frame = bytearray(seal(kind, content, **header))
        frame[place] ^= kind == FrameKind.DATA
        return frame

    monkeypatch.setattr(session._sealer, "seal", changed)
    gradients = {name: torch.ones_like(value) for name, value in before.items()}
    with pytest.raises(ParameterServerLostError, match="changed on its way"):
        trainer.client.wait(trainer.client.push(gradients, into=trainer.values()))
    assert same(trainer.copies(), before)
