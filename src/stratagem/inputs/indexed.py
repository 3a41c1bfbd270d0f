"""Distributes a DataLoader over a map-style dataset: each replica loads its own part.

Owns the order of the samples, which is the one that the loader itself would give, and the life of
an epoch. How a process loads is `loading`'s, what it holds is `portions`'.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, final

import torch
from torch.utils import data
from torch.utils.data import DataLoader, default_collate
from torch.utils.data.distributed import DistributedSampler

from stratagem.engine import random_state
from stratagem.errors import StrategyError
from stratagem.inputs import portions
from stratagem.inputs.arrays import ArrayDataset, as_they_are
from stratagem.inputs.loading import Indices, Source
from stratagem.inputs.portions import Lease, Portion, PortionPart
from stratagem.inputs.reader import InputHost, send_waiting, waiting_calls
from stratagem.inputs.splitting import Evenness, assemble, emptied, offsets
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
class DistributedLoader:
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
        _require_whole(loader, host)
        self.source = _source_of(loader)
        self._epochs = itertools.count(1)
        self._sent = False
        self._probed = loader.collate_fn in (default_collate, as_they_are)
        self._closed = False
        self._check_sizes()

    def __iter__(self) -> "_Epoch":
        if self._closed:
            raise StrategyError("this distributed data was closed; call distribute again")
        send_waiting(self.host)
        self._send()
        self.host.draw_alike()
        return _Epoch(self, next(self._epochs))

    def __len__(self) -> int:
        return len(self.loader)

    def close(self) -> None:
        """Drops the dataset in all replicas; batches that were not used yet are lost."""
        if not self._closed:
            self._closed = True
            portions.forget(self.key)
            send_waiting(self.host)
            self.host.call_in_children(portions.forget, self.key)

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
class _Epoch(Iterator[Any]):
    """One pass over the data."""

    def __init__(self, owner: DistributedLoader, number: int) -> None:
        self._owner = owner
        self._number = number
        self._open = True
        self._waiting = waiting_calls(owner.host)
        # As in torch: first the sampler, then the seed of the workers, then the first index.
        self._sampler = iter(owner.loader.batch_sampler)  # type: ignore[arg-type]  # never None here
        generator = owner.loader.generator
        self._seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        self._num_read = 0
        self._window: deque[tuple[int, list[Indices], tuple[int, ...]]] = deque()
        self._num_ahead = owner.source.num_ahead if _may_read_ahead(owner.loader) else 0
        if owner.source.num_workers:
            self._fill(self._num_ahead)

    def __iter__(self) -> "_Epoch":
        return self

    def __next__(self) -> Any:
        if not self._open:
            raise StopIteration
        self._fill(1)
        if not self._window:
            self.close()
            raise StopIteration
        number, parts, counts = self._window.popleft()
        self._fill(self._num_ahead)
        return self._batch(number, parts, counts)

    def skip(self) -> bool:
        """Passes over the next batch without loading it; whether there was one."""
        self._fill(1)
        if self._window:
            self._window.popleft()
            return True
        return False

    def close(self) -> None:
        """Ends the epoch in all replicas."""
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
            self._window.append((number, [indices[begin:end] for begin, end in offsets(sizes)], sizes))

    def _batch(self, number: int, parts: list[Indices], counts: tuple[int, ...]) -> Any:
        owner, here = self._owner, self._owner.host.replicas_here
        counts = tuple(counts[replica] for replica in here)
        first = self._portion(0, number, parts)
        owner.probe(first)
        first = self._portion(0, number, parts)
        leaves, structure = first.flatten(portions.load(first))
        others = [self._portion(place, number, parts) for place in range(1, len(here)) if counts[place]]
        joined = []
        for position, leaf in enumerate(leaves):
            own = leaf if counts[0] else emptied(leaf, len(first.indices))
            values = [own, *(PortionPart(portion, position, len(leaves)) for portion in others)]
            values += [emptied(leaf, len(first.indices))] * (len(here) - len(values))
            joined.append(PerReplica(values, counts))
        return assemble(joined, structure)

    def _portion(self, place: int, number: int, parts: list[Indices]) -> Portion:
        """What the replica at a place of this machine loads; the first also where nothing is left, for its form."""
        owner, replica = self._owner, self._owner.host.replicas_here[place]
        return Portion(
            owner.key,
            self._number,
            self._seed,
            replica,
            number,
            parts[replica] or parts[0][:1],
            tuple((each, own[replica]) for each, own, _ in self._window if own[replica]),
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


def _require_whole(loader: DataLoader[Any], host: InputHost) -> None:
    """Refuses a sampler that leaves out what is for other machines: that is divided here."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if host.input_pipeline[0] > 1 and isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise StrategyError(
            f"the DataLoader has a DistributedSampler for {sampler.num_replicas} replicas, but distribute divides each "
            f"global batch over the workers itself; leave the sampler out, or say auto_shard='off'"
        )


def _source_of(loader: DataLoader[Any]) -> Source:
    context = loader.multiprocessing_context
    return Source(
        loader.dataset,
        loader.collate_fn,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        timeout_s=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        start_method=context.get_start_method() if context is not None else None,
        pin_memory=loader.pin_memory,
        in_memory=isinstance(loader.dataset, data.TensorDataset | ArrayDataset),
    )
