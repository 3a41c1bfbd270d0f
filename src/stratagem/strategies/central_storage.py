"""Variables that exist once, in memory of the host or on one device; replicas compute, and one update is made."""

from collections.abc import Sequence
from typing import final

import torch

from stratagem.collectives.exchange_dtype import read_exchange_dtype
from stratagem.devices.device import LogicalDevice
from stratagem.devices.inventory import this_process
from stratagem.devices.lookup import DeviceLike
from stratagem.engine.lockstep import LocalReplicas
from stratagem.engine.recipe import CHECK_COPIES_EVERY, Recipe
from stratagem.strategies.replicated import Replicated, choose_devices, choose_exchange, driven_here, summed


@final
class CentralStorageStrategy(Replicated[LocalReplicas]):
    """Keeps every variable once, and updates it once per step.

    Replicas on the CPU share the memory of the variables: parameters and optimizer state take the memory of one
    copy, whatever the number of replicas. Replicas on accelerators compute with copies of the parameters; the
    optimizer state, and the values that it updates, are on `parameter_device` only.

    Args:
        compute_devices: The devices of the replicas; by default all logical devices of the best kind.
        parameter_device: The device that keeps the variables; by default the memory of the host.
        gradients: `mean` or `sum`, as in `MirroredStrategy`.
        unused: `zero` or `error`, as in `MirroredStrategy`.
        on_nonfinite: `skip`, `raise` or `apply`, as in `MirroredStrategy`.
        check_copies_every: The number of steps after which accelerators check that their copies are still equal; a
            `DriftError` names those that differ. 0 never checks.
        exchange_dtype: `"bf16"` or `None`, as in `MirroredStrategy`.
        stall_timeout_s: How many seconds replicas wait for another one before they report it as stalled.
    Raises:
        DeviceError: A device comes twice or does not exist.
        StrategyError: An option has a value that it does not take, or the call is inside a replica.
    Example:
        >>> import torch
        >>> strategy = CentralStorageStrategy(["cpu:0"])
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(2, 1)
        >>> strategy.local_results(strategy.run(lambda x: tuple(model(x).shape), args=(torch.ones(3, 2),)))
        ((3, 1),)
        >>> strategy.close()
    """

    def __init__(
        self,
        compute_devices: Sequence[DeviceLike] | None = None,
        parameter_device: DeviceLike | None = None,
        *,
        gradients: str = "mean",
        unused: str = "zero",
        on_nonfinite: str = "skip",
        check_copies_every: int = CHECK_COPIES_EVERY,
        exchange_dtype: str | torch.dtype | None = None,
        stall_timeout_s: float = 60.0,
    ) -> None:
        chosen = choose_devices("CentralStorageStrategy", compute_devices)
        kept_on = this_process().resolve(parameter_device) if parameter_device is not None else None
        recipe = Recipe(
            len(chosen),
            choose_exchange("auto", chosen),
            summed(gradients),
            unused,
            on_nonfinite,
            check_copies_every,
            read_exchange_dtype(exchange_dtype),
            kept_on=str(kept_on.torch_device if kept_on else "cpu"),
        )
        self._parameter_device = kept_on
        super().__init__(chosen, driven_here(chosen, recipe, stall_timeout_s))

    def _variables_on(self) -> LogicalDevice | None:
        return self._parameter_device
