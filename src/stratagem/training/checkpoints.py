"""Keeps the state of a training in files that are whole or absent.

A checkpoint is a folder `model.ckpt-STEP` with the tensors (`tensors.safetensors`) and everything
else (`state.json`, with the checksums of both). It is written under another name, brought to the
disk, and then renamed. Nothing that is read is ever executed. What a state means is decided by
those who make it.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stratagem._caller import warn_caller
from stratagem.errors import StratagemError, StratagemWarning

TENSORS = "tensors.safetensors"
STATE = "state.json"

_FORMAT = 1
_NAME = re.compile(r"model\.ckpt-(\d{1,18})")
_UNFINISHED = ".unfinished-"
_MAX_SHOWN = 5
_MAX_STATE_BYTES = 256 * 2**20


class CheckpointError(StratagemError, RuntimeError):
    """A checkpoint cannot be written, found or used."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is not what was written."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint is of another model."""


def save_checkpoint(folder: str | os.PathLike[str], step: int, state: Mapping[str, Any], *, keep_max: int = 0) -> str:
    """Writes a checkpoint, whole or not at all, and drops the oldest ones.

    Args:
        folder: Where checkpoints are kept; made if it does not exist.
        step: Which step it is of.
        state: Any nesting of dicts, lists and tuples of tensors, numbers, strings and `None`.
        keep_max: How many checkpoints to keep; 0 keeps all.
    Returns:
        The path of the checkpoint.
    Raises:
        CheckpointError: Something in the state cannot be kept, or the files cannot be written.
    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save_checkpoint(folder, 3, {"weight": torch.ones(2), "rates": (0.1, 0.2)})
        ...     load_checkpoint(path)
        {'weight': tensor([1., 1.]), 'rates': (0.1, 0.2)}
    """
    writer = _Writer()
    content = writer.encode(dict(state), "state")
    path = Path(folder) / f"model.ckpt-{step}"
    text = json.dumps({"format": _FORMAT, "step": step, "state": content})
    try:
        with whole_folder(path) as draft:
            save_file(writer.tensors, draft / TENSORS)
            sums = {"tensors_sha256": _digest(draft / TENSORS), "state_sha256": _digest_of(text)}
            (draft / STATE).write_text(json.dumps({"sums": sums}) + "\n" + text + "\n")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {str(path)!r} could not be written: {error}. Earlier checkpoints are as they were; make room, "
            f"or choose a folder that can be written to"
        ) from error
    if keep_max:
        for _, old_path in _numbered(path.parent)[:-keep_max]:
            with _unfinished(old_path) as aside:
                old_path.rename(aside / old_path.name)
    return str(path)


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The state in a checkpoint, after its checksums have been compared.

    Raises:
        CheckpointError: There is no such checkpoint.
        CheckpointCorruptError: It is not what was written.
    """
    sums, text = _read_state(Path(path))
    tensors_file = Path(path) / TENSORS
    try:
        _require_file(tensors_file)
        if _digest(tensors_file) != sums.get("tensors_sha256"):
            raise CheckpointCorruptError(f"{str(tensors_file)!r} is damaged: its checksum is not the one in {STATE}")
        tensors = load_file(tensors_file)
        state = _decode(json.loads(text)["state"], tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointCorruptError(f"{str(tensors_file)!r} or {STATE} is damaged: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointCorruptError(f"{str(path)!r} is damaged: the state is a {type(state).__name__}")
    return state


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to write files to, which then becomes `path`; if the block fails, nothing has changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f"{_UNFINISHED}*"):  # of a program that was killed while it saved
        shutil.rmtree(leftover, ignore_errors=True)
    with _unfinished(path) as draft, _unfinished(path) as aside:
        yield draft
        for each in (*draft.iterdir(), draft):
            _bring_to_disk(each)
        if path.exists():
            path.rename(aside / path.name)
        try:
            draft.rename(path)
        except BaseException:
            if (aside / path.name).exists():
                (aside / path.name).rename(path)
            raise
        _bring_to_disk(path.parent)


def all_checkpoints(folder: str | os.PathLike[str]) -> list[str]:
    """The paths of all checkpoints in a folder, oldest first, without looking into them."""
    return [str(path) for _, path in _numbered(Path(folder))]


def latest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The path of the newest checkpoint that is undamaged; damaged ones are named in a warning.

    Example:
        >>> latest_checkpoint("no such folder") is None
        True
    """
    found = load_latest(folder)
    return found[0] if found else None


def load_latest(folder: str | os.PathLike[str]) -> tuple[str, dict[str, Any]] | None:
    """The path and the state of the newest checkpoint that is undamaged, if there is one."""
    for _, path in reversed(_numbered(Path(folder))):
        try:
            return str(path), load_checkpoint(path)
        except CheckpointCorruptError as error:
            warn_caller(f"{error}; taking the checkpoint before it", StratagemWarning)
    return None


def step_of(path: str | os.PathLike[str]) -> int:
    """Which step a checkpoint is of, by its name.

    Example:
        >>> step_of("models/model.ckpt-120")
        120
    """
    match = _NAME.fullmatch(Path(path).name)
    if match is None:
        raise CheckpointError(f"a checkpoint is a folder named model.ckpt-STEP, got {str(path)!r}")
    return int(match[1])


def require_fit(path: str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses a checkpoint of another model, before anything is changed.

    Args:
        path: The checkpoint, for the error.
        saved: The `state_dict` in it.
        wanted: The `state_dict` of the model.
    Raises:
        CheckpointMismatchError: Names or shapes differ.
    """
    differences = [f"missing {name!r}" for name in wanted if name not in saved]
    differences += [f"extra {name!r}" for name in saved if name not in wanted]
    for name, tensor in wanted.items():
        if name in saved and _form(saved[name]) != _form(tensor):
            differences.append(f"{name!r} is {_form(saved[name])}, the model has {_form(tensor)}")
    if differences:
        more = f"; and {len(differences) - _MAX_SHOWN} more" if len(differences) > _MAX_SHOWN else ""
        raise CheckpointMismatchError(
            f"checkpoint {path!r} does not match the model: {'; '.join(differences[:_MAX_SHOWN])}{more}. "
            f"Use the model that it was saved from, or another model_dir"
        )


def _form(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


@final
class _Writer:
    """Turns a state into JSON values and, beside them, named tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._places: set[int] = set()

    def encode(self, value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            return {"tensor": self._keep(value, where)}
        if isinstance(value, bool | int | float | str | None):
            return value
        if isinstance(value, list):
            return [self.encode(each, f"{where}/{index}") for index, each in enumerate(value)]
        if isinstance(value, tuple):
            return {"tuple": [self.encode(each, f"{where}/{index}") for index, each in enumerate(value)]}
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str | int) or isinstance(key, bool):
                    raise CheckpointError(f"keys in a checkpoint are str or int, got {key!r} in {where}")
            return {"dict": [[key, self.encode(each, f"{where}/{key}")] for key, each in value.items()]}
        raise CheckpointError(
            f"a checkpoint keeps tensors, numbers, strings, None, lists, tuples and dicts, got "
            f"{type(value).__name__} {value!r} as {where}; keep what it is made of, or make it anew when resuming"
        )

    def _keep(self, tensor: torch.Tensor, where: str) -> str:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(f"a checkpoint keeps dense tensors, {where} is {tensor.layout} {tensor.dtype}")
        held = tensor.detach().to("cpu")
        # Of tensors that share memory, such as tied weights, safetensors wants copies.
        place = held.untyped_storage().data_ptr()
        alone = held.untyped_storage().nbytes() == held.nbytes and place not in self._places
        self._places.add(place)
        self.tensors[where] = held if alone and held.is_contiguous() else _copied(held)
        return where


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_decode(each, tensors) for each in content)
    if kind == "dict":
        return {key: _decode(each, tensors) for key, each in content}
    raise ValueError(f"{STATE} has an unknown kind of value, {kind!r}")


def _read_state(path: Path) -> tuple[dict[str, str], str]:
    file = path / STATE
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {str(path)!r}; checkpoints are folders named model.ckpt-STEP")
    try:
        _require_file(file)
        if file.stat().st_size > _MAX_STATE_BYTES:
            raise ValueError(f"{file.stat().st_size} bytes are more than it can have")
        header, text, _ = file.read_text().split("\n", 2)
        sums = json.loads(header)["sums"]
        if sums["state_sha256"] != _digest_of(text):
            raise ValueError("its checksum is not the one that was written")
        return sums, text
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointCorruptError(f"{str(file)!r} is damaged: {error}") from error


def _require_file(file: Path) -> None:
    if file.is_symlink() or not file.is_file():
        raise OSError(f"{file.name} is missing, or not a file")


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _bring_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """A folder beside `path` that nobody takes for a checkpoint; gone after the block, however that ends."""
    draft = Path(tempfile.mkdtemp(prefix=f"{_UNFINISHED}{path.name}-", dir=path.parent))
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _numbered(home: Path) -> list[tuple[int, Path]]:
    if not home.is_dir():
        return []
    found = [(int(match[1]), path) for path in home.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(each for each in found if each[1].is_dir())
