"""Drives one program on all devices of torch_xla: its variables, what a step is given and what it gives.

A step is traced in the main program and computed by all devices together, each with its rows of the global batch; the
main program does not wait for it. What torch_xla computes otherwise than torch is put right here.
"""

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from stratagem import _integrations, _torch, _tree
from stratagem._caller import warn_caller
from stratagem.devices.vendors import torch_xla as xla
from stratagem.errors import StratagemWarning, StrategyError
from stratagem.objects import per_replica
from stratagem.objects.per_replica import PerReplica, Remote
from stratagem.objects.tracking import Tracker


@final
class DeviceVariables:
    """The variables of a strategy on the devices, each of which has a copy of all.

    They are made on the host, where they are drawn as on one device, and brought to the devices before a step.
    """

    def __init__(self) -> None:
        self.tracker = Tracker()
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._loose: list[weakref.ref[torch.Tensor]] = []

    def settle(self) -> None:
        """Brings to the devices what is not there: what is new, and what the program has put elsewhere."""
        made = self.tracker.take() if self.tracker.has_news else []
        for each in made:
            _integrations.adapt(each)
        self._modules.update(each for each in made if isinstance(each, torch.nn.Module))
        self._loose = [each for each in self._loose if each() is not None]
        self._loose += [weakref.ref(each) for each in made if isinstance(each, torch.Tensor)]
        for module in list(self._modules):
            for tensor in _torch.module_parts.own_tensors(module):
                if tensor is not None and tensor.is_cpu:
                    _bring(tensor)
        for reference in self._loose:
            if (loose := reference()) is not None and loose.is_cpu:
                _bring(loose)
        for each in made:
            if isinstance(each, torch.optim.Optimizer):
                _bring_state(each)


def _bring(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        return
    hooks = _torch.gradient_hooks.program_hooks(tensor)
    if hooks is not None:
        _torch.gradient_hooks.drop_hooks(tensor)
    tensor.data = tensor.data.to(xla.DEVICE)
    if hooks is not None:
        _torch.gradient_hooks.set_program_hooks(tensor, hooks)


def _bring_state(optimizer: torch.optim.Optimizer) -> None:
    """Brings what an optimizer keeps for its parameters; it counts its steps on the host."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.is_cpu:
                state[name] = value.to(xla.DEVICE)


@final
class Inputs:
    """What steps are given, on the devices.

    Args:
        program: What computes them.
    """

    def __init__(self, program: xla.OneProgram) -> None:
        self._program = program
        self._num_uneven = 0  # batches in a row that every device has had whole

    def bring(self, arguments: Any) -> Any:
        """The arguments of a step: parts of a global batch are spread over the devices, other tensors are on each."""
        return _tree.map(
            self._bring, per_replica.load_deferred(arguments), is_leaf=lambda each: isinstance(each, PerReplica)
        )

    def note(self, num_rows: int | None) -> None:
        """Takes in of how many rows a step was; tells once if each device does the work of all."""
        if num_rows is None or self._num_uneven >= _MANY_UNEVEN:
            return
        self._num_uneven = self._num_uneven + 1 if num_rows % self._program.num_devices else 0
        if self._num_uneven == _MANY_UNEVEN:
            warn_caller(
                f"{_MANY_UNEVEN} batches in a row, the last of {num_rows} rows, did not divide evenly over "
                f"{self._program.num_devices} devices, so that each device computed all rows; choose a global batch of "
                f"a multiple of {self._program.num_devices} rows",
                StratagemWarning,
            )

    def _bring(self, value: Any) -> Any:
        if isinstance(value, PerReplica):
            spread = functools.partial(self._spread, num_rows=sum(value.counts) if value.counts else None)
            return _tree.map_only(torch.Tensor, spread, value[0])
        return _on_each(value) if isinstance(value, torch.Tensor) else value

    def _spread(self, tensor: torch.Tensor, *, num_rows: int | None) -> torch.Tensor:
        """Spreads rows that divide evenly; each device has all of others.

        XLA 2.9 ends the process where a step scatters rows that are spread unevenly, as the gradient of an embedding.
        """
        is_even = num_rows is not None and num_rows > 0 and num_rows % self._program.num_devices == 0
        is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.is_cpu
        dim = next((dim for dim, size in enumerate(tensor.shape) if size == num_rows), None)
        if not is_even or not is_plain or dim is None:
            return _on_each(tensor)
        spread = self._program.spread(tensor.detach(), dim)
        return spread.requires_grad_() if tensor.requires_grad else spread


_MANY_UNEVEN = 8


def _on_each(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type == xla.TORCH_TYPE else tensor.to(xla.DEVICE)


@final
class Results:
    """What steps have returned and nobody has read yet; it stays on the devices until then."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._kept: dict[int, torch.Tensor] = {}

    def keep(self, result: Any) -> Any:
        """What a step returned, as later steps do not change it."""
        return _tree.map(self._keep, result)

    def joined(self, result: Any, counts: tuple[int, ...] | None) -> Any:
        """The same as a program sees it."""
        return per_replica.join_results([result], counts, self._fetch, self._forget)

    def _keep(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        now = value.detach().clone()
        if now.device.type != xla.TORCH_TYPE:
            return now
        number = next(self._numbers)
        self._kept[number] = now
        return Remote(number)

    def _fetch(self, _: int, number: int) -> torch.Tensor:
        return self._kept.pop(number).cpu()

    def _forget(self, which: tuple[int, int]) -> None:
        self._kept.pop(which[1], None)


@final
class OnDevices(TorchFunctionMode):
    """Lets new tensors be on the devices, and torch's functions compute there what they do on one."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _makers() and (kwargs is None or kwargs.get("device") is None) and not _here.is_in_update:
            return func(*args, **{**(kwargs or {}), "device": xla.DEVICE})
        if func is torch.nn.functional.batch_norm or func is torch.batch_norm:
            return _batch_norm(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


_makers = functools.cache(_torch.modes.functions_with_device)


class _StepOfThread(threading.local):
    """The step that a thread is in, and the updates of optimizers in it."""

    mode: OnDevices | None = None
    is_aside = False  # whether an update goes on without the mode
    num_with_closure = 0

    @property
    def is_in_update(self) -> bool:
        """Whether the code is an optimizer's own, and not that of its closure."""
        return self.num_with_closure > 0 and not torch.is_grad_enabled()

    def put_back(self) -> None:
        """Ends an update."""
        if self.is_aside and self.mode is not None:
            _torch.modes.push_function_mode(self.mode)
        self.is_aside = False


_here = _StepOfThread()


@functools.cache
def _watch_updates() -> None:
    """Leaves optimizers alone, once for the process.

    What they make is where they make it: they count their steps on the host, and read that often. And they call more
    functions of torch than the rest of a step.
    """

    def begin(_: Any, args: Any, kwargs: Any) -> None:
        if _here.mode is None or _here.is_aside:
            return
        if _has_closure(args, kwargs):
            _here.num_with_closure += 1
            return
        top = _torch.modes.pop_function_mode()
        _here.is_aside = top is _here.mode
        if not _here.is_aside:
            _torch.modes.push_function_mode(top)

    def end(_: Any, args: Any, kwargs: Any) -> None:
        if _has_closure(args, kwargs):
            _here.num_with_closure = max(0, _here.num_with_closure - 1)
        else:
            _here.put_back()

    register_optimizer_step_pre_hook(begin)
    register_optimizer_step_post_hook(end)


def _has_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an update calls back; the optimizer itself is the first argument."""
    return any(each is not None for each in (*args[1:], *kwargs.values()))


def _batch_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Normalizes as torch does.

    torch_xla 2.9 puts the variance over n into the running one, and not that over n - 1, and has no backward pass where
    running statistics are used.
    """
    given = {**dict(zip(_ARGUMENTS[func is torch.batch_norm], args, strict=False)), **kwargs}
    if given.get("running_var") is None:
        return func(*args, **kwargs)
    return _normalized_by_batch(func, given) if given.get("training") else _normalized(given)


def _normalized_by_batch(func: Callable[..., Any], given: dict[str, Any]) -> Any:
    # Autograd keeps what it is given, which must not change afterwards.
    variance, biased = given["running_var"], given["running_var"].detach().clone()
    result = func(**{**given, "running_var": biased})
    num_values = given["input"].numel() // max(1, given["input"].shape[1])
    with torch.no_grad():
        added = biased - (1 - given.get("momentum", 0.1)) * variance
        variance.copy_(biased + added / (num_values - 1) if num_values > 1 else biased)
    return result


def _normalized(given: dict[str, Any]) -> torch.Tensor:
    inputs, weight, bias = given["input"], given.get("weight"), given.get("bias")
    form = (1, -1, *[1] * (inputs.dim() - 2))
    scale = torch.rsqrt(given["running_var"] + given.get("eps", 1e-5))
    scale = scale if weight is None else scale * weight
    shift = -given["running_mean"] * scale
    shift = shift if bias is None else shift + bias
    normalized: torch.Tensor = inputs * scale.view(form) + shift.view(form)
    return normalized.to(inputs.dtype)


_ARGUMENTS = (
    ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled"),
)


_OF_THE_HOST = "XLA tensor"  # what torch_xla expected, and did not get


@contextlib.contextmanager
def step(program: xla.OneProgram) -> Iterator[None]:
    """One step: what is asked for inside is computed from its end on, by all devices, and not waited for."""
    _watch_updates()
    mode = OnDevices()
    try:
        with mode:
            _here.mode = mode
            try:
                yield
            except RuntimeError as error:
                if _OF_THE_HOST in str(error):
                    raise StrategyError(
                        "a step on devices of torch_xla used a tensor, or a model, of the host; make models inside "
                        "`with strategy.scope():` or call strategy.adopt(model), and bring tensors from elsewhere by "
                        "tensor.to(strategy.device), or as arguments of run"
                    ) from error
                raise
            finally:
                _here.put_back()  # after an update that failed
                _here.mode, _here.num_with_closure = None, 0
    finally:
        program.start()
