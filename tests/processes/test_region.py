"""Shared memory: private writes stay private until they are published."""

import os
import subprocess
import sys

import pytest
import torch

from stratagem.errors import SharedMemoryError
from stratagem.processes.region import PAGE_BYTES, PAGEMAP, Region, hidden_pages


def make(num_pages: int = 4) -> tuple[Region, torch.Tensor, torch.Tensor]:
    region = Region.create(num_pages * PAGE_BYTES)
    return region, region.shared(torch.uint8, 0, region.num_bytes), region.private(torch.uint8, 0, region.num_bytes)


def test_shared_writes_are_seen_through_private_views() -> None:
    _, shared, private = make()
    shared[5] = 7
    assert private[5] == 7


def test_private_writes_are_seen_by_nobody_else() -> None:
    region, shared, private = make()
    private[PAGE_BYTES + 1] = 3
    assert shared[PAGE_BYTES + 1] == 0
    assert region.written_pages().tolist() == [1]


def test_publish_makes_written_pages_everyones() -> None:
    region, shared, private = make()
    private[0], private[2 * PAGE_BYTES], private[3 * PAGE_BYTES] = 1, 2, 3
    region.publish(region.written_pages())
    assert [shared[0].item(), shared[2 * PAGE_BYTES].item(), shared[3 * PAGE_BYTES].item()] == [1, 2, 3]
    assert not len(region.written_pages())
    shared[0] = 9
    assert private[0] == 9


def test_drop_forgets_private_writes() -> None:
    region, shared, private = make()
    shared[1] = 4
    private[1] = 5
    region.drop(region.written_pages())
    assert private[1] == 4
    assert not len(region.written_pages())


def test_reading_is_not_writing() -> None:
    region, shared, private = make()
    shared.fill_(1)
    assert private.sum() == region.num_bytes
    assert not len(region.written_pages())


@pytest.mark.parametrize("num_bytes", [0, 1, PAGE_BYTES, PAGE_BYTES + 1])
def test_sizes_are_whole_pages(num_bytes: int) -> None:
    region = Region.create(num_bytes)
    assert region.num_bytes == max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES
    assert region.private(torch.float32, 0, 0).numel() == 0


def test_too_much_memory_is_an_error_now_and_not_a_signal_later() -> None:
    with pytest.raises(SharedMemoryError, match=r"need .* of shared memory, .* are free"):
        Region.create(1 << 60)


def test_pages_that_are_given_back_take_no_memory_until_they_are_used_again() -> None:
    region = Region.create(8 * PAGE_BYTES)
    own = region.shared(torch.uint8, 0, region.num_bytes).fill_(7)
    region.give_back(PAGE_BYTES + 1, 5 * PAGE_BYTES + 1)  # whole pages only
    assert 512 * os.fstat(region.descriptor).st_blocks == 5 * PAGE_BYTES
    assert own.view(8, -1).float().mean(1).tolist() == [7, 7, 0, 0, 0, 7, 7, 7]
    own.fill_(1)
    assert 512 * os.fstat(region.descriptor).st_blocks == 8 * PAGE_BYTES


def test_descriptor_ends_with_the_region_and_tensors_live_on() -> None:
    region, shared, private = make()
    descriptor = region.descriptor
    del region
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    shared[0] = 2
    assert private[0] == 2


def test_probe_sees_the_pages_of_this_process() -> None:
    assert hidden_pages() == ""


def test_probe_says_why_pages_are_hidden() -> None:
    program = (
        "import ctypes, os; from stratagem.processes.region import hidden_pages;"
        "os.getuid() or os.setuid(65534);"
        "ctypes.CDLL(None).prctl(4, 0);"  # not dumpable: its files in /proc are root's
        "print(hidden_pages())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == f"{PAGEMAP} cannot be read: Permission denied\n"


def test_many_scattered_pages_are_found() -> None:
    region, shared, private = make(num_pages=3000)
    assert shared.sum() == private.sum() == 0
    wanted = [*range(0, 2000, 2), *range(2500, 2600), 2999]
    for page in wanted:
        private[page * PAGE_BYTES + page] = 1
    assert region.written_pages().tolist() == wanted
