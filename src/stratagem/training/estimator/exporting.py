"""Writes a model for use elsewhere: its weights, and what goes in and comes out as JSON."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils import _pytree as pytree

from stratagem.training.checkpoints import CheckpointError, whole_folder
from stratagem.training.estimator.checks import EstimatorError
from stratagem.training.estimator.specs import EstimatorSpec
from stratagem.training.estimator.states import structure_of

WEIGHTS = "weights.safetensors"
SIGNATURE = "signature.json"


def require_free(export_dir: str | os.PathLike[str]) -> Path:
    """Refuses to export over something that exists."""
    path = Path(export_dir)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise EstimatorError(f"export writes to a folder that is new or empty, {str(path)!r} is not; name another")
    return path


def write_export(path: Path, spec: EstimatorSpec, structure: Any, global_step: int) -> str:
    """Writes the folder of an exported model, whole or not at all.

    Args:
        path: The folder.
        spec: The model, restored.
        structure: The form of its features.
        global_step: How many steps it has been trained.
    """
    signatures: dict[str, Callable[[Any], Any]] = dict(spec.export_outputs or {})
    signatures = signatures or {"serving_default": spec.predictions or (lambda outputs: outputs)}
    spec.module.eval()
    with torch.no_grad():
        outputs = spec.module(example_from(structure))
        described = {name: structure_of(function(outputs)) for name, function in signatures.items()}
    content = {"format": 1, "global_step": global_step, "inputs": structure, "signatures": described}
    weights = {name: each.detach().cpu().clone().contiguous() for name, each in spec.module.state_dict().items()}
    try:
        with whole_folder(path) as draft:
            save_file(weights, draft / WEIGHTS)
            (draft / SIGNATURE).write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(f"the model could not be exported to {str(path)!r}: {error}") from error
    return str(path)


def example_from(structure: Any) -> Any:
    """Features of the form that a checkpoint keeps: one example of zeros."""

    def leaf(form: dict[str, Any]) -> torch.Tensor:
        if "dtype" not in form:
            raise EstimatorError(f"export describes features that are tensors, the input gave {form['kind']}")
        return torch.zeros([1, *form["shape"][1:]], dtype=getattr(torch, form["dtype"]))

    return pytree.tree_map(leaf, structure, is_leaf=lambda each: isinstance(each, dict) and _is_leaf(each))


def _is_leaf(form: dict[str, Any]) -> bool:
    return set(form) in ({"dtype", "shape"}, {"kind"})
