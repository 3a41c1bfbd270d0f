"""Says why an accelerator is not there, and what to do about it.

Owns the wording for a CPU build of torch, hidden GPUs and missing hardware, shared by errors and
by `stratagem devices`.
"""

import torch

from stratagem import _env
from stratagem.devices import masks
from stratagem.devices.accelerators import is_cpu_build
from stratagem.devices.device_spec import GPU
from stratagem.devices.host import Host

_SIMULATE_HINT = f"To try a program without GPUs: sg.config.simulate_devices('GPU', 2) or {_env.SIMULATE}=gpu:2"


def why_none(kind: str, host: Host) -> str:
    """Why there is no device of this kind, in one or two sentences, and what to do."""
    reasons = []
    if kind == GPU:
        reasons = visibility_notes(host)
    if is_cpu_build():
        in_the_box = f" although this machine has {host.num_nvidia_gpus()} NVIDIA GPU(s)" if _has_nvidia(host) else ""
        reasons.append(
            f"torch {torch.__version__} is a CPU build and cannot see accelerators{in_the_box}; "
            f"install a build of torch for yours"
        )
    elif kind == GPU and not _has_nvidia(host):
        reasons.append(f"torch {torch.__version__} finds no GPU")
    hint = f" {_SIMULATE_HINT}." if kind == GPU else ""
    return f"{'; '.join(reasons) or f'torch finds no {kind}'}.{hint}"


def visibility_notes(host: Host) -> list[str]:
    """What `CUDA_VISIBLE_DEVICES` hides of the real GPUs."""
    text = _env.cuda_visible_devices()
    num_gpus = host.num_nvidia_gpus()
    if text is None:
        return []
    if num_gpus is None or masks.is_by_uuid(text):
        return [f"{_env.CUDA_VISIBLE_DEVICES}={text!r} is set and hides the GPUs that it does not list"]
    mask = masks.apply(text, num_gpus)
    if mask.complaint:
        return [mask.complaint]
    hidden = num_gpus - len(mask.indices)
    return [f"{_env.CUDA_VISIBLE_DEVICES}={text!r} hides {hidden} of {num_gpus} GPU(s)"] if hidden else []


def _has_nvidia(host: Host) -> bool:
    return bool(host.num_nvidia_gpus())
