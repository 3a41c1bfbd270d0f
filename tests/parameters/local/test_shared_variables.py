"""What workers of one machine see of the variables that they share."""

import torch
from torch import nn

from stratagem.parameters.local.shared_variables import LocalVariables, SharedMemoryOfShards
from stratagem.variables.aggregation import Aggregation


class Program:
    """A main program and a worker that share one parameter, in one process."""

    def __init__(self) -> None:
        memory = SharedMemoryOfShards.create(1)
        self.main, self.worker = LocalVariables(memory), LocalVariables(memory)
        self.parameter = nn.Parameter(torch.zeros(3))
        (self.held,) = self.main.place([(1, self.parameter)], {}, set())
        self.main.add(self.held)
        self.seen = self.worker.build(self.held)[1]
        self.worker.add(self.held)
        self.worker.pull()

    def push(self, *, is_counted: bool = True) -> None:
        """Adds 1, as another worker does; one that is killed at the end does not count it."""
        with self.main.journal.writing([0]):
            self.held.store.shared.add_(1.0)
            self.main.note_change([self.held.target])
        self.main.board.version += is_counted


def test_pull_brings_all_changes_when_one_was_not_counted() -> None:
    program = Program()
    program.push(is_counted=False)
    program.worker.pull(if_changed=False)
    assert program.seen.tolist() == [1.0] * 3
    program.push()
    program.worker.pull()
    assert program.seen.tolist() == [2.0] * 3


def test_what_the_main_program_writes_is_pulled_and_is_no_push() -> None:
    program = Program()
    with torch.no_grad():
        program.parameter.fill_(5.0)
    program.main.publish_written()
    assert program.main.board.version == 0
    assert program.worker.is_behind(0)
    program.worker.pull()
    assert program.seen.tolist() == [5.0] * 3
    assert not program.worker.is_behind(0)


def test_smallest_values_of_workers_come_together_from_infinity() -> None:
    memory = SharedMemoryOfShards.create(1)
    main, workers = LocalVariables(memory), [LocalVariables(memory), LocalVariables(memory)]
    buffers = [torch.full((1,), torch.inf), torch.full((1,), torch.inf)]
    (held,) = main.place(list(enumerate(buffers)), {}, set())
    main.add(held)
    for number, worker in enumerate(workers):
        seen = worker.build(held)
        worker.add(held)
        worker.pull()
        worker.choose({id(seen[0]): Aggregation.MIN})
        seen[0].fill_(3.0 + number)
        seen[1].fill_(5.0 + number)
    for worker in workers:
        worker.add_buffers(worker.changed_buffers())
    assert [float(each) for each in buffers] == [3.0, 6.0]  # the last one's, where nothing else is known
