"""What programs for torch's own ways of training on several devices have, and what to write instead.

Owns the refusal of wrappers (DistributedDataParallel and its kin), and the advice that is added to errors of torch
where a program uses one, or a process group, with a strategy.
"""

import sys
from typing import Any, Final

import torch

from stratagem.errors import StrategyError, in_words

_NOT_NEEDED: Final = "the strategy divides batches and sums gradients itself. Leave it out: model = Net()"
_NO_SHARDS: Final = (
    "every replica of a strategy has the whole model. Leave it out; for a model that is too large for one device place "
    "its parts with sg.device (the guide on placement)"
)
# By the module that has the class, which is not imported for this.
_WRAPPERS: Final = (
    ("torch.nn.parallel", "DistributedDataParallel", _NOT_NEEDED),
    ("torch.nn.parallel", "DataParallel", _NOT_NEEDED),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", _NO_SHARDS),
    ("torch.distributed.fsdp", "FSDPModule", _NO_SHARDS),
)
_NO_GROUP: Final = (
    "a strategy has no default process group of torch.distributed. Leave out init_process_group, "
    "DistributedDataParallel, fully_shard and DistributedSampler. In a step write strategy.global_rank for "
    'dist.get_rank(), and sg.get_replica_context().all_reduce("sum", tensor) for dist.all_reduce(tensor)'
)
_ADVICE: Final = {
    "has no attribute 'no_sync'": (
        "a model of a strategy is not wrapped: write `with strategy.no_sync():` for `with model.no_sync():`, also in a "
        "step, and call optimizer.step() after the last backward()"
    ),
    "has no attribute 'module'": "a model of a strategy is not wrapped: write model for model.module",
    "Default process group has not been initialized": _NO_GROUP,
    "Error initializing torch.distributed using env://": _NO_GROUP,
}


def refuse_wrapper(obj: Any) -> None:
    """Refuses a module that would sum gradients, or divide a model, beside the strategy."""
    for place, name, instead in _WRAPPERS:
        kind = getattr(sys.modules.get(place), name, None)
        if kind is not None and isinstance(obj, kind):
            shown = "fully_shard" if name == "FSDPModule" else name
            raise StrategyError(f"{shown} was used on a model of a strategy, and {instead}")


def advise(error: BaseException | None) -> None:
    """Adds to an error of torch what to write instead, if it is one of those that such programs meet."""
    if not isinstance(error, AttributeError | ValueError | RuntimeError):
        return
    owner = getattr(error, "obj", None)  # of an error that comes from a child it is not known
    if owner is not None and not isinstance(owner, torch.nn.Module):
        return
    words = next((advice for part, advice in _ADVICE.items() if part in in_words(error)), None)
    if words is not None and words not in getattr(error, "__notes__", ()):
        error.add_note(words)
