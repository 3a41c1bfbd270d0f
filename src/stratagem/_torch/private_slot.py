"""A backend in Python, in torch's one private slot: strict devices are one (`devices/strict`); since torch 2.10."""

import ctypes
import functools
import importlib
import operator
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import torch

from stratagem._torch.gradient_hooks import hooks_of
from stratagem._torch.modes import without_dispatch_modes, without_function_modes

_any_torch: Final[Any] = torch  # whose annotations leave some of these out

identity_of: Final[Callable[[Any], int]] = operator.attrgetter("_cdata")
"""The same number for all objects of Python that stand for one generator."""


def holder() -> str | None:
    """The name of the backend that holds torch's one private slot, if one does."""
    name: str = _any_torch._C._get_privateuse1_backend_name()
    taken = name != _FREE_SLOT or hasattr(torch, name) or _any_torch._C._accelerator_getAccelerator() == _slot()
    return name if taken else None


def knows_device_type(name: str) -> bool:
    """Whether torch has a type of device by this name: its own, or that of the backend in the private slot."""
    return name in _OWN_TYPES or name == _any_torch._C._get_privateuse1_backend_name()


_OWN_TYPES: Final = frozenset(("cpu", "cuda", "xpu", "mps", "hpu", "mtia"))

_FREE_SLOT: Final = "privateuseone"


def _slot() -> torch.device:
    return torch.device(_FREE_SLOT)


def take(name: str, module: Any) -> None:
    """Makes a module the backend in torch's private slot, for the life of this process."""
    registration = importlib.import_module("torch.utils.backend_registration")
    registration._setup_privateuseone_for_python_backend(name, backend_module=module, device_guard=_new_private_guard())
    importlib.import_module("torch.utils._device")._device_constructors()  # cached: some are about to be replaced


def number_device_contexts(numbered: Callable[[Any], Any]) -> None:
    """Lets `with torch.device(...)` and `torch.set_default_device` take what a function makes of their device."""
    kind: Any = importlib.import_module("torch.utils._device").DeviceContext
    original = kind.__init__

    @functools.wraps(original)
    def init(context: Any, device: Any) -> None:
        original(context, device)
        context.device = numbered(context.device)

    kind.__init__ = init


class _ErrorSetAside(threading.local):
    """An error that was under way in a thread when torch asked for the type of the private slot's devices."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def take(self) -> BaseException | None:
        """Hands it over."""
        error, self.error = self.error, None
        return error


_set_aside = _ErrorSetAside()

_raise_what_is_under_way: Final[Callable[[], object]] = ctypes.PYFUNCTYPE(ctypes.c_void_p)(
    ("PyErr_Occurred", ctypes.pythonapi)
)
"""Raises the error that C++ has not yet turned into one of its own, if there is one."""


def _new_private_guard() -> Any:
    """What torch asks about the devices of the private slot: only their type, and that often.

    It also asks while an error of a hook or a kernel leaves a node of autograd. A call that succeeds while an error is
    under way is an error to Python, and there torch can only end the process. So the error is set aside; torch then
    says that there was one and does not know which, and who has called the engine puts it back.
    """

    class PrivateGuard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            try:
                _raise_what_is_under_way()
            except BaseException as error:
                _set_aside.error = error
            return _PRIVATE_TYPE

    return PrivateGuard()


_PRIVATE_TYPE: Final[Any] = _any_torch._C._autograd.DeviceType.PrivateUse1


class _Trigger(torch.autograd.Function):
    """A node of autograd that does what it is told when a backward pass comes to it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, told: list[Callable[[], None]]) -> torch.Tensor:
        ctx.told = told
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, None]:
        ctx.told[0]()
        return None, None


class _TriggerOfThread(threading.local):
    """The trigger of a thread: backward passes of two threads do not get into each other's way."""

    def __init__(self) -> None:
        self.told: list[Callable[[], None]] = []
        self.node: torch.Tensor | None = None
        self.is_inside = False


class EngineOfPrivateSlot:
    """Runs backward passes of devices in the private slot, in the thread that torch has for its first device.

    Torch's guard for backends in Python says that there is one device, and torch's engine has a thread for each that
    the guard knows; a node on a second device is an internal error. So the pass is begun as one on the first device,
    whose one node runs the real pass with torch's threads switched off. Torch carries the state of the calling thread
    over, as it does on an accelerator; what is not torch's is carried by a function. A process that made a backward
    pass before it had the devices has no such thread at all; its passes run in the thread that asks for them.
    """

    def __init__(self, device: torch.device, carry: Callable[[], Callable[[], None]]) -> None:
        self._carry = carry
        self._engine: Any = _any_torch.autograd.Variable._execution_engine
        self._device = device
        self._here = _TriggerOfThread()
        self._has_thread: bool | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        outcome: Future[Any] = Future()
        arrive = self._carry()

        def run() -> None:
            arrive()
            _set_aside.take()  # what is left of an error that somebody has dealt with
            was_inside, self._here.is_inside = self._here.is_inside, True
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    outcome.set_result(self._engine.run_backward(*args, **kwargs))
            except BaseException as error:
                outcome.set_exception((isinstance(error, SystemError) and _set_aside.take()) or error)
            finally:
                self._here.is_inside = was_inside

        if self._here.is_inside or not self._finds_thread():
            run()
        else:
            self._pull(run)
        return outcome.result()

    def _finds_thread(self) -> bool:
        if self._has_thread is None:
            try:
                self._pull(lambda: None)
                self._has_thread = True
            except RuntimeError as error:
                if "device_ready_queues_" not in str(error):
                    raise
                self._has_thread = False
        return self._has_thread

    def _pull(self, run: Callable[[], None]) -> None:
        here = self._here
        if here.node is None:
            with without_function_modes(), without_dispatch_modes(), torch.inference_mode(False), torch.enable_grad():
                trigger: Any = _Trigger
                here.node = trigger.apply(torch.zeros((), device=self._device, requires_grad=True), here.told)
        here.told[:] = [run]
        roots, gradients = (here.node,), (here.node.detach(),)
        try:
            self._engine.run_backward(
                roots, gradients, True, False, (), allow_unreachable=True, accumulate_grad=True
            )  # which keeps the trigger for the next time
        finally:
            here.told.clear()


def run_backward_of_private_slot(device: torch.device, carry: Callable[[], Callable[[], None]]) -> None:
    """Lets all backward passes of this process go by `EngineOfPrivateSlot`.

    Args:
        device: The first device of the slot.
        carry: Called in the thread that asks for a pass; gives what to call in the thread that runs it.
    """
    _any_torch.autograd.Variable._execution_engine = EngineOfPrivateSlot(device, carry)


def let_data_move(type_: str) -> None:
    """Lets `tensor.data = ...`, and with it `module.to(device)`, keep its tensor when that moves to a type of device.

    Torch does so between the types that it knows to be alike, and the private slot's is not one of them.
    """
    are_alike, data = torch._has_compatible_shallow_copy_type, _any_torch.Tensor.data

    def crosses(old: torch.Tensor, new: torch.Tensor) -> bool:
        return old.device.type != new.device.type and type_ in (old.device.type, new.device.type)

    def can_be_set(input: torch.Tensor, from_: torch.Tensor) -> bool:  # torch's compiler compares the names
        return crosses(input, from_) or are_alike(input, from_)

    def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if crosses(tensor, value):
            _move(tensor, value)
        data.__set__(tensor, value)

    _any_torch._has_compatible_shallow_copy_type = can_be_set
    _any_torch.Tensor.data = property(data.__get__, put)


def _move(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Makes a tensor one on the device of another, with its gradient and its hooks."""
    target: Any = tensor
    gradient, target.grad = target.grad, None
    # Torch keeps hooks with the memory, and looks for them in these dicts, which handles that remove hooks know too.
    before, after = hooks_of(target)
    target._backward_hooks = target._post_accumulate_grad_hooks = None
    _any_torch._C._swap_tensor_impl(target, value.detach().requires_grad_(tensor.requires_grad))
    target._backward_hooks, target._post_accumulate_grad_hooks = before, after
    target.grad = None if gradient is None else gradient.to(value.device, value.dtype)


def replace_accelerator_functions(functions: dict[str, Callable[..., Any]]) -> None:
    """Lets `torch.accelerator` ask these, which torch's guard for backends in Python answers with constants."""
    for name, function in functions.items():
        setattr(torch._C, f"_accelerator_{name}", function)
