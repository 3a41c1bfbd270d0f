"""What kernels of torch rely on and do not check themselves, checked before they run for another task.

Most of torch's operations refuse arguments that do not fit together. Those here, most of them made for autograd,
trust their caller: an index out of range or a tensor that is too small makes them read or write memory that belongs
to something else. Which operations those are was found by giving each of `allowed_operations` arguments that lie.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor

from stratagem import _torch
from stratagem.errors import SessionError

_Arguments: TypeAlias = Mapping[str, Any]
_Rule: TypeAlias = Callable[[_Arguments], None]


def checked(function: Any) -> Any:
    """An operation that refuses what its kernel would not; most do already, and come back as they are."""
    rule = _RULES.get(_torch.operations.schema_of(function).name.removeprefix("aten::"))
    return function if rule is None else _Checked(function, rule)


@final
class _Checked:
    """An operation with its rule before it."""

    def __init__(self, function: Any, rule: _Rule) -> None:
        self._function = function
        self._rule = rule
        self.tags = function.tags
        self._names = [each.name for each in _torch.operations.schema_of(function).arguments]
        self._defaults = {each.name: each.default_value for each in _torch.operations.schema_of(function).arguments}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._rule({**self._defaults, **dict(zip(self._names, args, strict=False)), **kwargs})
        return self._function(*args, **kwargs)

    def __str__(self) -> str:
        return str(self._function)


def _require_shape(given: _Arguments, name: str, shape: Sequence[int]) -> None:
    if tuple(given[name].shape) != tuple(shape):
        raise SessionError(f"{name} has the shape {tuple(given[name].shape)}, and must have {tuple(shape)}")


def _require_indices(given: _Arguments, name: str, bound: int, ignored: int | None = None) -> None:
    indices = given[name] if ignored is None else given[name][given[name] != ignored]
    if indices.numel():
        least, most = (int(each) for each in torch.aminmax(indices))
        if least < 0 or most >= bound:
            raise SessionError(f"{name} must be from 0 to {bound - 1}, and are from {least} to {most}")


def _like_forward(forward: Callable[..., Any], *names: str, gradient: str = "grad_output") -> _Rule:
    """The gradient has the shape that the operation gives for these arguments."""

    def rule(given: _Arguments) -> None:
        found = forward(*(_without_values(given[name]) for name in names))
        _require_shape(given, gradient, (found if isinstance(found, Tensor) else found[0]).shape)

    return rule


def _without_values(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def _max_pool(num_dimensions: int) -> _Rule:
    def rule(given: _Arguments) -> None:
        _require_shape(given, "indices", given["grad_output"].shape)
        _require_indices(given, "indices", math.prod(given["self"].shape[-num_dimensions:]))

    return rule


def _adaptive_pool(num_dimensions: int, *, has_indices: bool) -> _Rule:
    def rule(given: _Arguments) -> None:
        kept = given["self"].shape[:-num_dimensions]
        _require_shape(given, "grad_output", (*kept, *given["grad_output"].shape[-num_dimensions:]))
        if has_indices:
            _max_pool(num_dimensions)(given)

    return rule


def _embedding(given: _Arguments) -> None:
    _require_indices(given, "indices", given["num_weights"])


def _nll_loss(given: _Arguments) -> None:
    scores = given["self"]
    _require_indices(given, "target", scores.shape[1 if scores.dim() > 1 else 0], given["ignore_index"])


def _batch_norm(given: _Arguments) -> None:
    like = given["input"].shape
    if "grad_out" in given:
        _require_shape(given, "grad_out", like)
    saved = ("save_mean", "save_invstd") if given.get("train") else ()
    for name in ("weight", "bias", "running_mean", "running_var", *saved):
        if given.get(name) is not None:
            _require_shape(given, name, like[1:2])


def _layer_norm(given: _Arguments) -> None:
    shape, normalized = given["input"].shape, len(given["normalized_shape"])
    _require_shape(given, "grad_out", shape)
    for name in ("mean", "rstd"):
        if given[name].numel() != math.prod(shape[: len(shape) - normalized]):
            raise SessionError(f"{name} has the shape {tuple(given[name].shape)}, which does not fit {tuple(shape)}")


def _cdist(given: _Arguments) -> None:
    gradient = "grad_output" if "grad_output" in given else "grad"  # its name up to torch 2.13
    _like_forward(torch.cdist, "x1", "x2", gradient=gradient)(given)
    _require_shape(given, "cdist", given[gradient].shape)


def _unfold(given: _Arguments) -> None:
    whole = torch.empty(given["input_sizes"], device="meta")
    _require_shape(given, "grad_in", whole.unfold(given["dim"], given["size"], given["step"]).shape)


def _attention(given: _Arguments) -> None:
    query, key = given["query"].shape, given["key"].shape
    _require_shape(given, "key", (*query[:2], *key[2:3], *query[3:]))
    _require_shape(given, "value", key)
    if "out" in given:
        _require_shape(given, "grad_out", query)
        _require_shape(given, "out", query)
        _require_shape(given, "logsumexp", query[:3])


def _log_softmax(given: _Arguments) -> None:
    _require_shape(given, "grad_output", given["output"].shape)


def _upsample(given: _Arguments) -> None:
    """Scales say how sizes were found; with others, coordinates overflow."""
    if given.get("scale_factors") is not None:
        return  # from which torch finds the sizes itself
    sizes = given["input_size"] if "input_size" in given else given.get("self", given.get("input")).shape
    scales = [given[name] for name in ("scales", "scales_h", "scales_w") if name in given]
    for size, output, scale in zip(sizes[2:], given["output_size"], scales, strict=False):
        if scale is not None and not abs(size * scale - output) <= 1:
            raise SessionError(f"a scale of {scale} does not make {output} of {size}")


_RULES: Final[dict[str, _Rule]] = {
    "max_pool2d_with_indices_backward": _max_pool(2),
    "max_pool3d_with_indices_backward": _max_pool(3),
    "adaptive_max_pool2d_backward": _adaptive_pool(2, has_indices=True),
    "adaptive_max_pool3d_backward": _adaptive_pool(3, has_indices=True),
    "_adaptive_avg_pool2d_backward": _adaptive_pool(2, has_indices=False),
    "_adaptive_avg_pool3d_backward": _adaptive_pool(3, has_indices=False),
    "embedding_dense_backward": _embedding,
    "nll_loss_backward": _nll_loss,
    "nll_loss2d_backward": _nll_loss,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm,
    "_native_batch_norm_legit_functional": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "native_layer_norm_backward": _layer_norm,
    "grid_sampler_2d_backward": _like_forward(
        torch.grid_sampler_2d, "input", "grid", "interpolation_mode", "padding_mode", "align_corners"
    ),
    "reflection_pad1d_backward": _like_forward(torch.ops.aten.reflection_pad1d, "self", "padding"),
    "reflection_pad2d_backward": _like_forward(torch.ops.aten.reflection_pad2d, "self", "padding"),
    "replication_pad1d_backward": _like_forward(torch.ops.aten.replication_pad1d, "self", "padding"),
    "replication_pad2d_backward": _like_forward(torch.ops.aten.replication_pad2d, "self", "padding"),
    "unfold_backward": _unfold,
    "_cdist_backward": _cdist,
    "_log_softmax_backward_data": _log_softmax,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention,
    "upsample_bilinear2d": _upsample,
    "upsample_bilinear2d_backward": _upsample,
    "upsample_nearest1d": _upsample,
    "upsample_nearest1d_backward": _upsample,
    "upsample_nearest2d": _upsample,
    "upsample_nearest2d_backward": _upsample,
}
