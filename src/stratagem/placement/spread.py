"""A device function that spreads variables over devices by their size: `sg.device(sg.spread_variables([...]))`."""

from collections.abc import Sequence
from typing import final

from stratagem.devices.device_spec import DeviceSpec
from stratagem.devices.lookup import DeviceLike, as_list
from stratagem.errors import DeviceConfigurationError, DeviceTypeError
from stratagem.placement.scopes import Operation, read_target


@final
class SpreadVariables:
    """Chooses for each variable the device that has the least bytes so far; a function for `sg.device`.

    It places new tensors, such as those of layers made in the block, and the variables
    of a graph. Other operations run where their inputs are, or where the scopes around them say. TensorFlow's
    `replica_device_setter` with a greedy strategy does the same.

    Args:
        devices: The devices for variables: of this process, or of tasks (`/job:ps/task:0`) in a session.
    Raises:
        DeviceConfigurationError: There is none, or one is named twice.
    Example:
        >>> import torch
        >>> from stratagem.placement import device, device_of
        >>> with device(SpreadVariables(["/cpu:0"])):
        ...     layer = torch.nn.Linear(4, 2)
        >>> device_of(layer.weight).name
        '/device:CPU:0'
    """

    def __init__(self, devices: Sequence[DeviceLike]) -> None:
        chosen = [read_target(each) for each in as_list(devices)]
        if not chosen:
            raise DeviceConfigurationError("variables are spread over at least one device, got an empty list")
        if other := [each for each in chosen if not isinstance(each, DeviceSpec)]:
            raise DeviceTypeError(f"variables are spread over a list of devices such as ['/gpu:0'], got {other[0]!r}")
        if len(set(chosen)) < len(chosen):
            raise DeviceConfigurationError(f"variables are spread over different devices, got {list(map(str, chosen))}")
        self.num_bytes: dict[DeviceSpec, int] = {each: 0 for each in chosen if isinstance(each, DeviceSpec)}

    def __call__(self, operation: Operation) -> DeviceLike | None:
        if operation.num_bytes is None:
            return None
        device = min(self.num_bytes, key=lambda each: self.num_bytes[each])
        self.num_bytes[device] += operation.num_bytes
        return device


spread_variables = SpreadVariables
