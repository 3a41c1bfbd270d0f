"""What a checkpoint of a training holds, and how a model takes it back."""

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stratagem.training.checkpoints import (
    CheckpointError,
    CheckpointMismatchError,
    load_checkpoint,
    load_latest,
    require_fit,
)
from stratagem.training.estimator import random_state
from stratagem.training.estimator.session import Session
from stratagem.training.estimator.specs import EstimatorSpec, ModeKeys, WarmStartSettings


def state_of(session: Session, structure: Any, *, finished: bool) -> dict[str, Any]:
    """Everything that a training needs to go on.

    Args:
        session: The training.
        structure: The form of its features.
        finished: Whether it has come to its end, so that the next one starts its input anew.
    """
    spec = session.spec
    # The other replicas have generators of their own. They are seeded from the state that is saved,
    # here as in a training that goes on from it.
    random_state.draw()
    return {
        "global_step": session.global_step,
        "module": spec.module.state_dict(),
        "optimizer": spec.optimizer.state_dict() if spec.optimizer else None,
        "optimizer_kind": type(spec.optimizer).__name__,
        "scheduler": spec.scheduler.state_dict() if spec.scheduler else None,
        "random": random_state.current(),
        "input": None if finished else session.feed.position(),
        "features": structure,
    }


def restore_model(spec: EstimatorSpec, path: str, state: Mapping[str, Any]) -> None:
    """Gives a model, and in training its optimizer and scheduler, the state of a checkpoint.

    Raises:
        CheckpointMismatchError: The checkpoint is of another model or optimizer.
    """
    require_fit(path, state["module"], spec.module.state_dict())
    if spec.mode == ModeKeys.TRAIN and spec.optimizer is not None:
        if state["optimizer_kind"] != type(spec.optimizer).__name__:
            raise CheckpointMismatchError(
                f"checkpoint {path!r} has the state of optimizer {state['optimizer_kind']}, the model function made "
                f"{type(spec.optimizer).__name__}; use the same, or another model_dir with warm_start_from"
            )
        try:
            spec.optimizer.load_state_dict(state["optimizer"])
        except ValueError as error:
            raise CheckpointMismatchError(
                f"checkpoint {path!r} does not match the optimizer {type(spec.optimizer).__name__}: {error}"
            ) from error
        if (spec.scheduler is None) != (state["scheduler"] is None):
            raise CheckpointMismatchError(
                f"checkpoint {path!r} has {'no' if state['scheduler'] is None else 'a'} scheduler, unlike the model "
                f"function; use the same, or another model_dir with warm_start_from"
            )
        if spec.scheduler is not None:
            spec.scheduler.load_state_dict(state["scheduler"])
    spec.module.load_state_dict(state["module"])


def find_checkpoint(path: str | None, model_dir: str) -> tuple[str, dict[str, Any]] | None:
    """The checkpoint that was asked for, or else the newest one that is undamaged."""
    return load_latest(model_dir) if path is None else (str(path), load_checkpoint(path))


def warm_start(spec: EstimatorSpec, settings: WarmStartSettings) -> list[str]:
    """Gives a new model weights of another one; returns their names.

    Raises:
        CheckpointError: There is no checkpoint.
        CheckpointMismatchError: The checkpoint lacks a weight or has it in another shape, or no name fits.
    """
    source = settings.ckpt_to_initialize_from
    found = load_latest(source)
    if found is None and not os.path.isdir(source):
        raise CheckpointError(f"warm_start_from is a checkpoint or a folder with checkpoints, got {source!r}")
    path, state = found or (source, load_checkpoint(source))
    own = spec.module.state_dict()
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
    spec.module.load_state_dict({**own, **saved})
    return names


def structure_of(features: Any) -> Any:
    """The form of features without their values: dtype and shape of each tensor, the first dimension open."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return {"kind": type(value).__name__}
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": [None, *value.shape[1:]]}

    return pytree.tree_map(leaf, features)
