"""The operations that one task may ask another to run: all of them compute new tensors of given ones, and nothing else.

None reads files, hands out memory as it is, or calls back into Python. What is not in this list does not travel.
What their kernels do not check themselves is checked by `checked_operations`.
"""

from typing import Any, Final

import torch

from stratagem import _torch

NAMES: Final = frozenset(
    """
    abs acos acosh add addbmm addcdiv addcmul addmm addmv addr alias amax amin aminmax angle any all argmax argmin
    argsort asin asinh atan atan2 atanh baddbmm bernoulli bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor bmm bucketize cat ceil celu clamp clamp_max clamp_min clone col2im
    constant_pad_nd copy copysign cos cosh cummax cummin cumprod cumsum deg2rad diag_embed diagonal digamma div dot
    elu eq erf erfc erfinv exp exp2 expand expm1 fill flip float_power floor floor_divide fmax fmin fmod frac gather
    ge gelu glu gt hardshrink hardsigmoid hardswish hardtanh heaviside histc hypot im2col isfinite isinf isnan le
    leaky_relu lerp lgamma linalg_vector_norm log log10 log1p log2 log_sigmoid_forward logaddexp logaddexp2
    logcumsumexp logical_and logical_not logical_or logical_xor logit logsumexp lt masked_fill max maximum mean
    median min minimum mish mm mul mv nan_to_num ne neg new_full new_ones new_zeros norm normal_functional ones_like
    permute pow prod prelu rad2deg rand_like randint_like randn_like reciprocal relu remainder repeat
    repeat_interleave roll round rsqrt rsub searchsorted select select_scatter selu sgn sigmoid sign signbit silu
    sin sinc sinh slice slice_scatter softplus softshrink sort split split_with_sizes sqrt square squeeze stack std
    std_mean sub sum t tan tanh threshold topk transpose tril triu trunc unbind unfold uniform unsqueeze var
    var_mean view where xlogy zero zeros_like full_like _fft_c2c _fft_c2r _fft_r2c _log_softmax _prelu_kernel
    _safe_softmax _softmax _to_copy _unsafe_view

    arange full normal ones rand randint randn randperm zeros

    _adaptive_avg_pool2d _adaptive_avg_pool3d _cdist_forward _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training adaptive_max_pool2d adaptive_max_pool3d avg_pool2d avg_pool3d
    binary_cross_entropy binary_cross_entropy_with_logits convolution embedding grid_sampler_2d huber_loss index
    index_put index_select scatter scatter_add scatter_reduce max_pool2d_with_indices max_pool3d_with_indices
    mse_loss native_batch_norm native_dropout native_group_norm native_layer_norm nll_loss2d_forward
    nll_loss_forward reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d smooth_l1_loss
    soft_margin_loss upsample_bilinear2d upsample_nearest1d upsample_nearest2d
    _scaled_dot_product_flash_attention_for_cpu

    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _cdist_backward _log_softmax_backward_data
    _prelu_kernel_backward _softmax_backward_data adaptive_max_pool2d_backward adaptive_max_pool3d_backward
    avg_pool2d_backward avg_pool3d_backward binary_cross_entropy_backward convolution_backward diagonal_backward
    elu_backward embedding_dense_backward gelu_backward glu_backward grid_sampler_2d_backward hardshrink_backward
    hardsigmoid_backward hardswish_backward hardtanh_backward huber_loss_backward leaky_relu_backward
    log_sigmoid_backward logit_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward
    mish_backward mse_loss_backward native_batch_norm_backward native_dropout_backward native_group_norm_backward
    native_layer_norm_backward nll_loss2d_backward nll_loss_backward reflection_pad1d_backward
    reflection_pad2d_backward replication_pad1d_backward replication_pad2d_backward select_backward sigmoid_backward
    silu_backward slice_backward smooth_l1_loss_backward soft_margin_loss_backward softplus_backward
    softshrink_backward tanh_backward threshold_backward unfold_backward upsample_bilinear2d_backward
    upsample_nearest1d_backward upsample_nearest2d_backward _scaled_dot_product_flash_attention_for_cpu_backward

    _foreach_add _foreach_addcdiv _foreach_addcmul _foreach_div _foreach_lerp _foreach_mul _foreach_neg _foreach_pow
    _foreach_sqrt _foreach_sub
    """.split()  # noqa: SIM905  # hundreds of names read better so
)


def name_of(function: Any) -> tuple[str, str] | None:
    """The name and overload of an operation that may travel; None for all others."""
    namespace, _, name = _torch.operations.schema_of(function).name.partition("::")
    allowed = namespace == "aten" and name in NAMES and not _torch.operations.schema_of(function).is_mutable
    return (name, _torch.operations.overload_of(function)) if allowed else None


def operation(name: Any, overload: Any) -> Any:
    """The operation of that name, if it may travel; else None."""
    if not isinstance(name, str) or not isinstance(overload, str) or name not in NAMES:
        return None
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or overload not in packet.overloads():
        return None
    function = getattr(packet, overload)
    return None if _torch.operations.schema_of(function).is_mutable else function
