"""What one operator of a trace costs a GPU: arithmetic, memory traffic and kernels, read from the shapes of its tensors.

Views, allocations without a value and questions about a tensor start no kernel and cost nothing: counting them as
kernels wrecks any ranking of step times. Everything else moves its tensors through memory once, and matrix products,
convolutions and attention also compute.

Not here: seconds (`step_time`), time that two kernels overlap, caches, and which kernel CUDA would choose: a trace has
already chosen its operators. Causal attention counts in full, as torch's own counter does. Convolutions of fp32 are of
the same kind as products of fp32, though torch rounds them to tf32 unless told otherwise, and products only when told.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

KINDS = ("matmul_fp32", "matmul_half", "other")
_FP32, _HALF, _OTHER = KINDS
_NARROW = {torch.float16, torch.bfloat16}  # and 8-bit floats, which have a rate of their own that nobody asked for yet

# One launch of a kernel over lists of tensors: ATen/native/cuda/MultiTensorApply.cuh allows 320 blocks of 65536
# elements and 30 to 110 tensors, the fewer the more lists there are; an optimizer with four lists gets 36.
_LAUNCH_ELEMENTS = 320 * 65536
_LAUNCH_TENSORS = 36


class OpCost(NamedTuple):
    flops: float  # a multiplication and an addition are two
    bytes: float  # read and written
    kind: str  # of KINDS: the units that compute
    kernels: int


def cost_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, outs: Any) -> OpCost | None:
    """What `outs = func(*args, **kwargs)` costs, seen in `__torch_dispatch__`; None where it starts no kernel.

    Takes 2 to 8 microseconds, more for operators over lists of tensors. `bytes` counts every input and output once, so
    an operator in place reads and writes its tensor. A broadcast tensor counts at its broadcast size.
    """
    try:
        rule = _RULES[func]
    except KeyError:
        rule = _RULES[func] = _classify(func)
    if rule is None:
        return None
    if rule.lists:
        return _list_cost(rule, args, outs)
    if args and outs is args[0] and not rule.mutates:
        return None  # already what was asked for
    written = _bytes_of(outs)
    read = _bytes_of([arg for at, arg in enumerate(args) if at not in rule.skipped] if rule.skipped else args)
    if kwargs:
        read += sum(_bytes_of(arg) for name, arg in kwargs.items() if name != "out")
    if rule.formula is None:
        return OpCost(0.0, float(rule.moved(read, written)), _OTHER, 1)
    return OpCost(float(rule.formula(args, kwargs or {}, outs)), float(read + written), _kind_of(args), 1)


class _Rule(NamedTuple):
    formula: Callable[[Sequence[Any], Mapping[str, Any], Any], float] | None = None
    skipped: frozenset[int] = frozenset()  # positions of arguments whose bytes are not read
    moved: Callable[[int, int], int] = int.__add__  # bytes read and written -> bytes through memory
    mutates: bool = False
    lists: bool = False  # a foreach or fused operator
    rewritten: tuple[int, ...] = ()  # of lists, positions of arguments that it writes and does not return


def _classify(func: Any) -> _Rule | None:
    """The rule for an operator, once for all its calls; None where it never starts a kernel."""
    packet = getattr(func, "overloadpacket", func)
    formula = _FORMULAS.get(packet)
    if formula is None and packet in flop_registry:
        counted = flop_registry[packet]  # takes the tensors as the operator does; slower, since it walks through them
        formula = lambda args, kwargs, outs: counted(*args, **kwargs, out_val=outs)  # noqa: E731
    schema = getattr(func, "_schema", None)
    if schema is None:
        return _Rule(formula)  # a higher-order operator
    if func.is_view or torch.Tag.inplace_view in func.tags or packet in _NO_KERNELS or func.namespace in _NO_NAMESPACES:
        return None
    if not schema.is_mutable and not any("Tensor" in str(value.type) for value in schema.returns):
        return None  # sizes, strides, scalars
    if packet in _GATHERS:
        return _Rule(skipped=_GATHERS[packet], moved=_both_ways)
    if packet in _SCATTERS:
        return _Rule(skipped=frozenset({0}), moved=lambda read, _: 3 * read, mutates=True)
    if packet in _WRITES:
        return _Rule(skipped=frozenset({0}), mutates=True)
    if packet in _PICKS:
        return _Rule(skipped=_PICKS[packet])
    takes_lists = bool(schema.arguments) and str(schema.arguments[0].type) == "List[Tensor]"
    if takes_lists and ("_foreach_" in packet.__name__ or packet.__name__.startswith("_fused_")):
        return _Rule(lists=True, rewritten=() if schema.returns else _rewritten(schema))
    return _Rule(formula, mutates=schema.is_mutable)


def _rewritten(schema: Any) -> tuple[int, ...]:
    """Positions of the lists that an operator without results writes: of an optimizer's, gradients are only read."""
    return tuple(
        index
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and argument.name != "grads"
        and str(argument.type) == "List[Tensor]"
    )


def _list_cost(rule: _Rule, args: Sequence[Any], outs: Any) -> OpCost | None:
    """One operator over lists of tensors: as many launches as its tensors or its elements need, whichever is more."""
    if not args[0]:
        return None
    moved = _bytes_of(args) + sum(_bytes_of(args[index]) for index in rule.rewritten)
    elements = sum(tensor.numel() for tensor in args[0])
    kernels = max(ceil(len(args[0]) / _LAUNCH_TENSORS), ceil(elements / _LAUNCH_ELEMENTS), 1)
    return OpCost(0.0, float(moved + _bytes_of(outs)), _OTHER, kernels)


def _bytes_of(values: Any) -> int:
    """Bytes of a tensor, or of the tensors in a sequence of tensors, sequences and anything else."""
    if isinstance(values, torch.Tensor):
        return values.nbytes
    total = 0
    if isinstance(values, (list, tuple)):
        for value in values:
            if isinstance(value, torch.Tensor):
                total += value.nbytes
            elif isinstance(value, (list, tuple)):
                total += _bytes_of(value)
    return total


def _kind_of(args: Sequence[Any]) -> str:
    first = args[0]
    if not isinstance(first, torch.Tensor):
        first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        if first is None:
            return _FP32
    return _HALF if first.dtype in _NARROW or first.dtype.itemsize == 1 else _FP32


# Formulas. Shapes: M, N, K of a product (M,K) @ (K,N); B batch; H heads; S sequence; D head dimension.


def _product(left: torch.Tensor, right: torch.Tensor) -> int:
    """(…,M,K) @ (…,K,N), with as many leading dimensions on both sides, or a right side without any."""
    return 2 * left.numel() * right.shape[-1]


def _linear(args: Sequence[Any], kwargs: Mapping[str, Any], outs: Any) -> int:
    return 2 * args[0].numel() * args[1].shape[0]


def _matmul(args: Sequence[Any], kwargs: Mapping[str, Any], outs: Any) -> int:
    return 2 * outs.numel() * args[0].shape[-1]


def _grouped_product(args: Sequence[Any], kwargs: Mapping[str, Any], outs: Any) -> int:
    """Experts: every row meets one expert's weight, so the products together are as large as one."""
    left, right = args[0], args[1]
    if left.dim() == 3 and right.dim() == 2:
        return 2 * left.shape[-1] * left.shape[-2] * right.shape[-1]
    return _product(left, right)


def _convolution(inputs: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, transposed: bool) -> int:
    """Each weight meets every position of the smaller side: the output, or the input where it is transposed."""
    positions = (inputs if transposed else output).shape[2:]
    return 2 * inputs.shape[0] * prod(positions) * weight.numel()


def _convolution_backward(args: Sequence[Any], kwargs: Mapping[str, Any], outs: Any) -> int:
    """As much as forward for the gradient of the input, and as much for that of the weight."""
    grad, inputs, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    return _convolution(inputs, weight, grad, transposed) * (bool(wanted[0]) + bool(wanted[1]))


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, int]:
    """Of (B,H,S,D): of query by key, and of weights by value."""
    pairs = 2 * prod(query.shape[:3]) * key.shape[2]
    return pairs * query.shape[3], pairs * value.shape[3]


def _attention_forward(args: Sequence[Any], kwargs: Mapping[str, Any], outs: Any) -> int:
    return sum(_attention(*args[:3]))


def _attention_backward(args: Sequence[Any], kwargs: Mapping[str, Any], outs: Any) -> int:
    """Scores again, then the gradients of query and of key (all over D), of value and of the weights."""
    by_key, by_value = _attention(*args[1:4])
    return 3 * by_key + 2 * by_value


_FORMULAS = {
    aten.mm: lambda args, kwargs, outs: _product(args[0], args[1]),
    aten.bmm: lambda args, kwargs, outs: _product(args[0], args[1]),
    aten.addmm: lambda args, kwargs, outs: _product(args[1], args[2]),
    aten._addmm_activation: lambda args, kwargs, outs: _product(args[1], args[2]),
    aten.baddbmm: lambda args, kwargs, outs: _product(args[1], args[2]),
    aten.linear: _linear,  # composite: seen only in inference mode
    aten.matmul: _matmul,
    aten._grouped_mm: _grouped_product,
    aten.convolution: lambda args, kwargs, outs: _convolution(args[0], args[1], outs, args[6]),
    aten._convolution: lambda args, kwargs, outs: _convolution(args[0], args[1], outs, args[6]),
    aten.convolution_backward: _convolution_backward,
    **dict.fromkeys(
        [
            aten._scaled_dot_product_flash_attention,
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_efficient_attention,
            aten._scaled_dot_product_cudnn_attention,
            aten._scaled_dot_product_fused_attention_overrideable,
        ],
        _attention_forward,
    ),
    **dict.fromkeys(
        [
            aten._scaled_dot_product_flash_attention_backward,
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
            aten._scaled_dot_product_efficient_attention_backward,
            aten._scaled_dot_product_cudnn_attention_backward,
            aten._scaled_dot_product_fused_attention_overrideable_backward,
        ],
        _attention_backward,
    ),
}

_NO_NAMESPACES = {"prim", "prims", "profiler", "inductor"}
_NO_KERNELS = {
    *(aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided, aten.empty_permuted),
    *(aten._unsafe_view, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.unsafe_chunk, aten.lift, aten.set_data),
    *(aten._local_scalar_dense, aten.is_same_size, aten.requires_grad_, aten._fw_primal, aten._assert_async),
    *(aten._assert_tensor_metadata, aten.record_stream, aten.resolve_conj, aten.resolve_neg),
}


def _both_ways(read: int, written: int) -> int:
    return read + 2 * written


# A gather reads of its table no more than it writes: a table's rows, a choice of elements.
_GATHERS = dict.fromkeys([aten.index, aten.index_select, aten.gather, aten.take, aten.take_along_dim], frozenset({0}))
_GATHERS[aten.embedding] = frozenset({0})
# A scatter reads its source, and reads and writes as much of its target.
_SCATTERS = {
    *(aten.index_put_, aten._index_put_impl_, aten.index_add_, aten.index_copy_),
    *(aten.scatter_, aten.scatter_add_, aten.scatter_reduce_),
}
# These write their first argument and do not read it.
_WRITES = {aten.copy_, aten.fill_, aten.zero_, aten.normal_, aten.uniform_, aten.bernoulli_, aten.random_}
# These look at single elements of an argument.
_PICKS = {
    aten.nll_loss_forward: frozenset({0}),
    aten.nll_loss2d_forward: frozenset({0}),
    aten.nll_loss_backward: frozenset({1}),
    aten.nll_loss2d_backward: frozenset({1}),
    aten.zeros_like: frozenset({0}),
    aten.ones_like: frozenset({0}),
    aten.full_like: frozenset({0}),
    aten.rand_like: frozenset({0}),
    aten.randn_like: frozenset({0}),
    aten.new_zeros: frozenset({0}),
    aten.new_ones: frozenset({0}),
    aten.new_full: frozenset({0}),
}

_RULES: dict[Any, _Rule | None] = {}
