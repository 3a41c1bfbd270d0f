"""An equal copy of every variable on each local device, in agreement after every step."""

from collections.abc import Sequence
from typing import final

import torch

from stratagem.collectives.exchange_dtype import read_exchange_dtype
from stratagem.devices.lookup import DeviceLike
from stratagem.engine.lockstep import LocalReplicas
from stratagem.engine.recipe import CHECK_COPIES_EVERY, Recipe
from stratagem.strategies.replicated import Replicated, choose_devices, choose_exchange, driven_here, summed


@final
class MirroredStrategy(Replicated[LocalReplicas]):
    """Keeps an equal copy of every variable on each local device.

    Replica i receives slice i of the global batch. No copy changes until gradients from all
    replicas have been summed, so copies never drift apart. For several machines use
    `MultiWorkerMirroredStrategy`.

    Args:
        devices: The devices of the replicas; by default all logical devices of the best kind.
        gradients: `mean` if the loss of a step is a mean over rows: each replica counts by its number of rows. `sum` if
            the step itself divides a sum over rows by the global batch: gradients of the replicas are added up.
        unused: What happens if only some replicas used a parameter. `zero`: the others have gradients of zero.
            `error`: an error names the parameter.
        on_nonfinite: What happens to a step whose gradients are not finite. `skip`: no update, and a warning. `raise`:
            an error. `apply`: the update is made.
        cross_device_ops: How gradients travel between replicas. `shared_memory`: variables exist once, in memory that
            all replicas share; for the CPU. `torch`: every replica has its own variables, and torch.distributed
            (NCCL, or gloo on the CPU) sums gradients during the backward pass. `to_one`: replica 0 sums them
            and sends them back; simple and slow. `auto`: `shared_memory` on the CPU, `torch` on accelerators, and
            `torch` with a warning in containers that hide the page map of a process, which sharing needs.
        check_copies_every: The number of steps after which replicas with their own copies (`torch`, `to_one`) check
            that these are still equal; a `DriftError` names those that differ. 0 never checks.
        exchange_dtype: `"bf16"` or `torch.bfloat16`: float32 gradients travel as bfloat16, in half the bytes, and are
            added up in float32. Every replica rounds its own, and all have the same sums. By default, and with one
            replica, gradients stay as they are.
        stall_timeout_s: How many seconds replicas wait for another one before they report it as stalled.
    Raises:
        DeviceError: `devices` is empty, has a device twice, or has one that does not exist.
        StrategyError: An option has a value that it does not take, or the call is inside a replica.
    Example:
        >>> import torch
        >>> strategy = MirroredStrategy(["cpu:0"])
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(2, 1)
        >>> strategy.gather(strategy.run(model, args=(torch.ones(3, 2),))).shape
        torch.Size([3, 1])
        >>> strategy.close()
    """

    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        *,
        gradients: str = "mean",
        unused: str = "zero",
        on_nonfinite: str = "skip",
        cross_device_ops: str | None = "auto",
        check_copies_every: int = CHECK_COPIES_EVERY,
        exchange_dtype: str | torch.dtype | None = None,
        stall_timeout_s: float = 60.0,
    ) -> None:
        chosen = choose_devices("MirroredStrategy", devices)
        recipe = Recipe(
            len(chosen),
            choose_exchange(cross_device_ops, chosen),
            summed(gradients),
            unused,
            on_nonfinite,
            check_copies_every,
            read_exchange_dtype(exchange_dtype),
        )
        super().__init__(chosen, driven_here(chosen, recipe, stall_timeout_s))
