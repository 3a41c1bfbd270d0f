"""Writes a model for use elsewhere: its weights, and what goes in and comes out as JSON."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from stratagem import _tree
from stratagem.errors import CheckpointWriteError, EstimatorError
from stratagem.training.checkpoints import whole_folder
from stratagem.training.estimator.models import Model
from stratagem.training.estimator.training_state import structure_of

WEIGHTS = "weights.safetensors"
SIGNATURE = "signature.json"


def require_free(export_dir: str | os.PathLike[str]) -> Path:
    """Refuses to export over something that exists."""
    path = Path(export_dir)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise EstimatorError(f"export writes to a folder that is new or empty, {str(path)!r} is not; name another")
    return path


def write_export(path: Path, model: Model, structure: Any, global_step: int) -> str:
    """Writes the folder of an exported model, whole or not at all.

    Args:
        path: The folder.
        model: The model, restored.
        structure: The form of its features.
        global_step: How many steps it has been trained.
    """
    described = {name: structure_of(each) for name, each in model.outputs(example_from(structure)).items()}
    content = {"format": 1, "global_step": global_step, "inputs": structure, "signatures": described}
    weights = {name: each.detach().cpu().clone().contiguous() for name, each in model.weights().items()}
    try:
        with whole_folder(path) as draft:
            save_file(weights, draft / WEIGHTS)
            (draft / SIGNATURE).write_text(json.dumps(content, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise CheckpointWriteError(f"the model could not be exported to {str(path)!r}: {error}") from error
    return str(path)


def example_from(structure: Any) -> Any:
    """Features of the form that a checkpoint keeps: one example of zeros."""

    def leaf(form: dict[str, Any]) -> torch.Tensor:
        if "dtype" not in form:
            raise EstimatorError(f"export describes features that are tensors, the input gave {form['kind']}")
        return torch.zeros([1, *form["shape"][1:]], dtype=getattr(torch, form["dtype"]))

    return _tree.map(leaf, structure, is_leaf=lambda each: isinstance(each, dict) and _is_leaf(each))


def _is_leaf(form: dict[str, Any]) -> bool:
    return set(form) in ({"dtype", "shape"}, {"kind"})
