import json
import subprocess
import sys
from importlib.resources import files

import pytest

from autofit import catalog
from autofit.errors import UsageError
from autofit.units import looks_like_size

# Memory that the card is sold with in GiB, compute capability: from data sheets, not from the catalog.
DATA_SHEETS = {
    "t4": (16, (7, 5)),
    "v100-16": (16, (7, 0)),
    "v100-32": (32, (7, 0)),
    "rtx-2080-ti": (11, (7, 5)),
    "rtx-3060": (12, (8, 6)),
    "rtx-3080": (10, (8, 6)),
    "rtx-3090": (24, (8, 6)),
    "rtx-4070-ti": (12, (8, 9)),
    "rtx-4090": (24, (8, 9)),
    "rtx-5090": (32, (12, 0)),
    "a10g": (24, (8, 6)),
    "l4": (24, (8, 9)),
    "l40s": (48, (8, 9)),
    "rtx-a6000": (48, (8, 6)),
    "a100-40": (40, (8, 0)),
    "a100-80": (80, (8, 0)),
    "h100-80": (80, (9, 0)),
    "h200": (141, (9, 0)),
}

# CUDA cores, boost clock in MHz, memory bus in bits and Gbit/s per pin: specifications of the chips, from which rates
# follow (a core does two operations per clock). V100, A100 and H100 as SXM boards.
CHIPS = {
    "t4": (2560, 1590, 256, 10),
    "v100-16": (5120, 1530, 4096, 1.755),
    "v100-32": (5120, 1530, 4096, 1.755),
    "rtx-2080-ti": (4352, 1545, 352, 14),
    "rtx-3060": (3584, 1777, 192, 15),
    "rtx-3080": (8704, 1710, 320, 19),
    "rtx-3090": (10496, 1695, 384, 19.5),
    "rtx-4070-ti": (7680, 2610, 192, 21),
    "rtx-4090": (16384, 2520, 384, 21),
    "rtx-5090": (21760, 2407, 512, 28),
    "a10g": (10240, 1710, 384, 12.5),
    "l4": (7424, 2040, 192, 12.5),
    "l40s": (18176, 2520, 384, 18),
    "rtx-a6000": (10752, 1800, 384, 16),
    "a100-40": (6912, 1410, 5120, 2.43),
    "a100-80": (6912, 1410, 5120, 3.186),
    "h100-80": (16896, 1980, 5120, 5.23),
    "h200": (16896, 1980, 6144, 6.25),
}

# What the hub's files hold and no attribute of the configuration class stands for: read by the model through
# getattr, folded into other attributes, or left over from former versions of transformers.
NOT_ATTRIBUTES = {
    *("norm_rel_ebd", "position_buckets", "share_att_key"),
    *("rope_scaling", "rope_theta", "num_labels", "torch_dtype"),
    *("gradient_checkpointing", "position_embedding_type", "tie_weights_", "is_llama_config", "rope_interleaved"),
    *("n_ctx", "n_special", "predict_special_tokens", "task_specific_params", "path_norm", "use_mrope"),
}

AUTO_CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "causal-lm": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
}


def build(class_name: str, config):
    """The model on the meta device, which owns no memory; the class itself, or an auto class."""
    import torch
    import transformers

    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        return model_class.from_config(config) if class_name.startswith("Auto") else model_class(config)


def auto_config(model: catalog.CatalogModel):
    from transformers import AutoConfig

    return AutoConfig.for_model(**model.config)


@pytest.mark.parametrize("name", catalog.model_names())
def test_a_model_has_exactly_as_many_parameters_as_published(name):
    model = catalog.find_model(name)
    built = build(model.parameters_class, auto_config(model))
    assert sum(p.numel() for p in built.parameters()) == model.parameters


@pytest.mark.parametrize("name", catalog.model_names())
def test_a_model_builds_for_its_default_task(name):
    model = catalog.find_model(name)
    built = build(AUTO_CLASSES[model.task], auto_config(model))
    # Heads differ from the published class; trunk and embeddings are nearly all of a model.
    assert sum(p.numel() for p in built.parameters()) == pytest.approx(model.parameters, rel=0.04)


@pytest.mark.parametrize("name", catalog.model_names())
def test_every_key_of_a_configuration_means_something_to_transformers(name):
    model = catalog.find_model(name)
    config = auto_config(model)
    known = set(type(config)().to_dict()) | set(config.attribute_map) | NOT_ATTRIBUTES
    assert set(model.config) <= known


@pytest.mark.parametrize("name", catalog.model_names())
def test_a_model_is_found_by_id_and_alias_in_any_case(name):
    model = catalog.find_model(name)
    assert model.id == name
    assert name.split("/")[1] in model.aliases
    for spelling in (name, *model.aliases):
        for text in (spelling, spelling.upper(), spelling.lower()):
            assert catalog.find_model(text) == model


def test_no_two_models_share_a_name():
    spellings = [s for name in catalog.model_names() for s in (name, *catalog.find_model(name).aliases)]
    assert len({s.lower() for s in spellings}) == len(spellings)


def test_every_model_file_is_named_after_the_model_in_it():
    ids = {file.name: json.loads(file.read_text())["id"] for file in (files(catalog) / "models").iterdir()}
    assert {f"{id.split('/')[1].lower()}.json" for id in ids.values()} == set(ids)
    assert sorted(ids.values()) == sorted(catalog.model_names())


@pytest.mark.parametrize("name", ["bert-base-uncasedd", "", "somebody/bert-base-uncased", "bert"])
def test_an_unknown_model_is_none(name):
    assert catalog.find_model(name) is None


def test_what_a_caller_does_to_a_configuration_stays_with_the_caller():
    config = catalog.find_model("meta-llama/Llama-3.2-1B").config
    config["rope_scaling"]["factor"] = 1.0
    del config["vocab_size"]
    fresh = catalog.find_model("meta-llama/Llama-3.2-1B").config
    assert (fresh["rope_scaling"]["factor"], fresh["vocab_size"]) == (32.0, 128256)


def test_gpus_are_those_of_the_data_sheets():
    assert sorted(catalog.gpu_names()) == sorted(DATA_SHEETS)


@pytest.mark.parametrize(("name", "nominal_gib", "capability"), [(n, *facts) for n, facts in DATA_SHEETS.items()])
def test_a_gpu_can_use_between_88_and_100_percent_of_its_memory(name, nominal_gib, capability):
    gpu = catalog.find_gpu(name)
    assert 0.88 <= gpu.usable_bytes / (nominal_gib * 2**30) <= 1
    assert gpu.capability == capability
    # From the smallest card's context to twice the largest that was seen with lazily loaded kernels.
    assert gpu.context_bytes is None or 100 * 2**20 <= gpu.context_bytes <= 2**30


@pytest.mark.parametrize(("name", "facts"), CHIPS.items())
def test_the_rates_of_a_gpu_follow_from_its_cores_and_clocks(name, facts):
    cores, boost_mhz, bus_bits, pin_gbps = facts
    gpu = catalog.find_gpu(name)
    assert gpu.fp32_flops == pytest.approx(2 * cores * boost_mhz * 1e6, rel=0.015)
    assert gpu.bandwidth_bytes == pytest.approx(bus_bits / 8 * pin_gbps * 1e9, rel=0.005)


def test_every_gpu_has_cores_and_clocks():
    assert sorted(CHIPS) == sorted(catalog.gpu_names())


@pytest.mark.parametrize("name", catalog.gpu_names())
def test_a_shorter_number_is_never_slower(name):
    gpu = catalog.find_gpu(name)
    assert gpu.half_flops > 1.99 * gpu.fp32_flops
    if gpu.tf32_flops is not None:
        # Tensor cores take two 16-bit numbers for one of tf32, in every generation; sheets round.
        assert gpu.half_flops == pytest.approx(2 * gpu.tf32_flops, rel=0.015)
        assert gpu.tf32_flops >= gpu.fp32_flops


@pytest.mark.parametrize("name", catalog.gpu_names())
def test_tf32_and_bf16_come_with_capability_8(name):
    gpu = catalog.find_gpu(name)
    assert gpu.native_bf16 == (gpu.tf32_flops is not None) == (gpu.capability[0] >= 8)


@pytest.mark.parametrize("name", catalog.gpu_names())
def test_a_geforce_card_halves_the_rate_where_sums_are_kept_in_fp32(name):
    gpu = catalog.find_gpu(name)
    ratio = gpu.half_flops / gpu.fp32_flops
    # Ampere and newer: 2 on GeForce and on the A10G, 4 on professional cards of the same chips, more in data centres.
    halved = (name.startswith("rtx-") and name != "rtx-a6000") or name == "a10g"
    assert ratio == pytest.approx(4 if name == "rtx-2080-ti" else 2, rel=0.01) if halved else ratio > 3.9


@pytest.mark.parametrize("name", catalog.gpu_names())
def test_every_figure_of_a_gpu_names_its_source(name):
    gpu = catalog.find_gpu(name)
    assert gpu.source
    assert "NVIDIA" in gpu.rates_source


@pytest.mark.parametrize("name", catalog.gpu_names())
def test_a_gpu_is_found_whatever_the_case_and_separators(name):
    gpu = catalog.find_gpu(name)
    assert gpu.name == name
    for spelling in (name, gpu.label, *gpu.aliases):
        words = spelling.replace("-", " ")
        for text in (spelling, words.upper(), words.replace(" ", "_"), words.replace(" ", ""), f"  {words} "):
            assert catalog.find_gpu(text) == gpu, text


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti"),
        ("NVIDIA GeForce RTX 4070 Ti", "rtx-4070-ti"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100-80"),
        ("NVIDIA H200", "h200"),
    ],
)
def test_a_gpu_is_found_by_the_name_that_its_driver_reports(driver_name, name):
    assert catalog.find_gpu(driver_name).name == name


@pytest.mark.parametrize("name", ["RTX 3080 Laptop GPU", "RTX 3090 Ti", "A100", "", "nvidia", "24GB"])
def test_what_only_resembles_a_gpu_is_none(name):
    assert catalog.find_gpu(name) is None


def test_no_two_gpus_share_a_name_and_none_is_named_like_a_size():
    spellings = [(s, name) for name in catalog.gpu_names() for s in (name, *catalog.find_gpu(name).aliases)]
    bare = {}
    for spelling, name in spellings:
        assert bare.setdefault(spelling.replace("-", "").lower(), name) == name
        assert not looks_like_size(spelling)


def test_gpu_names_begin_with_the_smallest():
    sizes = [catalog.find_gpu(name).usable_bytes for name in catalog.gpu_names()]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GB", 24 * 10**9), ("24 GiB", 24 * 2**30), ("rtx-4090", 25250627584), ("NVIDIA GeForce RTX 3080", 10351935488)],
)
def test_a_budget_is_a_size_or_what_a_gpu_can_use(text, expected):
    assert catalog.parse_budget(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("24", ["'24'", "24GB", "24GiB"]),
        ("24XB", ["'24XB'", "unknown unit"]),
        ("0GB", ["no memory"]),
        ("-5GB", ["'-5GB'", "24GB"]),
        ("", ["''", "24GB", "rtx-3090"]),
        ("gtx-banana", ["'gtx-banana'", "24GB", "known cards", "t4", "h200"]),
        ("rtx-3909", ["'rtx-3909'", "did you mean", "rtx-3090"]),
        ("RTX 409O", ["did you mean", "rtx-4090"]),
        ("a100", ["did you mean a100-40 or a100-80?"]),
        ("3090", ["no unit", "rtx-3090"]),
        ("2080ti", ["unknown unit", "rtx-2080-ti"]),
    ],
)
def test_a_budget_that_is_neither_is_refused_with_the_way_out_in_one_line(text, words):
    with pytest.raises(UsageError) as caught:
        catalog.parse_budget(text)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_plain_number_gets_no_card_suggested():
    with pytest.raises(UsageError) as caught:
        catalog.parse_budget("40")
    assert "card" not in str(caught.value)


def test_the_catalog_is_read_without_torch_and_transformers():
    code = (
        "import sys; from autofit import catalog; catalog.parse_budget('t4'); catalog.find_model('gpt2');"
        "sys.exit(bool({'torch', 'transformers', 'optuna'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
