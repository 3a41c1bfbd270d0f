"""Moving averages of weights: `ExponentialMovingAverage`.

Owns the averages, which are parameters without gradients: those made in a scope are distributed like any others. How
they come to the replicas and back is up to `strategies`.
"""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch

from stratagem import _torch
from stratagem.engine import context
from stratagem.engine.queued.main_program import settle_all
from stratagem.errors import StrategyError

Variables = torch.nn.Module | torch.Tensor | Iterable[torch.Tensor] | Iterable[tuple[str | None, torch.Tensor]]
Count = int | torch.Tensor | Callable[[], Any]

_UNFILLED = "unfilled"


@final
class ExponentialMovingAverage(torch.nn.Module):
    """Keeps an exponential moving average of each variable, as in `tf.train`: older values count less and less.

    The first `apply` takes the values as they are; each later one makes every average
    `decay * average + (1 - decay) * value`. To apply it in a function that is run, make it and call `track` in the
    scope, where the model is made; every replica then has the same averages, and so has the main program after the
    run. Between runs `apply` needs no preparation.

    Args:
        decay: The part of the average that stays in each update, from 0 to 1; 0.999 is usual.
        num_updates: The number of updates so far: a number, a tensor of one number, or a function. The decay is
            then at most `(1 + num_updates) / (10 + num_updates)`, so that early averages follow quickly. In a run,
            the function's answer in replica 0 counts for all.
        zero_debias: Whether averages begin at zero instead of the first values and are divided by `1 - decay ** t`:
            then the weight of each value depends on its age alone, also that of the first.
    Raises:
        StrategyError: `decay` or `num_updates` is out of range.
    Example:
        >>> weight = torch.tensor([1.0])
        >>> ema = ExponentialMovingAverage(0.75).apply([("weight", weight)])
        >>> _ = weight.fill_(5.0)
        >>> ema.apply().average(weight).item()
        2.0
    """

    decay: float
    num_updates: Count | None

    def __init__(self, decay: float, num_updates: Count | None = None, zero_debias: bool = False) -> None:
        super().__init__()
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
            raise StrategyError(f"decay is a number from 0 to 1, got {decay!r}; 0.999 is usual")
        if zero_debias and decay == 1:
            raise StrategyError("with zero_debias decay is below 1, got 1: the average would stay zero for ever")
        if num_updates is not None and not callable(num_updates):
            _checked_count(num_updates)
        self.decay = float(decay)
        self.zero_debias = bool(zero_debias)
        if isinstance(num_updates, torch.Tensor):
            # As a buffer it is distributed, so that every replica sees how the program counts it up.
            self.register_buffer("num_updates", num_updates, persistent=False)
        else:
            self.num_updates = num_updates

    def track(self, variables: Variables) -> "ExponentialMovingAverage":
        """Makes room for the averages of variables; in a scope, so that they are distributed. Returns itself.

        Args:
            variables: A module, whose parameters are meant, or tensors, or pairs of name and tensor.
        Example:
            >>> ema = ExponentialMovingAverage(0.99).track(torch.nn.Linear(2, 1))
            >>> list(ema.state_dict())
            ['weight/ExponentialMovingAverage', 'bias/ExponentialMovingAverage', 'unfilled']
        """
        known = self._known()
        new = {id(each): (name, each) for name, each in _named(variables) if id(each) not in known}
        if not new:
            return self
        replica = context.current_replica()
        if replica is not None:
            name, variable = next(iter(new.values()))
            raise StrategyError(
                f"averages are made in the main program, but replica {replica.replica_id_in_sync_group} met "
                f"{len(new)} variable(s) without one (first: {name or 'a tensor'!r} of shape {tuple(variable.shape)}); "
                f"make them before the run:\n"
                f"    with strategy.scope():\n"
                f"        ema = sg.ExponentialMovingAverage({self.decay}).track(model)"
            )
        settle_all()
        taken = [name for group in self._groups() for name in group.names]
        for name, _ in new.values():
            taken.append(_unique(str(len(taken)) if name is None else name, taken))
        group = _Shadows(taken[-len(new) :], [variable for _, variable in new.values()])
        self.add_module(f"shadows/{len(list(self.children()))}", group)
        for strategy in context.holders_of(self):
            strategy.adopt(group)  # the replicas have this object already, and get what it now holds
        return self

    def apply(self, variables: Any = None) -> "ExponentialMovingAverage":
        """Moves the averages towards the values that the variables have now. Returns itself.

        Args:
            variables: As for `track`, which is done for new ones; by default all that have an average.
        Raises:
            StrategyError: In a run, a variable has no average yet.
        """
        if callable(variables) and not isinstance(variables, torch.nn.Module):
            return super().apply(variables)  # a model that holds this one calls a function on all of its modules
        if variables is None:
            chosen = list(self._known().values())
            if not chosen:
                raise StrategyError("nothing is averaged yet; give apply a module or tensors the first time")
        else:
            named = list(_named(variables))
            known = self.track(named)._known()
            chosen = list({id(each): known[id(each)] for _, each in named}.values())
        settle_all()
        decay, weights = self._current_decay(), defaultdict(list)
        for group, index in chosen:
            unfilled = group.unfilled[index]
            # The division by what the decays leave, worked into the weight: the average itself is what is kept.
            weight = 1.0 if unfilled == 1 else (1 - decay) / (1 - decay * unfilled)
            group.unfilled[index] = decay * unfilled if self.zero_debias else 0.0
            weights[weight].append((group.shadow(index), group.variables[index].detach()))
        with torch.no_grad(), _shared_work() as own_part:
            for weight, pairs in weights.items():
                shadows, values = zip(*(own_part(shadow, value.to(shadow)) for shadow, value in pairs), strict=True)
                if weight == 1:
                    _torch.tensors.foreach_copy_(shadows, values)
                else:
                    _torch.tensors.foreach_lerp_(shadows, values, weight)
        return self

    def average(self, variable: torch.Tensor) -> torch.Tensor:
        """The average of a variable: the parameter, without gradients, that later calls of `apply` go on changing.

        Raises:
            StrategyError: `apply` has not been called for this variable.
        """
        group, index = self._find(variable)
        if group.unfilled[index] == 1:
            raise StrategyError(f"{group.names[index]!r} has no average yet; call apply first")
        return group.shadow(index)

    def average_name(self, variable: torch.Tensor | str) -> str:
        """The name of a variable's average, in `state_dict` and `variables_to_restore`.

        Args:
            variable: A variable that has an average, or any name.
        Example:
            >>> ExponentialMovingAverage(0.9).average_name("layer.weight")
            'layer.weight/ExponentialMovingAverage'
        """
        if isinstance(variable, torch.Tensor):
            group, index = self._find(variable)
            variable = group.names[index]
        return f"{variable}/ExponentialMovingAverage"

    def variables_to_restore(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        """What to load a module from, so that it has averages for weights: names in a checkpoint, and the tensors.

        Works before the first `apply`, for programs that only evaluate.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> ema = ExponentialMovingAverage(0.9).apply(model)
            >>> saved = {**model.state_dict(), **ema.state_dict()}
            >>> restored = torch.nn.Linear(2, 1)
            >>> with torch.no_grad():
            ...     for name, tensor in ExponentialMovingAverage(0.9).variables_to_restore(restored).items():
            ...         _ = tensor.copy_(saved[name])
            >>> torch.equal(restored.weight, model.weight)
            True
        """
        names = {id(each): name for name, each in _named(module)}
        names |= {key: group.names[index] for key, (group, index) in self._known().items() if key in names}
        return {
            self.average_name(str(names[id(each)])) if id(each) in names else name: each
            for name, each in module.state_dict(keep_vars=True).items()
            if isinstance(each, torch.Tensor)
        }

    @contextlib.contextmanager
    def swapped(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """Inside the block, which is for evaluation, the module has its averages for weights; then its own again.

        Example:
            >>> model = torch.nn.Linear(1, 1)
            >>> ema = ExponentialMovingAverage(0.5).apply(model)
            >>> _ = torch.nn.init.zeros_(model.weight)
            >>> with ema.swapped(model):
            ...     print(bool(model.weight.any()))
            True
            >>> bool(model.weight.any())
            False
        """
        known = self._known()
        averaged = [each for _, each in _named(module) if id(each) in known]
        if not averaged:
            raise StrategyError(f"{type(module).__name__} has no averages yet; call apply(model) first")
        averages = [self.average(each) for each in averaged]
        settle_all()
        own = [each.detach().clone() for each in averaged]
        try:
            _write(averaged, averages)
            yield module
        finally:
            _write(averaged, own)

    def _current_decay(self) -> float:
        if self.num_updates is None:
            return self.decay
        if not callable(self.num_updates):
            count = _checked_count(self.num_updates)
        else:
            count = _checked_count(self.num_updates())
            replica = context.current_replica()
            if replica is not None and replica.num_replicas_in_sync > 1:
                # Other replicas have a copy of the function, which does not see what the program counts.
                count = float(replica.all_gather(torch.tensor([count], dtype=torch.float64))[0])
        return min(self.decay, (1 + count) / (10 + count))

    def _groups(self) -> "list[_Shadows]":
        return [each for each in self.children() if isinstance(each, _Shadows)]

    def _known(self) -> "dict[int, tuple[_Shadows, int]]":
        """Where the average of each variable is, by the variable's identity in this process."""
        places = [(group, index) for group in self._groups() for index in range(len(group.variables))]
        return {id(group.variables[index]): (group, index) for group, index in places}

    def _find(self, variable: torch.Tensor) -> "tuple[_Shadows, int]":
        found = self._known().get(id(variable))
        if found is None:
            names = [name for group in self._groups() for name in group.names]
            form = f"of shape {tuple(variable.shape)}" if isinstance(variable, torch.Tensor) else repr(variable)
            raise StrategyError(
                f"no average of this variable ({type(variable).__name__} {form}); "
                + (f"there are those of {', '.join(map(repr, names))}" if names else "call apply first")
            )
        return found

    def _by_name(self) -> "dict[str, tuple[_Shadows, int]]":
        return {group.names[index]: (group, index) for group, index in self._known().values()}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        named = self._by_name()
        for name, (group, index) in named.items():
            shadow = group.shadow(index)
            destination[prefix + self.average_name(name)] = shadow if keep_vars else shadow.detach()
        # In the order of the names: who loads may have met the variables in another order.
        rest = [group.unfilled[index] for _, (group, index) in sorted(named.items())]
        destination[prefix + _UNFILLED] = torch.tensor(rest, dtype=torch.float64, device="cpu")

    def _load_from_state_dict(self, state: Any, prefix: str, _: Any, strict: bool, *reports: list[str]) -> None:
        missing, unexpected, errors = reports
        named = self._by_name()
        keys = {prefix + self.average_name(name): place for name, place in named.items()}
        wanted = [*keys, prefix + _UNFILLED]
        missing += [key for key in wanted if key not in state]
        unexpected += [key for key in state if key.startswith(prefix) and key not in wanted]
        for key, (group, index) in keys.items():
            shadow, value = group.shadow(index), state.get(key)
            if value is not None and value.shape == shadow.shape:
                shadow.copy_(value.detach())
            elif value is not None:
                errors.append(f"{key!r} has shape {tuple(value.shape)}, the variable {tuple(shadow.shape)}")
        rest = state.get(prefix + _UNFILLED, torch.ones(len(named))).tolist()
        if len(rest) != len(named):
            hint = "" if named else "; call track(model) before load_state_dict"
            errors.append(f"the state has {len(rest)} averages, but there are {len(named)} here{hint}")
            return
        for (_, (group, index)), unfilled in zip(sorted(named.items()), rest, strict=True):
            group.unfilled[index] = unfilled


@final
class _Shadows(torch.nn.Module):
    """The averages of variables that were met together.

    Names and `unfilled` are plain values, so that replicas are told when the main program changes them; the
    variables travel as references, and are the replica's own in each replica.
    """

    def __init__(self, names: Sequence[str], variables: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.names = tuple(names)
        self.variables = tuple(variables)
        # What of each average is not made of values yet: all before the first, then none; or with zero_debias the
        # product of all decays.
        self.unfilled = [1.0] * len(names)
        for index, variable in enumerate(variables):
            self.register_parameter(str(index), torch.nn.Parameter(variable.detach().clone(), requires_grad=False))

    def shadow(self, index: int) -> torch.Tensor:
        return self.get_parameter(str(index))

    def _save_to_state_dict(self, *_: Any) -> None:
        """Its owner does that, under the names of the variables."""

    def _load_from_state_dict(self, *_: Any) -> None:
        """The same."""


@contextlib.contextmanager
def _shared_work() -> Iterator[Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]:
    """Gives the part of an average, and of a value that goes into it, that this process has to do.

    Replicas that share memory do a part each, as with the update of an optimizer; elsewhere everyone does all.
    """
    replica = context.current_replica()

    def own_part(shadow: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        part = None if replica is None else replica.own_part(shadow)
        if part is None:
            return shadow, value
        if value.stride() != shadow.stride():
            value = torch.empty_like(shadow).copy_(value)
        own = value.as_strided((part.last - part.first,), (1,), value.storage_offset() + part.first)
        return part.values(part.first, part.last), own

    with contextlib.nullcontext() if replica is None else replica.split_update((), checked=True):
        yield own_part


def _named(variables: Variables) -> Iterator[tuple[str | None, torch.Tensor]]:
    """Variables with their names, where they have one; of a module the parameters that can be averaged."""
    if isinstance(variables, torch.nn.Module):
        averages = {id(each) for group in _shadows_in(variables) for each in group.parameters()}
        named = variables.named_parameters()
        yield from ((name, each) for name, each in named if _can_be_averaged(each) and id(each) not in averages)
        return
    several = isinstance(variables, Iterable) and not isinstance(variables, torch.Tensor)
    for each in variables if several else [variables]:
        name, variable = each if isinstance(each, tuple) and len(each) == 2 else (None, each)
        if not isinstance(variable, torch.Tensor) or not isinstance(name, str | None):
            raise StrategyError(
                f"averages are of a module, of tensors, or of pairs of name and tensor, got {each!r}, a "
                f"{type(each).__name__}"
            )
        if not _can_be_averaged(variable):
            what = f"{name or 'a tensor'!r} of shape {tuple(variable.shape)}"
            raise StrategyError(f"averages are of floating-point variables, got {what} and type {variable.dtype}")
        yield name, variable


def _shadows_in(module: torch.nn.Module) -> list[_Shadows]:
    return [each for each in module.modules() if isinstance(each, _Shadows)]


def _can_be_averaged(variable: torch.Tensor) -> bool:
    return variable.is_floating_point() or variable.is_complex()


def _unique(name: str, taken: Sequence[str]) -> str:
    """The name, with a number where another variable has it already, as TensorFlow does."""
    numbered = (f"{name}_{number}" for number in itertools.count(1))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)


def _checked_count(count: Any) -> float:
    if isinstance(count, torch.Tensor) and count.numel() == 1:
        count = count.item()
    if isinstance(count, bool) or not isinstance(count, int | float) or not count >= 0:
        raise StrategyError(
            f"num_updates is a number from 0 up, a tensor of one, or a function that gives one; got {count!r}"
        )
    return float(count)


@torch.no_grad()
def _write(variables: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.copy_(value)
