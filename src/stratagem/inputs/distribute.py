"""Decides how data of each kind is distributed, and refuses what cannot be."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from stratagem import _tree
from stratagem._checks import require_count
from stratagem.errors import StrategyError
from stratagem.inputs.arrays import ArrayDataset, as_they_are, is_table, of_columns
from stratagem.inputs.indexed import DistributedLoader
from stratagem.inputs.iterables import (
    AheadFeed,
    DistributedStream,
    FunctionFeed,
    MadeFeed,
    OneTimeFeed,
    RepeatedFeed,
    StreamFeed,
)
from stratagem.inputs.own_data import OneMachine, OwnData, files_of_this_machine
from stratagem.inputs.reader import InputContext, InputHost
from stratagem.inputs.splitting import BatchDim, Evenness
from stratagem.inputs.tf_data import in_batches, is_tf_dataset

Distributed = DistributedLoader | DistributedStream | OwnData
AUTO_SHARD = ("data", "file", "off")
_OPTIONS = ("global_batch_size", "shuffle", "uneven", "auto_shard", "batch_dim", "prefetch")


def distribute(
    data: Any,
    host: InputHost,
    *,
    global_batch_size: int | None = None,
    shuffle: bool = False,
    uneven: str = "allow",
    auto_shard: str = "data",
    batch_dim: BatchDim = 0,
    prefetch: bool = False,
) -> Distributed:
    """Divides data over the replicas: replica i gets the i-th contiguous slice of each global batch.

    The result can be iterated many times, once per epoch. Every sample is used exactly once per
    epoch, in the order that one device would see. Slices are as even as possible, the larger ones
    first; a replica for which nothing is left gets a copy of one example, which counts for nothing.
    A batch keeps its structure, with a `PerReplica` at every leaf (a list becomes a tuple), so that
    it can be the `args` of a run; a batch that is a single tensor stays one: write `args=(batch,)`.

    Args:
        data: A DataLoader, whose batches are global batches; a dataset, or tensors, arrays or tables
            (also in a tuple or dict); an iterable of global batches; a tf.data dataset; a function that returns an
            iterable for each epoch.
        host: The strategy.
        global_batch_size: The size of a global batch, for datasets, tensors and arrays.
        shuffle: Whether datasets, tensors and arrays are put in a new order for each epoch.
        uneven: `allow`, or `error` to refuse batches that do not divide evenly.
        auto_shard: How several machines share data; see `Strategy.distribute`.
        batch_dim: Along which dimension batches have their examples; see `Strategy.distribute`.
        prefetch: Whether the main program reads the next batch while replicas compute.
    Raises:
        StrategyError: The data is of another kind, or does not go with the other arguments.
        UnevenDataError: A batch does not divide evenly, and `uneven` is `error`.
    """
    if global_batch_size is not None:
        require_count(global_batch_size=global_batch_size)
    for name, option in (("shuffle", shuffle), ("prefetch", prefetch)):
        if not isinstance(option, bool):
            raise StrategyError(f"{name} is True or False, got {option!r}")
    if is_tf_dataset(data):
        data, global_batch_size = in_batches(data, global_batch_size, shuffle), None
    if shuffle and global_batch_size is None:
        raise StrategyError(
            "shuffle=True goes with global_batch_size=, for datasets, tensors and arrays; "
            "a DataLoader or an iterable of batches has its own order"
        )
    if auto_shard not in AUTO_SHARD:
        raise StrategyError(f"auto_shard is one of {', '.join(map(repr, AUTO_SHARD))}, got {auto_shard!r}")
    if auto_shard != "off" and not isinstance(host, OneMachine):
        require_whole(data)
    if auto_shard != "data" and host.input_pipeline[0] > 1:
        own = files_of_this_machine(data, host) if auto_shard == "file" else data
        batches = distribute(
            own,
            OneMachine(host),
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            uneven=uneven,
            batch_dim=batch_dim,
            prefetch=prefetch,
        )
        return OwnData(batches, host)
    evenness = Evenness(uneven, host.num_replicas)
    if global_batch_size is not None:
        data = _loader_of(of_columns(data), global_batch_size, shuffle, batch_dim)
        batch_dim = 0 if isinstance(data.dataset, ArrayDataset) else batch_dim
    _require_batches(data)
    if isinstance(data, DataLoader) and _has_indices(data):
        return DistributedLoader(data, host, evenness)
    return DistributedStream(_feed_of(data, prefetch), host, evenness, batch_dim=batch_dim)


def require_known_options(unknown: Mapping[str, Any]) -> None:
    """Refuses options that `distribute` does not have, and says which to write.

    Raises:
        StrategyError: There is one.
    """
    for name, value in unknown.items():
        close = difflib.get_close_matches(name, _OPTIONS, n=1)
        if name == "batch_size":
            hint = f"write global_batch_size={value!r}: the number of rows that all replicas together take in one step"
        elif name in inspect.signature(DataLoader).parameters:
            hint = f"give it to a DataLoader: strategy.distribute(DataLoader(data, {name}={value!r}, ...))"
        else:
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(_OPTIONS)}"
        raise StrategyError(f"distribute has no option {name!r}; {hint}")


def distribute_from_function(
    fn: Callable[[InputContext], Iterable[Any]], host: InputHost, *, batch_dim: BatchDim = 0
) -> Distributed:
    """Gives each replica batches that a function makes, already of per-replica size.

    Args:
        fn: Gets an `InputContext` and returns an iterable of per-replica batches, or of single examples; as many of
            them as there are replicas make one step. It is called once if what it returns can be iterated
            again (a list, a DataLoader), and once per epoch if not (a generator).
        host: The strategy.
        batch_dim: Along which dimension batches have their examples.
    Raises:
        StrategyError: `fn` is not callable, or does not return an iterable.
    """
    if not callable(fn):
        raise StrategyError(f"distribute_from_function takes a function of an InputContext, got {type(fn).__name__}")
    try:
        inspect.signature(fn).bind(None)
    except TypeError:
        raise StrategyError(
            f"distribute_from_function takes a function of one argument, its InputContext, got "
            f"{getattr(fn, '__name__', fn)}{inspect.signature(fn)}"
        ) from None
    except ValueError:
        pass  # one of C, which does not say
    context = InputContext(*host.input_pipeline, host.num_replicas)
    evenness = Evenness("allow", host.num_replicas)
    stream = DistributedStream(FunctionFeed(fn, context), host, evenness, per_replica=True, batch_dim=batch_dim)
    return OwnData(stream, host) if host.input_pipeline[0] > 1 else stream


def _loader_of(data: Any, global_batch_size: int, shuffle: bool, batch_dim: BatchDim) -> DataLoader[Any]:
    """Makes batches of data that has single examples."""
    if _are_arrays(data):
        return _loader(ArrayDataset(data, batch_dim), global_batch_size, shuffle, as_they_are)
    if isinstance(data, IterableDataset):
        if shuffle:
            raise StrategyError("shuffle=True needs data with indices, got an IterableDataset; shuffle inside it")
        return DataLoader(data, batch_size=global_batch_size)
    if isinstance(data, DataLoader) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise StrategyError(
            f"global_batch_size goes with datasets, tensors and arrays; a {type(data).__name__} "
            f"makes its own batches, so leave it out"
        )
    return _loader(data, global_batch_size, shuffle, None)


def _loader(
    dataset: Any, global_batch_size: int, shuffle: bool, collate_fn: Callable[[Any], Any] | None
) -> DataLoader[Any]:
    # A random sampler refuses to be made for no examples.
    shuffle = shuffle and len(dataset) > 0
    return DataLoader(dataset, batch_size=global_batch_size, shuffle=shuffle, collate_fn=collate_fn)


def _has_indices(loader: DataLoader[Any]) -> bool:
    """Whether replicas can load by index, so that nothing is cut: it iterates as torch's own, by indices."""
    own_iteration = type(loader).__iter__ is not DataLoader.__iter__
    return not (isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None or own_iteration)


def require_whole(data: Any) -> None:
    """Refuses a DataLoader whose sampler leaves out what is for other replicas: that is divided here."""
    if not isinstance(data, DataLoader):
        return
    for sampler in (data.sampler, getattr(data.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise StrategyError(
                f"the DataLoader has a DistributedSampler that leaves {sampler.num_replicas - 1} of "
                f"{sampler.num_replicas} examples to others, but each global batch is divided over the "
                f"replicas here; remove the sampler (shuffle=True on the DataLoader shuffles), or say "
                f"auto_shard='off' if every machine has its own part"
            )


def _feed_of(data: Any, prefetch: bool) -> StreamFeed:
    if isinstance(data, Iterator):
        return OneTimeFeed(data, prefetch=prefetch)
    feed = RepeatedFeed(data) if hasattr(data, "__iter__") else MadeFeed(data)
    return AheadFeed(feed) if prefetch else feed


def _are_arrays(data: Any) -> bool:
    """Whether this is the whole data in memory, and not a sequence of batches."""
    if isinstance(data, torch.Tensor | np.ndarray | dict):
        return True
    if not isinstance(data, tuple) and not _tree.is_record(data):
        return False
    leaves = _tree.leaves(data)
    return bool(leaves) and all(isinstance(each, torch.Tensor | np.ndarray) for each in leaves)


def _require_batches(data: Any) -> None:
    """Refuses what does not say by itself what its global batches are."""
    arrays = torch.Tensor, np.ndarray
    direct = isinstance(data, tuple) and any(isinstance(each, arrays) for each in data)
    if is_table(data) or (isinstance(data, tuple) and any(map(is_table, data))):
        raise StrategyError(
            f"a table ({type(data).__name__}) is divided into batches of its rows by global_batch_size="
        )
    if hasattr(data, "column_names") and hasattr(data, "features"):
        raise StrategyError(
            f"a {type(data).__module__}.{type(data).__name__} has single examples, so it needs global_batch_size=, or "
            f"a DataLoader around it; for batches of its own give a function: lambda: data.iter(batch_size=32)"
        )
    if direct or isinstance(data, (*arrays, dict)) or _tree.is_namedtuple(data) or _tree.is_record(data):
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
