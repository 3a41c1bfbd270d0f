"""One replica's part of a global batch, loaded in the process that uses it.

Owns the sources that this process knows, by key, and the loaders of the epochs under way. The
functions at the end are what the controller calls in its children, and in itself.
"""

from dataclasses import dataclass, field
from typing import Any, final

from stratagem import _tree
from stratagem.errors import StrategyError
from stratagem.inputs.loading import Indices, Loader, Numbered, Source
from stratagem.inputs.splitting import flatten
from stratagem.objects.per_replica import Deferred


@final
class Lease:
    """As long as anybody holds it, the children keep the source that it stands for."""


@final
@dataclass(frozen=True)
class Portion:
    """What one replica has to load for one global batch.

    Args:
        key: Which source.
        epoch: Which pass over it.
        seed: The base seed of the workers in this epoch.
        replica: Whose part.
        number: The number of the batch in its epoch.
        indices: What the part consists of.
        ahead: The parts that follow, to be loaded early.
        template: The structure of a batch, if it cannot be told from the batch alone.
        lease: Keeps the source; stays in the controller.
    """

    key: int
    epoch: int
    seed: int
    replica: int
    number: int
    indices: Indices
    ahead: tuple[Numbered, ...]
    template: Any = None
    lease: Lease | None = field(default=None, compare=False)

    def __reduce__(self) -> Any:
        return Portion, (
            self.key,
            self.epoch,
            self.seed,
            self.replica,
            self.number,
            self.indices,
            self.ahead,
            self.template,
        )

    def leaves(self) -> list[Any]:
        """The leaves of the batch, loaded once however many ask."""
        if self.key not in _known:
            raise StrategyError(
                "the data of this batch is no longer here: what distribute returned was closed; "
                "use the batch before that"
            )
        return _known[self.key].leaves(self)

    def flatten(self, batch: Any) -> tuple[list[Any], _tree.Structure]:
        """The leaves of a batch of this portion, and how they hang together."""
        if self.template is None:
            return flatten(batch)
        structure = _tree.structure(self.template)
        try:
            return _tree.flatten_as(structure, batch), structure
        except ValueError as error:
            raise StrategyError(
                f"global batch {self.number} has another structure than the first: {error}; "
                f"let collate_fn return the same structure each time"
            ) from error


@final
class PortionPart(Deferred):
    """One leaf of a portion."""

    def __init__(self, portion: Portion, leaf: int, num_leaves: int) -> None:
        self._portion = portion
        self._leaf = leaf
        self._num_leaves = num_leaves

    def load(self) -> Any:
        leaves = self._portion.leaves()
        if len(leaves) != self._num_leaves:
            raise StrategyError(
                f"collate_fn gave replica {self._portion.replica} {len(leaves)} parts in global batch "
                f"{self._portion.number}, and replica 0 {self._num_leaves}; "
                f"let it return the same structure whatever the number of examples"
            )
        return leaves[self._leaf]

    def __repr__(self) -> str:
        return f"<{len(self._portion.indices)} examples, loaded in replica {self._portion.replica}>"


@final
class _KnownSource:
    """A source in this process."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._loaders: dict[tuple[int, int], Loader] = {}
        self._waiting: dict[int, Loader] = {}  # for another epoch, by replica
        self._latest: dict[tuple[int, int], tuple[int, list[Any]]] = {}
        self._ended: set[int] = set()

    def load(self, portion: Portion) -> Any:
        """The batch of a portion; in an epoch that has ended, nothing is loaded ahead."""
        if portion.epoch in self._ended:
            return self.source.fetch(portion.indices)
        place = portion.epoch, portion.replica
        if place not in self._loaders:
            waiting = self._waiting.pop(portion.replica, None)
            self._loaders[place] = waiting or self.source.loader(portion.seed + portion.replica)
        return self._loaders[place].load(portion.number, portion.indices, portion.ahead)

    def leaves(self, portion: Portion) -> list[Any]:
        place = portion.epoch, portion.replica
        number, leaves = self._latest.get(place, (None, []))
        if number != portion.number:
            leaves = portion.flatten(self.load(portion))[0]
            self._latest[place] = portion.number, leaves
        return leaves

    def release(self, epoch: int) -> None:
        self._ended.add(epoch)
        for place in [each for each in self._loaders if each[0] == epoch]:
            loader = self._loaders.pop(place)
            if place[1] not in self._waiting and loader.go_on():
                self._waiting[place[1]] = loader
            else:
                loader.close()
        for place in [each for each in self._latest if each[0] == epoch]:
            del self._latest[place]

    def close(self) -> None:
        for loader in (*self._loaders.values(), *self._waiting.values()):
            loader.close()


_known: dict[int, _KnownSource] = {}


def register(key: int, source: Source) -> None:
    """Makes a source known in this process."""
    _known.setdefault(key, _KnownSource(source))


def load(portion: Portion) -> Any:
    """The whole batch of a portion, in this process."""
    return _known[portion.key].load(portion)


def release(key: int, epoch: int) -> None:
    """Ends what works for an epoch in this process."""
    if key in _known:
        _known[key].release(epoch)


def forget(key: int) -> None:
    """Drops a source from this process."""
    known = _known.pop(key, None)
    if known is not None:
        known.close()
