"""Decides how data of each kind is distributed, and refuses what cannot be."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stratagem import _tree
from stratagem.errors import StrategyError
from stratagem.inputs.arrays import ArrayDataset, as_they_are
from stratagem.inputs.indexed import DistributedLoader
from stratagem.inputs.iterables import DistributedStream, FunctionFeed, MadeFeed, OneTimeFeed, RepeatedFeed, StreamFeed
from stratagem.inputs.own_data import OneMachine, OwnData, files_of_this_machine
from stratagem.inputs.reader import InputContext, InputHost
from stratagem.inputs.splitting import Evenness

Distributed = DistributedLoader | DistributedStream | OwnData
AUTO_SHARD = ("data", "file", "off")


def distribute(
    data: Any,
    host: InputHost,
    *,
    global_batch_size: int | None = None,
    shuffle: bool = False,
    uneven: str = "allow",
    auto_shard: str = "data",
) -> Distributed:
    """Divides data over the replicas: replica i gets the i-th contiguous slice of each global batch.

    The result can be iterated many times, once per epoch. Every sample is used exactly once per
    epoch, in the order that one device would see. Slices are as even as possible, the larger ones
    first; a replica for which nothing is left gets an empty batch. A batch keeps its structure, with
    a `PerReplica` at every leaf (a list becomes a tuple), so that it can be the `args` of a run;
    a batch that is a single tensor stays one: write `args=(batch,)`.

    Args:
        data: A DataLoader, whose batches are global batches; a dataset, or tensors or arrays (also
            in a tuple or dict); an iterable of global batches; a function that returns one for
            each epoch.
        host: The strategy.
        global_batch_size: The size of a global batch, for datasets, tensors and arrays.
        shuffle: Whether datasets, tensors and arrays are put in a new order for each epoch.
        uneven: `allow`, or `error` to refuse batches that do not divide evenly.
        auto_shard: How several machines share data; see `Strategy.distribute`.
    Raises:
        StrategyError: The data is of another kind, or does not go with the other arguments.
        UnevenDataError: A batch does not divide evenly, and `uneven` is `error`.
    """
    if global_batch_size is not None and (type(global_batch_size) is not int or global_batch_size < 1):
        raise StrategyError(f"global_batch_size must be a positive int, got {global_batch_size!r}")
    if shuffle and global_batch_size is None:
        raise StrategyError(
            "shuffle=True goes with global_batch_size=, for datasets, tensors and arrays; "
            "a DataLoader or an iterable of batches has its own order"
        )
    if auto_shard not in AUTO_SHARD:
        raise StrategyError(f"auto_shard is one of {', '.join(map(repr, AUTO_SHARD))}, got {auto_shard!r}")
    if auto_shard != "data" and host.input_pipeline[0] > 1:
        own = files_of_this_machine(data, host) if auto_shard == "file" else data
        return OwnData(
            distribute(own, OneMachine(host), global_batch_size=global_batch_size, shuffle=shuffle, uneven=uneven), host
        )
    evenness = Evenness(uneven, host.num_replicas)
    if global_batch_size is not None:
        return _of_examples(data, host, evenness, global_batch_size, shuffle)
    _require_batches(data)
    if isinstance(data, DataLoader):
        return _of_loader(data, host, evenness)
    return DistributedStream(_feed_of(data), host, evenness)


def distribute_from_function(fn: Callable[[InputContext], Iterable[Any]], host: InputHost) -> Distributed:
    """Gives each replica batches that a function makes, already of per-replica size.

    Args:
        fn: Gets an `InputContext` and returns an iterable of per-replica batches; as many of them as
            there are replicas make one step. It is called once if what it returns can be iterated
            again (a list, a DataLoader), and once per epoch if not (a generator).
        host: The strategy.
    Raises:
        StrategyError: `fn` is not callable, or does not return an iterable.
    """
    if not callable(fn):
        raise StrategyError(f"distribute_from_function takes a function of an InputContext, got {type(fn).__name__}")
    context = InputContext(*host.input_pipeline, host.num_replicas)
    stream = DistributedStream(FunctionFeed(fn, context), host, Evenness("allow", host.num_replicas), per_replica=True)
    return OwnData(stream, host) if host.input_pipeline[0] > 1 else stream


def _of_examples(data: Any, host: InputHost, evenness: Evenness, global_batch_size: int, shuffle: bool) -> Distributed:
    """Data that has single examples, of which batches are made here."""
    if _are_arrays(data):
        arrays = ArrayDataset(data)
        return _of_loader(_loader(arrays, global_batch_size, shuffle, as_they_are), host, evenness)
    if isinstance(data, IterableDataset):
        if shuffle:
            raise StrategyError("shuffle=True needs data with indices, got an IterableDataset; shuffle inside it")
        return _of_loader(DataLoader(data, batch_size=global_batch_size), host, evenness)
    if isinstance(data, DataLoader) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise StrategyError(
            f"global_batch_size goes with datasets, tensors and arrays; a {type(data).__name__} "
            f"makes its own batches, so leave it out"
        )
    return _of_loader(_loader(data, global_batch_size, shuffle, None), host, evenness)


def _loader(
    dataset: Any, global_batch_size: int, shuffle: bool, collate_fn: Callable[[Any], Any] | None
) -> DataLoader[Any]:
    # A random sampler refuses to be made for no examples.
    shuffle = shuffle and len(dataset) > 0
    return DataLoader(dataset, batch_size=global_batch_size, shuffle=shuffle, collate_fn=collate_fn)


def _of_loader(loader: DataLoader[Any], host: InputHost, evenness: Evenness) -> Distributed:
    """By index where the loader has indices and iterates as torch's own does; else by its batches."""
    own_iteration = type(loader).__iter__ is not DataLoader.__iter__
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None or own_iteration:
        return DistributedStream(RepeatedFeed(loader), host, evenness)
    return DistributedLoader(loader, host, evenness)


def _feed_of(data: Any) -> StreamFeed:
    if isinstance(data, Iterator):
        return OneTimeFeed(data)
    if hasattr(data, "__iter__"):
        return RepeatedFeed(data)
    return MadeFeed(data)


def _are_arrays(data: Any) -> bool:
    """Whether this is the whole data in memory, and not a sequence of batches."""
    if isinstance(data, torch.Tensor | np.ndarray | dict):
        return True
    if not isinstance(data, tuple):
        return False
    leaves = _tree.leaves(data)
    return bool(leaves) and all(isinstance(each, torch.Tensor | np.ndarray) for each in leaves)


def _require_batches(data: Any) -> None:
    """Refuses what does not say by itself what its global batches are."""
    arrays = torch.Tensor, np.ndarray
    direct = isinstance(data, tuple) and any(isinstance(each, arrays) for each in data)
    if direct or isinstance(data, (*arrays, dict)) or _tree.is_namedtuple(data):
        raise StrategyError(
            f"a {type(data).__name__} of tensors or arrays is divided into batches by distribute, so it needs "
            f"global_batch_size=; an iterable of batches can be a list, a DataLoader or a generator"
        )
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise StrategyError(f"a dataset ({type(data).__name__}) needs global_batch_size=, or a DataLoader around it")
    if isinstance(data, str | bytes | type) or not (hasattr(data, "__iter__") or callable(data)):
        raise StrategyError(
            f"distribute cannot iterate {type(data).__name__} {data!r}; it takes a DataLoader, a dataset, tensors "
            f"or arrays with global_batch_size=, an iterable of global batches, or a function that returns one"
        )
