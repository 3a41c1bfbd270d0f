"""Variables that exist once, in memory of the host or on one device; replicas compute, and one update is made."""

from collections.abc import Sequence
from typing import final

from stratagem.devices.device import LogicalDevice
from stratagem.devices.inventory import this_process
from stratagem.devices.lookup import DeviceLike
from stratagem.engine.lockstep import LocalReplicas
from stratagem.engine.recipe import CHECK_COPIES_EVERY, Recipe
from stratagem.strategies.replicated import Replicated, choose_devices, choose_exchange, driven_here, summed


@final
class CentralStorageStrategy(Replicated[LocalReplicas]):
    """Keeps every variable once, and updates it once.

    Replicas that compute on the CPU see the variables in memory that they share: with any number of
    them, parameters and the optimizer's state take the memory of one. Accelerators work on copies; the
    optimizer's state, and the values that it updates, are on `parameter_device` alone.

    Args:
        compute_devices: Where the replicas compute; by default all logical devices of the best kind.
        parameter_device: Where variables are kept; by default the memory of the host.
        gradients: `mean`: a loss is a mean over a replica's rows and counts by them. `sum`: losses are added up;
            for sums over rows that the program divides by the global batch itself, which `mean` would divide again.
        unused: What a parameter that only some replicas used means: `zero` gradients, or an `error`.
        on_nonfinite: What a gradient that is not finite does to its step: `skip`, `raise` or `apply`.
        check_copies_every: After how many steps accelerators make sure that their copies are still the same; a
            `DriftError` says which are not. 0 for never.
        stall_timeout_s: How long replicas wait for another before it counts as stalled.
    Raises:
        DeviceError: A device is named twice or does not exist.
        StrategyError: An option is not one of its values, or the call is inside a replica.
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
            kept_on=str(kept_on.torch_device if kept_on else "cpu"),
        )
        self._parameter_device = kept_on
        super().__init__(chosen, driven_here(chosen, recipe, stall_timeout_s))

    def _variables_on(self) -> LogicalDevice | None:
        return self._parameter_device
