"""Keras models on parameter servers: which of torch's optimizers stands for one of Keras', and its update as a push.

A server knows optimizers by name and plain options. Knows Keras' objects by what they have, without importing Keras.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stratagem.errors import StrategyError
from stratagem.parameters.contract import OptimizerSpec, Plain

Push = Callable[[dict[str, torch.Tensor], tuple[dict[str, Plain], ...]], None]

_NOT_APPLIED = ("use_ema", "gradient_accumulation_steps", "loss_scale_factor")


def _sgd(optimizer: Any) -> dict[str, Plain]:
    return {"momentum": optimizer.momentum, "nesterov": optimizer.nesterov}


def _betas(optimizer: Any) -> dict[str, Plain]:
    return {"betas": (float(optimizer.beta_1), float(optimizer.beta_2)), "eps": optimizer.epsilon}


def _adam(optimizer: Any) -> dict[str, Plain]:
    return {**_betas(optimizer), "amsgrad": optimizer.amsgrad}


def _nadam(optimizer: Any) -> dict[str, Plain]:
    return {**_betas(optimizer), "momentum_decay": 1.0}  # Keras' momentum grows with every step


def _adadelta(optimizer: Any) -> dict[str, Plain]:
    return {"rho": optimizer.rho, "eps": optimizer.epsilon}


def _adagrad(optimizer: Any) -> dict[str, Plain]:
    return {"initial_accumulator_value": optimizer.initial_accumulator_value, "eps": optimizer.epsilon}


# Of torch's optimizers that do the same, up to the place where epsilon is added: the name, and its options.
_OPTIONS: dict[str, tuple[str, Callable[[Any], dict[str, Plain]]]] = {
    "SGD": ("SGD", _sgd),
    "Adam": ("Adam", _adam),
    "AdamW": ("AdamW", _adam),
    "Adamax": ("Adamax", _betas),
    "Nadam": ("NAdam", _nadam),
    "Adadelta": ("Adadelta", _adadelta),
    "Adagrad": ("Adagrad", _adagrad),
}


def optimizers_in(made: Sequence[Any]) -> list[Any]:
    """The Keras optimizers of the models among some objects."""
    found: list[Any] = [getattr(each, "optimizer", None) for each in made if isinstance(each, torch.nn.Module)]
    known = {id(each): each for each in found if type(each).__module__.startswith("keras.")}
    return [each for each in known.values() if each.built]


def variables_of(optimizers: Sequence[Any]) -> dict[str, torch.nn.Parameter]:
    """What Keras optimizers update, by names that are the same in every task."""
    # By their order: paths that Keras gives count up with every model that a program makes.
    variables = {id(each): each for optimizer in optimizers for each in optimizer._trainable_variables}
    return {f"{number}/{each.name}": each.value for number, each in enumerate(variables.values())}


def described(optimizer: Any, names: Mapping[int, str]) -> OptimizerSpec:
    """A Keras optimizer as one that servers can apply.

    Args:
        optimizer: The optimizer.
        names: The names of its variables, by the `id` of their values.
    Raises:
        StrategyError: There is none of torch's that does the same.
    """
    kind = type(optimizer).__name__
    if kind not in _OPTIONS:
        raise StrategyError(
            f"parameter servers apply Keras' {', '.join(_OPTIONS)}, got {kind}; compile the model with one of them, or "
            f"use MultiWorkerMirroredStrategy"
        )
    if any(variable.constraint is not None for variable in optimizer._trainable_variables):
        raise StrategyError("parameter servers do not apply constraints of Keras' variables; leave them out")
    decay = optimizer.weight_decay
    wrong = next((name for name in _NOT_APPLIED if getattr(optimizer, name)), "")
    wrong = wrong or ("weight_decay" if decay and kind != "AdamW" else "")
    if wrong:
        raise StrategyError(
            f"parameter servers do not apply {kind}({wrong}={getattr(optimizer, wrong)!r}); leave {wrong} out"
            + (", or use AdamW" if wrong == "weight_decay" else "")
        )
    name, options_of = _OPTIONS[kind]
    common = {"lr": _rate(optimizer.learning_rate), **options_of(optimizer)}
    decays = {"weight_decay": float(decay or 0.0)} if kind == "AdamW" else {}
    decayed: list[str] = []
    plain: list[str] = []
    for variable in optimizer._trainable_variables:
        (decayed if decays and optimizer._use_weight_decay(variable) else plain).append(names[id(variable.value)])
    groups = [(tuple(decayed), {**common, **decays}), (tuple(plain), {**common, **(decays and {"weight_decay": 0.0})})]
    return OptimizerSpec(name, tuple(group for group in groups if group[0]))


def take_over(optimizer: Any, spec: OptimizerSpec, names: Mapping[int, str], push: Push) -> None:
    """Puts a push in the place of the optimizer's update; Keras clips gradients before it."""

    def update(gradients: Sequence[torch.Tensor], variables: Sequence[Any], learning_rate: Any) -> None:
        found = {names[id(each.value)]: own.detach() for own, each in zip(gradients, variables, strict=True)}
        push(found, tuple({**options, "lr": _rate(learning_rate)} for _, options in spec.groups))

    optimizer.__dict__["_backend_update_step"] = update


def _rate(value: Any) -> float:
    return float(torch.as_tensor(getattr(value, "value", value)).item())
