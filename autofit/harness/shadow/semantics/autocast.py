"""CUDA's lists of operators for `torch.autocast("cpu")`, and CUDA's softmax from fp16 to fp32.

`torch.autocast("cuda")` turns itself off where there is no GPU, and the CPU's autocast has other lists: its layer norm
and softmax stay in 16 bits. Here every operator that CUDA casts otherwise gets a kernel of its own under the CPU's
autocast key, and every one that CUDA leaves alone falls through. The matrix products, which both lists have in 16 bits,
keep the CPU's C++ kernel and with it the cache of cast weights: one 16-bit copy per fp32 leaf and region.

Not covered: recurrent layers (cuDNN has its own rules for them), and the cache for the few 16-bit operators that the CPU
has not (`einsum`, `mv`, `addmv`, `addr`, `convolution` called by name): each call casts its weights anew.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten
_KEY = "AutocastCPU"
_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU)


def _names(text: str) -> list[str]:
    return text.split()


# The lists of aten/src/ATen/autocast_mode.h, as torch 2.13 has them: AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32,
# AT_FORALL_FP32_SET_OPT_DTYPE, AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE and AT_FORALL_PROMOTE. What an installed torch
# does not have is left out.
LOWER_PRECISION = _names("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
    chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
""")
FP32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
""")
FP32_OUTPUT = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
FP32_APPENDED = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
PROMOTE = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
BANNED = ["binary_cross_entropy"]  # aten/src/ATen/autocast_mode.cpp, binary_cross_entropy_banned

# The CPU casts these itself, and CUDA what they are made of: leaving them is the same, with the cache.
_KEPT = {"conv1d.padding", "conv2d.padding", "conv3d.padding", "mkldnn_rnn_layer"}


def find_overload(name: str) -> OpOverload | None:
    """The aten operator of a name such as `pow.Scalar`; None where the installed torch has it not."""
    base, _, overload = name.partition(".")
    packet = getattr(_aten, base, None)
    return getattr(packet, overload or "default", None) if packet is not None else None


def cpu_autocast_operators() -> set[str]:
    """Names of the aten operators that have a kernel of their own under the CPU's autocast key."""
    names = set()
    for schema in torch._C._jit_get_all_schemas():
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        if name.startswith("aten::") and torch._C._dispatch_has_kernel(name):
            names.add(name)
    return {name.removeprefix("aten::") for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEY)}


# ---- the policies (CastPolicy and WrapFunction_ in autocast_mode.h) ----


def _is_eligible(tensor: Any) -> bool:
    """is_eligible."""
    return (
        isinstance(tensor, Tensor)
        and tensor.device.type == "cpu"
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
    )


def _cast(argument: Any, dtype: torch.dtype) -> Any:
    """cached_cast without the cache, which serves casts to 16 bits only."""
    if isinstance(argument, list | tuple):
        return [_cast(item, dtype) for item in argument]
    return argument.to(dtype) if _is_eligible(argument) else argument


def _without_autocast(op: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return op(*args, **kwargs)


def _casting(op: OpOverload, choose: Callable[[tuple, dict], torch.dtype]) -> Callable:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = choose(args, kwargs)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return op(*(_cast(a, dtype) for a in args), **{k: _cast(v, dtype) for k, v in kwargs.items()})

    return kernel


def _lower_precision(op: OpOverload) -> Callable:
    return _casting(op, lambda args, kwargs: torch.get_autocast_dtype("cpu"))


def _fp32(op: OpOverload) -> Callable:
    return _casting(op, lambda args, kwargs: torch.float32)


def _promote(op: OpOverload) -> Callable:
    """fp32 as soon as one tensor, or one of a list of tensors, is fp32."""

    def widest(args: tuple, kwargs: dict) -> torch.dtype:
        tensors = [t for a in (*args, *kwargs.values()) for t in (a if isinstance(a, list | tuple) else [a])]
        is_wide = any(_is_eligible(t) and t.dtype == torch.float32 for t in tensors)
        return torch.float32 if is_wide else torch.get_autocast_dtype("cpu")

    return _casting(op, widest)


def _fp32_output(op: OpOverload) -> Callable:
    """The output becomes fp32 by the operator's own `dtype`; the input is handed over as it is."""
    positional = [a.name for a in op._schema.arguments if not a.kwarg_only]
    place = positional.index("dtype") if "dtype" in positional else None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if place is not None and len(args) > place else kwargs.get("dtype")
        if given is None and _is_eligible(args[0]):
            if place is not None and len(args) > place:
                args = (*args[:place], torch.float32, *args[place + 1 :])
            else:
                kwargs = {**kwargs, "dtype": torch.float32}
        return _without_autocast(op, args, kwargs)

    return kernel


def _fp32_appended(op: OpOverload, with_dtype: OpOverload) -> Callable:
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    names = [a.name for a in op._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
        return _without_autocast(with_dtype, [given[name] for name in names], {"dtype": dtype})

    return kernel


def _banned(op: OpOverload) -> Callable:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"CUDA refuses {op._schema.name.removeprefix('aten::')} under autocast: its input is too coarse in 16 bits; "
            "use binary_cross_entropy_with_logits"
        )

    return kernel


# ---- softmax ----


def _softmax(op: OpOverload, fused: OpOverload) -> Callable:
    """From fp16 to fp32 in one kernel, without a copy of the input in fp32.

    aten/src/ATen/native/SoftMax.cpp, softmax and log_softmax: CUDA tensors of kHalf with dtype kFloat. bf16 is converted
    first: torch/_decomp/decompositions.py of torch 2.13 refuses `half_to_float` for it, and the sources seen of other
    versions name kHalf alone. A real tensor is converted by the CPU, which has no such kernel.
    """

    def kernel(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if isinstance(input, FakeTensor) and input.dtype == torch.float16 and dtype == torch.float32:
            return fused(input, dim, True)
        return op._op_dk(DispatchKey.CompositeImplicitAutograd, input, dim, dtype)

    return kernel


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """While open, `torch.autocast("cpu", dtype)` casts what `torch.autocast("cuda", dtype)` would.

    Casts are recorded by autograd, since the autocast key comes before autograd's. F.softmax and F.log_softmax of fake
    tensors to fp32 take CUDA's way outside autocast as well.
    """
    cpu = cpu_autocast_operators()
    kernels: dict[str, Callable] = {}
    for names, policy in ((FP32, _fp32), (FP32_OUTPUT, _fp32_output), (PROMOTE, _promote), (BANNED, _banned)):
        kernels |= {name: policy(op) for name in names if (op := find_overload(name)) is not None}
    for name in set(LOWER_PRECISION) - cpu:
        if (op := find_overload(name)) is not None:
            kernels[name] = _lower_precision(op)
    for name, longer in FP32_APPENDED.items():
        kernels[name] = _fp32_appended(find_overload(name), find_overload(longer))
    for name in cpu - set(kernels) - set(LOWER_PRECISION) - _KEPT:
        kernels[name] = torch.library.fallthrough_kernel
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():  # torch tells of the first kernel of its own that is overridden
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name, kernel in kernels.items():
                library.impl(name, kernel, _KEY)
        for name in ("softmax", "log_softmax"):
            op, fused = getattr(_aten, name).int, getattr(_aten, f"_{name}").default
            library.impl(f"{name}.int", _softmax(op, fused), "AutogradCPU")
        yield
