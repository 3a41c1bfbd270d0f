"""Keeps the state of a training in files that are whole or absent.

A checkpoint is a folder `model.ckpt-STEP` with the tensors (`tensors.safetensors`) and everything
else (`state.json`, with the checksums of both). It is written under another name, brought to the
disk, and then renamed. Nothing that is read is ever executed. What a state means is decided by
those who make it.
"""

import contextlib
import ctypes
import fcntl
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
from stratagem.devices.device import mib
from stratagem.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointWriteError,
    StratagemWarning,
)

TENSORS = "tensors.safetensors"
STATE = "state.json"

_FORMAT = 1
_NAME = re.compile(r"model\.ckpt-(\d{1,18})")
_UNFINISHED = ".unfinished-"
_MAX_SHOWN = 5
_MAX_STATE_BYTES = 16 * 2**20
_MAX_SUMS_BYTES = 1024
_MAX_INT_BITS = 10_000  # Python reads no longer ones from a file
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


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
        CheckpointError: Something in the state cannot be kept.
        CheckpointWriteError: The files cannot be written.
    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save_checkpoint(folder, 3, {"weight": torch.ones(2), "rates": (0.1, 0.2)})
        ...     load_checkpoint(path)
        {'weight': tensor([1., 1.]), 'rates': (0.1, 0.2)}
    """
    writer = _Writer()
    content = writer.encoded(state)
    path = Path(checkpoint_path(folder, step))
    text = json.dumps({"format": _FORMAT, "step": step, "state": content})
    if len(text) > _MAX_STATE_BYTES:
        raise CheckpointError(
            f"a checkpoint keeps at most {mib(_MAX_STATE_BYTES)} besides its tensors, got {mib(len(text))}; keep long "
            f"lists of numbers as tensors"
        )
    try:
        with whole_folder(path) as draft:
            tensors_file = draft / TENSORS
            save_file(writer.tensors, tensors_file)
            sums = {
                "tensors_bytes": tensors_file.stat().st_size,
                "tensors_sha256": _digest(tensors_file),
                "state_sha256": _digest_of(text),
            }
            (draft / STATE).write_text(json.dumps({"sums": sums}) + "\n" + text + "\n")
    except (OSError, SafetensorError) as error:
        need = sum(each.nbytes for each in writer.tensors.values()) + len(text)
        raise CheckpointWriteError(
            f"checkpoint {str(path)!r} could not be written: {error} (need {mib(need)}, free {_free(path.parent)}). "
            f"Earlier checkpoints are as they were; make room, or choose a folder that can be written to"
        ) from error
    # Not the new one, whatever its step: those with a later step may be damaged ones that were passed over.
    others = [each for _, each in _numbered(path.parent) if each != path]
    for old_path in others[: max(0, len(others) + 1 - keep_max)] if keep_max else ():
        with _unfinished(old_path) as aside:
            old_path.rename(aside / old_path.name)
    return str(path)


def require_keepable(state: Mapping[str, Any]) -> None:
    """Refuses a state with something in it that a checkpoint cannot keep.

    Raises:
        CheckpointError: It has.
    """
    _Writer().encoded(state)


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
        if _digest(tensors_file) != sums["tensors_sha256"]:
            raise CheckpointCorruptError(
                f"{str(tensors_file)!r} is damaged: its sha256 is not the one in {STATE} (size "
                f"{tensors_file.stat().st_size}, expected {sums['tensors_bytes']})"
            )
        _require_small_header(tensors_file, text)
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
    for leftover in path.parent.glob(f"{_UNFINISHED}*"):
        _remove_if_left(leftover)
    with _unfinished(path) as draft, _unfinished(path) as aside:
        yield draft
        for each in (*draft.iterdir(), draft):
            _bring_to_disk(each)
        _put_in_place(draft, path, aside)
        _bring_to_disk(path.parent)


def all_checkpoints(folder: str | os.PathLike[str]) -> list[str]:
    """The paths of all checkpoints in a folder, oldest first, without looking into them."""
    return [str(path) for _, path in _numbered(Path(folder))]


def latest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Returns the path of the newest undamaged checkpoint; a warning names damaged ones.

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
        except CheckpointError as error:
            if path.is_dir():  # else another program has dropped it meanwhile
                warn_caller(f"{error}; taking the checkpoint before it", StratagemWarning)
    return None


def checkpoint_path(folder: str | os.PathLike[str], step: int) -> str:
    """Where the checkpoint of a step is."""
    return str(Path(folder) / f"model.ckpt-{step}")


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

    def encoded(self, state: Any) -> Any:
        """The whole state."""
        if not isinstance(state, Mapping):
            raise CheckpointError(f"a checkpoint keeps a dict of states by their names, got {type(state).__name__}")
        try:
            return self.encode(state, "state")
        except RecursionError:
            raise CheckpointError(
                "a state is nested too deep for a checkpoint, or contains itself; keep it as a flat dict"
            ) from None

    def encode(self, value: Any, where: str) -> Any:
        # By hand, as in `_decode`: a file tells tuples from lists, and keeps the way to every value.
        if isinstance(value, torch.Tensor):
            return {"tensor": self._keep(value, where)}
        if isinstance(value, bool | int | float | str | None):
            if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
                raise CheckpointError(f"an int in a checkpoint has at most {_MAX_INT_BITS} bits, {where} has more")
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
            f"{type(value).__name__} {value!r} as {where}; keep its parts, or make it again when resuming"
        )

    def _keep(self, tensor: torch.Tensor, where: str) -> str:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(f"a checkpoint keeps dense tensors, {where} is {tensor.layout} {tensor.dtype}")
        held = tensor.detach().to("cpu")
        # Of tensors that share memory, such as tied weights, safetensors wants copies.
        place = held.untyped_storage().data_ptr()
        alone = held.untyped_storage().nbytes() == held.nbytes and place not in self._places
        self._places.add(place)
        where = where.encode("ascii", "backslashreplace").decode()
        while where in self.tensors:  # as of the keys 1 and "1", or "a/b" and "b" in "a"; the state says which is which
            where += "'"
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
        if file.stat().st_size > _MAX_STATE_BYTES + _MAX_SUMS_BYTES:
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


def _require_small_header(file: Path, state: str) -> None:
    """Refuses a header with more tensors than the state has: to read one with a million takes minutes."""
    with file.open("rb") as content:
        num_bytes = int.from_bytes(content.read(8), "little")
    most = min(_MAX_STATE_BYTES, len(state) + 512 * state.count('"tensor"') + 4096)
    if num_bytes > most:
        raise ValueError(f"its header says {num_bytes} bytes, and the tensors of {STATE} need at most {most}")


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _free(folder: Path) -> str:
    try:
        return mib(shutil.disk_usage(folder).free)
    except OSError:
        return "unknown"


def _put_in_place(draft: Path, path: Path, aside: Path) -> None:
    """Gives a folder its name. What had the name is in `draft` or `aside` then."""
    if not path.exists():
        draft.rename(path)
    elif not _swap(draft, path):
        path.rename(aside / path.name)
        try:
            draft.rename(path)
        except BaseException:
            (aside / path.name).rename(path)
            raise


def _swap(one: Path, other: Path) -> bool:
    """Gives each of two folders the other's name in one step; `False` where the file system cannot do that."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


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
    descriptor = os.open(draft, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        os.close(descriptor)


def _remove_if_left(draft: Path) -> None:
    """Removes what a program left that was killed while it saved; one that still saves holds a lock."""
    with contextlib.suppress(OSError):
        descriptor = os.open(draft, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(draft, ignore_errors=True)
        finally:
            os.close(descriptor)


def _numbered(home: Path) -> list[tuple[int, Path]]:
    if not home.is_dir():
        return []
    found = [(int(match[1]), path) for path in home.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(each for each in found if each[1].is_dir())
