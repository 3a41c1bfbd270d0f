"""Compares parameter servers of a cluster with one on torch.distributed.rpc, and judges the targets.

Two workers and one server on loopback, each worker with half of the batch. The peer is written in the way of PyTorch's
tutorial on batch updates: a worker sends its gradients and gets the updated parameters back, in one call; the server
updates at once, under a lock. Also measured: what sealing costs, and what compression does to a training.
"""

import argparse
import hashlib
import hmac
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zmq
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch.distributed import rpc

import stratagem as sg
from benchmarks.contender import NUM_WARM_UP, build, make_optimizer
from benchmarks.measure import RESULTS
from benchmarks.models import WORKLOADS
from benchmarks.tables import TARGET_COLUMNS, Target, markdown, show
from stratagem.cluster.launch.ports import Ports
from stratagem.parameters.network.compression import Compression

MODELS = ("mlp", "transformer", "wide")
CONTENDERS = ("memory", "frames", "rpc")  # rpc, too, goes through memory on one machine
NUM_WORKERS = 2
_NUM_STEPS = {"mlp": 40, "transformer": 10, "wide": 6}
_TIMEOUT_S = 240.0
_CHUNK_BYTES = 2**20


# The contenders, each in processes of its own


def zmq_worker(model: str, folder: Path, *, shares_memory: bool) -> None:
    """A task of `stratagem run --workers 2 --ps 1`; tensors go through memory, or in frames as between machines."""
    with sg.ParameterServerStrategy(shares_memory=shares_memory) as strategy:
        workload = WORKLOADS[model]
        with strategy.scope():
            net, optimizer = build(workload)
        number, count = strategy.replicas_here.start, strategy.num_replicas
        inputs, targets = (each.chunk(count)[number] for each in workload.make_batch())

        def step() -> None:
            optimizer.zero_grad()
            workload.loss(net, inputs, targets).backward()
            optimizer.step()

        _write(folder, number, _timed(lambda: strategy.run(step), _NUM_STEPS[model]))


class RpcServer:
    """The parameters of a model, for workers that call by rpc."""

    def __init__(self, model: str) -> None:
        self._model, self._optimizer = build(WORKLOADS[model])
        self._lock = threading.Lock()

    @staticmethod
    def update_and_fetch(server: Any, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Applies gradients; returns all parameters."""
        own: RpcServer = server.local_value()
        with own._lock:
            for parameter, gradient in zip(own._model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            own._optimizer.step()
            return [parameter.detach().clone() for parameter in own._model.parameters()]


def rpc_worker(server: Any, model: str, number: int, folder: Path) -> None:
    """Trains with a server that is reached by rpc."""
    torch.set_num_threads(1)
    workload = WORKLOADS[model]
    net, _ = build(workload)
    inputs, targets = (each.chunk(NUM_WORKERS)[number] for each in workload.make_batch())
    parameters = list(net.parameters())

    def step() -> None:
        net.zero_grad()
        workload.loss(net, inputs, targets).backward()
        gradients = [parameter.grad for parameter in parameters]
        fetched = rpc.rpc_sync(server.owner(), RpcServer.update_and_fetch, args=(server, gradients))
        with torch.no_grad():
            for parameter, value in zip(parameters, fetched, strict=True):
                parameter.copy_(value)

    _write(folder, number, _timed(step, _NUM_STEPS[model]))


def rpc_process(model: str, rank: int, folder: Path) -> None:
    """The server, or one of the workers, which are pinned as `stratagem run` pins them."""
    torch.set_num_threads(1)
    if rank:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(rank - 1) % len(cores)]})
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=_TIMEOUT_S)
    name = f"worker{rank - 1}" if rank else "ps"
    rpc.init_rpc(name, rank=rank, world_size=NUM_WORKERS + 1, rpc_backend_options=options)
    if not rank:
        server = rpc.RRef(RpcServer(model))
        started = [
            rpc.rpc_async(f"worker{number}", rpc_worker, args=(server, model, number, folder))
            for number in range(NUM_WORKERS)
        ]
        for each in started:
            each.wait()
    rpc.shutdown()


def _timed(step: Callable[[], object], num_steps: int) -> list[float]:
    for _ in range(NUM_WARM_UP):
        step()
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


def _write(folder: Path, number: int, seconds: list[float]) -> None:
    (folder / f"{number}.json").write_text(json.dumps(seconds))


# Starting them


def measure(contender: str, model: str) -> float:
    """Examples per second of all workers together, in one run."""
    with tempfile.TemporaryDirectory() as folder:
        own = [sys.executable, "-m"]
        if contender != "rpc":
            launcher = ["stratagem", "run", "--workers", str(NUM_WORKERS), "--ps", "1", "-m"]
            _run([[*own, *launcher, "benchmarks.parameter_network", "--as", contender, model, folder]], {})
        else:
            ports = Ports("127.0.0.1")
            port = ports.pick().rpartition(":")[2]
            ports.close()
            loopback = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TP_SOCKET_IFNAME": "lo"}
            commands = [
                [*own, "benchmarks.parameter_network", "--as", "rpc", model, folder, "--rank", str(rank)]
                for rank in range(NUM_WORKERS + 1)
            ]
            _run(commands, loopback | {"GLOO_SOCKET_IFNAME": "lo"})
        steps = [json.loads(each.read_text()) for each in sorted(Path(folder).glob("*.json"))]
    if len(steps) != NUM_WORKERS:
        raise SystemExit(f"{contender} {model}: {len(steps)} of {NUM_WORKERS} workers have finished")
    num_examples = len(WORKLOADS[model].make_batch()[0]) / NUM_WORKERS
    return sum(num_examples / statistics.median(seconds) for seconds in steps)


def _run(commands: list[list[str]], environment: dict[str, str]) -> None:
    started = [
        subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        for process in started:
            _, errors = process.communicate(timeout=_TIMEOUT_S)
            if process.returncode:
                raise SystemExit(errors[-3000:])
    finally:
        for process in started:
            process.kill()
            process.wait()


# What sealing costs


def sealing() -> list[list[str]]:
    """MB/s of one core for each way of sealing, one side only."""
    content, target = os.urandom(_CHUNK_BYTES), bytearray(_CHUNK_BYTES + 16)
    cipher, key = AESGCM(os.urandom(32)), os.urandom(32)
    ways: dict[str, Callable[[], object]] = {
        "AES-256-GCM, encrypts and signs": lambda: cipher.encrypt_into(os.urandom(12), content, b"", target),
        "HMAC-SHA256, signs": lambda: hmac.digest(key, content, hashlib.sha256),
        "HMAC-BLAKE2b, signs": lambda: hmac.digest(key, content, "blake2b"),
    }
    rows = []
    for name, way in ways.items():
        seconds = min(_once(way, 50) for _ in range(5))
        rows.append([name, f"{50 * _CHUNK_BYTES / seconds / 1e6:.0f}"])
    rows.append(["ZeroMQ without anything, both sides", f"{_zmq_speed(curve=False):.0f}"])
    rows.append(["ZeroMQ with CURVE, encrypts and signs, both sides", f"{_zmq_speed(curve=True):.0f}"])
    return rows


def _once(way: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        way()
    return time.perf_counter() - start


def _zmq_speed(*, curve: bool, num_chunks: int = 256) -> float:
    """MB/s from one thread to another, over loopback."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        if curve:
            public, secret = zmq.curve_keypair()
            router.curve_server, router.curve_publickey, router.curve_secretkey = True, public, secret
            dealer.curve_serverkey = public
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        for each in (router, dealer):
            each.set(zmq.LINGER, 0)
            each.set(zmq.SNDHWM, 16)
            each.set(zmq.RCVHWM, 16)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        content = os.urandom(_CHUNK_BYTES)

        def send() -> None:
            for _ in range(num_chunks):
                dealer.send(content)

        sending = threading.Thread(target=send)
        start = time.perf_counter()
        sending.start()
        for _ in range(num_chunks):
            router.recv()
            router.recv(copy=False)
        seconds = time.perf_counter() - start
        sending.join()
    return num_chunks * _CHUNK_BYTES / seconds / 1e6


# What compression does


def compression(num_steps: int = 150) -> list[list[str]]:
    """The loss of a small network after some steps, and the bytes that its gradients took, by compression."""
    rows = []
    for name, way in (
        ("none", None),
        ("bf16", Compression("bf16")),
        ("topk 10 %", Compression("topk", fraction=0.1)),
        ("topk 1 %", Compression("topk", fraction=0.01)),
    ):
        loss, num_bytes = _train_compressed(way, num_steps)
        rows.append([name, f"{loss:.4f}", f"{num_bytes / num_steps / 1e3:.1f}"])
    return rows


def _train_compressed(way: Compression | None, num_steps: int) -> tuple[float, int]:
    from stratagem.parameters.network.compression import Encoder, decoded  # noqa: PLC0415
    from stratagem.parameters.protocol import Piece, Variable  # noqa: PLC0415

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    teacher = torch.nn.Linear(64, 10)
    optimizer, encoder, num_bytes = make_optimizer(net), Encoder(way), 0
    for _ in range(num_steps):
        inputs = torch.randn(128, 64)
        targets = teacher(inputs).argmax(1)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(inputs), targets)
        loss.backward()
        for name, parameter in net.named_parameters():
            if parameter.grad is None:
                continue
            piece = Piece(Variable(name, tuple(parameter.shape), parameter.dtype), 0, parameter.shape[0])
            count, encoding, tensors = encoder.encode(piece, parameter.grad)
            num_bytes += sum(each.nbytes for each in tensors)
            gradient = decoded(piece, count, encoding, iter(tensors))
            parameter.grad = gradient if isinstance(gradient, torch.Tensor) else parameter.grad
        optimizer.step()
    return loss.item(), num_bytes


def main() -> None:
    """Measures, prints the tables, writes the files; or is one of the contenders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--as", dest="contender", choices=CONTENDERS)
    parser.add_argument("model", nargs="?")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.contender == "rpc":
        rpc_process(options.model, options.rank, options.folder)
        return
    if options.contender:
        zmq_worker(options.model, options.folder, shares_memory=options.contender == "memory")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that no run is left behind
    models = options.models.split(",")
    speeds: dict[tuple[str, str], list[float]] = {(model, who): [] for model in models for who in CONTENDERS}
    for round_number in range(options.rounds):
        for model in models:
            for who in CONTENDERS if round_number % 2 == 0 else reversed(CONTENDERS):
                speeds[model, who].append(measure(who, model))
    rows, targets = [], []
    for model in models:
        middle = {who: statistics.median(speeds[model, who]) for who in CONTENDERS}
        rows.append([model, *(f"{each:.1f}" for each in middle.values())])
        for who in CONTENDERS[:-1]:
            ratios = [one / other for one, other in zip(speeds[model, who], speeds[model, "rpc"], strict=True)]
            what = f"examples/s of rpc, {model}, tensors in {who}"
            targets.append(Target(what, middle[who] / middle["rpc"], 1.0, spread=(min(ratios), max(ratios))))
    tables = [
        (
            "Parameter servers between machines, on loopback",
            ("model", *(f"{who}, examples/s" for who in CONTENDERS)),
            rows,
        ),
        ("Targets", TARGET_COLUMNS, [each.cells() for each in targets]),
        ("Sealing", ("way", "MB/s"), sealing()),
        ("Compression", ("gradients", "loss after 150 steps", "kB per step"), compression()),
    ]
    for title, columns, lines in tables:
        show(title, columns, lines)
    RESULTS.mkdir(exist_ok=True)
    text = "\n".join(f"## {title}\n\n{markdown(columns, lines)}" for title, columns, lines in tables)
    (RESULTS / "parameter_network.md").write_text(text)
    (RESULTS / "parameter_network.json").write_text(json.dumps([each.as_json() for each in targets], indent=2))


if __name__ == "__main__":
    main()
