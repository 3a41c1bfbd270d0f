"""Variables that the workers of one machine share: where they lie, and one process' view of them.

Values lie once, in shared memory, in stores that belong to one shard each. A worker computes with a
copy of its own, which it brings up to date from time to time: it never sees a variable that is being
changed. Tables with sparse gradients are not copied: a worker reads their rows where they are.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch

from stratagem.collectives.collective import combine
from stratagem.parameters.local.board import Board
from stratagem.parameters.local.journal import Journal, Target
from stratagem.parameters.local.locks import Locks
from stratagem.parameters.partitioning import make_plan
from stratagem.parameters.protocol import Variable
from stratagem.processes.region import PAGE_BYTES, Region
from stratagem.variables.aggregation import Aggregation
from stratagem.variables.store import Homes, Placement, Store

TRAINED, TABLE, OTHER = "trained", "table", "other"
_SMALL = 4096
_CPU = torch.device("cpu")


@final
@dataclasses.dataclass(frozen=True)
class Held:
    """Variables of one kind in one shard.

    Args:
        store: Where they lie.
        shard: Which shard.
        kind: `TRAINED`, a `TABLE` alone, or `OTHER`: buffers.
        target: Lets changes be undone.
    """

    store: Store
    shard: int
    kind: str
    target: Target


@final
@dataclasses.dataclass(frozen=True)
class SharedMemoryOfShards:
    """What all processes of one machine need to see the same variables.

    Args:
        board: Versions and marks.
        locks: One for each shard, and one for the board.
        num_shards: How many shards.
        torn_pushes: Whether a push that does not come to its end stays as it is, and is not undone.
    """

    board: Board
    locks: Locks
    num_shards: int
    torn_pushes: bool = False

    @classmethod
    def create(cls, num_shards: int, *, torn_pushes: bool = False) -> "SharedMemoryOfShards":
        """New memory, without any variable."""
        return cls(Board.create(), Locks(Region.create(PAGE_BYTES)), num_shards, torn_pushes)


@final
class LocalVariables:
    """One process' view of the variables.

    Args:
        memory: What all have in common.
        torn_reads: Whether a worker computes with the shared values themselves, which others may be changing.
        device: Where a worker has its copies; an accelerator has some of tables as well.
    """

    def __init__(self, memory: SharedMemoryOfShards, *, torn_reads: bool = False, device: torch.device = _CPU) -> None:
        self.memory = memory
        self.board = memory.board
        self.journal = Journal(memory.board, memory.locks, undoes=not memory.torn_pushes)
        self.held: list[Held] = []
        self.version = -1  # which this process' copies are of
        self._num_writes = -1  # likewise: how many of the main program's they have
        self._torn_reads = torn_reads
        self._device = device
        self._copies: dict[int, torch.Tensor] = {}  # by number of the target: this process' own values
        self._pulled: dict[int, torch.Tensor] = {}  # of buffers: what they were when they were pulled
        self._copied: dict[int, int] = {}  # likewise: the change that the copy has
        self._watched: dict[int, dict[int, torch.Tensor]] = {}  # of some parameters, by name: what they were, likewise
        self._homes: dict[int, tuple[Homes, dict[int, torch.Tensor]]] = {}  # likewise: a worker's tensors, by name
        self._where: dict[int, tuple[Held, Placement]] = {}
        self._loads = [0] * memory.num_shards
        self._chosen: dict[int, Aggregation] = {}  # of buffers, by name

    # In the main program

    def place(
        self, named: Sequence[tuple[int, torch.Tensor]], labels: Mapping[int, str], tables: set[int]
    ) -> list[Held]:
        """Moves tensors into shared memory, spread over the shards by size.

        Args:
            named: The tensors and their names.
            labels: What to call them in messages, by `id`.
            tables: Those, by `id`, that get sparse gradients.
        """
        variables = [Variable(str(name), tuple(each.shape), each.dtype) for name, each in named]
        plan = make_plan(variables, self.memory.num_shards)
        order = sorted(range(self.memory.num_shards), key=self._loads.__getitem__)
        shards = {int(piece.name): order[place] for place, pieces in enumerate(plan.shards) for piece in pieces}
        kinds: dict[Any, list[tuple[int, torch.Tensor]]] = {}
        for name, tensor in named:
            # Small ones that are not trained are counters, metrics and statistics, also where they are parameters.
            is_trained = isinstance(tensor, torch.nn.Parameter) and (tensor.requires_grad or tensor.numel() > _SMALL)
            kind = (TABLE if id(tensor) in tables else TRAINED) if is_trained else OTHER
            alone = name if kind == TABLE else 0
            # Apart from those that are frozen: they are copied only when somebody has written to them.
            key = shards[name], kind, tensor.dtype, tensor.requires_grad, alone
            kinds.setdefault(key, []).append((name, tensor))
            self._loads[shards[name]] += tensor.nbytes
        placed: list[Held] = []
        numbers = self.journal.free_numbers()
        for (shard, kind, dtype, _, _), chosen in kinds.items():
            # On pages of its own: what the main program writes to one variable takes nothing of its neighbours along.
            store = Store.take_in(chosen, dtype, labels, align_bytes=PAGE_BYTES)
            shape = store.placements[0].shape if kind == TABLE else (store.num_elements,)
            number = next(numbers)
            placed.append(Held(store, shard, kind, self.journal.new_target(number, shard, store.region, dtype, shape)))
        return placed

    def publish_written(self) -> None:
        """Makes everyone's what the main program wrote to variables."""
        for held in self.held:
            held.store.bring_back()
            pages = held.store.region.written_pages()
            if len(pages):
                with self.journal.writing([held.shard]):
                    held.store.region.publish(pages)
                    self.note_change([held.target])
                    self.board.num_writes += 1

    # In all processes

    def note_change(self, targets: Iterable[Target]) -> None:
        """Lets workers know that these have changed; the caller holds the shards."""
        for target in targets:
            self.board.targets[target.number, 3] += 1

    def add(self, held: Held) -> None:
        """Takes variables."""
        self.held.append(held)
        self.journal.targets.append(held.target)
        self._where |= {placement.name: (held, placement) for placement in held.store.placements}

    def drop(self, names: Iterable[int]) -> None:
        """Lets go of variables that the program has dropped, and of memory that nothing else is in."""
        gone = set(names)
        for held in list(self.held):
            held.store.gone |= gone & {placement.name for placement in held.store.placements}
            for name in gone & self._watched.get(held.target.number, {}).keys():
                del self._watched[held.target.number][name]
            if len(held.store.gone) == len(held.store.placements):
                self.held.remove(held)
                self.journal.drop([held.target])
                for kept in (self._copies, self._pulled, self._watched, self._copied, self._homes):
                    kept.pop(held.target.number, None)

    def find(self, name: int) -> tuple[Held, Placement]:
        """Where a variable lies."""
        return self._where[name]

    # In a worker

    def build(self, held: Held) -> dict[int, torch.Tensor]:
        """Makes a worker's own tensors of variables that it was sent, by name."""
        flat = held.store.shared
        if held.kind == OTHER or (held.kind == TRAINED and not self._torn_reads) or self._device != _CPU:
            flat = torch.zeros(held.store.num_elements, dtype=held.store.dtype, device=self._device)
            self._copies[held.target.number] = flat
            if held.kind == OTHER:
                self._pulled[held.target.number] = torch.zeros_like(flat)
        homes, tensors = Homes(flat, held.store.placements), {}
        for number, placement in enumerate(held.store.placements):
            made, is_parameter = homes.make(number), placement.is_parameter
            tensors[placement.name] = torch.nn.Parameter(made, placement.requires_grad) if is_parameter else made
        self._homes[held.target.number] = homes, tensors
        self.version = -1
        return tensors

    def bring_back(self) -> list[int]:
        """Brings tensors home that a step gave other memory (`weight.data = ...`); their names."""
        names = []
        for homes, tensors in self._homes.values():
            order = list(tensors)
            names += [order[number] for number in homes.bring_back(list(tensors.values()))]
        return names

    def pull(self, *, if_changed: bool = True) -> None:
        """Brings this worker's copies up to date; each variable is of one version, those of a shard together."""
        version, num_writes = self.board.version, self.board.num_writes
        if if_changed and (version, num_writes) == (self.version, self._num_writes):
            return
        for shard in range(self.memory.num_shards):
            with self.journal.reading(shard):
                self.copy_shard(shard)
        self.version, self._num_writes = version, num_writes

    def is_behind(self, version: int) -> bool:
        """Whether this worker's copies are older than a version, or than what the main program wrote."""
        return self.version < version or self._num_writes != self.board.num_writes

    def forget(self) -> None:
        """Has everything copied anew: this worker has changed its copies, and not pushed that."""
        self.version = -1
        self._copied.clear()

    def copy_shard(self, shard: int) -> None:
        """Copies the values of one shard, whose lock the caller holds."""
        for held in self.held:
            number = held.target.number
            changed, own = int(self.board.targets[number, 3]), self._copies.get(number)
            if own is not None and held.shard == shard and self._copied.get(number) != changed:
                self._copied[number] = changed
                own.copy_(held.store.shared)
                if number in self._pulled:
                    self._pulled[number].copy_(own)
                for name, pulled in self._watched.get(number, {}).items():
                    pulled.copy_(_part(own, self.find(name)[1]))

    def watch(self, names: Iterable[int]) -> None:
        """Remembers what is pulled of parameters, from now on: then it is known which elements a step writes to."""
        for name in names:
            held, placement = self.find(name)
            own, watched = self._copies.get(held.target.number), self._watched.setdefault(held.target.number, {})
            if own is not None and name not in watched:
                watched[name] = _part(own, placement).clone()

    def write_own(self, names: Iterable[int]) -> None:
        """Writes what a step wrote to parameters itself to what all have; the caller holds the shards.

        Values, not changes: what a step has clipped stays so. Only the elements that it has changed, if that is known.
        """
        for name in names:
            held, placement = self.find(name)
            _part(held.store.shared, placement).copy_(self._with_own(name))

    def _with_own(self, name: int) -> torch.Tensor:
        """What all have of a parameter, with what this worker has written to it."""
        held, placement = self.find(name)
        own, shared = (_part(each, placement) for each in (self._copies[held.target.number], held.store.shared))
        pulled = self._watched.get(held.target.number, {}).get(name)
        return own.cpu() if pulled is None else torch.where((own == pulled).cpu(), shared, own.cpu())

    def has_copy(self, held: Held) -> bool:
        """Whether this worker computes with a copy of its own."""
        return held.target.number in self._copies

    def changed_buffers(self) -> list[tuple[Held, torch.Tensor]]:
        """What this worker changed in buffers since it pulled them: stores, and its own values."""
        return [
            (held, self._copies[number])
            for held in self.held
            if (number := held.target.number) in self._pulled
            and not torch.equal(self._pulled[number], self._copies[number])
        ]

    def add_buffers(self, changed: Sequence[tuple[Held, torch.Tensor]]) -> None:
        """Adds the changes of buffers to what all have; the caller holds the shards.

        Changes, not values: so that the counts and moving averages of all workers come together.
        """
        for held, own in changed:
            held.store.shared.copy_(self._with_changes(held, own))
            self._pulled[held.target.number].copy_(own)

    def choose(self, chosen: Mapping[int, Aggregation]) -> None:
        """Takes how some buffers, by `id`, are joined from now on: only smallest and largest values are no changes."""
        for _, tensors in self._homes.values() if chosen else ():
            self._chosen |= {name: chosen[id(each)] for name, each in tensors.items() if id(each) in chosen}

    def _with_changes(self, held: Held, own: torch.Tensor) -> torch.Tensor:
        """What all have of buffers, with what this worker has changed."""
        shared, own = held.store.shared, own.cpu()
        value = _with_changes(shared, self._pulled[held.target.number].cpu(), own)
        for placement in held.store.placements if self._chosen else ():
            if (how := self._chosen.get(placement.name)) in (Aggregation.MIN, Aggregation.MAX):
                parts = [_part(shared, placement), _part(own, placement)]
                _part(value, placement).copy_(combine(parts, how))
        return value

    def refresh(self, written: Sequence[int] = ()) -> None:
        """Brings this worker's copies up to date, with what it has changed; the caller holds all shards.

        Args:
            written: The parameters that it has written to; changes of buffers are found.
        """
        kept = {name: self._with_own(name).clone() for name in written}
        for held, own in self.changed_buffers():
            number, shared = held.target.number, held.store.shared
            own.copy_(self._with_changes(held, own))
            self._pulled[number].copy_(shared)
            self._copied[number] = int(self.board.targets[number, 3])
        for shard in range(self.memory.num_shards):
            self.copy_shard(shard)
        for name, value in kept.items():
            held, placement = self.find(name)
            _part(self._copies[held.target.number], placement).copy_(value)


def _part(flat: torch.Tensor, placement: Placement) -> torch.Tensor:
    """A variable as a vector, in the order of memory."""
    return flat[placement.offset : placement.offset + placement.numel]


def _with_changes(shared: torch.Tensor, pulled: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """What all have, with the changes of a worker."""
    if own.dtype == torch.bool:
        return torch.where(own == pulled, shared, own)
    # Where nobody else was, the value itself: it is not rounded again. Nor is there a change from what is infinite.
    alone = (shared == pulled) | ~pulled.isfinite()
    return torch.where(own == pulled, shared, torch.where(alone, own, shared + (own - pulled)))
