"""One ps task's part of all variables: values, the optimizer's state, versions.

No transport and no threads: whoever serves a shard calls it from one thread, with values that it has
already made of what came. Whatever the values say is checked here, before anything is changed: a push
is applied whole or not at all, and at most once.
"""

import inspect
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, final

import torch

from stratagem import _dtypes
from stratagem.collectives.collective import is_finite
from stratagem.errors import ParameterError
from stratagem.parameters.protocol import (
    OptimizerSpec,
    Piece,
    Plain,
    Pulled,
    Push,
    PushOutcome,
    Rows,
    ShardPlan,
    Verdict,
)
from stratagem.variables.optimizer_slices import ELEMENTWISE, bare_step, over

OPTIMIZERS: dict[str, Any] = {**ELEMENTWISE, "SparseAdam": torch.optim.SparseAdam}
"""What a shard can be told to apply. All treat each element by itself, so that rows may lie apart."""

_TAKES_ROWS = frozenset({torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam})


@final
class Shard:
    """The variables of one ps task.

    Args:
        plan: Where all variables lie.
        number: Which shard of the plan this is.
        optimizers: How pushes are applied; a push says by which.
        values: The first values, by name: of this shard's pieces. They are copied.
        rate_of: The factor of the learning rate of a push, by its staleness; `None` for 1.
    Raises:
        ParameterError: The optimizers or the values do not fit the plan.
    """

    def __init__(
        self,
        plan: ShardPlan,
        number: int,
        optimizers: Sequence[OptimizerSpec],
        values: Mapping[str, torch.Tensor],
        *,
        rate_of: Callable[[int], float] | None = None,
    ) -> None:
        self.pieces: dict[str, Piece] = {piece.name: piece for piece in plan.shards[number]}
        self.version = 0
        self._rate_of = rate_of
        self._values: dict[str, torch.Tensor] = {}
        for name, piece in self.pieces.items():
            _require_form(f"the first value of {name!r}", values.get(name), piece)
            self._values[name] = values[name].detach().clone()
        sparse = {name for name, piece in self.pieces.items() if piece.variable.sparse}
        self._optimizers = [_Applier(spec, self._values, sparse) for spec in optimizers]
        self._lives: dict[int, tuple[int, int]] = {}  # of each worker: its incarnation, its last push
        self._broken = ""

    def admit(self, worker: int) -> int:
        """Begins a new life of a worker: what its earlier ones still send is refused from now on.

        Returns:
            Its incarnation, with which it must push; its pushes count from 1.
        """
        incarnation = self._lives.get(worker, (0, 0))[0] + 1
        self._lives[worker] = incarnation, 0
        return incarnation

    def fence(self, worker: int) -> None:
        """Refuses what a worker still sends, until it is admitted anew."""
        if worker in self._lives:
            self.admit(worker)

    def pull(
        self,
        names: Sequence[str] | None = None,
        rows: Mapping[str, torch.Tensor] | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> Pulled:
        """Copies of values, all of one version.

        Args:
            names: Of which variables; by default of all that are not `sparse`.
            rows: Of which variables only some rows, and which: int64, counted from the piece's first row.
            into: Where whole variables are copied to; by default to new memory.
        Raises:
            ParameterError: There is no such variable or row here.
        """
        self._require_whole()
        found: dict[str, torch.Tensor | Rows] = {}
        chosen = [name for name, each in self.pieces.items() if not each.variable.sparse] if names is None else names
        for name in chosen:
            found[name] = self._value(name).clone() if into is None else into[name].copy_(self._value(name))
        for name, indices in (rows or {}).items():
            if reason := _why_no_rows(name, indices, len(self._value(name)) if self._value(name).dim() else 0):
                raise ParameterError(reason)
            found[name] = Rows(indices, self._value(name)[indices])
        return Pulled(self.version, found)

    def push(self, push: Push) -> PushOutcome:
        """Applies an update, whole and once, or says why not."""
        self._require_whole()
        refused = self._judge(push)
        if refused is not None:
            return refused
        staleness = self.version - push.version
        self._lives[push.worker] = push.incarnation, push.number
        self._broken = f"push {push.number} of worker {push.worker} failed half way"
        with torch.no_grad():
            for name, value in push.assigned.items():
                self._values[name].copy_(value)
            applier = self._optimizers[push.optimizer]
            applier.set(push.options or ())  # also where none of its gradients is
            if push.gradients:
                applier.apply(push.gradients, self._rate_of(staleness) if self._rate_of else 1.0)
        self._broken = ""
        self.version += 1
        return PushOutcome(Verdict.APPLIED, self.version, staleness)

    def state_dict(self) -> dict[str, Any]:
        """All that the shard is: copies. `version`, `values` by name, `optimizers`: for each the state by name."""
        self._require_whole()
        return {
            "version": self.version,
            "values": {name: value.clone() for name, value in self._values.items()},
            "optimizers": [each.state() for each in self._optimizers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave; all workers must be admitted anew.

        Raises:
            ParameterError: It is of other variables; the shard is as before.
        """
        values, optimizers = state["values"], state["optimizers"]
        if set(values) != set(self.pieces) or len(optimizers) != len(self._optimizers):
            raise ParameterError(
                f"the state has the variables {sorted(values)} and {len(optimizers)} optimizers, this shard has "
                f"{sorted(self.pieces)} and {len(self._optimizers)}; load the state of the same shard"
            )
        for name, piece in self.pieces.items():
            _require_form(f"the saved value of {name!r}", values[name], piece)
        with torch.no_grad():
            for name, value in self._values.items():
                value.copy_(values[name])
        for own, saved in zip(self._optimizers, optimizers, strict=True):
            own.load(saved)
        self.version = int(state["version"])
        self._lives = {worker: (incarnation + 1, 0) for worker, (incarnation, _) in self._lives.items()}
        self._broken = ""

    def _value(self, name: str) -> torch.Tensor:
        if name not in self._values:
            raise ParameterError(f"no variable {name!r} in this shard; it has {', '.join(self._values) or 'none'}")
        return self._values[name]

    def _require_whole(self) -> None:
        if self._broken:
            raise ParameterError(
                f"{self._broken}: the values of this shard are no longer one state of the model; load a checkpoint"
            )

    def _judge(self, push: Push) -> PushOutcome | None:
        """Why a push is not applied; `None` if it is. Changes nothing."""
        incarnation, last = self._lives.get(push.worker, (0, 0))
        if push.incarnation != incarnation or not incarnation:
            reason = f"worker {push.worker} has incarnation {incarnation}, but the push has {push.incarnation}"
            return PushOutcome(Verdict.FENCED, self.version, reason=reason)
        if push.number <= last:
            return PushOutcome(
                Verdict.DUPLICATE, self.version, reason=f"push {push.number} has come before; the last one was {last}"
            )
        reason = self._why_refused(push, last)
        return PushOutcome(Verdict.REFUSED, self.version, reason=reason) if reason else None

    def _why_refused(self, push: Push, last: int) -> str:
        if push.number != last + 1:
            return f"pushes come in order: {last + 1} is next, got {push.number}"
        if not 0 <= push.version <= self.version:
            return f"version {push.version} is not one of 0 to {self.version}, which this shard has had"
        if not 0 <= push.optimizer < len(self._optimizers):
            return f"no optimizer {push.optimizer}; there are {len(self._optimizers)}"
        for name in push.assigned:
            if name in self.pieces and self.pieces[name].variable.trained:
                return f"{name!r} is trained: it is updated by gradients, not assigned"
        applier = self._optimizers[push.optimizer]
        for name, value in [*push.gradients.items(), *push.assigned.items()]:
            if name not in self.pieces:
                return f"no variable {name!r} in this shard; it has {', '.join(self.pieces)}"
            reason = _why_wrong_rows(name, value, self.pieces[name]) if isinstance(value, Rows) else ""
            reason = reason or _why_wrong_form(f"the value for {name!r}", value, self.pieces[name])
            if reason:
                return reason
        return applier.why_refused(push.gradients, push.options)


@final
class _Applier:
    """An optimizer over pieces, made of its description."""

    def __init__(self, spec: OptimizerSpec, values: Mapping[str, torch.Tensor], sparse: Container[str]) -> None:
        if spec.kind not in OPTIMIZERS:
            raise ParameterError(
                f"a parameter server cannot apply the optimizer {spec.kind!r}; it knows {', '.join(OPTIMIZERS)}"
            )
        for names, options in spec.groups:
            if options.get("momentum") and (name := next((each for each in names if each in sparse), None)):
                raise ParameterError(
                    f"{spec.kind} with momentum keeps a state of {name!r} that grows with all rows ever touched; use "
                    f"SGD without momentum, Adagrad or SparseAdam for tables with sparse gradients"
                )
        self._kind = OPTIMIZERS[spec.kind]
        self._step = bare_step(self._kind)
        self._names = [name for names, _ in spec.groups for name in names if name in values]
        held = [[values[name] for name in names if name in values] for names, _ in spec.groups]
        try:
            # Its own constructor checks the options and adds those that were left out. Groups without any variable
            # here are kept, so that their numbers are the same in all shards.
            given = [
                {**_listed(options), "params": own or [torch.zeros(1)]}
                for (_, options), own in zip(spec.groups, held, strict=True)
            ]
            given = given or [{"params": [torch.zeros(1)]}]
            built = self._kind(given, **_shared_by(self._kind, given))
        except (TypeError, ValueError) as error:
            raise ParameterError(f"{spec.kind} does not take these options: {error}") from error
        groups = [{**group, "params": own} for group, own in zip(built.param_groups, held, strict=False)]
        state = {each: built.state[each] for own in held for each in own if each in built.state}
        self._optimizer = over(built, groups, state)
        self._values = {name: values[name] for name in self._names}

    def why_refused(self, gradients: Mapping[str, Any], options: Sequence[Mapping[str, Plain]] | None) -> str:
        """Why these cannot be applied; empty if they can."""
        for name, gradient in gradients.items():
            if name not in self._values:
                return f"the optimizer does not have {name!r}; it has {', '.join(self._names)}"
            if not _dtypes.is_updated_by_optimizers(self._values[name].dtype):
                return (
                    f"a gradient came for {name!r}; {name!r} is {_dtypes.name_of(self._values[name].dtype)}, which no "
                    f"optimizer updates. Train it in float32, or assign its values"
                )
            if isinstance(gradient, Rows) and self._kind not in _TAKES_ROWS:
                return (
                    f"{self._kind.__name__} does not take sparse gradients (rows), but one came for {name!r}; "
                    f"use SGD, Adagrad or SparseAdam"
                )
            if not isinstance(gradient, Rows) and self._kind is torch.optim.SparseAdam:
                return f"SparseAdam takes sparse gradients (rows) only, but a dense one came for {name!r}"
        if options is None:
            return ""
        groups = self._optimizer.param_groups
        if len(options) != len(groups):
            return f"options for {len(options)} groups, the optimizer has {len(groups)}"
        for given, group in zip(options, groups, strict=True):
            for key, value in given.items():
                if key == "params" or key not in group:
                    return f"no option {key!r} of {self._kind.__name__}"
                if not _is_alike(value, group[key]):
                    return f"option {key}={value!r} is not of the same kind as its value before, {group[key]!r}"
        return ""

    def set(self, options: Sequence[Mapping[str, Plain]]) -> None:
        for given, group in zip(options, self._optimizer.param_groups, strict=False):
            group.update(_listed(given))

    def apply(self, gradients: Mapping[str, "torch.Tensor | Rows"], rate: float) -> None:
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for name, gradient in gradients.items():
            self._values[name].grad = _as_gradient(gradient, self._values[name])
        try:
            for group in self._optimizer.param_groups:
                group["lr"] *= rate
            self._step(self._optimizer)
        finally:
            for name in gradients:
                self._values[name].grad = None
            for group, own in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = own

    def state(self) -> dict[str, dict[str, Any]]:
        return {
            name: {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in found.items()}
            for name, tensor in self._values.items()
            if (found := self._optimizer.state.get(tensor))
        }

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        self._optimizer.state.clear()
        for name, values in saved.items():
            self._optimizer.state[self._values[name]] = {
                key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()
            }


def _as_gradient(gradient: "torch.Tensor | Rows", value: torch.Tensor) -> torch.Tensor:
    if not isinstance(gradient, Rows):
        return gradient
    return torch.sparse_coo_tensor(
        gradient.indices[None], gradient.values, value.shape, is_coalesced=True, check_invariants=False
    )


def _shared_by(kind: type[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a constructor is given: some options (Adagrad's first value of its sums) it takes from there alone."""
    known = inspect.signature(kind).parameters.keys() - {"params"}
    return {name: value for name, value in groups[0].items() if name in known}


def _listed(options: Mapping[str, Plain]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def _is_alike(value: Any, before: Any) -> bool:
    """Whether an option may take the place of another: of the same kind, and finite."""
    if isinstance(before, bool) or isinstance(value, bool) or before is None or value is None:
        return value is before or type(value) is type(before)
    if isinstance(before, int | float):
        return isinstance(value, int | float) and math.isfinite(value)
    if isinstance(before, tuple | list):
        return (
            isinstance(value, tuple | list)
            and len(value) == len(before)
            and all(_is_alike(*pair) for pair in zip(value, before, strict=True))
        )
    return type(value) is type(before)


def _require_form(what: str, value: torch.Tensor | None, piece: Piece) -> None:
    reason = _why_wrong_form(what, value, piece, finite=False) if value is not None else f"{what} is missing"
    if reason:
        raise ParameterError(reason)


def _why_wrong_form(what: str, value: Any, piece: Piece, *, finite: bool = True) -> str:
    tensor = value.values if isinstance(value, Rows) else value
    shape = (len(value.indices), *piece.shape[1:]) if isinstance(value, Rows) else piece.shape
    if tensor.dtype != piece.variable.dtype or tuple(tensor.shape) != shape or tensor.layout != torch.strided:
        return f"{what} is {piece.variable.dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
    if finite and tensor.is_floating_point() and not is_finite(tensor):
        return f"{what} is not finite"
    return ""


def _why_wrong_rows(name: str, rows: Rows, piece: Piece) -> str:
    if not piece.shape:
        return f"{name!r} has no rows"
    reason = _why_no_rows(name, rows.indices, piece.shape[0])
    if not reason and len(rows.indices) > 1 and not bool((rows.indices.diff() > 0).all()):
        return f"the row indices of {name!r} must be in rising order, each only once"
    return reason


def _why_no_rows(name: str, indices: torch.Tensor, num_rows: int) -> str:
    if indices.dtype != torch.int64 or indices.dim() != 1:
        return f"rows of {name!r} are named by a vector of int64, got {indices.dtype} {tuple(indices.shape)}"
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < num_rows:
        return f"{name!r} has rows 0 to {num_rows - 1} here, got {int(indices.min())} to {int(indices.max())}"
    return ""
