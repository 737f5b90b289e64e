"""The attention implementation of a model that exists already, also where a Trainer makes it anew for its training."""

from typing import Any


def use_attention(trainer: Any, implementation: str | None) -> None:
    """Have `trainer` train with `implementation`; None leaves the model's own."""
    if implementation is None:
        return
    if trainer.model_init is not None:
        original = trainer.call_model_init

        def call_model_init(*args: Any, **kwargs: Any) -> Any:
            model = original(*args, **kwargs)
            _set(model, implementation)
            return model

        trainer.call_model_init = call_model_init
    _set(trainer.model, implementation)


def _set(model: Any, implementation: str) -> None:
    """Also under a PEFT wrapper; nothing where it is in use already."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(base.config, "_attn_implementation", None) != implementation:
        base.set_attn_implementation(implementation)
