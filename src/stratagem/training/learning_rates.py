"""Learning rates for large global batches: how to scale one, and how to warm up to it.

The rules and the warm-up are those of Goyal et al., "Accurate, Large Minibatch SGD" (2017).
"""

import math
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from stratagem.errors import StrategyError

_RULES = {"linear": 1.0, "sqrt": 0.5}  # to what power the rate grows with the batch


def scale_learning_rate(base: float, *, base_batch: int, global_batch: int, rule: str = "linear") -> float:
    """Returns the learning rate for a global batch, given a rate that is good for another batch.

    Args:
        base: The rate that is good for a batch of `base_batch`.
        base_batch: The number of examples in that batch.
        global_batch: The number of examples that all replicas together take in one step.
        rule: `linear`, which is usual for SGD, or `sqrt`, which is usual for Adam.
    Raises:
        StrategyError: A number is not above 0, or the rule is neither.
    Example:
        >>> scale_learning_rate(0.1, base_batch=256, global_batch=8192)
        3.2
        >>> scale_learning_rate(0.001, base_batch=64, global_batch=256, rule="sqrt")
        0.002
    """
    if not _is_number(base) or not base > 0:
        raise StrategyError(f"base is a learning rate above 0, got {base!r}")
    for name, batch in (("base_batch", base_batch), ("global_batch", global_batch)):
        if type(batch) is not int or batch < 1:
            raise StrategyError(f"{name} is a number of examples from 1 up, got {batch!r}")
    if rule not in _RULES:
        raise StrategyError(f"rule is one of {', '.join(map(repr, _RULES))}, got {rule!r}")
    return float(base * (global_batch / base_batch) ** _RULES[rule])


@final
class WarmUp(LRScheduler):
    """Raises the learning rate in a straight line for some steps, then hands over to another scheduler.

    The first `num_steps` updates have rates from `start` up to the rate that the optimizer has when
    this is made, which is the rate of the next update. From then on every step is a step of `after`, from its first
    one. Made in a scope, it is distributed like every scheduler, and may be stepped in the main program or in a
    function of `run`.

    Args:
        optimizer: The optimizer; its rates are the goal.
        num_steps: The number of steps until the goal is reached.
        start: The rate of the first update, in all parameter groups.
        after: The scheduler for later steps, made for the same optimizer before this one.
    Raises:
        StrategyError: An argument is out of range, or `after` cannot be stepped without arguments.
    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.4)
        >>> scheduler = WarmUp(optimizer, 4, after=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        >>> rates = []
        >>> for _ in range(7):
        ...     rates.append(round(optimizer.param_groups[0]["lr"], 3))
        ...     optimizer.step()
        ...     scheduler.step()
        >>> rates
        [0.0, 0.1, 0.2, 0.3, 0.4, 0.2, 0.1]
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        num_steps: int,
        start: float = 0.0,
        after: LRScheduler | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise StrategyError(f"WarmUp takes an optimizer, got {type(optimizer).__name__}")
        if type(num_steps) is not int or num_steps < 1:
            raise StrategyError(f"num_steps is a whole number from 1 up, got {num_steps!r}")
        # As numbers: the rates are tensors in some optimizers, and these change.
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if not _is_number(start) or not 0 <= start <= min(rates):
            raise StrategyError(f"start is a rate from 0 to that of the optimizer, {min(rates)!r}, got {start!r}")
        if after is not None:
            _check_after(after, optimizer)
        self.num_steps = num_steps
        self.start = float(start)
        self.after = after
        self.full_lrs = rates
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rates of this step, as long as this scheduler itself sets them."""
        part = min(1.0, self.last_epoch / self.num_steps)
        return [self.start + part * (rate - self.start) if part < 1 else rate for rate in self.full_lrs]

    def step(self) -> None:  # type: ignore[override]  # the number of the epoch is no longer given
        """Goes on to the next rate."""
        if self.after is None or self.last_epoch < self.num_steps:
            super().step()
            return
        self.last_epoch += 1
        self.after.step()
        self._last_lr = self.after.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The state, with that of `after`."""
        return {**super().state_dict(), "after": self.after.state_dict() if self.after else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state; as with every scheduler, the optimizer's own state has the rates."""
        if (state_dict["after"] is None) != (self.after is None):
            has = "has none" if state_dict["after"] is None else "has one"
            raise StrategyError(f"the state {has} of a scheduler for after the warm-up; make WarmUp as it was saved")
        if self.after is not None:
            self.after.load_state_dict(state_dict["after"])
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "after"})


def _check_after(after: Any, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(after, LRScheduler) or isinstance(after, ReduceLROnPlateau):
        raise StrategyError(
            f"after is a scheduler whose step takes no arguments, got {type(after).__name__}; step that one yourself "
            f"once the warm-up is over"
        )
    if after.optimizer is not optimizer:
        raise StrategyError(f"after is for the same optimizer, but {type(after).__name__} was made for another one")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
