"""What a checkpoint of a training holds besides the model's own state, and how a new model takes weights of another."""

import os
import re
from typing import Any

import torch

from stratagem import _tree
from stratagem.engine import random_state
from stratagem.errors import CheckpointError, CheckpointMismatchError, EstimatorError
from stratagem.objects.per_replica import PerReplica
from stratagem.strategies.strategy import Strategy
from stratagem.training.checkpoints import load_checkpoint, load_latest, require_fit
from stratagem.training.estimator.estimator_session import EstimatorSession
from stratagem.training.estimator.models import Model
from stratagem.training.estimator.specs import WarmStartSettings

State = tuple[str, dict[str, Any]]


def state_of(session: EstimatorSession, structure: Any, *, finished: bool) -> dict[str, Any]:
    """Everything that a training needs to go on.

    Args:
        session: The training.
        structure: The form of its features.
        finished: Whether it has come to its end, so that the next one starts its input anew.
    """
    return {
        **session.model.state(),
        "global_step": session.global_step,
        "random": random_state.to_values(random_state.current()),
        "input": None if finished else dict(session.position),
        "features": structure,
    }


def find_checkpoint(path: str | None, model_dir: str) -> State | None:
    """The checkpoint that was asked for, or else the newest one that is undamaged."""
    return load_latest(model_dir) if path is None else (str(path), load_checkpoint(path))


def step_in(found: State | None) -> int:
    """How many steps a model has been trained."""
    return int(found[1]["global_step"]) if found is not None else 0


def require_agreement(found: State | None, model_dir: str, strategy: Strategy) -> None:
    """Refuses to go on where programs that work together do not see the same checkpoint."""
    here = PerReplica([step_in(found)] * len(strategy.replicas_here))
    lowest, highest = (int(strategy.reduce(op, here)) for op in ("min", "max"))
    if lowest != highest:
        raise EstimatorError(
            f"all workers need the same checkpoint, but the newest is of step {lowest} for one and of step {highest} "
            f"for another; let model_dir, {model_dir!r} here, be a folder that they share"
        )


def warm_start(model: Model, settings: WarmStartSettings) -> list[str]:
    """Gives a new model weights of another one; returns their names.

    Raises:
        CheckpointError: There is no checkpoint.
        CheckpointMismatchError: The checkpoint lacks a weight or has it in another shape, or no name fits.
    """
    source = str(settings.ckpt_to_initialize_from)
    found = load_latest(source)
    if found is None and not os.path.isdir(source):
        raise CheckpointError(f"warm_start_from is a checkpoint or a folder with checkpoints, got {source!r}")
    path, state = found or (source, load_checkpoint(source))
    own = model.weights()
    names = [name for name in own if re.search(settings.vars_to_warm_start, name)]
    if not names:
        raise CheckpointMismatchError(
            f"vars_to_warm_start={settings.vars_to_warm_start!r} fits no weight of the model; it has {', '.join(own)}"
        )
    earlier = settings.var_name_to_prev_var_name or {}
    saved = {name: state["module"].get(earlier.get(name, name)) for name in names}
    require_fit(
        path, {name: each for name, each in saved.items() if each is not None}, {name: own[name] for name in names}
    )
    model.set_weights(saved)
    return names


def structure_of(features: Any) -> Any:
    """The form of features without their values: dtype and shape of each tensor, the first dimension open."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return {"kind": type(value).__name__}
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": [None, *value.shape[1:]]}

    return _tree.map(leaf, features)
