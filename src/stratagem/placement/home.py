"""Makes a device the home of a thread, or of the whole process: tensors that nobody has placed are there.

A replica is at home on its device, for each run in the main program, for life in a child. Where a program has set a
limit that the kernel does not hold, what is at home is counted; elsewhere this costs nothing.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, final

import torch

from stratagem import _tree
from stratagem.devices import serving, usage
from stratagem.devices.device import LogicalDevice
from stratagem.placement import presence, residence, scopes
from stratagem.placement.residence import Home, Tenant


def at_home(
    device: LogicalDevice, tenant: Tenant, replica: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """For the time of a block, in the main program: it has other memory too, so that what is the device's is counted.

    Args:
        device: The device; of an accelerator, torch's allocator holds the limit.
        tenant: Who computes in the block.
        replica: As which replica.
    """
    on_host = device.torch_device.type == "cpu"
    block = _AtHome(Home(device, replica, counts=device.is_limit_given and on_host, tenant=tenant))
    return block if on_host else _limited(block, device)


@contextlib.contextmanager
def _limited(block: "_AtHome", device: LogicalDevice) -> Iterator[None]:
    with block, serving.limited_accelerator(device):
        yield


@final
class _AtHome:
    """The block of `at_home`."""

    __slots__ = ("_before", "_home")

    def __init__(self, home: Home) -> None:
        self._home = home

    def __enter__(self) -> None:
        self._before = residence.move_home(self._home)
        try:
            presence.update()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        device = self._home.device
        if (place := residence.counting_home()) is not None:
            usage.count(device.name, device.memory_limit_bytes, place.used_bytes, place.peak_bytes)
        residence.move_home(self._before)
        presence.update()


def stay_at(device: LogicalDevice, replica: int) -> None:
    """For life, in a child: the kernel holds its limit."""
    residence.stay_at(Home(device, replica))
    serving.serve_for_life(device)


Follow: TypeAlias = Callable[[torch.device], contextlib.AbstractContextManager[None]]
_followers: list[Follow] = []


def let_follow(follow: Follow) -> None:
    """Lets a library that has a device of its own, beside torch's, compute where a replica is at home.

    Args:
        follow: Makes the block in which the library does.
    """
    _followers.append(follow)


def _in_replica() -> contextlib.AbstractContextManager[None]:
    """A replica is in none of the scopes of the program, and libraries compute on its device."""
    return _apart() if _followers or scopes.state.open else scopes.placing()


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    with contextlib.ExitStack() as entered:
        entered.enter_context(scopes.placing())
        if residence.replica() is not None:
            entered.enter_context(scopes.outside())
        if _followers and (home := residence.home_here()) is not None:
            for follow in _followers:
                entered.enter_context(follow(home.device.torch_device))
        yield


def compute(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], variables: Iterable[torch.Tensor]
) -> Any:
    """Calls a function of the program; what it is given and the variables that it uses count.

    What it made and returns does not count any more; what was there before, as variables are, stays on the device.

    A replica is in none of the scopes around the run: they would move the one in the main program only.

    Raises:
        OutOfMemoryError: They do not fit.
    """
    place = residence.counting_home()
    if place is None:
        with _in_replica():
            return function(*args, **kwargs)
    for each in variables:
        place.settle(each, torch.nn.Parameter)
    begin = residence.next_mark()
    given = [each for each in _tree.leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    with place.reserved(given, torch.Tensor.to):
        with _in_replica():
            result = function(*args, **kwargs)
        returned = [each for each in _tree.leaves(result) if isinstance(each, torch.Tensor)]
        residence.release((each for each in returned if not isinstance(each, torch.nn.Parameter)), since=begin)
    return result
