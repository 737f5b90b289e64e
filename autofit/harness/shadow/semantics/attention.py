"""The attention kernel that a CUDA device would choose, and what torch does before and after it.

Under `cuda_attention` a call of `scaled_dot_product_attention` on fake CPU tensors ends in the operator of the chosen
kernel, whose shape function gives the sizes of what it returns and saves. Real tensors get the CPU's own kernel. What a
kernel takes and gives back inside itself (the flash backward pass accumulates in fp32) is not seen.

The rules are those of aten/src/ATen/native/transformers around torch 2.13: cuda/sdp_utils.cpp chooses, sdp_utils_cpp.h
holds the checks that kernels share, attention.cpp pads, converts and falls back. Nested tensors, AMD and other
accelerators are not covered.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend

_aten = torch.ops.aten
_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

FLASH, EFFICIENT, CUDNN, MATH = "flash", "efficient", "cudnn", "math"
_NAMES = {
    int(SDPBackend.FLASH_ATTENTION.value): FLASH,
    int(SDPBackend.EFFICIENT_ATTENTION.value): EFFICIENT,
    int(SDPBackend.CUDNN_ATTENTION.value): CUDNN,
    int(SDPBackend.MATH.value): MATH,
}
_DEFAULT_ORDER = [
    FLASH,
    EFFICIENT,
    MATH,
    CUDNN,
]  # aten/src/ATen/Context.h, sdp_priority_order, less the overrideable one
_FUSED_CAPABILITIES = (8, 0), (12, 1)  # check_flash_attention_hardware_support, check_cudnn_hardware_support
_EFFICIENT_CAPABILITIES = (5, 0), (12, 1)  # check_mem_efficient_hardware_support
# check_prefer_cudnn_attention: on capability 9.x and 10.x, with cuDNN above 9.15, unless the variable below is 1. Read in
# a source of 2.14; that every wheel from 2.10 on behaves so is an assumption. It matters for masked attention alone.
_CUDNN_FIRST_FROM = (2, 10)
_CUDNN_LAST = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
_EFFICIENT_GROUPS_FROM = (2, 14)  # pytorch/pytorch#191085: until then grouped queries leave flash, cuDNN and math
_EFFICIENT_ALIGNMENT = 8  # attention.cpp, preprocess_mask
_FLASH_ALIGNMENT = 8  # attention.cpp, pad_last_dim for the head dimension


@dataclass(frozen=True)
class _Call:
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    @property
    def needs_grad(self) -> bool:
        """input_requires_grad, should_compute_logsumexp."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


# ---- the choice ----


def choose_kernel(call: _Call, capability: tuple[int, int]) -> str:
    """The first kernel of the priority order that takes the call (select_sdp_backend).

    The flags of `torch.backends.cuda` and the order of `torch.nn.attention.sdpa_kernel` count. RuntimeError where no
    enabled kernel takes it, as on the device.
    """
    takes = {FLASH: _flash_takes, EFFICIENT: _efficient_takes, CUDNN: _cudnn_takes, MATH: _math_takes}
    for kernel in _priority_order(capability):
        if takes[kernel](call, capability):
            return kernel
    raise RuntimeError(
        "none of the enabled kernels of scaled_dot_product_attention takes this call on a GPU of capability "
        f"{capability[0]}.{capability[1]}; enable math, or ask sdpa_kernel for others"
    )


def _priority_order(capability: tuple[int, int]) -> list[str]:
    order = [_NAMES[code] for code in torch._C._get_sdp_priority_order() if code in _NAMES]
    prefers_cudnn = _VERSION >= _CUDNN_FIRST_FROM and capability[0] in (9, 10) and os.environ.get(_CUDNN_LAST) != "1"
    if prefers_cudnn and order == _DEFAULT_ORDER:
        return [CUDNN, FLASH, EFFICIENT, MATH]
    return order


def _flash_takes(call: _Call, capability: tuple[int, int]) -> bool:
    """can_use_flash_attention."""
    head_dim = call.query.shape[-1]
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and call.mask is None
        and _has_four_dimensions(call)
        and head_dim == call.key.shape[-1] == call.value.shape[-1]
        and head_dim <= 256
        and _within(capability, _FUSED_CAPABILITIES)
        and _flash_trains(call, capability)
        and not (call.is_causal and call.query.shape[-2] != call.key.shape[-2])
        and _has_dtype(call, torch.float16, torch.bfloat16)
        and _heads_fit(call, takes_groups=True)
        and _is_not_empty(call)
        and _last_strides_are_one(call, ignore_width_one=True)
    )


def _flash_trains(call: _Call, capability: tuple[int, int]) -> bool:
    """check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120: shared memory of consumer cards."""
    if not call.needs_grad or not ((8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)):
        return True
    head_dim = call.query.shape[-1]
    return head_dim <= 192 or (head_dim > 224 and call.dropout_p == 0)


def _efficient_takes(call: _Call, capability: tuple[int, int]) -> bool:
    """can_use_mem_efficient_attention; bf16 needs capability 8.0."""
    dtypes = (torch.float16, torch.float32) + ((torch.bfloat16,) if capability[0] >= 8 else ())
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and _within(capability, _EFFICIENT_CAPABILITIES)
        and _has_four_dimensions(call)
        and call.query.shape[-1] == call.key.shape[-1]
        and all(
            width > 0 and width % _gemm_alignment(call, capability) == 0
            for width in (call.query.shape[-1], call.value.shape[-1])
        )
        and _is_not_empty(call)
        and _last_strides_are_one(call, ignore_width_one=False)
        and _heads_fit(call, takes_groups=_VERSION >= _EFFICIENT_GROUPS_FROM)
        and _has_dtype(call, *dtypes)
    )


def _gemm_alignment(call: _Call, capability: tuple[int, int]) -> int:
    """minimum_gemm_alignment, in elements."""
    is_half = call.query.element_size() == 2
    has_tensor_cores = capability[0] >= 8 or (capability[0] == 7 and is_half)
    return max(4 if capability[0] >= 8 else 1, (8 if is_half else 4) if has_tensor_cores else 1)


def _cudnn_takes(call: _Call, capability: tuple[int, int]) -> bool:
    """can_use_cudnn_attention, with a head dimension of at most 128 (newer cuDNN take 256, of the same size as flash).

    check_cudnn_dropout lets multiples of 1/16 pass only, so the usual 0.1 goes to flash or the efficient kernel.
    """
    widths = call.query.shape[-1], call.value.shape[-1]
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and not (
            torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
        and _has_four_dimensions(call)
        and _has_dtype(call, torch.float16, torch.bfloat16)
        and _within(capability, _FUSED_CAPABILITIES)
        and _mask_broadcasts(call)
        and call.dropout_p * 16 == math.floor(call.dropout_p * 16)
        and _is_not_empty(call)
        and _last_strides_are_one(call, ignore_width_one=True)
        and _heads_fit(call, takes_groups=True, same_key_value=False)
        and (all(width <= 128 for width in widths) or (widths == (192, 128) and capability[0] in (9, 10)))
        and all(width % 8 == 0 for width in widths)
        and call.key.shape[2] != 1
        and not (call.dropout_p > 0 and call.query.shape[2] == 1)
    )


def _math_takes(call: _Call, capability: tuple[int, int]) -> bool:
    return torch.backends.cuda.math_sdp_enabled()


# The checks below are in sdp_utils_cpp.h: check_tensor_shapes, check_tensor_dtype, check_nonzero_sequence_lengths_dense,
# check_last_dim_stride_equals_1_dense, check_batch_size_and_num_heads_dense, check_attn_mask_shape.


def _within(capability: tuple[int, int], bounds: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    return bounds[0] <= capability <= bounds[1]


def _has_four_dimensions(call: _Call) -> bool:
    return call.query.dim() == call.key.dim() == call.value.dim() == 4


def _has_dtype(call: _Call, *dtypes: torch.dtype) -> bool:
    return call.query.dtype == call.key.dtype == call.value.dtype and call.query.dtype in dtypes


def _is_not_empty(call: _Call) -> bool:
    return call.query.shape[-2] > 0 and call.key.shape[-2] > 0


def _last_strides_are_one(call: _Call, ignore_width_one: bool) -> bool:
    inputs = all(t.stride(-1) == 1 for t in (call.query, call.key, call.value))
    inputs = inputs or (ignore_width_one and call.query.shape[-1] == 1)
    return inputs and (call.mask is None or call.mask.stride(-1) == 1)


def _heads_fit(call: _Call, takes_groups: bool, same_key_value: bool = True) -> bool:
    query, key, value = (t.shape for t in (call.query, call.key, call.value))
    if not query[0] == key[0] == value[0]:
        return False
    heads, key_heads, value_heads = query[-3], key[-3], value[-3]
    if not (call.enable_gqa and takes_groups):
        return heads == key_heads == value_heads
    if same_key_value and key_heads != value_heads:
        return False
    return heads % key_heads == 0 and heads % value_heads == 0


def _mask_broadcasts(call: _Call) -> bool:
    if call.mask is None:
        return True
    shape, query = call.mask.shape, call.query.shape
    whole = (query[0], query[1], query[2], call.key.shape[2])
    return (
        not call.mask.requires_grad
        and len(shape) in (2, 4)
        and all(size in (1, target) for size, target in zip(shape, whole[-len(shape) :], strict=True))
    )


# ---- the kernels, with what attention.cpp does around them ----


def _run_flash(call: _Call) -> Tensor:
    """The head dimension is padded to a multiple of 8 and the padding sliced off the output, which keeps its storage."""
    head_dim = call.query.shape[-1]
    scale = 1 / math.sqrt(head_dim) if call.scale is None else call.scale
    query, key, value = (_pad_last(t, -head_dim % _FLASH_ALIGNMENT) for t in (call.query, call.key, call.value))
    out = _aten._scaled_dot_product_flash_attention.default(
        query, key, value, call.dropout_p, call.is_causal, False, scale=scale
    )[0]
    return out if out.shape[-1] == head_dim else out[..., :head_dim]


def _run_efficient(call: _Call) -> Tensor:
    key, value = _repeat_heads(call, call.key, call.value)
    mask = call.mask
    if mask is not None:
        mask = _align_mask(_make_additive(mask, call.query.dtype))
        mask = mask.expand(*call.query.shape[:3], call.key.shape[2])
    return _aten._scaled_dot_product_efficient_attention.default(
        call.query, key, value, mask, call.needs_grad, call.dropout_p, call.is_causal, scale=call.scale
    )[0]


def _run_cudnn(call: _Call) -> Tensor:
    mask = None if call.mask is None else _make_additive(call.mask, call.query.dtype)
    return _aten._scaled_dot_product_cudnn_attention.default(
        call.query, call.key, call.value, mask, call.needs_grad, call.dropout_p, call.is_causal, False, scale=call.scale
    )[0]


def _run_math(call: _Call) -> Tensor:
    """_scaled_dot_product_attention_math, operator by operator.

    The C++ would add the mask out of place here, as it does for every subclass of Tensor, and a fake tensor is one.
    """
    dtype = call.query.dtype
    upcasts = (
        dtype in (torch.float16, torch.bfloat16) and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    )
    # Every name below lives to the end of the function, as it does in C++.
    wide_query, wide_key, wide_value = (t.float() if upcasts else t for t in (call.query, call.key, call.value))
    mask = None if call.mask is None else _make_additive(call.mask, dtype)
    factor = math.sqrt(abs(1 / math.sqrt(wide_query.shape[-1]) if call.scale is None else call.scale))
    query = wide_query * (-factor if call.scale is not None and call.scale < 0 else factor)
    if call.is_causal:
        if mask is not None:
            raise RuntimeError("scaled_dot_product_attention takes attn_mask or is_causal, not both")
        shape = query.shape[-2], wide_key.shape[-2]
        mask = _make_additive(torch.ones(shape, dtype=torch.bool, device=query.device).tril(), query.dtype)
    key, value = _repeat_heads(call, wide_key, wide_value)
    attention = torch.matmul(query, key.transpose(-2, -1) * factor)
    if mask is not None:
        attention.add_(mask)
    attention = _SafeSoftmax.apply(attention)
    if call.dropout_p > 0:
        attention = torch.dropout(attention, call.dropout_p, True)
    out = torch.matmul(attention, value).to(dtype)
    attention.to(dtype)  # the second output of the C++ function, made and dropped
    return out


class _SafeSoftmax(torch.autograd.Function):
    """`aten._safe_softmax` over the last dimension (attention.cpp) with its steps in sight.

    The operator counts as one, and the softmax, the comparison and the selection inside it are each as large as the
    attention matrix. It saves its result alone (tools/autograd/derivatives.yaml).
    """

    @staticmethod
    def forward(ctx, scores: Tensor) -> Tensor:
        softmax = torch.softmax(scores, -1)
        minus_infinity = torch.scalar_tensor(-math.inf, dtype=softmax.dtype, device=softmax.device)
        masked = scores.eq(minus_infinity)
        masked_rows = torch.all(masked, -1, keepdim=True)
        zero = torch.scalar_tensor(0.0, dtype=softmax.dtype, device=softmax.device)
        result = torch.where(masked_rows, zero, softmax)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return _aten._softmax_backward_data.default(grad, result, -1, result.dtype)


def _make_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """convert_boolean_attn_mask: the negated mask, one byte per element, then one number of `dtype` per element."""
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask.logical_not(), -math.inf, torch.scalar_tensor(0.0, dtype=dtype, device=mask.device))


def _align_mask(mask: Tensor) -> Tensor:
    """preprocess_mask and pad_bias: a copy with a wider last dimension unless every stride is a multiple of 8.

    A last dimension that is a multiple of 8 already grows by a whole 8 where other strides make the copy necessary.
    """
    if mask.stride(-1) == 1 and all(mask.stride(i) % _EFFICIENT_ALIGNMENT == 0 for i in range(mask.dim() - 1)):
        return mask
    width = mask.shape[-1]
    return F.pad(mask, (0, _EFFICIENT_ALIGNMENT - width % _EFFICIENT_ALIGNMENT))[..., :width]


def _pad_last(tensor: Tensor, count: int) -> Tensor:
    return F.pad(tensor, (0, count)) if count else tensor


def _repeat_heads(call: _Call, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """pre_process_group_query_attention_input."""
    heads = call.query.shape[-3]
    if not call.enable_gqa or heads == key.shape[-3] == value.shape[-3]:
        return key, value
    return tuple(t.repeat_interleave(heads // t.shape[-3], -3) for t in (key, value))


_RUN = {FLASH: _run_flash, EFFICIENT: _run_efficient, CUDNN: _run_cudnn, MATH: _run_math}


@contextmanager
def cuda_attention(capability: tuple[int, int]) -> Iterator[None]:
    """While open, attention of fake CPU tensors takes the kernel of a CUDA device of this compute capability."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not all(isinstance(t, FakeTensor) for t in (query, key, value)):
            return _aten.scaled_dot_product_attention.default._op_dk(
                DispatchKey.CompositeImplicitAutograd,
                *(query, key, value, attn_mask, dropout_p, is_causal),
                scale=scale,
                enable_gqa=enable_gqa,
            )
        call = _Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return _RUN[choose_kernel(call, tuple(capability))](call)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", attend, "AutogradCPU")
        yield
