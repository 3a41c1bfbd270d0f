"""What goes in at one end of the pipe comes out at the other."""

import collections
import dataclasses
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stratagem.processes.packing import pack, survives, travels_by_value
from stratagem.processes.pipe import Wire
from stratagem.processes.region import Region


@pytest.fixture
def ends() -> Iterator[tuple[Wire, Wire]]:
    first, second = socket.socketpair()
    wires = Wire(first), Wire(second)
    yield wires
    for wire in wires:
        wire.close()


def passed(ends: tuple[Wire, Wire], message: object) -> Any:
    sender = threading.Thread(target=ends[0].send, args=(message,))
    sender.start()
    received = ends[1].receive()
    sender.join()
    return received


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Row:
    number: int
    values: torch.Tensor


PLAIN = [
    None,
    True,
    3,
    2.5,
    "text",
    b"bytes",
    [1, [2]],
    {"a": (1, 2)},
    {1, 2},
    Point(1, 2),
    1j,
    range(3),
    "ä" * 100_000,
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values(ends: tuple[Wire, Wire], value: object) -> None:
    received = passed(ends, value)
    assert received == value
    assert type(received) is type(value)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type_and_size(ends: tuple[Wire, Wire], dtype: torch.dtype) -> None:
    for shape in ((), (0,), (3, 0, 2), (5,), (3, 4), (300, 300)):
        tensor = (10 * torch.randn(shape)).to(dtype)
        received = passed(ends, tensor)
        assert received.dtype == dtype, shape
        assert torch.equal(received, tensor), shape
        received.zero_()  # it is the receiver's own


LAYOUTS = {
    "transposed": lambda: torch.arange(12.0).view(3, 4).T,
    "every other": lambda: torch.arange(12.0)[1::2],
    "expanded": lambda: torch.arange(3.0).view(3, 1).expand(3, 5),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "conjugated": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "needs gradient": lambda: torch.ones(3, requires_grad=True),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_layouts(ends: tuple[Wire, Wire], name: str) -> None:
    tensor = LAYOUTS[name]()
    received = passed(ends, tensor)
    assert torch.equal(received.to_dense().resolve_conj().resolve_neg(), tensor.to_dense().resolve_conj().resolve_neg())
    assert received.requires_grad == tensor.requires_grad
    if tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg():
        assert received.stride() == tensor.stride()


def test_views_stay_views_of_one_memory(ends: tuple[Wire, Wire]) -> None:
    base = torch.arange(10)
    first, second, whole = passed(ends, (base[2:5], base[4:], base))
    second[0] = 77
    assert first[2] == 77
    assert whole[4] == 77
    late, early = passed(ends, (base[6:8], base[1:3]))
    assert (late.tolist(), early.tolist()) == ([6, 7], [1, 2])


def test_a_slice_travels_without_the_rest() -> None:
    large = torch.arange(10_000_000.0)
    packed = pack((large[5_000_000:5_000_003], large[5_000_010:5_000_011]))
    assert sum(map(len, packed.buffers)) < 1000


def test_slice_of_a_large_tensor_has_its_values(ends: tuple[Wire, Wire]) -> None:
    large = torch.arange(1_000_000, dtype=torch.int16).view(1000, 1000)
    received = passed(ends, {"rows": large[500:700], "column": large[:, 3]})
    assert torch.equal(received["rows"], large[500:700])
    assert torch.equal(received["column"], large[:, 3])


def test_parameters_modules_and_optimizers(ends: tuple[Wire, Wire]) -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    copied, its_optimizer = passed(ends, (model, optimizer))
    assert isinstance(copied[0].weight, nn.Parameter)
    assert its_optimizer.param_groups[0]["params"][0] is copied[0].weight
    assert its_optimizer.param_groups[0]["lr"] == 0.25
    state = its_optimizer.state[copied[0].weight]
    assert torch.equal(state["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    copied(torch.ones(2, 300)).sum().backward()
    its_optimizer.step()


ARRAYS = {
    "small": np.arange(3),
    "large": np.random.default_rng(0).normal(size=(200, 300)),
    "empty": np.empty((0, 3)),
    "fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "strided": np.arange(20)[::3],
    "objects": np.array([{"a": 1}, None], dtype=object),
    "text": np.array(["a", "bc"]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_numpy_arrays(ends: tuple[Wire, Wire], name: str) -> None:
    received = passed(ends, ARRAYS[name])
    np.testing.assert_array_equal(received, ARRAYS[name])
    assert received.dtype == ARRAYS[name].dtype
    received[...] = received  # it is the receiver's own


def test_one_message_may_hold_large_and_small_of_everything(ends: tuple[Wire, Wire]) -> None:
    message = {
        "row": Row(3, torch.ones(100_000)),
        "arrays": [np.ones(n) for n in (0, 1, 100_000, 2)],
        "tensors": [torch.full((n,), float(n)) for n in (0, 100_000, 1, 50_000)],
    }
    received = passed(ends, message)
    assert received["row"].values.sum() == 100_000
    assert [len(each) for each in received["arrays"]] == [0, 1, 100_000, 2]
    for ours, theirs in zip(received["tensors"], message["tensors"], strict=True):
        assert torch.equal(ours, theirs)


def test_regions_are_the_same_memory(ends: tuple[Wire, Wire]) -> None:
    region = Region.create(100)
    received = passed(ends, region)
    received.shared(torch.int32, 0, 3).fill_(9)
    assert region.shared(torch.int32, 0, 3).tolist() == [9, 9, 9]


class PeculiarError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Counting:
    """A socket whose calls are counted."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.calls: collections.Counter[str] = collections.Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._socket, name)
        if not callable(found):
            return found

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return found(*args, **kwargs)

        return counted


def test_a_message_wakes_the_other_side_once_and_is_read_in_three_calls() -> None:
    first, second = map(Counting, socket.socketpair())
    sender, receiver = Wire(first), Wire(second)  # type: ignore[arg-type]
    sender.send({"loss": torch.tensor(0.5), "others": [torch.arange(number) for number in range(9)]})
    assert receiver.receive()["loss"] == 0.5
    assert first.calls == {"sendmsg": 1}
    assert second.calls == {"recvmsg": 1, "recvmsg_into": 2}
    for each in (first, second):
        each.close()


def test_more_tensors_than_one_call_can_carry(ends: tuple[Wire, Wire]) -> None:
    sent = [torch.full((number % 7,), number) for number in range(2000)]
    assert all(map(torch.equal, passed(ends, sent), sent))


def test_errors_survive_or_not() -> None:
    assert survives(ValueError("bad row 812"))
    assert survives(KeyError("a"))
    assert not survives(PeculiarError(1, 2))


def test_other_end_closed_is_end_of_file(ends: tuple[Wire, Wire]) -> None:
    ends[0].close()
    with pytest.raises(EOFError):
        ends[1].receive()


def test_what_cannot_be_built_leaves_the_pipe_in_order(ends: tuple[Wire, Wire]) -> None:
    class Boom:
        def __reduce__(self) -> Any:
            return int, ("boom",)

    ends[0].send((Boom(), torch.ones(100_000), np.ones(3)))
    with pytest.raises(ValueError, match="boom"):
        ends[1].receive()
    assert passed(ends, "next") == "next"


def test_threads_can_send_at_once(ends: tuple[Wire, Wire]) -> None:
    threads = [
        threading.Thread(target=lambda n=n: [ends[0].send((n, "x" * 5000)) for _ in range(50)]) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    received = [ends[1].receive() for _ in range(200)]
    for thread in threads:
        thread.join()
    assert all(text == "x" * 5000 for _, text in received)


def test_classes_that_come_back_stay_as_they_are(ends: tuple[Wire, Wire]) -> None:
    class Result:
        def name(self) -> str:
            return "mine"

    original = Result.name
    assert type(passed(ends, Result())) is Result
    assert Result.name is not original  # a child takes over what the controller has changed
    original, (first, second) = Result.name, socket.socketpair()
    ends = Wire(first), Wire(second, keeps_classes=True)
    assert type(passed(ends, Result())) is Result
    assert Result.name is original
    for end in ends:
        end.close()


def test_a_module_of_the_users_travels_by_value(
    ends: tuple[Wire, Wire], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_wire_module.py").write_text("offset = 3\ndef shifted(x):\n    return x + offset\n")
    monkeypatch.syspath_prepend(tmp_path)
    import users_wire_module  # type: ignore[import-not-found]

    packed = pack(lambda x: users_wire_module.shifted(x) + 1)
    assert b"subimport" not in packed.data.replace(b"dynamic_subimport", b"")
    assert travels_by_value(users_wire_module)
    assert travels_by_value(users_wire_module.shifted)
    assert not travels_by_value(torch)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "wire_package.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    import wire_package  # type: ignore[import-not-found]

    assert not travels_by_value(wire_package)  # installed, though not where Python installs by itself
    del sys.modules["wire_package"]
    assert not travels_by_value(nn.Linear)
    assert not travels_by_value(collections.OrderedDict)
    del sys.modules["users_wire_module"]


def test_modules_of_a_kind_of_their_own_travel_by_name(ends: tuple[Wire, Wire]) -> None:
    def capability() -> str:
        return torch.backends.cpu.get_cpu_capability()

    ends[0].send((torch.backends.cpu, capability))
    module, function = ends[1].receive()
    assert module is torch.backends.cpu
    assert function() == capability()


def test_many_mentions_of_shared_memory_take_one_descriptor_each(ends: tuple[Wire, Wire]) -> None:
    one, other = ends
    regions = [Region.create(100) for _ in range(100)]
    regions[7].shared(torch.uint8, 0, 1).fill_(7)
    one.send([*regions, *regions])
    received = other.receive()
    assert [each is received[100 + number] for number, each in enumerate(received[:100])] == [True] * 100
    assert received[7].shared(torch.uint8, 0, 1).item() == 7
