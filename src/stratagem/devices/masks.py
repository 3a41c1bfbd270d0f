"""Applies `CUDA_VISIBLE_DEVICES` by the rules of the CUDA driver.

The driver itself masks real GPUs; this file masks simulated ones in the same way, and explains for
both why a GPU is not seen. The rules: a list of indices; each visible one is renumbered from 0 in
the order given; the first entry that names no GPU hides itself and all that follow; an index given
twice hides everything; the empty text hides everything.
"""

import dataclasses
import re

from stratagem._env import CUDA_VISIBLE_DEVICES

# What Slurm, containers and people write to hide every GPU on purpose.
_HIDE_ALL = {"", "-1", "none", "void", "nodevfiles"}


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which GPUs stay visible, in their new order, and what is wrong with the text, if anything."""

    indices: tuple[int, ...]
    complaint: str | None = None


def apply(text: str | None, count: int) -> Mask:
    """Masks `count` GPUs.

    Example:
        >>> apply("2,0", 4).indices
        (2, 0)
        >>> apply("0,9,1", 4).indices
        (0,)
    """
    if text is None:
        return Mask(tuple(range(count)))
    if text.strip().lower() in _HIDE_ALL:
        return Mask(())
    chosen: list[int] = []
    strange = None
    for entry in text.rstrip(", ").split(","):
        index = _leading_number(entry)
        if index is None:
            return Mask(tuple(chosen), _complaint(text, f"{entry.strip()!r} is not an index from 0 up"))
        if index >= count:
            return Mask(tuple(chosen), _complaint(text, f"there is no GPU {index} among {count}"))
        if index in chosen:
            return Mask((), f"{CUDA_VISIBLE_DEVICES}={text!r}: GPU {index} is listed twice, which hides every GPU")
        if entry.strip().lstrip("+0") != str(index).lstrip("0"):
            strange = (
                f"{CUDA_VISIBLE_DEVICES}={text!r}: {entry.strip()!r} is read as {index}; separate indices by commas"
            )
        chosen.append(index)
    return Mask(tuple(chosen), strange)


def is_by_uuid(text: str | None) -> bool:
    """Whether GPUs are named by the identity of their hardware, which only the driver can resolve."""
    return text is not None and text.startswith(("GPU-", "MIG-"))


def _leading_number(entry: str) -> int | None:
    """The driver reads digits and ignores what follows them: `1gpu` is 1."""
    match = re.match(r"\s*\+?([0-9]{1,9})", entry)
    return int(match[1]) if match else None


def _complaint(text: str, why: str) -> str:
    return f"{CUDA_VISIBLE_DEVICES}={text!r}: {why}; that entry and all after it are ignored"
