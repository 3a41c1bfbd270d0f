"""What becomes of what a worker writes to its copies of parameters itself."""

import torch
from torch import nn

from stratagem.parameters.local.shared_variables import Held, LocalVariables, SharedMemoryOfShards

NAME = 7


def make_worker() -> tuple[LocalVariables, torch.Tensor, Held]:
    """A worker with a copy of one parameter, and where that lies."""
    memory = SharedMemoryOfShards.create(1)
    parameter = nn.Parameter(torch.zeros(2, 3))
    (held,) = LocalVariables(memory).place([(NAME, parameter)], {}, set())
    worker = LocalVariables(memory)
    worker.add(held)
    (copy,) = worker.build(held).values()
    worker.pull()
    return worker, copy.detach(), held


def push_of_another(worker: LocalVariables, held: Held) -> None:
    held.store.shared[:6] += 1
    worker.note_change([held.target])


def test_write_to_some_elements_leaves_what_others_pushed_to_the_rest() -> None:
    worker, copy, held = make_worker()
    worker.watch([NAME])
    copy[0, 0] = 5.0
    push_of_another(worker, held)
    worker.write_own([NAME])
    assert held.store.shared[:6].tolist() == [5.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    worker.note_change([held.target])
    worker.copy_shard(0)
    copy[1, 0] = 0.0  # compared with what was pulled last
    push_of_another(worker, held)
    worker.write_own([NAME])
    assert held.store.shared[:6].tolist() == [6.0, 2.0, 2.0, 0.0, 2.0, 2.0]


def test_refresh_keeps_what_was_written() -> None:
    worker, copy, held = make_worker()
    worker.watch([NAME])
    copy[0, 0] = 5.0
    push_of_another(worker, held)
    worker.refresh([NAME])
    assert copy.tolist() == [[5.0, 1.0, 1.0], [1.0, 1.0, 1.0]]


def test_parameter_that_is_not_watched_is_written_whole() -> None:
    worker, copy, held = make_worker()
    copy[0, 0] = 5.0
    push_of_another(worker, held)
    worker.write_own([NAME])
    assert held.store.shared[:6].tolist() == [5.0, 0.0, 0.0, 0.0, 0.0, 0.0]
