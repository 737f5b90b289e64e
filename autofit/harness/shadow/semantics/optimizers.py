"""Optimizers on fake CPU tensors as they are on CUDA: which implementation runs, and what it holds.

torch chooses by the type and device of the parameters (`_default_to_fused_or_foreach` in torch/optim/optimizer.py):
foreach for plain tensors on CUDA, one tensor after the other on the CPU or for a subclass, as a fake tensor is.
`clip_grad_norm_` chooses likewise (torch/utils/_foreach_utils.py). With foreach every intermediate of all parameters of
a group is alive at once, and that is a peak. In units of the bytes of all parameters, one group, counted from a ledger
in the tests:

    optimizer                    state     more during a step
    AdamW, Adam foreach          2         1     square roots of the second moment
    AdamW fused                  2         0     what Trainer's default, `adamw_torch_fused`, asks for
    AdamW, one after the other   2         3 tensors of the largest size
    SGD                          0         0     1 with weight decay, which is added to a copy of the gradients
    SGD with momentum            1         0     1 with weight decay
    RMSprop                      1         1     2 with weight decay
    Adagrad                      1         2     state appears when it is made
    Adafactor                    row and column means of each matrix, and three temporaries of the largest (fp32)

Trainer makes two groups, with and without weight decay, which step one after the other.

Step counters are one number for each parameter: on the device with `fused` or `capturable`, else in host memory
("special device hosting for step" in `Adam._init_group`), which is what `on_host` is told after the step that makes
them. Adagrad's are made on the host and moved to the device by accelerate (`AcceleratedOptimizer.__init__`), so they
stay.

bitsandbytes' optimizers need its CUDA kernels, so stand-ins with their state take their places, package or no package
(bitsandbytes/optim/optimizer.py and ademamix.py, versions with 256 elements a block, 0.45 and newer; older ones had
2048):

    8 bits      1 byte per element and state, a float32 for each 256 elements, two tables of 256 float32 in all. Tensors
                of fewer than 4096 elements, and embeddings, for which Trainer asks so, keep 32 bits
    32 bits     4 bytes per element and state
    states      AdamW and Adam 2, Lion and RMSprop 1, AdEMAMix 3 (the first two in one tensor)
    paged       states of tensors of 100,000 elements and more are CUDA managed memory: no allocator of torch counts
                them, the driver moves them to the device for the step and drops them where there is no room. Told of as
                host memory, so a process may hold more of the device than is counted, never more than it can have

Everything else of `TrainingArguments.optim` is refused by name: low-rank projections, fused backward passes, tensor
subclasses and packages of their own cannot be had from shapes. Not covered: `capturable=True`, which torch refuses on
the CPU, and optimizers that a script brings along, which run as they are.
"""

import contextlib
import importlib.machinery
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autofit.harness.shadow.semantics import CannotShadowError
from autofit.harness.shadow.semantics.host_transfer import HostMemory, replaced

# How each `optim` of TrainingArguments is traced. "own": its own code runs. "stand-in": a class here with its state.
# Otherwise why it cannot be.
_LOW_RANK = "it projects the gradients of chosen modules with a package of its own"
_PACKAGE = "it comes from a package whose memory has not been modelled"
_SUBCLASS = "torchao keeps its state in tensor subclasses, which fake tensors do not nest in"
_FUSED_BACKWARD = "it updates weights during the backward pass"
OPTIMIZERS: dict[str, str] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"), "own"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"), "stand-in"),
    **dict.fromkeys(("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"), "stand-in"),
    **dict.fromkeys(("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit"), "stand-in"),
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"), "stand-in"),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), _SUBCLASS),
    **dict.fromkeys(("galore_adamw", "galore_adamw_8bit", "galore_adafactor"), _LOW_RANK),
    **dict.fromkeys(("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"), _LOW_RANK),
    **dict.fromkeys(("apollo_adamw", "apollo_adamw_layerwise"), _LOW_RANK),
    **dict.fromkeys(("lomo", "adalomo"), _FUSED_BACKWARD),
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), _PACKAGE),
    **dict.fromkeys(("adamw_anyprecision", "grokadamw", "stable_adamw"), _PACKAGE),
    "adamw_torch_xla": "it is for XLA devices",
    "adamw_torch_npu_fused": "it is for NPUs",
}

MIN_8BIT_ELEMENTS = 4096  # `min_8bit_size` of bitsandbytes.optim.AdamW
BLOCK_ELEMENTS = 256  # `init_state` of Optimizer1State, Optimizer2State and AdEMAMix
PAGED_ELEMENTS = 100_000  # `get_state_buffer` of Optimizer8bit
NORM_CHUNK_ELEMENTS = 65536  # kChunkSize in aten/src/ATen/native/cuda/MultiTensorApply.cuh


def check_optimizer(name: str) -> None:
    """Raise CannotShadowError unless `optim=name` can be traced."""
    how = OPTIMIZERS.get(str(name), "it is not known here")
    if how not in ("own", "stand-in"):
        raise CannotShadowError(f"optim={name} cannot be predicted: {how}; measure it with a probe")


@contextlib.contextmanager
def cuda_optimizers(on_host: Callable[[torch.Tensor], None] | None = None) -> Iterator[None]:
    """Have optimizers and gradient clipping on fake CPU tensors choose and hold what they would on CUDA.

    `on_host` hears of tensors that are host memory: of step counters, after the step that made them, and of paged
    state, before anything counted it. Trainer raises CannotShadowError when asked for one that cannot be traced.
    """
    from torch.optim import optimizer as torch_optimizer
    from torch.utils import _foreach_utils

    on_host = on_host or (lambda tensor: None)
    devices = _foreach_utils._get_foreach_kernels_supported_devices
    with contextlib.ExitStack() as stack:
        for module in (torch_optimizer, _foreach_utils):
            known = module._foreach_supported_types
            stack.enter_context(replaced(module, "_foreach_supported_types", [*known, FakeTensor]))
        stack.enter_context(
            replaced(torch_optimizer, "_get_foreach_kernels_supported_devices", lambda: [*devices(), "cpu"])
        )
        stack.enter_context(replaced(torch, "_foreach_norm", _norm_with_partials(torch._foreach_norm)))
        hook = torch_optimizer.register_optimizer_step_post_hook(_report_steps(on_host))
        stack.callback(hook.remove)
        stack.enter_context(_stand_ins(on_host))
        yield


def _norm_with_partials(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_foreach_norm` on CUDA first takes one number for each chunk of each tensor, as many as the largest needs:
    `foreach_tensor_norm_cuda` in aten/src/ATen/native/cuda/ForeachReduceOp.cu. 9 MB for a Llama of 8 billion."""

    def foreach_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not tensors or not isinstance(tensors[0], FakeTensor):
            return original(tensors, *args, **kwargs)
        first = tensors[0]
        chunks = -(-max(t.numel() for t in tensors) // NORM_CHUNK_ELEMENTS)
        dtype = torch.float32 if first.dtype in (torch.float16, torch.bfloat16) else first.dtype
        partials = torch.empty(len(tensors) * chunks, dtype=dtype, device=first.device)
        norms = original(tensors, *args, **kwargs)
        del partials
        return norms

    return foreach_norm


def _report_steps(on_host: Callable[[torch.Tensor], None]) -> Callable[..., None]:
    """A hook after each step that tells of the counters made in it."""
    known: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()

    def tell(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not type(optimizer).__module__.startswith("torch.optim") or isinstance(optimizer, torch.optim.Adagrad):
            return
        told = known.setdefault(optimizer, set())
        if len(told) == len(optimizer.state):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state and id(parameter) not in told:
                    told.add(id(parameter))
                    step = optimizer.state[parameter].get("step")
                    if isinstance(step, FakeTensor) and not (group.get("fused") or group.get("capturable")):
                        on_host(step)

    return tell


# ---- bitsandbytes ----


class _Overrides:
    """Stands for the one `bitsandbytes.optim.GlobalOptimManager`: which parameters keep 32 bits."""

    def __init__(self) -> None:
        self._configs: dict[int, dict[str, Any]] = {}
        self._modules: list[tuple[Any, str, dict[str, Any]]] = []

    def get_instance(self) -> "_Overrides":
        return self

    def register_parameters(self, params: Any) -> None:
        """Nothing: parameters are looked up by themselves."""

    def override_config(self, parameters: Any, key: Any = None, value: Any = None, key_value_dict: Any = None) -> None:
        for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
            self._configs.setdefault(id(parameter), {}).update(key_value_dict or {key: value})

    def register_module_override(self, module: Any, param_name: str, config: dict[str, Any]) -> None:
        self._modules.append((module, param_name, config))

    def bits(self, parameter: torch.Tensor) -> int | None:
        for module, name, config in self._modules:
            if getattr(module, name) is parameter:
                return config.get("optim_bits")
        return self._configs.get(id(parameter), {}).get("optim_bits")


class _BlockwiseOptimizer(torch.optim.Optimizer):
    """What a bitsandbytes optimizer holds. A step takes nothing more: its kernels work in place."""

    buffers: tuple[int, ...] = (1, 1)  # states that each tensor of state stands for
    bits: int | None = None  # None: as `optim_bits` says
    paged: bool | None = None  # None: as `is_paged` says
    host: HostMemory
    overrides: _Overrides

    def __init__(self, params: Any, lr: float = 1e-3, *_: Any, **options: Any) -> None:
        self.optim_bits = self.bits or options.pop("optim_bits", 32)
        self.is_paged = options.pop("is_paged", False) if self.paged is None else self.paged
        self.min_8bit_size = options.pop("min_8bit_size", MIN_8BIT_ELEMENTS)
        self._tables: list[torch.Tensor] = []
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.contiguous()
                    if not self.state[parameter]:
                        self._make_state(parameter, self.state[parameter])
        return loss

    def _make_state(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        count = parameter.numel()
        bits = self.overrides.bits(parameter) or self.optim_bits
        dtype = torch.uint8 if bits == 8 and count >= self.min_8bit_size else torch.float32
        if dtype == torch.uint8 and not self._tables:
            self._tables = [parameter.new_empty(256, dtype=torch.float32) for _ in self.buffers]
        for number, states in enumerate(self.buffers, start=1):
            state[f"state{number}"] = self._buffer(parameter, states, dtype)
            if dtype == torch.uint8:
                blocks = states * -(-count // BLOCK_ELEMENTS)
                state[f"absmax{number}"] = parameter.new_empty(blocks, dtype=torch.float32)
        state["step"] = 1

    def _buffer(self, parameter: torch.Tensor, states: int, dtype: torch.dtype) -> torch.Tensor:
        shape = parameter.shape if states == 1 else (states, *parameter.shape)
        if self.is_paged and parameter.numel() >= PAGED_ELEMENTS:
            return self.host.empty(parameter, shape, dtype)
        return parameter.new_empty(shape, dtype=dtype)


_ONE_STATE, _TWO_STATES, _TWO_AND_ONE = (1,), (1, 1), (2, 1)
_FAMILIES = {
    "Adam": _TWO_STATES,
    "AdamW": _TWO_STATES,
    "Lion": _ONE_STATE,
    "RMSprop": _ONE_STATE,
    "AdEMAMix": _TWO_AND_ONE,
}


def _make_module(on_host: Callable[[torch.Tensor], None]) -> types.ModuleType:
    """A `bitsandbytes.optim` of stand-ins. Their names say `bitsandbytes`, which is what Trainer looks for."""
    module = types.ModuleType("bitsandbytes.optim")
    module.GlobalOptimManager = overrides = _Overrides()
    host = HostMemory(on_host)
    for family, buffers in _FAMILIES.items():
        for prefix, paged in (("", None), ("Paged", True)):
            for suffix, bits in (("", None), ("8bit", 8), ("32bit", 32)):
                name = f"{prefix}{family}{suffix}"
                body = {
                    "__module__": f"bitsandbytes.optim.{family.lower()}",
                    "buffers": buffers,
                    "bits": bits,
                    "paged": paged,
                    "host": host,
                    "overrides": overrides,
                }
                setattr(module, name, type(name, (_BlockwiseOptimizer,), body))
    return module


@contextlib.contextmanager
def _stand_ins(on_host: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Refuse what cannot be traced when Trainer makes its optimizer, and put stand-ins in bitsandbytes' place.

    Where the package is loaded already, its classes are replaced by name. Trainer, which imports it to make its
    optimizer, is given a package of stand-ins for so long only: nobody else takes it for installed or misses the rest.
    """
    import transformers

    module = _make_module(on_host)
    create = transformers.Trainer.create_optimizer

    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(self.args.optim, "value", self.args.optim)
        if self.optimizer is None and getattr(self, "optimizer_cls_and_kwargs", None) is None:
            check_optimizer(name)
        with _importable(module) if OPTIMIZERS.get(name) == "stand-in" else contextlib.nullcontext():
            return create(self, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        loaded = sys.modules.get("bitsandbytes.optim")
        for name in vars(module) if loaded is not None else ():
            if not name.startswith("__") and hasattr(loaded, name):
                stack.enter_context(replaced(loaded, name, getattr(module, name)))
        stack.enter_context(replaced(transformers.Trainer, "create_optimizer", create_optimizer))
        yield


@contextlib.contextmanager
def _importable(module: types.ModuleType) -> Iterator[None]:
    """Have `import bitsandbytes` find the stand-ins, and transformers' optimizer table believe it."""
    package = types.ModuleType("bitsandbytes")
    for one in (package, module):
        one.__spec__ = importlib.machinery.ModuleSpec(one.__name__, loader=None)
    package.__path__, package.optim = [], module
    with contextlib.ExitStack() as stack:
        table = sys.modules.get("transformers.trainer_optimizer")  # a part of transformers.trainer before 5.0
        if table is not None and hasattr(table, "is_bitsandbytes_available"):
            stack.enter_context(replaced(table, "is_bitsandbytes_available", lambda *_: True))
        before = {name: sys.modules.get(name) for name in ("bitsandbytes", "bitsandbytes.optim")}
        sys.modules.update({"bitsandbytes": package, "bitsandbytes.optim": module})
        try:
            yield
        finally:
            for name, former in before.items():
                if former is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = former
