"""Sends what steps use to the replicas once, and from then on only what the main program changes in it.

What a step changes lives in its replica; what the main program changes between two calls replaces it
everywhere. So every object that a step can reach and that can change (`kinds`) gets a name, by which it
travels as a reference. After a run the objects of replica 0 are noted as they are: what differs from
that before the next run, the main program has changed. Only what the function of a run can reach is
looked at. Objects that a step made have no name: they are part of what holds them.
"""

import bisect
import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch

from stratagem import _torch, _tree
from stratagem.objects import kinds
from stratagem.objects.comparing import FIXED, VALUES, Token
from stratagem.objects.kind import CONTENT, Kind
from stratagem.objects.kinds import Namespace
from stratagem.objects.known_objects import KnownObject, Stamp
from stratagem.objects.per_replica import Deferred, PerReplica
from stratagem.objects.random_kinds import GIVEN_RANDOM
from stratagem.objects.same_again import SameAgain
from stratagem.objects.steady import Steady, stays_itself
from stratagem.objects.token_maker import DEFINITIONS, TokenMaker, is_large
from stratagem.processes.packing import Raw, can_be_packed, global_names, travels_by_value
from stratagem.processes.registry import Registry, namespace_name, view_name

_MAX_NODES = 20_000  # then what the last run did not use is dropped: cycles that nobody else has are found no other way
_UNKNOWN = object()  # the token of what a child may have in any state

Members = tuple[dict[Any, Any], list[Any]]
"""Members that an object gets, by key, and the keys of those that it loses."""


class Delivery(NamedTuple):
    """What a child must know before it runs a function: objects that it lacks, changes in those that it has.

    Both with their names after them: an error that looks for what cannot be sent shall not show those.
    """

    new: list[Any]
    changes: list[Members]
    names: tuple[list[int], list[int]]
    dropped: list[int]


@final
class Captured:
    """What children have of the objects that the main program's functions use, as the main program remembers it.

    Args:
        registry: The names of distributed objects, whose attributes are watched too.
        steady: Those among them that need not be looked at one by one; whoever runs functions looks at all of them.
    """

    def __init__(self, registry: Registry, steady: Steady | None = None) -> None:
        self._registry = registry
        self._steady = steady or Steady(registry)
        self._numbers = itertools.count(1)
        self._nodes: dict[int, KnownObject] = {}  # by `id`
        self._distributed: dict[int, KnownObject] = {}  # by name
        self._seen: set[int] = set()  # distributed objects that have been looked at
        self._seen_version = -1  # of the registry
        self._num_notes = -1  # of those that are steady: that of which all have been looked at one by one
        self._dropped: list[int] = []
        self._memory: list[tuple[int, int, int]] | None = None  # of distributed tensors: from, to, name
        self._limit = _MAX_NODES
        self._in_run: list[KnownObject] = []  # what the function of the last delivery can reach
        self._again: _SameRun | None = None  # what must be so for all of that to be as it was then
        self.new_globals: dict[int, Collection[str]] = {}  # of namespaces, in the last delivery

    def prepare(self, *roots: Any) -> Delivery:
        """What to send along with a function and its arguments.

        Args:
            roots: All that is sent: the function, its arguments.
        """
        self._sweep()
        self._memory = None
        following: list[Any] = []
        generators: list[torch.Generator] = []
        _follow_arguments(roots[1:], following, generators)
        if not generators and self._is_same_again(roots[0], following):
            self.new_globals = {}
            return Delivery([], [], ([], []), [])
        for node in list(self._nodes.values()):  # another thread may drop some
            node.is_sent = True
        preparation = _Preparation(self)
        _follow_arguments(roots[0], following, generators)
        delivery = preparation.delivery(following, generators)
        self._in_run = preparation.reached()
        is_new = delivery.new or delivery.changes or delivery.dropped
        self._again = None
        if (
            not is_new
            and isinstance(roots[0], types.FunctionType)
            and (reached := SameAgain.of(self._in_run)) is not None
        ):
            names = {node.name for node in self._in_run}
            self._again = _SameRun(weakref.ref(roots[0]), self._surroundings(), names, reached)
        return delivery

    def _surroundings(self) -> tuple[int, bool, int]:
        """What a delivery depends on, besides the objects that its function can reach."""
        return self._registry.version, self._steady.is_so, self._steady.num_notes

    def _is_same_again(self, function: Any, following: Sequence[Any]) -> bool:
        """Whether a function is that of the last delivery, and all that it and its arguments can reach is as it was."""
        again = self._again
        if again is None or again.function() is not function or self._dropped:
            return False
        for each in following:
            node = self.node_of(each)
            is_known = each in self._registry if node is None else node.name in again.names
            if not is_known:
                return False
        return again.surroundings == self._surroundings() and again.reached.holds()

    def note_run(self) -> None:
        """Notes the state after a run in this process: what steps changed lives in their replicas."""
        if self._again is not None and self._steady.is_so and self._again.reached.holds():
            return
        tokens = TokenMaker(self.name_of, self.knows)
        reached = self._in_run
        if not self._steady.is_so:
            reached = list(dict.fromkeys([*reached, *self._distributed.values()]))
            self._num_notes = self._steady.num_notes
        for node in reached:
            obj = node.get()
            if obj is not None and not self.is_as_before(node, obj):
                node.state = tokens.state(node.kind, obj)
                self._again = None  # it may lead to others now
            if node.owners:
                node.keep_cell(obj)

    def forget(self) -> None:
        """Children may have anything: what the main program has is sent anew."""
        for key, node in list(self._nodes.items()):
            self.drop(key, node.name)
        self._in_run, self._again = [], None
        for node in self._distributed.values():
            node.state, node.stamp = dict.fromkeys(node.state, _UNKNOWN), None
        self._num_notes = -1

    def reference(self, obj: Any) -> Any:
        """The name of an object that children have."""
        node = self.node_of(obj)
        if node is None:
            return None if obj in self._registry else self._view_name(obj)
        if isinstance(node.kind, Namespace):
            return namespace_name(node.name, obj)
        return node.name if node.is_sent else None

    def name_of(self, obj: Any) -> Any:
        """The name of an object that children have or are about to get, distributed ones included."""
        node = self.node_of(obj)
        if node is not None:
            return node.name
        name = self._registry.reference(obj)
        return self._view_name(obj) if name is None else name

    def knows(self, obj: Any) -> bool:
        """Whether an object has a name of its own; quicker to tell than which."""
        return id(obj) in self._nodes or obj in self._registry

    def referring(self, otherwise: Callable[[Any], Any]) -> "References":
        """How objects are named on the way, given how those are that no function has captured."""
        return References(self, otherwise)

    # Names

    def _view_name(self, obj: Any) -> Any:
        """The name of a tensor in the memory of a distributed one: replicas have it in that of their own."""
        if type(obj) is not torch.Tensor or obj.requires_grad or obj.layout != torch.strided or not obj.numel():
            return None
        if self._memory is None:
            live = [(name, each) for name, each in self._registry.live().items() if isinstance(each, torch.Tensor)]
            self._memory = sorted((*_memory(each), name) for name, each in live if each.layout == torch.strided)
        start, end = _memory(obj)
        place = bisect.bisect_right(self._memory, (start, sys.maxsize)) - 1
        if place < 0 or end > self._memory[place][1]:
            return None
        offset = (start - self._memory[place][0]) // obj.element_size()
        return view_name(self._memory[place][2], obj, offset)

    def add(self, obj: Any, kind: Kind, owner: tuple[types.FunctionType, int] | None = None) -> KnownObject:
        """Gives an object a name; a cell is known by a function that has it."""
        node = self._nodes[id(obj)] = KnownObject(-next(self._numbers), kind)
        drop = functools.partial(_drop, weakref.ref(self), id(obj), node.name)
        if owner is not None:
            self.own(node, owner)
            node.keep_cell(obj)
        else:
            try:
                node.weak = weakref.ref(obj, drop)
            except TypeError:  # a list, a dict
                node.strong = obj
        return node

    def own(self, node: KnownObject, owner: tuple[types.FunctionType, int]) -> None:
        """Notes that a function has a cell."""
        function, place = owner
        if all(reference() is not function for reference, _ in node.owners):
            key = id(function.__closure__[place])  # type: ignore[index]
            drop = functools.partial(_drop_owner, weakref.ref(self), key, node.name)
            node.owners.append((weakref.ref(function, drop), place))

    def drop(self, key: int, name: int) -> None:
        """Forgets an object that is gone."""
        node = self._nodes.get(key)
        if node is not None and node.name == name:
            del self._nodes[key]
            node.let_go()
            self._dropped.append(name)

    def drop_owner(self, key: int, name: int) -> None:
        """Forgets a cell when no function has it any more."""
        node = self._nodes.get(key)
        if node is not None and node.name == name:
            node.owners = [each for each in node.owners if each[0]() is not None]
            if not node.owners and node.strong is None:
                self.drop(key, name)

    def node_of(self, obj: Any) -> KnownObject | None:
        """What is known of an object that functions use; a module is its dict of globals."""
        return self._nodes.get(id(vars(obj)) if type(obj) is types.ModuleType else id(obj))

    def is_as_before(self, node: KnownObject, obj: Any) -> bool:
        """Whether an object is as it was when this was last asked, but for objects in it that children know."""
        identities = node.kind.identities(obj)
        if node.stamp is not None and node.stamp.holds(identities):
            return True
        node.stamp = None if identities is None else self._stamp(identities, node.kind.used(obj))
        return False

    def _stamp(self, identities: tuple[int, ...], used: Iterable[Any]) -> Stamp | None:
        made = Stamp(identities, [], [], [])
        for each in used:
            if (node := self.node_of(each)) is not None:
                made.known.append(node)
            elif not stays_itself(each, self._registry):
                return None
            elif each in self._registry or isinstance(each, DEFINITIONS):
                made.alive.append(weakref.ref(each))
            else:
                made.kept.append(each)
        return made

    def distributed(self) -> tuple[list[KnownObject], set[type]]:
        """The distributed objects whose attributes are to be looked at one by one, and the classes of the others."""
        if self._seen_version != self._registry.version:
            self._note_distributed()
        if not self._steady.is_so or self._num_notes != self._steady.num_notes:
            # They may have been noted as they are before these children were sent that.
            self._num_notes = self._steady.num_notes if self._steady.is_so and self._steady.look() else -1
            return list(self._distributed.values()), set()
        rest = self._distributed.keys() - self._steady.names
        return [self._distributed[name] for name in sorted(rest)], self._steady.classes

    def _note_distributed(self) -> None:
        self._seen_version = self._registry.version
        live = self._registry.live()
        for name in self._seen - live.keys():
            self._distributed.pop(name, None)
        new, self._seen = live.keys() - self._seen - {0}, set(live)  # 0 is the strategy
        for name, obj in [(name, live[name]) for name in sorted(new)]:
            if (kind := kinds.kind_of_distributed(obj)) is not None:
                node = self._distributed[name] = KnownObject(name, kind)
                node.weak, node.is_sent = weakref.ref(obj), True
                # Its class, and what leads to nothing that can change, have come with it.
                known = {key for key, value in kind.read(obj).items() if key == CONTENT or not _can_change(value)}
                tokens = kind.tokens(obj, TokenMaker(self.name_of, self.knows).token)
                node.state = {key: token for key, token in tokens.items() if key in known}

    def take_dropped(self) -> list[int]:
        """The names of objects that are gone."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _sweep(self) -> None:
        """Lets go of objects that only this one still has."""
        if len(self._nodes) > self._limit:
            reached = {node.name for node in self._in_run}
            for key, node in zip(list(self._nodes), list(self._nodes.values()), strict=False):
                if node.name not in reached:
                    self.drop(key, node.name)
            self._limit = max(_MAX_NODES, 2 * len(self._nodes))
        is_done = False
        while not is_done:
            # Held by the node, and by the call. No tuples are made meanwhile: then others might be collected.
            unused = [
                (id(node.strong), node.name)
                for node in list(self._nodes.values())
                if node.strong is not None and sys.getrefcount(node.strong) == 2
            ]
            for key, name in unused:
                self.drop(key, name)
            is_done = not unused


class _SameRun(NamedTuple):
    """A delivery with nothing in it, and what must be so for the next to be like it."""

    function: "weakref.ref[types.FunctionType]"
    surroundings: tuple[int, bool, int]
    names: set[int]  # of all that the function and its arguments can reach
    reached: SameAgain


@final
class References:
    """Names objects on their way to a child.

    Args:
        captured: What functions have captured.
        otherwise: Names what they have not.
    """

    def __init__(self, captured: Captured, otherwise: Callable[[Any], Any]) -> None:
        self._captured = captured
        self._otherwise = otherwise

    def __call__(self, obj: Any) -> Any:
        name = self._captured.reference(obj)
        return self._otherwise(obj) if name is None else name

    def new_globals(self, content: dict[str, Any]) -> Collection[str]:
        """The names in the globals of functions that the child is given now.

        They come with each function too: what is built on the way may call it before the delivery is there.
        """
        node = self._captured.node_of(content)
        return () if node is None else self._captured.new_globals.get(node.name, ())


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor lies."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size() * bool(tensor.numel())


def _drop(reference: "weakref.ref[Captured]", key: int, name: int, _: Any) -> None:
    if (own := reference()) is not None:
        own.drop(key, name)


def _drop_owner(reference: "weakref.ref[Captured]", key: int, name: int, _: Any) -> None:
    if (own := reference()) is not None:
        own.drop_owner(key, name)


def _noting(captured: Captured, todo: list[Any]) -> Callable[[Any], Any]:
    """Gives the names of objects inside others, which are to be looked at too."""

    def name_of(obj: Any) -> Any:
        if captured.node_of(obj) is not None:
            todo.append(obj)
        return captured.name_of(obj)

    return name_of


@final
class _Preparation:
    """Finds what to send, once."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._changed: dict[int, tuple[KnownObject, Members]] = {}
        self._new: dict[int, tuple[KnownObject, Any]] = {}
        self._todo: list[Any] = []
        self._known: list[KnownObject] = []
        self._unknown: list[tuple[Any, Kind]] = []
        self._tokens = TokenMaker(_noting(captured, self._todo), captured.knows)
        self._looked_at: dict[int, KnownObject] = {}

    def reached(self) -> list[KnownObject]:
        """All that was found on the way."""
        return list((self._looked_at | {name: node for name, (node, _) in self._new.items()}).values())

    def delivery(self, roots: Sequence[Any], generators: Sequence[torch.Generator]) -> Delivery:
        nodes, classes = self._captured.distributed()
        self._todo += classes | {type(obj) for node in nodes if (obj := node.get()) is not None}
        for node in nodes:
            self._find_changes(node)
        self._todo += roots
        for each in generators:
            if self._captured.node_of(each) is None:
                node = self._captured.add(each, GIVEN_RANDOM)
                self._new[node.name] = node, each
            self._todo.append(each)
        self._name_all()
        self._note()
        new = {name: obj for name, (node, obj) in self._new.items() if not isinstance(node.kind, Namespace)}
        changes = {name: members for name, (_, members) in self._changed.items()}
        names = list(new), list(changes)
        self._captured.new_globals = {
            name: members.keys()
            for name, (node, (members, _)) in self._changed.items()
            if isinstance(node.kind, Namespace)
        }
        return Delivery(list(new.values()), list(changes.values()), names, self._captured.take_dropped())

    def _find_changes(self, node: KnownObject) -> None:
        """Looks at an object that children have, once."""
        obj = node.get()
        if node.name in self._looked_at or node.name in self._new or obj is None:
            return
        self._looked_at[node.name] = node
        if self._captured.is_as_before(node, obj):
            self._known += node.stamp.known  # type: ignore[union-attr]
            return
        now = self._tokens.state(node.kind, obj)
        if now != node.state or list(now) != list(node.state):
            self._change(node, obj, now)
        self._follow(obj)

    def _change(self, node: KnownObject, obj: Any, now: Mapping[Any, Token]) -> None:
        before = node.state
        removed = [key for key in before if key not in now]
        keys = [key for key, token in now.items() if key not in before or before[key] != token]
        if [key for key in now if key in before] != [key for key in before if key in now]:
            keys, removed = list(now), list(before)  # in another order
        members = node.kind.read(obj)
        changed = {key: members[key] for key in keys}
        self._put(node, changed, removed)
        if not is_large(obj):
            self._todo += [*changed.keys(), *changed.values()]

    def _put(self, node: KnownObject, members: Mapping[Any, Any], removed: Iterable[Any] = ()) -> None:
        """Enters members that a child must get."""
        if node.kind.leaves_out or (isinstance(node.kind, Namespace) and node.kind.is_whole):
            # Most functions use little of a module: what cannot be sent is left out, unless children have another.
            had = node.state.keys() - node.left_out
            node.left_out |= {
                key
                for key, each in members.items()
                if not (key in had or type(each) in VALUES or can_be_packed(each, self._captured.name_of))
            }
            members = {key: each for key, each in members.items() if key not in node.left_out}
        _, (values, gone) = self._changed.setdefault(node.name, (node, ({}, [])))
        values.update(members)
        gone += removed

    def _name_all(self) -> None:
        while self._known or self._todo or self._unknown:
            if self._known:
                self._find_changes(self._known.pop())
            elif self._todo:
                self._look_at(self._todo.pop())
            else:  # what children have is compared before more of what it holds gets a name
                value, kind = self._unknown.pop()
                if self._captured.node_of(value) is None:
                    self._name(value, kind)

    def _look_at(self, value: Any) -> None:
        if type(value) in FIXED:
            return
        if isinstance(value, types.ModuleType):
            if travels_by_value(value):
                self._use(vars(value), None)
        elif (node := self._captured.node_of(value)) is not None:
            self._find_changes(node)
        elif self._captured.name_of(value) is not None or (
            isinstance(value, DEFINITIONS) and not travels_by_value(value)
        ):
            return
        elif (found := kinds.kind_of(value)) is not None:
            self._unknown.append((value, found))
        elif (parts := kinds.parts_of(value)) is not None:
            self._todo += parts
        else:
            self._tokens.token(value)  # finds what it refers to
            self._todo += _class_with_methods(value)

    def _name(self, value: Any, kind: Kind) -> None:
        node = self._captured.add(value, kind)
        self._new[node.name] = node, value
        if is_large(value):
            self._tokens.state(kind, value)  # finds what it refers to
            return
        members = kind.read(value)
        if kind.is_seeded:
            self._changed[node.name] = node, (dict(members), [])
        elif not isinstance(value, torch.Tensor | np.ndarray):
            self._todo += [*members.keys(), *members.values()]
        self._follow(value)

    def _follow(self, value: Any) -> None:
        """Goes on to what an object uses besides its members."""
        if not isinstance(value, torch.Tensor | np.ndarray | types.CellType | types.FunctionType):
            self._todo.append(type(value))
        if isinstance(value, type):
            self._todo += value.__bases__
        if isinstance(value, types.FunctionType) and not _torch.compiling.is_compiled(value):
            if not kinds.are_of_library(value.__globals__):
                self._use(value.__globals__, global_names(value.__code__))
            for place, cell in enumerate(value.__closure__ or ()):
                self._name_cell(value, place, cell)

    def _name_cell(self, function: types.FunctionType, place: int, cell: types.CellType) -> None:
        node = self._captured.node_of(cell)
        if node is not None:
            self._captured.own(node, (function, place))
            self._find_changes(node)
            return
        kind = kinds.kind_of(cell)
        node = self._captured.add(cell, kind, (function, place))  # type: ignore[arg-type]
        self._new[node.name] = node, cell
        self._todo += kind.read(cell).values()  # type: ignore[union-attr]

    def _use(self, content: dict[str, Any], names: Iterable[str] | None) -> None:
        """Lets children have names of a namespace; all if it is a module that is used whole."""
        node = self._captured.node_of(content)
        if node is None:
            node = self._captured.add(content, Namespace())
            self._new[node.name] = node, content
        own: Any = node.kind
        before = set(own.read(content)) if not own.is_whole else None
        if names is None:
            own.is_whole = True
        else:
            own.names.update(names)
        if before is not None:
            added = {key: each for key, each in own.read(content).items() if key not in before}
            if added:
                self._put(node, added)
                self._todo += self._changed[node.name][1][0].values()
        self._find_changes(node)

    def _note(self) -> None:
        """Takes the state that children will have as the one to compare with."""
        tokens = TokenMaker(self._captured.name_of, self._captured.knows)
        for node, _ in [*self._new.values(), *self._changed.values()]:
            obj = node.get()
            if obj is not None:
                node.state = tokens.state(node.kind, obj)


def _class_with_methods(value: Any) -> list[type]:
    """The class of a value, if methods of it are functions, which use globals; not that of a lock, say."""
    return [type(value)] if any(isinstance(each, types.FunctionType) for each in vars(type(value)).values()) else []


def _can_change(value: Any) -> bool:
    """Whether a value is of a kind, or leads to one that is."""
    return not (type(value) in FIXED or kinds.is_opaque(value))


def _follow_arguments(value: Any, todo: list[Any], generators: list[torch.Generator]) -> None:
    """Finds what of a function and its arguments is followed: of values of single replicas only their generators."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, PerReplica):
            own = [part for part in each.held if not isinstance(part, torch.Tensor)]  # as most are: quicker to tell
            generators += [part for part in own if isinstance(part, torch.Generator)]
        elif type(each) in FIXED or isinstance(each, _OF_ONE_REPLICA):
            continue
        elif type(each) is tuple:
            left += reversed(each)
        elif any(isinstance(leaf, _OF_ONE_REPLICA) for leaf in _tree.leaves(each)):
            parts = each.values() if isinstance(each, dict) else each if isinstance(each, tuple | list) else ()
            left += reversed(list(parts))
        else:
            todo.append(each)


_OF_ONE_REPLICA = (PerReplica, Deferred, Raw)


def receive(delivery: Delivery, registry: Registry, replica: int) -> None:
    """In a child: takes what `Captured.prepare` found.

    Args:
        delivery: What came.
        registry: The objects of this child.
        replica: Its number.
    """
    for name in delivery.dropped:
        registry.remove(name)
    for name, obj in zip(delivery.names[0], delivery.new, strict=True):
        registry.keep(name, obj)
    for name, (members, removed) in zip(delivery.names[1], delivery.changes, strict=True):
        obj = registry.resolve(name)
        kind = kinds.kind_of_distributed(obj) if name > 0 else kinds.kind_of_known(obj)
        kind.write(obj, members, removed, replica)  # type: ignore[union-attr]
