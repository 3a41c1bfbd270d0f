"""Makes `optimizer.step()` an update that is done once, for all replicas.

For `CentralStorageStrategy`, and optimizers that cannot be split: replica 0 runs the optimizer, and
has its state, and what it wrote is then everyone's.
"""

import functools
from collections.abc import Callable
from typing import Any, cast, final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from stratagem import _torch, _tree
from stratagem.errors import StrategyError
from stratagem.variables.optimizer_slices import (
    StateElsewhere,
    bare_step,
    copy_attributes,
    copy_options,
    over,
    parameters_of,
    step_with_hooks,
)
from stratagem.variables.participant import Updating

_WORDS = (
    "replica 0 makes the update for all replicas, and only it has the state of this {}; a step may replace it but "
    "not read it: read and change optimizer.state between two runs"
)
_under_way: list[str] = []  # classes of optimizers whose step this process is in


@final
class CentralUpdate:
    """An update of all parameters of one optimizer, in replica 0.

    Args:
        runtime: The replica.
        kept_on: Where the values that the optimizer updates are kept. If that is not where replica 0 has its
            parameters, the optimizer works on copies there.
    """

    def __init__(self, runtime: Updating, kept_on: torch.device) -> None:
        self._runtime = runtime
        self._kept_on = kept_on
        # By parameter, which is not kept alive: the copy, and the parameter's version when they were last the same.
        self._kept: Any = WeakIdKeyDictionary()

    @staticmethod
    def refuse_inside_another(optimizer: torch.optim.Optimizer) -> None:
        """Refuses the step of an optimizer inside that of one that replica 0 runs: the others do not come there."""
        if _under_way:
            raise StrategyError(
                f"{_under_way[-1]}.step() calls {type(optimizer).__name__}.step(), but only replica 0 updates "
                f"variables that are kept once, and the other replicas never make that call; use MirroredStrategy"
            )

    def step(self, optimizer: torch.optim.Optimizer, whole: Callable[..., Any]) -> None:
        """Updates, and makes it known to all replicas; every one must come here."""
        parameters = parameters_of(optimizer)
        self._runtime.publish_written()
        if self._runtime.may_update(parameters):
            if self._runtime.rank == 0:
                _under_way.append(type(optimizer).__name__)
                try:
                    if (elsewhere := self._runtime.update_elsewhere) is not None:
                        elsewhere(optimizer)
                    elif self._runtime.device == self._kept_on:
                        whole(optimizer)
                    else:
                        self._step_elsewhere(optimizer)
                finally:
                    _under_way.pop()
            self._runtime.share_from_first(parameters)
        if self._runtime.rank:
            optimizer.state = StateElsewhere(_WORDS.format(type(optimizer).__name__), writes=True)

    def _step_elsewhere(self, optimizer: torch.optim.Optimizer) -> None:
        step_with_hooks(optimizer, functools.partial(self._update_elsewhere, optimizer))

    @torch.no_grad()
    def _update_elsewhere(self, optimizer: torch.optim.Optimizer) -> None:
        """Lets the optimizer work on the copies that are kept, and brings the result back."""
        groups = [
            {**group, "params": [self._copy_of(each) for each in group["params"]]} for group in optimizer.param_groups
        ]
        inner = over(optimizer, groups, {self._copy_of(each): self._here(own) for each, own in optimizer.state.items()})
        for parameter, (copy, _) in self._kept.items():
            copy.grad = None if parameter.grad is None else parameter.grad.to(self._kept_on)
        bare_step(type(optimizer))(inner)
        copy_attributes(inner, optimizer)
        copy_options(inner, optimizer)
        for parameter, (copy, _) in list(self._kept.items()):
            if copy.grad is not None:
                parameter.copy_(copy)
                self._kept[parameter] = copy, _torch.tensors.version_of(parameter)
                optimizer.state[parameter] = inner.state[copy]

    def _here(self, state: Any) -> Any:
        """What is remembered of a parameter, where that is kept: `load_state_dict` puts it where replica 0 computes."""
        return _tree.map_only(torch.Tensor, self._brought, state)

    def _brought(self, value: torch.Tensor) -> torch.Tensor:
        counts_on_host = not value.dim() and value.device.type == "cpu"  # as torch keeps the number of steps
        return value if counts_on_host else value.to(self._kept_on)

    def _copy_of(self, parameter: torch.Tensor) -> torch.Tensor:
        copy, version = self._kept.get(parameter, (None, -1))
        if copy is None:
            copy = parameter.detach().to(self._kept_on, copy=True)
        elif version != _torch.tensors.version_of(parameter):  # the program has written to it
            copy.copy_(parameter)
        self._kept[parameter] = copy, _torch.tensors.version_of(parameter)
        return cast(torch.Tensor, copy)
