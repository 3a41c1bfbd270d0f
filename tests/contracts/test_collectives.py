"""What every collective promises, asked of each: a new one is a row in `ROWS`."""

import functools
import hmac
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pytest
import torch
import torch.distributed

import stratagem as sg
from stratagem.collectives.calling import connect_all
from stratagem.collectives.collective import Collective
from stratagem.collectives.mesh import Mesh
from stratagem.collectives.one_replica import OneReplica
from stratagem.collectives.shared_memory import SharedMemory
from stratagem.collectives.signals import Signals
from stratagem.collectives.sockets import Sockets
from stratagem.collectives.to_one import ToOne
from stratagem.collectives.torch_distributed import TorchDistributed
from stratagem.collectives.two_level import TwoLevel
from stratagem.errors import CollectiveError
from stratagem.processes.region import Region
from tests.collectives.harness import PATIENCE_S, Replicas, give_up, meeting_point, same_bits, seeded, shared, started
from tests.contracts.strategies_under_test import STRICT
from tests.hardware import target

Results = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where replicas can meet."""

    control: Region
    slots: Region
    path: str
    second_machine: tuple[Region, Region]


def one_replica(rank: int, size: int, place: Place) -> Collective:
    return OneReplica()


def shared_memory(rank: int, size: int, place: Place) -> Collective:
    return SharedMemory(place.slots, meeting_point(place.control, rank, size))


def to_one(rank: int, size: int, place: Place) -> Collective:
    return ToOne(shared_memory(rank, size, place))


def gloo(rank: int, size: int, place: Place) -> Collective:
    collective = TorchDistributed(rank, size, path=place.path, timeout_s=PATIENCE_S)
    collective.start()
    return collective


def mesh(rank: int, size: int, place: Place) -> Collective:
    store = torch.distributed.FileStore(place.path, size)
    found = connect_all(rank, size, store, address="127.0.0.1", sign=signed, timeout_s=PATIENCE_S)
    return Mesh(rank, size, Sockets(found), functools.partial(give_up, missing=[]))


def signed(message: bytes) -> bytes:
    return hmac.digest(b"the secret of a test", message, "sha256")


def two_level(rank: int, size: int, place: Place) -> Collective:
    """Machines of two replicas each; the last one may have one."""
    machine, inside = divmod(rank, 2)
    sizes = [2] * (size // 2) + [1] * (size % 2)
    control, slots = place.second_machine if machine else (place.control, place.slots)
    local = SharedMemory(slots, meeting_point(control, inside, sizes[machine]))
    return TwoLevel(local, mesh(machine, len(sizes), place) if inside == 0 else None, machine, sizes)


@final
class OnDevice(Collective):
    """A collective that is given the same tensors on a device; what comes out is compared on the CPU."""

    def __init__(self, inner: Collective, device: torch.device) -> None:
        super().__init__(inner.rank, inner.size)
        self._inner, self._device = inner, device

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return self._back(self._inner.all_reduce(self._there(tensor), op))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        return self._back(self._inner.broadcast(self._there(tensor), root))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [self._back(each) for each in self._inner.all_gather(self._there(tensor))]

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        self._inner.close()

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device) if tensor.layout is torch.strided else tensor

    def _back(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device == self._device
        return tensor.cpu()


def strict_gpus(rank: int, size: int, place: Place) -> Collective:
    """In a program of its own; see `test_strict_devices`, and `tests/hardware` for real ones."""
    if target.IS_REAL:
        torch.accelerator.set_device_index(rank)
    else:
        sg.config.simulate_devices("GPU", size, strict=True)
    return OnDevice(gloo(rank, size, place), target.torch_device(rank))


@dataclass(frozen=True)
class Row:
    build: Callable[[int, int, Place], Collective]
    size: int

    @property
    def machine_size(self) -> int:
        """How many replicas are summed before the machines are."""
        return 2 if self.build is two_level else self.size

    def __str__(self) -> str:
        return f"{self.build.__name__}-{self.size}"


ROWS: tuple[Row, ...] = (
    Row(one_replica, 1),
    Row(shared_memory, 2),
    Row(shared_memory, 4),
    Row(gloo, 2),
    Row(gloo, 3),
    Row(mesh, 2),
    Row(mesh, 3),
    Row(to_one, 2),
    Row(two_level, 3),
    Row(two_level, 4),
)
if STRICT in os.environ:
    ROWS = (Row(strict_gpus, 2 if target.IS_REAL else 3),)
MOST_REPLICAS = max(row.size for row in ROWS)

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64,)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
OTHERS = (torch.bool, torch.float8_e5m2)
OPERATIONS = ("sum", "mean", "max", "min")

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda numbers: numbers[:24].view(6, 4).t(),
    "channels last": lambda numbers: numbers[:120].view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "sliced": lambda numbers: numbers[:60].view(10, 6)[::2, 1:4],
    "expanded": lambda numbers: numbers[:4].view(1, 4).expand(3, 4),
    "0-dim": lambda numbers: numbers[0],
    "one of a column": lambda numbers: numbers[:6].view(3, 2)[:1, 0],
    "one element": lambda numbers: numbers[:1],
    "empty": lambda numbers: numbers[:0].view(0, 3),
    "one slot": lambda numbers: numbers[: 2**19],
    "larger than a slot": lambda numbers: numbers,
}
LARGE = 2**19
NUM_LARGE = 2**19 + 2**17 + 4321  # float32: more than one slot of 2 MiB, and not a multiple of anything


def numbers_for(dtype: torch.dtype, numel: int, rank: int) -> torch.Tensor:
    """What a replica puts in: the whole range of the integers, floats that do not add up exactly."""
    generator = seeded(numel, rank)
    if dtype == torch.bool:
        return torch.rand(numel, generator=generator) < 0.5
    if dtype in INTEGERS:
        raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        return raw.view(dtype)
    if dtype.is_complex:
        return torch.randn(numel, generator=generator, dtype=dtype)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def inputs(rank: int) -> dict[str, torch.Tensor]:
    """Every tensor that the suite reduces, broadcasts and gathers, by name."""
    tensors = {str(dtype): numbers_for(dtype, 35, rank).view(7, 5) for dtype in FLOATS + COMPLEX + INTEGERS + OTHERS}
    large = numbers_for(torch.float32, NUM_LARGE, rank)
    tensors |= {name: layout(large) for name, layout in LAYOUTS.items()}
    tensors["large bool"] = numbers_for(torch.bool, 2**21 + 3, rank)
    tensors["conjugate"] = numbers_for(torch.complex64, 12, rank).conj()
    tensors["with gradient"] = torch.ones(3).add(rank).requires_grad_()
    tensors["not finite"] = torch.tensor([float("nan"), 1.0, float("inf")]).roll(rank)
    return tensors


def operations_for(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype.is_complex:
        return "sum", "mean"
    return OPERATIONS if dtype.is_floating_point else ("sum", "max", "min")


def ragged(dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Tensors whose shape is another on every replica; on replica 1 there is nothing in them."""
    shape = [(2, 3), (0, 3), (), (4, 1, 2)][rank]
    return numbers_for(dtype, 24, rank)[: torch.Size(shape).numel()].view(shape)


def everything(rank: int, size: int, row: Row, place: Place) -> Results:
    """Calls every operation on every input; what came out, by name."""
    results: Results = {}
    collective = row.build(rank, size, place)
    for name, tensor in inputs(rank).items():
        before, strides = tensor.detach().clone(), tensor.stride()
        for op in operations_for(tensor.dtype) if tensor.numel() < LARGE else ("sum", "max"):
            results["all_reduce", name, op] = collective.all_reduce(tensor, op)
        for root in range(size) if tensor.numel() < LARGE else (size - 1,):
            results["broadcast", name, root] = collective.broadcast(tensor, root)
        results["all_gather", name] = collective.all_gather(tensor)
        unchanged = same_bits(tensor.detach().resolve_conj(), before.resolve_conj())
        results["unchanged", name] = unchanged and tensor.stride() == strides
    for root in range(size):
        for op in OPERATIONS:
            results["reduce", op, root] = collective.reduce(numbers_for(torch.float32, 35, rank), op, root)
    for op in OPERATIONS:
        whole = numbers_for(torch.float32, 12 * 5, rank).view(12, 5)
        results["reduce_scatter", op] = collective.reduce_scatter(whole, op)
    for dtype in (torch.float32, torch.bool, torch.bfloat16):
        results["ragged", dtype] = collective.all_gather(ragged(dtype, rank))
    lengths = numbers_for(torch.float32, NUM_LARGE, rank)[: NUM_LARGE if rank == size - 1 else 10]
    results["ragged", "large"] = collective.all_gather(lengths)
    collective.barrier()
    collective.close()
    return results


def reductions(rank: int, size: int, row: Row, place: Place) -> Results:
    """Only the calls whose bits could differ from run to run, in another order."""
    collective = row.build(rank, size, place)
    results = {}
    for name, tensor in reversed(inputs(rank).items()):
        for op in operations_for(tensor.dtype) if tensor.numel() < LARGE else ("sum", "max"):
            results["all_reduce", name, op] = collective.all_reduce(tensor, op)
    collective.close()
    return results


WRONG: dict[str, Callable[[Collective], Any]] = {
    "unknown": lambda one: one.all_reduce(torch.ones(2), "median"),
    "mean of integers": lambda one: one.all_reduce(torch.ones(2, dtype=torch.int32), "mean"),
    "max of complex": lambda one: one.all_reduce(torch.ones(2, dtype=torch.complex64), "max"),
    "sparse": lambda one: one.all_reduce(torch.eye(2).to_sparse()),
    "no such root": lambda one: one.broadcast(torch.ones(2), one.size),
    "negative root": lambda one: one.broadcast(torch.ones(2), -1),
    "reduce without root": lambda one: one.reduce(torch.ones(2), "sum", one.size),
    "scatter of a scalar": lambda one: one.reduce_scatter(torch.tensor(1.0)),
}
MISMATCHES: dict[str, Callable[[Collective], Any]] = {
    "shapes": lambda one: one.all_reduce(torch.ones(2 + one.rank, 3)),
    "types": lambda one: one.all_reduce(torch.ones(2, dtype=torch.float64 if one.rank else torch.float32)),
    "operations": lambda one: one.all_reduce(torch.ones(2), "max" if one.rank else "sum"),
    "roots": lambda one: one.broadcast(torch.ones(2), one.rank),
    "gathered types": lambda one: one.all_gather(torch.ones(2, dtype=torch.int64 if one.rank else torch.int32)),
    "calls": lambda one: one.all_gather(torch.ones(2)) if one.rank else one.all_reduce(torch.ones(2)),
    "barrier": lambda one: one.all_reduce(torch.ones(2)) if one.rank else one.barrier(),
}
BOTH_SIDES = {
    "shapes": ("(2, 3)", "(3, 3)"),
    "types": ("float32", "float64"),
    "operations": ("all_reduce('sum')", "all_reduce('max')"),
    "roots": ("broadcast(root=0)", "broadcast(root=1)"),
    "gathered types": ("int32", "int64"),
    "calls": ("all_reduce('sum')", "all_gather"),
    "barrier": ("barrier", "all_reduce('sum')"),
}


def mistakes(rank: int, size: int, row: Row, place: Place, wrong: dict[str, Callable[[Collective], Any]]) -> Results:
    """What each wrong call says, and what the next right one gives."""
    results: Results = {}
    collective = row.build(rank, size, place)
    for name, call in wrong.items():
        try:
            call(collective)
            results[name] = "nothing was said"
        except CollectiveError as error:
            results[name] = str(error)
        results["after", name] = collective.all_reduce(torch.full((3,), rank + 1.0))
    collective.close()
    return results


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    with started(MOST_REPLICAS) as processes:
        yield processes


def place_for(row: Row, folder: Path) -> Place:
    control, slots = shared(Signals.num_bytes(row.size), SharedMemory.num_bytes(row.size))
    Signals(control, 0, row.size).reset()
    second = shared(Signals.num_bytes(row.size), SharedMemory.num_bytes(row.size))
    Signals(second[0], 0, 2).reset()
    if row.build is two_level:
        Signals(control, 0, 2).reset()
    return Place(control, slots, str(folder / "store"), (second[0], second[1]))


several = pytest.mark.parametrize("row", [row for row in ROWS if row.size > 1], indirect=True, ids=str, scope="module")


@pytest.fixture(scope="module", params=ROWS, ids=str)
def row(request: pytest.FixtureRequest) -> Row:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def runs(row: Row, replicas: Replicas, tmp_path_factory: pytest.TempPathFactory) -> list[list[Results]]:
    """What all replicas got from everything, and from the reductions a second time."""
    return [
        replicas.run(row.size, calls, row, place_for(row, tmp_path_factory.mktemp("meet")))
        for calls in (everything, reductions)
    ]


@pytest.fixture(scope="module")
def everyones() -> list[dict[str, torch.Tensor]]:
    return [inputs(rank) for rank in range(MOST_REPLICAS)]


@pytest.fixture
def place(row: Row, tmp_path: Path) -> Place:
    return place_for(row, tmp_path)


def reference(parts: list[torch.Tensor], op: str, machine_size: int) -> torch.Tensor:
    """The same by plain torch, one after the other, those of one machine first."""
    dtype = parts[0].dtype
    if dtype == torch.bool:
        return functools.reduce(torch.logical_and if op == "min" else torch.logical_or, parts)
    if dtype in INTEGERS:
        return integer_reference(parts, op)
    if dtype.is_floating_point and dtype.itemsize < 4:
        return reference([part.float() for part in parts], op, machine_size).to(dtype)
    if op in ("max", "min"):
        return functools.reduce(torch.maximum if op == "max" else torch.minimum, parts)
    machines = [parts[start : start + machine_size] for start in range(0, len(parts), machine_size)]
    total = functools.reduce(torch.add, [functools.reduce(torch.add, machine) for machine in machines])
    return total / len(parts) if op == "mean" else total


def integer_reference(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """By the integers of Python, which never overflow, and then do."""
    dtype = parts[0].dtype
    bits, smallest = 8 * dtype.itemsize, torch.iinfo(dtype).min
    columns = zip(*(part.flatten().tolist() for part in parts), strict=True)
    combined = [{"sum": sum, "max": max, "min": min}[op](column) for column in columns]
    wrapped = [(number - smallest) % 2**bits + smallest for number in combined]
    return torch.tensor(wrapped, dtype=dtype).view(parts[0].shape)


def assert_equal(got: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    wanted = wanted.detach().resolve_conj()
    assert got.dtype == wanted.dtype, what
    assert got.shape == wanted.shape, what
    if got.dtype.is_floating_point and got.dtype.itemsize > 1:
        got, wanted = got.nan_to_num(nan=12345.0), wanted.nan_to_num(nan=12345.0)
    assert same_bits(got, wanted), what


def entries(runs: list[list[Results]], kind: str) -> Iterator[tuple[int, Any, Any]]:
    """Replica, name and result of everything of one kind, of the first run."""
    for rank, results in enumerate(runs[0]):
        found = [(name, value) for name, value in results.items() if name[0] == kind]
        assert found
        for name, value in found:
            yield rank, name, value


@pytest.mark.parametrize("op", OPERATIONS)
def test_all_reduce_equals_plain_torch(
    runs: list[list[Results]], row: Row, op: str, everyones: list[dict[str, torch.Tensor]]
) -> None:
    for _, name, got in entries(runs, "all_reduce"):
        if name[2] == op:
            assert_equal(
                got, reference([own[name[1]].detach() for own in everyones[: row.size]], op, row.machine_size), name
            )


def test_reduce_gives_the_result_to_the_root_only(runs: list[list[Results]], row: Row) -> None:
    parts = [numbers_for(torch.float32, 35, rank) for rank in range(row.size)]
    for rank, name, got in entries(runs, "reduce"):
        _, op, root = name
        if rank == root:
            assert_equal(got, reference(parts, op, row.machine_size), name)
        else:
            assert got is None


def test_reduce_scatter_gives_each_its_part(runs: list[list[Results]], row: Row) -> None:
    parts = [numbers_for(torch.float32, 60, rank).view(12, 5) for rank in range(row.size)]
    for rank, name, got in entries(runs, "reduce_scatter"):
        assert_equal(got, reference(parts, name[1], row.machine_size).chunk(row.size)[rank], name)


def test_broadcast_gives_all_the_tensor_of_each_root(
    runs: list[list[Results]], row: Row, everyones: list[dict[str, torch.Tensor]]
) -> None:
    for _, name, got in entries(runs, "broadcast"):
        assert_equal(got, everyones[name[2]][name[1]], name)


def test_all_gather_gives_the_tensors_of_all(
    runs: list[list[Results]], row: Row, everyones: list[dict[str, torch.Tensor]]
) -> None:
    for _, name, got in entries(runs, "all_gather"):
        assert len(got) == row.size
        for rank, part in enumerate(got):
            assert_equal(part, everyones[rank][name[1]], name)


def test_all_gather_takes_tensors_of_different_shapes(runs: list[list[Results]], row: Row) -> None:
    for _, name, got in entries(runs, "ragged"):
        for rank, part in enumerate(got):
            if name[1] == "large":
                length = NUM_LARGE if rank == row.size - 1 else 10
                assert_equal(part, numbers_for(torch.float32, NUM_LARGE, rank)[:length], name)
            else:
                assert_equal(part, ragged(name[1], rank), name)


def test_arguments_are_left_as_they_were(runs: list[list[Results]]) -> None:
    assert [name for _, name, unchanged in entries(runs, "unchanged") if not unchanged] == []


def test_results_have_no_history(runs: list[list[Results]]) -> None:
    for kind in ("all_reduce", "broadcast"):
        assert [name for _, name, got in entries(runs, kind) if got.requires_grad] == []


def test_all_replicas_get_the_same_bits(runs: list[list[Results]], row: Row) -> None:
    for _, name, got in entries(runs, "all_reduce"):
        assert same_bits(got, runs[0][0][name]), name


def test_a_second_run_gives_the_same_bits(runs: list[list[Results]]) -> None:
    for rank, name, got in entries(runs, "all_reduce"):
        assert same_bits(got, runs[1][rank][name]), name


def test_wrong_calls_say_what_is_wrong_and_do_no_harm(replicas: Replicas, row: Row, place: Place) -> None:
    right = row.size * (row.size + 1) / 2
    wanted = {
        "unknown": "no reduction named 'median'; known: sum, mean, max, min",
        "mean of integers": "cannot average torch.int32",
        "max of complex": "torch.complex64 has no max",
        "sparse": "dense tensors, got a sparse_coo one",
        "no such root": f"no replica {row.size} to be the root",
        "negative root": "no replica -1 to be the root",
        "reduce without root": f"no replica {row.size} to be the root",
        "scatter of a scalar": "got shape ()",
    }
    for results in replicas.run(row.size, mistakes, row, place, {name: WRONG[name] for name in wanted}):
        for name, words in wanted.items():
            assert words in results[name], name
            assert results["after", name].tolist() == [right] * 3


@several
def test_uneven_reduce_scatter_is_refused(replicas: Replicas, row: Row, place: Place) -> None:
    wrong = {"uneven": lambda one: one.reduce_scatter(torch.ones(one.size + 1))}
    for results in replicas.run(row.size, mistakes, row, place, wrong):
        assert f"got shape ({row.size + 1},); give a multiple of {row.size}" in results["uneven"]


@several
def test_mismatches_name_both_sides_and_do_no_harm(replicas: Replicas, row: Row, place: Place) -> None:
    right = row.size * (row.size + 1) / 2
    for results in replicas.run(row.size, mistakes, row, place, MISMATCHES):
        for name, (ours, theirs) in BOTH_SIDES.items():
            first, second = results[name].split("replica 0 called ")[1].split("replica 1 called ")
            assert ours in first, name
            assert theirs in second, name
            assert results["after", name].tolist() == [right] * 3


def test_barrier_holds_everyone_back_until_the_last_one_comes(replicas: Replicas, row: Row, place: Place) -> None:
    for seen in replicas.run(row.size, arrive_one_by_one, row, place):
        assert seen == [row.size] * row.size


def arrive_one_by_one(rank: int, size: int, row: Row, place: Place) -> list[int]:
    """How many replicas had arrived when each of several barriers opened."""
    collective = row.build(rank, size, place)
    arrivals = place.control.shared(torch.int64, place.control.num_bytes - 8 * size * size, size * size).view(
        size, size
    )
    seen = []
    for late in range(size):
        if rank == late:
            sum(range(200_000))  # the others are there long before
        arrivals[late, rank] = 1
        collective.barrier()
        seen.append(int(arrivals[late].sum()))
    collective.close()
    return seen
