"""Distributes a DataLoader over a map-style dataset: each replica loads its own part.

Owns the order of the samples, which is the one that the loader itself would give, and the life of
an epoch. How a process loads is `loading`'s, what it holds is `portions`'.
"""

import itertools
import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from torch.utils import data
from torch.utils.data import DataLoader, default_collate
from torch.utils.data.distributed import DistributedSampler

from stratagem._checks import StaysHere
from stratagem.engine import random_state
from stratagem.errors import StrategyError
from stratagem.inputs import portions
from stratagem.inputs.arrays import ArrayDataset, as_they_are
from stratagem.inputs.loading import Indices, Source
from stratagem.inputs.portions import Lease, Portion, PortionPart
from stratagem.inputs.reader import InputHost, Pass, length_of, send_waiting, waiting_calls
from stratagem.inputs.splitting import Evenness, assemble, offsets
from stratagem.inputs.templates import common_template
from stratagem.objects.per_replica import PerReplica

_keys = itertools.count(1)

# These draw all their random numbers before the first index, or from a generator of their own. Any
# other sampler may look at what training has done so far, so it is read when its batch is due.
_READ_AHEAD = (
    data.SequentialSampler,
    data.RandomSampler,
    data.SubsetRandomSampler,
    data.WeightedRandomSampler,
    DistributedSampler,
)


@final
class DistributedLoader(StaysHere):
    """Global batches whose slices are loaded by the replicas that use them.

    Each iteration is one epoch, in the order that the loader itself would give with the same seed.
    The dataset is sent to the replicas once, when the first epoch begins; what the program changes
    in it afterwards stays in the main program.

    Args:
        loader: The loader; its sampler, collate function, generator and workers are respected.
        host: The strategy.
        evenness: How uneven batches are treated.
    """

    def __init__(self, loader: DataLoader[Any], host: InputHost, evenness: Evenness) -> None:
        self.loader = loader
        self.host = host
        self.evenness = evenness
        self.key = next(_keys)
        self.lease = Lease()
        self.template: Any = None
        self.source = _source_of(loader, len(host.replicas_here))
        self._epochs = itertools.count(1)
        self._seed: int | None = None
        self._sent = False
        self._probed = loader.collate_fn in (default_collate, as_they_are)
        self._closed = False
        self._check_sizes()

    def __iter__(self) -> "_Epoch":
        self.host.require_usable()
        if self._closed:
            raise StrategyError("this distributed data was closed; call distribute again")
        send_waiting(self.host)
        self._send()
        self.host.draw_alike()
        if self.host.input_pipeline[0] == 1:
            return _Epoch(self, next(self._epochs))
        order = _order_of(self.loader.batch_sampler)
        epoch = _Epoch(self, next(self._epochs))
        self.host.compare_data(
            {
                "kind of data": "examples",
                "examples": length_of(self.loader.dataset),
                "batches": length_of(self.loader),
                "examples in a batch": self.loader.batch_size,
                "sampler": type(getattr(self.loader.batch_sampler, "sampler", self.loader.batch_sampler)).__name__,
                "checksum of the order": order,
                "checksum of the first batch": epoch.checksum_of_first(),
            }
        )
        return epoch

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def undivided(self) -> DataLoader[Any]:
        """The batches as they were given: one pass is one epoch."""
        return self.loader

    def close(self) -> None:
        """Drops the dataset in all replicas; batches that were not used yet are lost."""
        if not self._closed:
            self._closed = True
            portions.forget(self.key)
            send_waiting(self.host)
            self.host.call_in_children(portions.forget, self.key)

    def seed_of_workers(self) -> int:
        """The seed of an epoch's workers; workers that persist have one for all epochs."""
        if self._seed is None or not self.loader.persistent_workers:
            drawn = torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
            self._seed = int(drawn.item())
        return self._seed

    def probe(self, first: Portion) -> None:
        """Finds out, once, which parts of a batch are lists with one entry per example.

        Only a collate function of the program's own can make such; it is asked for a batch of one
        and for a batch of two.
        """
        if self._probed:
            return
        self._probed = True
        index = first.indices[0]
        following = ((-1, [index, index]), (first.number, first.indices), *first.ahead)
        try:
            with random_state.kept():
                one = portions.load(_renumbered(first, -2, [index], following))
                two = portions.load(_renumbered(first, -1, [index, index], following[1:]))
        except Exception:
            return  # it cannot make batches of that size; what is wrong, if anything, shows in the real ones
        self.template = common_template(one, two)

    def _send(self) -> None:
        if self._sent:
            return
        try:
            self.host.call_in_children(portions.register, self.key, self.source)
        except (TypeError, AttributeError, ValueError) as error:
            error.add_note(
                "while sending the dataset and collate_fn to the replicas; what cannot be sent, such as an open "
                "file, is best opened in __getitem__, or give distribute an iterable of global batches"
            )
            raise
        self._sent = True
        portions.register(self.key, self.source)
        # A finalizer must not call the children: it may run in the middle of another call.
        weakref.finalize(self.lease, _leave, self.key, waiting_calls(self.host)).atexit = False

    def _check_sizes(self) -> None:
        """Complains of uneven batches before the first, where their sizes are known."""
        sampler = self.loader.batch_sampler
        if type(sampler) is not data.BatchSampler or not hasattr(sampler.sampler, "__len__"):
            return
        total = len(sampler.sampler)  # type: ignore[arg-type]  # asked above
        if total >= sampler.batch_size:
            self.evenness.check(sampler.batch_size, "a global batch")
        if total % sampler.batch_size and not sampler.drop_last:
            self.evenness.check(total % sampler.batch_size, "the last global batch")


@final
class _Epoch(Pass):
    """One pass over the data."""

    def __init__(self, owner: DistributedLoader, number: int) -> None:
        super().__init__(owner.host)
        self._owner = owner
        self._number = number
        self._open = True
        self._waiting = waiting_calls(owner.host)
        # As in torch: first the sampler, then the seed of the workers, then the first index.
        self._sampler = iter(owner.loader.batch_sampler)  # type: ignore[arg-type]  # never None here
        self._seed = owner.seed_of_workers()
        self._num_read = 0
        self._window: deque[tuple[int, list[Indices], tuple[int, ...]]] = deque()
        self._reads_ahead = _may_read_ahead(owner.loader)
        self._num_ahead = owner.source.num_ahead if self._reads_ahead else 0
        if owner.source.num_workers:
            self._fill(self._num_ahead)

    def __iter__(self) -> "_Epoch":
        return self

    def __next__(self) -> Any:
        try:
            return self.draw()
        except StopIteration:
            self.close()
            raise

    def prepare(self) -> None:
        if self._reads_ahead and self._open:
            self._fill(1)

    def draw(self) -> Any:
        if not self._open:
            raise StopIteration
        self.host.require_usable()
        self._fill(1)
        if not self._window:
            raise StopIteration
        number, parts, counts = self._window.popleft()
        self._fill(self._num_ahead)
        return self._batch(number, parts, counts)

    def checksum_of_first(self) -> int | None:
        """Tells the examples of the first batch from others; `None` if there are none, or they have no numbers."""
        self._fill(1)
        if not self._window:
            return None
        _, parts, counts = self._window[0]
        return _checksum([index for part, count in zip(parts, counts, strict=True) for index in part[:count]])

    def skip(self) -> bool:
        """Passes over the next batch without loading it; whether there was one."""
        self._fill(1)
        if self._window:
            self._window.popleft()
            return True
        return False

    def close(self) -> None:
        if self._open:
            self._open = False
            portions.release(self._owner.key, self._number)
            self._owner.host.call_in_children(portions.release, self._owner.key, self._number)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self._open = False
            portions.release(self._owner.key, self._number)
            self._waiting.append((portions.release, (self._owner.key, self._number)))

    def _fill(self, num_batches: int) -> None:
        """Reads indices until so many batches wait."""
        while len(self._window) < num_batches:
            try:
                indices = list(next(self._sampler))
            except StopIteration:
                return
            number = self._num_read
            self._num_read += 1
            sizes = self._owner.evenness.slices(len(indices), f"global batch {number}")
            # A replica without examples loads one that counts for nothing.
            parts: list[Indices] = [indices[begin:end] or indices[:1] for begin, end in offsets(sizes)]
            self._window.append((number, parts, sizes))

    def _batch(self, number: int, parts: list[Indices], counts: tuple[int, ...]) -> Any:
        owner, here = self._owner, self._owner.host.replicas_here
        counts = tuple(counts[replica] for replica in here)
        owner.probe(self._portion(0, number, parts))
        first, *others = [self._portion(place, number, parts) for place in range(len(here))]
        leaves, structure = first.flatten(portions.load(first))
        joined = [
            PerReplica([leaf, *(PortionPart(portion, position, len(leaves)) for portion in others)], counts)
            for position, leaf in enumerate(leaves)
        ]
        return assemble(joined, structure)

    def _portion(self, place: int, number: int, parts: list[Indices]) -> Portion:
        """What the replica at a place of this machine loads."""
        owner, replica = self._owner, self._owner.host.replicas_here[place]
        return Portion(
            owner.key,
            self._number,
            self._seed,
            replica,
            number,
            parts[replica],
            tuple((each, own[replica]) for each, own, _ in self._window),
            owner.template,
            owner.lease,
        )


def _renumbered(portion: Portion, number: int, indices: Indices, ahead: Any) -> Portion:
    return Portion(portion.key, portion.epoch, portion.seed, 0, number, indices, ahead)


def _leave(key: int, waiting: list[Any]) -> None:
    portions.forget(key)
    waiting.append((portions.forget, (key,)))


def _may_read_ahead(loader: DataLoader[Any]) -> bool:
    if loader.num_workers:
        return True
    sampler = loader.batch_sampler
    if type(sampler) is not data.BatchSampler or type(sampler.sampler) not in _READ_AHEAD:
        return False
    return getattr(sampler.sampler, "generator", None) is not torch.default_generator


def _order_of(batch_sampler: Any) -> int | None:
    """Tells the order of the coming epoch from others, where a sampler of torch's own has one of its own.

    That of the others follows from the random numbers of the program and from how many examples there are; samplers of
    other kinds cannot be asked twice.
    """
    sampler = getattr(batch_sampler, "sampler", None)
    generator = getattr(sampler, "generator", None)
    decided = type(sampler) in (data.SequentialSampler, data.RandomSampler) and generator is None
    if type(batch_sampler) is not data.BatchSampler or type(sampler) not in _READ_AHEAD or decided:
        return None
    with random_state.kept():
        before = generator.get_state() if generator is not None else None
        try:
            return _checksum(list(sampler))  # type: ignore[arg-type]  # one of `_READ_AHEAD`
        finally:
            if generator is not None:
                generator.set_state(before)


def _checksum(indices: Sequence[Any]) -> int | None:
    try:
        return zlib.crc32(np.asarray(indices, dtype=np.int64).tobytes())
    except (TypeError, ValueError, OverflowError):
        return None


def _source_of(loader: DataLoader[Any], num_replicas: int) -> Source:
    """What a replica loads with; the replicas of a machine share the workers that the loader asks for."""
    context = loader.multiprocessing_context
    return Source(
        loader.dataset,
        loader.collate_fn,
        num_workers=-(-loader.num_workers // num_replicas),
        prefetch_factor=loader.prefetch_factor,
        timeout_s=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        start_method=context.get_start_method() if context is not None else None,
        persistent_workers=loader.persistent_workers,
        pin_memory=loader.pin_memory,
        in_memory=isinstance(loader.dataset, data.TensorDataset | ArrayDataset),
    )
