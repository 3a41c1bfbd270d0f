"""An equal copy of every variable on each local device, in agreement after every step."""

from collections.abc import Sequence
from typing import final

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
        devices: Where the replicas compute; by default all logical devices of the best kind.
        gradients: `mean`: a loss is a mean over a replica's rows and counts by them. `sum`: losses are added up;
            for sums over rows that the program divides by the global batch itself, which `mean` would divide again.
        unused: What a parameter that only some replicas used means: `zero` gradients in the others,
            or an `error`.
        on_nonfinite: What a gradient that is not finite does to its step: `skip`, `raise` or `apply`.
        cross_device_ops: How gradients travel. `shared_memory`: variables lie once in memory that all
            replicas share; for the CPU. `torch`: every replica has its own, and gradients are summed
            by torch.distributed (NCCL, or gloo on the CPU) while the backward pass goes on.
            `to_one`: the same, but summed in replica 0 and sent back; simple and slow. `auto` takes
            `shared_memory` on the CPU and `torch` on accelerators, and with a warning in containers that
            hide a process' page map, without which memory cannot be shared this way.
        check_copies_every: After how many steps replicas that have copies of their own (`torch`, `to_one`) make sure
            that those are still the same; a `DriftError` says which are not. 0 for never.
        stall_timeout_s: How long replicas wait for another before it counts as stalled.
    Raises:
        DeviceError: `devices` is empty, names one twice or one that does not exist.
        StrategyError: An option is not one of its values, or the call is inside a replica.
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
        cross_device_ops: str = "auto",
        check_copies_every: int = CHECK_COPIES_EVERY,
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
        )
        super().__init__(chosen, driven_here(chosen, recipe, stall_timeout_s))
