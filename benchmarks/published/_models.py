"""Configurations and heads of transformers' models by the names that published rows have for them."""

from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig

from autofit.catalog import find_model

HEADS = {
    "fill-mask": transformers.AutoModelForMaskedLM,
    "text-classification": transformers.AutoModelForSequenceClassification,
    "token-classification": transformers.AutoModelForTokenClassification,
    "question-answering": transformers.AutoModelForQuestionAnswering,
    "text-generation": transformers.AutoModelForCausalLM,
    "image-classification": transformers.AutoModelForImageClassification,
    None: transformers.AutoModel,
}
# Models that the catalog does not have, as what they differ in from one that it has.
_LIKE = {"bert-base-cased": ("bert-base-uncased", {"vocab_size": 28996})}


def config_of(named: str | dict[str, Any]) -> PretrainedConfig:
    """Of a name, or of what differs from a bare BertConfig. Raises ValueError for a model that nobody here knows."""
    if isinstance(named, dict):
        return transformers.BertConfig(**named)
    like, changes = _LIKE.get(named.rpartition("/")[2], (named, {}))
    found = find_model(like)
    if found is None:
        raise ValueError(f"{named} is not in the catalog")
    values = {name: value for name, value in found.config.items() if name != "model_type"}
    config = AutoConfig.for_model(found.config["model_type"], **{**values, **changes})
    if config.pad_token_id is None:
        config.pad_token_id = 0
    return config
