"""Runs operations on strict devices: by the CPU's kernels, in the memory that stands for the device's.

One function takes every operation that torch has a kernel for; views are made by torch's own code, which looks at no
memory. What a real accelerator refuses is refused here: tensors of two devices in one call, a generator of another
device. Owns what is special about some operations; memory and streams are their modules'.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.autograd.graph import increment_version

from stratagem import _torch
from stratagem.devices.strict import counts, device_memory, streams
from stratagem.devices.strict.slot import HELD

_HOST_ARGUMENTS: Final = {
    "_pack_padded_sequence": "lengths",
    "index": "indices",
    "index_put_": "indices",
    "_index_put_impl_": "indices",
    "_unsafe_index": "indices",
}
"""What operations take from the host by their own rule, wherever their others are; those on lists take scalars."""

_SIZE_BY_VALUE: Final = frozenset(
    ("nonzero", "masked_select", "unique_consecutive", "unique_dim", "_unique", "_unique2", "bincount")
)
"""Operations whose result has a size that depends on values, so that the host must wait for it."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is known of an operation before it is called."""

    names: tuple[str, ...]
    outs: frozenset[str]
    written: frozenset[str]
    returned: tuple[str | None, ...]  # for each result, the argument that it is
    has_device: bool
    draws: bool
    waits: bool
    tensors: frozenset[str]  # the arguments that must not be plain numbers


def run(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operation; what torch calls for everything that has no kernel of its own on strict devices."""
    with _torch.modes.without_function_modes():
        plan = _plan_of(operation)
        given = dict(zip(plan.names, args, strict=False)) | kwargs
        index = _device_of(operation, plan, given)
        name = _name_of(operation)
        counts.note_kernel(name, index, streams.current_stream_number(index))
        if plan.waits:
            counts.note_wait(name)
        inside = {key: _inside(value) for key, value in given.items()}
        for key in plan.tensors:
            if isinstance(inside.get(key), bool | int | float | complex):
                inside[key] = _as_tensor(inside[key], given)
        inside |= {key: _fresh(given[key]) for key in plan.outs if given.get(key) is not None}
        if plan.has_device:
            inside["device"] = torch.device("cpu")
        if inside.get("pin_memory"):
            inside["pin_memory"] = False
        positional = [inside[key] for key in plan.names[: len(args)]]
        with _drawing(operation, plan, inside, index):
            named = {key: value for key, value in inside.items() if key not in plan.names[: len(args)]}
            result = _on_cpu(operation, positional, named)
        for key in plan.outs:
            _put_out(given.get(key), inside.get(key))
        _require_same_sizes(operation, plan, given, inside)
        for key in plan.written:
            if isinstance(given.get(key), list | tuple):  # torch counts writes to single tensors only
                increment_version(tuple(_tensors_in(given[key])))
        return _outside(operation, plan, given, result, index)


def _on_cpu(operation: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        if torch.is_autocast_enabled("cpu"):
            with _torch.operations.below_autocast("AutocastCPU"):
                return operation(*args, **kwargs)
        return operation(*args, **kwargs)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"{operation} cannot run on strict devices: they compute with the CPU's kernels, and it has none there "
            f"({str(error).splitlines()[0]}). Compute this part on the CPU, with tensor.cpu()"
        ) from error


REFUSED: Final = {
    "SparsePrivateUse1": "sparse",
    "SparseCsrPrivateUse1": "sparse",
    "QuantizedPrivateUse1": "quantized",
    "NestedTensorPrivateUse1": "nested",
}
"""What strict devices do not hold, by torch's key for it."""


def refuse(what: str, operation: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch calls for every operation on tensors of such a sort."""
    why = _WITHOUT.get(what, "")
    raise NotImplementedError(
        f"{operation} cannot run on strict devices: they hold dense tensors only, and this makes or takes a {what} "
        f"one. {why}Compute this part on the CPU, with tensor.cpu()"
    )


_WITHOUT: Final = {
    "sparse": "With sparse=False a layer makes dense gradients; real GPUs do not need this. ",
    "nested": "Nested tensors of layout torch.jagged are made of dense ones. ",
}


@functools.cache
def _plan_of(operation: Any) -> _Plan:
    schema = _torch.operations.schema_of(operation)
    writes = [each for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    aliases = {next(iter(each.alias_info.before_set)): each.name for each in writes if each.alias_info.before_set}
    returned = [
        aliases.get(next(iter(each.alias_info.before_set), "")) if each.alias_info is not None else None
        for each in schema.returns
    ]
    tells = any("Tensor" not in str(each.type) for each in schema.returns)
    name = schema.name.partition("::")[2]
    return _Plan(
        names=tuple(each.name for each in schema.arguments),
        outs=frozenset(each.name for each in schema.arguments if each.is_out),
        written=frozenset(each.name for each in writes if not each.is_out),
        returned=tuple(returned),
        has_device=any(each.name == "device" for each in schema.arguments),
        draws=torch.Tag.nondeterministic_seeded in operation.tags,
        waits=tells or name in _SIZE_BY_VALUE,
        tensors=frozenset(
            each.name
            for each in schema.arguments
            if str(each.type) == "Tensor" and not _torch.operations.takes_numbers_for_tensors(name)
        ),
    )


def _as_tensor(number: complex, given: dict[str, Any]) -> torch.Tensor:
    """A number of the program, which torch hands over as such, in the type that it has beside the tensors of a call."""
    beside = next((each for value in given.values() for each in _tensors_in(value)), None)
    made = torch.tensor(number)
    return made if beside is None else made.to(torch.result_type(beside, number))  # as the CPU does, without a check


def _name_of(operation: Any) -> str:
    return str(_torch.operations.schema_of(operation).name.partition("::")[2])


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)


def _device_of(operation: Any, plan: _Plan, given: dict[str, Any]) -> int:
    """The device that a call is for; refuses tensors of several."""
    found: torch.device | None = None
    from_host = _HOST_ARGUMENTS.get(_name_of(operation), "scalars")
    for key, value in given.items():
        for tensor in _tensors_in(value):
            device = tensor.device
            if device.type != HELD.torch_type and (not tensor.dim() or key == from_host) and key not in plan.written:
                continue
            if found is not None and device != found:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, {found} and "
                    f"{device}! (when checking argument for argument {key} in {operation}). In a step, "
                    f"tensor.to(strategy.device) brings a tensor to the device of its replica"
                )
            found = device
    if (
        found is None or found.type != HELD.torch_type
    ):  # made from nothing, or all of it is from the host by its own rule
        wanted = given.get("device")
        return streams.index_of(wanted if wanted is not None and wanted.type == HELD.torch_type else None)
    return found.index


def _inside(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return device_memory.to_host(value) if value.device.type == HELD.torch_type else value
    if isinstance(value, list | tuple):
        return [_inside(each) for each in value]
    return value


def _fresh(out: Any) -> Any:
    """What the CPU's kernel writes to in the place of an `out=`, which it may resize."""
    return [_fresh(each) for each in out] if isinstance(out, list | tuple) else torch.empty(0, dtype=out.dtype)


def _put_out(out: Any, made: Any) -> None:
    if isinstance(out, list | tuple):
        for each, other in zip(out, made, strict=True):
            _put_out(each, other)
    elif out is not None:
        if out.shape != made.shape:
            _resize_(out, made.shape)
        device_memory.to_host(out).copy_(made)


def _require_same_sizes(operation: Any, plan: _Plan, given: dict[str, Any], inside: dict[str, Any]) -> None:
    for key in plan.written:
        for outer, inner in zip(_tensors_in(given.get(key)), _tensors_in(inside.get(key)), strict=True):
            if outer.shape != inner.shape:
                raise NotImplementedError(f"{operation} cannot run on strict devices: it changes the size of {key!r}")


def _outside(operation: Any, plan: _Plan, given: dict[str, Any], result: Any, index: int) -> Any:
    several = isinstance(result, tuple) and len(plan.returned) > 1
    results = result if several else (result,)
    made = [
        given[name] if name is not None and given.get(name) is not None else _to_device(operation, each, index)
        for name, each in zip(plan.returned, results, strict=False)
    ]
    return tuple(made) if several else made[0] if made else None


def _to_device(operation: Any, value: Any, index: int) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise NotImplementedError(
                f"{operation} cannot run on strict devices: its result is {value.layout}, {value.dtype}, and they hold "
                f"dense tensors only. Compute this part on the CPU, with tensor.cpu()"
            )
        return device_memory.to_device(value.clone() if device_memory.is_on_device(value) else value, index)
    if isinstance(value, list | tuple):
        return [_to_device(operation, each, index) for each in value]
    return value


@contextlib.contextmanager
def _drawing(operation: Any, plan: _Plan, inside: dict[str, Any], index: int) -> Iterator[None]:
    """Lets what draws random numbers draw those of its device."""
    if not plan.draws:
        yield
        return
    own = streams.generator_of(index)
    if "generator" in plan.names:
        given = inside.get("generator")
        if given is not None and (found := streams.device_of(given)).index != index:
            raise RuntimeError(
                f"Expected a '{HELD.torch_type}:{index}' device for generator but found '{found}' in {operation}"
            )
        inside["generator"] = own if given is None else given
        yield
        return
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(own.get_state())
    try:
        yield
    finally:
        own.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


# Memory


def _empty(size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    index = streams.index_of(device)
    device_memory.require(_product(size) * dtype.itemsize, index)
    with _torch.modes.without_function_modes():
        made = torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format or torch.contiguous_format)
        return device_memory.to_device(made, index)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    index = streams.index_of(device)
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if _product(size) else 0
    device_memory.require(extent * dtype.itemsize, index)
    with _torch.modes.without_function_modes():
        whole = device_memory.to_device(torch.empty(extent, dtype=dtype, device="cpu"), index)
        return _as_strided(whole, size, stride, 0)


def _as_strided(tensor: torch.Tensor, size: Any, stride: Any, offset: int | None = None) -> torch.Tensor:
    as_strided = torch.ops.aten.as_strided.default
    made: torch.Tensor = _torch.operations.run_kernel_of_cpu(as_strided, tensor, size, stride, offset)
    return made


def _resize_(tensor: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    """Takes new memory where the old is too small; others that shared it keep the old one."""
    with _torch.modes.without_function_modes():
        stride = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format).stride()
        storage = tensor.untyped_storage()
        needed = (tensor.storage_offset() + _product(size)) * tensor.itemsize
        if needed > storage.nbytes():
            host = torch.empty(needed, dtype=torch.uint8, device="cpu")
            host[: storage.nbytes()] = _bytes_of(tensor)
            storage = device_memory.to_device(host, tensor.device.index).untyped_storage()
        set_ = torch.ops.aten.set_.source_Storage_storage_offset
        _torch.operations.run_kernel_of_cpu(set_, tensor, storage, tensor.storage_offset(), list(size), list(stride))
        return tensor


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage behind a tensor, on the host."""
    whole = device_memory.to_host(tensor).untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(whole)[: tensor.untyped_storage().nbytes()]


def _product(size: Any) -> int:
    return functools.reduce(lambda left, right: left * right, size, 1)


# Copies


def _copy_(target: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
    """Copies within a device, between two, to and from the host; the host waits where a real one would."""
    if not isinstance(source, torch.Tensor):
        return target.fill_(source)  # a number
    with _torch.modes.without_function_modes():
        inner, outer = source.device.type == HELD.torch_type, target.device.type == HELD.torch_type
        index = target.device.index if outer else source.device.index
        counts.note_kernel("copy_", index, streams.current_stream_number(index))
        if inner != outer and not (non_blocking and device_memory.is_pinned(target if inner else source)):
            counts.note_wait("copy to the host" if inner else "copy to the device")
        device_memory.to_host(target).copy_(_inside(source)) if outer else target.copy_(_inside(source))
        return target


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _copy_(target, source, non_blocking)


# Operations that torch has for accelerators only


def _convolution(*args: Any) -> Any:
    return run(torch.ops.aten.convolution.default, *args)


def _convolution_backward(
    grad: Any, value: Any, weight: Any, stride: Any, padding: Any, dilation: Any, transposed: Any, *rest: Any
) -> Any:
    *others, mask = rest
    bias_sizes = [grad.shape[1]] if mask[2] else None
    places = stride, padding, dilation, transposed
    return run(torch.ops.aten.convolution_backward.default, grad, value, weight, bias_sizes, *places, *others, mask)


def _fused_sdp_choice(*_: Any, **__: Any) -> int:
    """Attention by plain operations, which every device has."""
    return 0


def _lstm_cell(gates: Any, hidden: Any, cell: Any, bias: Any = None, hidden_bias: Any = None) -> Any:
    total = gates + hidden if bias is None else gates + hidden + bias + hidden_bias
    into, forget, new, out = total.chunk(4, 1)
    into, forget, new, out = into.sigmoid(), forget.sigmoid(), new.tanh(), out.sigmoid()
    state = forget * cell + into * new
    return out * state.tanh(), state, torch.cat([into, forget, new, out], 1)


def _lstm_cell_backward(grad_hidden: Any, grad_cell: Any, cell: Any, state: Any, workspace: Any, has_bias: bool) -> Any:
    into, forget, new, out = workspace.chunk(4, 1)
    bent = state.tanh()
    grad_hidden = torch.zeros_like(state) if grad_hidden is None else grad_hidden
    grad_state = grad_hidden * out * (1 - bent * bent)
    if grad_cell is not None:
        grad_state = grad_state + grad_cell
    parts = [
        grad_state * new * into * (1 - into),
        grad_state * cell * forget * (1 - forget),
        grad_state * into * (1 - new * new),
        grad_hidden * bent * out * (1 - out),
    ]
    gates = torch.cat(parts, 1)
    return gates, grad_state * forget, gates.sum(0) if has_bias else None


def _gru_cell(gates: Any, hidden_gates: Any, hidden: Any, bias: Any = None, hidden_bias: Any = None) -> Any:
    if bias is not None:
        gates, hidden_gates = gates + bias, hidden_gates + hidden_bias
    reset, update, new = gates.chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = hidden_gates.chunk(3, 1)
    reset, update = (reset + hidden_reset).sigmoid(), (update + hidden_update).sigmoid()
    new = (new + reset * hidden_new).tanh()
    return (hidden - new) * update + new, torch.cat([reset, update, new, hidden, hidden_new], 1)


def _gru_cell_backward(grad: Any, workspace: Any, has_bias: bool) -> Any:
    reset, update, new, hidden, hidden_new = workspace.chunk(5, 1)
    grad_new = grad * (1 - update) * (1 - new * new)
    grad_reset = grad_new * hidden_new * reset * (1 - reset)
    grad_update = grad * (hidden - new) * update * (1 - update)
    gates = torch.cat([grad_reset, grad_update, grad_new], 1)
    hidden_gates = torch.cat([grad_reset, grad_update, grad_new * reset], 1)
    sums = (gates.sum(0), hidden_gates.sum(0)) if has_bias else (None, None)
    return gates, hidden_gates, grad * update, *sums


# The host's side of copies


def _pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    with _torch.modes.without_function_modes():
        return device_memory.pin(tensor)


def _is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return device_memory.is_pinned(tensor)


KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "resize_": _resize_,
    "copy_": _copy_,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
    "_fused_sdp_choice": _fused_sdp_choice,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
"""Kernels of strict devices, by the operation of aten."""

HOST_KERNELS: Final[dict[str, Callable[..., Any]]] = {"_pin_memory": _pin_memory, "is_pinned": _is_pinned}
"""Kernels of the CPU, which torch has only where a real accelerator is."""
