"""Says why an accelerator is not there, and what to do about it.

Owns the wording for a CPU build of torch, hidden GPUs and missing hardware, shared by errors and
by `stratagem devices`.
"""

import torch

from stratagem import _env
from stratagem.devices import kind_table, masks
from stratagem.devices.host import Host
from stratagem.devices.kind_table import GPU, TPU
from stratagem.devices.vendors import tpu_libraries


def why_none(kind: str, host: Host) -> str:
    """Why there is no device of this kind, in one or two sentences, and what to do."""
    reasons = []
    if kind == GPU:
        reasons = visibility_notes(host)
    row = kind_table.row_of(kind)
    if kind == TPU:
        reasons.append(tpu_libraries.why_none(host))
    elif row.package is not None and not row.is_built():
        reasons.append(f"torch sees a {kind} through {row.package}, which this program has not loaded")
    elif kind_table.is_cpu_build():
        in_the_box = f" although this machine has {host.num_nvidia_gpus()} NVIDIA GPU(s)" if _has_nvidia(host) else ""
        reasons.append(
            f"torch {torch.__version__} is a CPU build and cannot see accelerators{in_the_box}; "
            f"install a build of torch for yours"
        )
    elif kind == GPU and not _has_nvidia(host):
        reasons.append(f"torch {torch.__version__} finds no GPU")
    return f"{'; '.join(reasons) or f'torch finds no {kind}'}{_simulate_hint(kind)}"


def _simulate_hint(kind: str) -> str:
    if kind not in kind_table.strict_kinds():
        return ""
    variable = f"{_env.SIMULATE}={kind.lower()}:2"
    return f". To try a program without {kind}s: sg.config.simulate_devices({kind!r}, 2) or {variable}"


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
