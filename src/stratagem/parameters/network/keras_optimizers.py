"""Keras models on parameter servers: which of torch's optimizers stands for one of Keras', and its update as a push.

A server knows optimizers by name and plain options. Knows Keras' objects by what they have, without importing Keras.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stratagem.errors import StrategyError
from stratagem.parameters.protocol import OptimizerSpec, Plain

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


# Where Keras keeps what torch keeps under a key: lists with an entry for each variable.
_KEPT: dict[str, dict[str, str]] = {
    "SGD": {"momentum_buffer": "momentums"},
    "Adam": {"exp_avg": "_momentums", "exp_avg_sq": "_velocities", "max_exp_avg_sq": "_velocity_hats"},
    "Adamax": {"exp_avg": "_m", "exp_inf": "_u"},
    "Nadam": {"exp_avg": "_momentums", "exp_avg_sq": "_velocities"},
    "Adadelta": {"square_avg": "_accumulated_grads", "acc_delta": "_accumulated_delta_vars"},
    "Adagrad": {"sum": "_accumulators"},
}
_KEPT["AdamW"] = _KEPT["Adam"]

_OVERRIDDEN = ("_backend_update_step", "save_own_variables")


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


def save_with(optimizer: Any, fetch: Callable[[], None]) -> None:
    """Lets something be fetched before an optimizer is saved."""

    def save(store: Any) -> None:
        fetch()
        type(optimizer).save_own_variables(optimizer, store)

    optimizer.__dict__["save_own_variables"] = save


def let_go(optimizer: Any) -> None:
    """Makes an optimizer a plain one."""
    for name in _OVERRIDDEN:
        optimizer.__dict__.pop(name, None)


def state_of(optimizer: Any, names: Mapping[int, str], num_pushing: int) -> dict[str, dict[str, Any]]:
    """What an optimizer keeps that has been loaded, as torch has it; empty if it has made no step.

    Args:
        optimizer: The optimizer.
        names: The names of its variables, by the `id` of their values.
        num_pushing: How many tasks make updates by themselves: each counts its own steps.
    """
    num_steps = int(optimizer.iterations.value) * num_pushing
    states: dict[str, dict[str, Any]] = {}
    for place, variable in enumerate(optimizer._trainable_variables if num_steps else ()):
        own = {key: held[place].value.detach().clone() for key, held in _kept(optimizer)}
        if "momentum_buffer" in own:
            own["momentum_buffer"].div_(-_rate(optimizer.learning_rate))  # in Keras the rate is in it
        elif own:
            own["step"] = torch.tensor(float(num_steps))
        if hasattr(optimizer, "_u_product"):
            own["mu_product"] = optimizer._u_product.value.detach().clone()
        states[names[id(variable.value)]] = own
    return states


def put_state(optimizer: Any, names: Mapping[int, str], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Gives an optimizer what torch's keeps on the servers."""
    for place, variable in enumerate(optimizer._trainable_variables):
        own = states.get(names[id(variable.value)], {})
        for key, held in _kept(optimizer):
            if key in own:
                factor = -_rate(optimizer.learning_rate) if key == "momentum_buffer" else 1.0
                held[place].assign(own[key] * factor)
        if "mu_product" in own:
            optimizer._u_product.assign(own["mu_product"])


def _kept(optimizer: Any) -> list[tuple[str, Any]]:
    found = [(key, getattr(optimizer, name, None)) for key, name in _KEPT[type(optimizer).__name__].items()]
    return [(key, held) for key, held in found if held]


def _rate(value: Any) -> float:
    return float(torch.as_tensor(getattr(value, "value", value)).item())
