"""The sum of one flat vector over the replicas of a machine, in real processes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from stratagem.collectives.exchange import WindowExchange, chunk_of
from stratagem.collectives.signals import Signals
from stratagem.processes.region import Region
from tests.collectives.harness import Replicas, meeting_point, same_bits, seeded, shared, started

SIZE = 3
# Three chunks of about 4000 elements: segments lie in one, across one border, across both, and at the ends.
LENGTHS = (1, 1000, 2500, 9000, 3, 0, 500)
NUM_ELEMENTS = sum(LENGTHS)
SEGMENTS = [(sum(LENGTHS[:number]), length) for number, length in enumerate(LENGTHS)]
ALL = (True,) * SIZE


@dataclass(frozen=True)
class Case:
    """What the replicas put in, and who counts."""

    dtype: torch.dtype = torch.float32
    counted: tuple[bool, ...] = ALL
    absent: tuple[tuple[int, int], ...] = ()  # replica, segment
    poison: tuple[tuple[int, int, float], ...] = ()  # replica, element, value
    window_bytes: int = 1 << 20  # more than the vector has
    small: int = 2000  # some segments are, some are not
    shown_as: torch.dtype | None = None

    def vector(self, rank: int) -> torch.Tensor:
        vector = torch.randn(NUM_ELEMENTS, generator=seeded(rank)).to(self.dtype)
        for replica, element, value in self.poison:
            if replica == rank:
                vector[element] = value
        return vector

    def segments(self, rank: int, vector: torch.Tensor) -> list[torch.Tensor | None]:
        return [
            None if (rank, number) in self.absent else vector[offset : offset + length]
            for number, (offset, length) in enumerate(SEGMENTS)
        ]

    def has(self, rank: int, segment: int) -> bool:
        return self.counted[rank] and (rank, segment) not in self.absent


def total(rank: int, size: int, regions: list[Region], case: Case) -> dict[str, Any]:
    control, slots, summed = regions
    signals = meeting_point(control, rank, size)
    exchange = WindowExchange(
        *(slots, summed, case.dtype, SEGMENTS, NUM_ELEMENTS, signals, case.window_bytes),
        small=case.small,
        shown_as=case.shown_as,
    )
    vector = case.vector(rank)
    before = vector.clone()
    vectors = case.segments(rank, vector)
    present, finite = exchange.add_up(vectors if case.counted[rank] else [None] * len(vectors))
    signals.barrier()
    results = {
        "sum": exchange.sum.clone(),
        "present": present,
        "finite": finite,
        "unchanged": same_bits(vector, before),
    }
    signals.barrier()
    # What one replica does to its sum the others do not see, until the next sum is made.
    exchange.sum.mul_(rank + 2)
    signals.barrier()
    results["scaled"] = exchange.sum.clone()
    signals.barrier()
    exchange.forget()
    signals.barrier()
    results["after forgetting"] = exchange.sum.clone()
    signals.barrier()
    return results


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    with started(SIZE) as processes:
        yield processes


def run(replicas: Replicas, case: Case, size: int = SIZE) -> list[dict[str, Any]]:
    slot_bytes = WindowExchange.num_slot_bytes(NUM_ELEMENTS, len(SEGMENTS), case.dtype, size, case.window_bytes)
    regions = shared(Signals.num_bytes(size), slot_bytes, case.dtype.itemsize * NUM_ELEMENTS)
    Signals(regions[0], 0, size).reset()
    return replicas.run(size, total, regions, case)


def wanted(case: Case, segment: int, ranks: Sequence[int] = range(SIZE)) -> torch.Tensor | None:
    """The plain sum of a segment in the order of the replicas; `None` if nobody has it."""
    offset, length = SEGMENTS[segment]
    shown = [case.vector(rank)[offset : offset + length] for rank in ranks if case.has(rank, segment)]
    parts = [each.to(case.shown_as or case.dtype).float() for each in shown]
    if not parts:
        return None
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return result.to(case.dtype)


def assert_sums(results: list[dict[str, Any]], case: Case) -> None:
    for number, (offset, length) in enumerate(SEGMENTS):
        expected = wanted(case, number, range(len(results)))
        for result in results:
            assert result["present"][number] == (expected is not None)
            if expected is not None:
                got = result["sum"][offset : offset + length]
                torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_chunks_cover_the_vector_and_begin_at_cache_lines() -> None:
    for num_elements in (0, 1, 1023, 1024, NUM_ELEMENTS, 10**6 + 1):
        for size in (1, 2, 3, 7):
            chunks = [chunk_of(rank, size, num_elements) for rank in range(size)]
            assert chunks[0][0] == 0
            assert chunks[-1][1] == num_elements
            assert [end for _, end in chunks[:-1]] == [start for start, _ in chunks[1:]]
            assert all(start % 1024 == 0 for start, _ in chunks)


def test_segments_lie_across_the_borders_of_chunks() -> None:
    borders = [chunk_of(rank, SIZE, NUM_ELEMENTS)[0] for rank in range(1, SIZE)]
    assert all(any(offset < border < offset + length for offset, length in SEGMENTS) for border in borders)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sum_is_that_of_all_replicas_in_order(replicas: Replicas, size: int) -> None:
    case = Case(counted=(True,) * size)
    assert_sums(run(replicas, case, size), case)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_low_precision_is_summed_in_float32(replicas: Replicas, dtype: torch.dtype) -> None:
    case = Case(dtype=dtype)
    if dtype == torch.float64:
        results = run(replicas, case)
        exact = sum(case.vector(rank) for rank in range(SIZE))
        assert all(same_bits(result["sum"], exact) for result in results)
    else:
        assert_sums(run(replicas, case), case)


@pytest.mark.parametrize("window_bytes", [8000, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_shown_as_a_narrower_type_are_summed_in_their_own(
    replicas: Replicas, size: int, window_bytes: int
) -> None:
    case = Case(shown_as=torch.bfloat16, counted=(True,) * size, absent=((0, 3), (0, 0)), window_bytes=window_bytes)
    assert_sums(run(replicas, case, size), case)
    case = replace(case, poison=((0, 1200, float("nan")),))
    assert not all(result["finite"] for result in run(replicas, case, size))


def test_two_sums_agree_to_the_last_bit(replicas: Replicas) -> None:
    first, second = run(replicas, Case()), run(replicas, Case())
    assert all(same_bits(first[0]["sum"], result["sum"]) for result in (*first, *second))


@pytest.mark.parametrize("window_bytes", [4, 400, 8000, 4 * NUM_ELEMENTS - 4])
def test_sum_is_the_same_in_any_number_of_windows(replicas: Replicas, window_bytes: int) -> None:
    case = Case(window_bytes=window_bytes, absent=((0, 3), (1, 0)), counted=(True, True, True))
    whole = run(replicas, replace(case, window_bytes=1 << 20))
    results = run(replicas, case)
    assert_sums(results, case)
    assert all(same_bits(result["sum"], whole[0]["sum"]) for result in results)


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_sum_is_the_same_whether_segments_are_summed_together_or_alone(replicas: Replicas, small: int) -> None:
    for absent in ((), ((0, 3), (1, 0))):
        case = Case(small=small, absent=absent, window_bytes=8000)
        results, mixed = run(replicas, case), run(replicas, replace(case, small=2000))
        assert_sums(results, case)
        assert all(same_bits(result["sum"], mixed[0]["sum"]) for result in results)


FORMS = [((30, 40), (40, 1)), ((30, 40), (1, 30)), ((2, 3, 4, 50), (600, 1, 150, 3)), ((5,), (1,))]


def sum_of_forms(rank: int, size: int, regions: list[Region], window_bytes: int) -> list[torch.Tensor]:
    control, slots, summed = regions
    signals = meeting_point(control, rank, size)
    lengths = [torch.Size(shape).numel() for shape, _ in FORMS]
    segments = [(sum(lengths[:number]), length) for number, length in enumerate(lengths)]
    exchange = WindowExchange(
        slots, summed, torch.float32, segments, sum(lengths), signals, window_bytes, forms=FORMS, small=1 << 20
    )
    # Gradients come in the layout of the parameter or row by row.
    generator = seeded(rank)
    given = [torch.randn(shape, generator=generator) for shape, _ in FORMS]
    laid = [torch.empty_strided(*form).copy_(each) for each, form in zip(given, FORMS, strict=True)]
    exchange.add_up(laid if rank == 1 else given)
    signals.barrier()
    flat = [exchange.sum[offset : offset + length] for offset, length in segments]
    return [each.as_strided(*form).clone() for each, form in zip(flat, FORMS, strict=True)]


@pytest.mark.parametrize("window_bytes", [1 << 20, 1000])
def test_small_segments_may_come_in_any_layout(replicas: Replicas, window_bytes: int) -> None:
    numel = sum(torch.Size(shape).numel() for shape, _ in FORMS)
    slot_bytes = WindowExchange.num_slot_bytes(numel, len(FORMS), torch.float32, SIZE, window_bytes)
    regions = shared(Signals.num_bytes(SIZE), slot_bytes, 4 * numel)
    Signals(regions[0], 0, SIZE).reset()
    generators = [seeded(rank) for rank in range(SIZE)]
    given = [[torch.randn(shape, generator=generator) for shape, _ in FORMS] for generator in generators]
    for result in replicas.run(SIZE, sum_of_forms, regions, window_bytes):
        for number, total in enumerate(result):
            assert same_bits(total, given[0][number] + given[1][number] + given[2][number])


def test_arguments_are_left_as_they_were(replicas: Replicas) -> None:
    assert all(result["unchanged"] for result in run(replicas, Case()))


def test_segments_that_some_or_all_replicas_lack_are_left_out(replicas: Replicas) -> None:
    nobody = tuple((rank, 1) for rank in range(SIZE))
    for window_bytes in (1 << 20, 5000):
        case = Case(absent=((0, 3), (1, 0), (2, 2), (0, 2), *nobody), window_bytes=window_bytes)
        results = run(replicas, case)
        assert_sums(results, case)
        assert [result["present"][1] for result in results] == [False] * SIZE


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_replica_that_does_not_count_is_left_out_even_if_it_holds_nan(replicas: Replicas, left_out: int) -> None:
    counted = tuple(rank != left_out for rank in range(SIZE))
    poison = tuple((left_out, element, float("nan")) for element in (0, 1500, 5000, NUM_ELEMENTS - 1))
    case = Case(counted=counted, poison=poison)
    results = run(replicas, case)
    assert_sums(results, case)
    assert all(result["finite"] for result in results)
    assert all(result["sum"].isfinite().all() for result in results)


def test_segment_that_only_a_replica_has_that_does_not_count_is_absent(replicas: Replicas) -> None:
    case = Case(counted=(True, False, True), absent=((0, 4), (2, 4)))
    assert [result["present"][4] for result in run(replicas, case)] == [False] * SIZE


def test_nothing_is_present_when_nobody_counts(replicas: Replicas) -> None:
    for result in run(replicas, Case(counted=(False,) * SIZE)):
        assert result["present"] == [False] * len(SEGMENTS)
        assert result["finite"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_is_false_for_the_chunk_that_is_not(replicas: Replicas, value: float, dtype: torch.dtype) -> None:
    element = chunk_of(1, SIZE, NUM_ELEMENTS)[0] + 5
    case = Case(dtype=dtype, poison=((2, element, value),))
    results = run(replicas, case)
    assert [result["finite"] for result in results] == [True, False, True]
    assert_sums(results, case)


def test_large_finite_numbers_whose_sum_is_not_are_finite(replicas: Replicas) -> None:
    largest = torch.finfo(torch.float32).max
    case = Case(poison=tuple((0, element, largest) for element in range(10, 20)))
    assert [result["finite"] for result in run(replicas, case)] == [True] * SIZE


def test_infinities_that_cancel_are_not_finite(replicas: Replicas) -> None:
    case = Case(poison=((0, 7, float("inf")), (1, 7, float("-inf"))))
    assert [result["finite"] for result in run(replicas, case)] == [False, True, True]


def test_private_changes_of_the_sum_do_not_reach_others_and_can_be_forgotten(replicas: Replicas) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        results = run(replicas, replace(Case(), dtype=dtype))
        for rank, result in enumerate(results):
            assert same_bits(result["scaled"], results[0]["sum"] * (rank + 2))
            assert same_bits(result["after forgetting"], results[0]["sum"])


def test_what_lies_between_segments_stays_zero() -> None:
    segments = [(16 * number, 3 + number % 11) for number in range(60)]
    num_elements, window_bytes = 16 * 60, 4 * 200
    slot_bytes = WindowExchange.num_slot_bytes(num_elements, len(segments), torch.float32, 1, window_bytes)
    control, slots, summed = shared(Signals.num_bytes(1), slot_bytes, 4 * num_elements)
    signals = meeting_point(control, 0, 1)
    signals.reset()
    exchange = WindowExchange(slots, summed, torch.float32, segments, num_elements, signals, window_bytes)
    expected = torch.zeros(num_elements)
    for offset, length in segments:
        expected[offset : offset + length] = 7.0
    for _ in range(2):
        exchange.add_up([torch.full((length,), 7.0) for _, length in segments])
        assert exchange.sum.equal(expected)
