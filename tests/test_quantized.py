"""Quantized checkpoints: each format against an independent writer of it, and everything that can be wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import Stored, Writer, awq, gptq, packed, quantize_folder, scaled
from reference_driver import forward
from safetensors.torch import load_file, save_file
from tiny_models import save
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from longbatch import models
from longbatch.errors import UsageError

CPU = torch.device("cpu")
IDS = torch.arange(3, 60)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
Q_PROJ = "model.layers.1.self_attn.q_proj"


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


def fp8(**weights: Any) -> dict[str, Any]:
    return compressed("float-quantized", num_bits=8, type="float", symmetric=True, **weights)


CASES: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq": (GPTQ, gptq(4, 32, symmetric=True)),
    "gptq-8-bits": ({**GPTQ, "bits": 8, "group_size": 16}, gptq(8, 16, symmetric=False)),
    "gptq-asymmetric": ({**GPTQ, "sym": False}, gptq(4, 32, symmetric=False)),
    "gptq-one-group": ({**GPTQ, "group_size": -1}, gptq(4, -1, symmetric=True)),
    "gptq-act-order": ({**GPTQ, "desc_act": True}, gptq(4, 32, symmetric=False, shuffled=True)),
    "gptq-v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(4, 32, symmetric=False, v2=True)),
    "gptq-uneven-groups": ({**GPTQ, "group_size": 40}, gptq(4, 40, symmetric=False)),
    "awq": (AWQ, awq(32)),
    "awq-one-group": ({**AWQ, "group_size": -1, "version": "GEMM"}, awq(-1)),
    "fp8-blocks": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        scaled(32, 32, name="weight_scale_inv"),
    ),
    "fp8-blocks-of-128": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        scaled(128, 128, name="weight_scale_inv"),
    ),
    "fp8-uneven-blocks": (
        {"quant_method": "fp8", "weight_block_size": [40, 24]},
        scaled(40, 24, name="weight_scale_inv"),
    ),
    "fp8-matrix": ({"quant_method": "fp8", "activation_scheme": "static"}, scaled(None, None)),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, scaled(1, None)),
    "compressed-tensor": (fp8(strategy="tensor"), scaled(None, None)),
    "compressed-channel": (fp8(strategy="channel"), scaled(1, None)),
    "compressed-block": (fp8(strategy="block", block_structure=[32, 48]), scaled(32, 48)),
    "compressed-block-text": (fp8(strategy="block", block_structure="16x16"), scaled(16, 16)),
    "compressed-int8": (
        compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
        scaled(1, None, fp8=False),
    ),
    "compressed-int8-zeros": (
        compressed("int-quantized", num_bits=8, type="int", symmetric=False, strategy="group", group_size=16),
        scaled(1, 16, fp8=False, zeros=True),
    ),
    "compressed-int4": (
        compressed("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=32),
        packed(4, 32, symmetric=True),
    ),
    "compressed-int4-zeros": (
        compressed("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=16),
        packed(4, 16, symmetric=False),
    ),
    "compressed-int4-act-order": (
        compressed("pack-quantized", num_bits=4, symmetric=False, strategy="group", group_size=16, actorder="group"),
        packed(4, 16, symmetric=False, shuffled=True),
    ),
    "compressed-int4-act-order-symmetric": (
        compressed("pack-quantized", num_bits=4, symmetric=True, strategy="group", group_size=16, actorder="group"),
        packed(4, 16, symmetric=True, shuffled=True),
    ),
    "compressed-packed-int8": (
        compressed("pack-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
        packed(8, -1, symmetric=True),
    ),
}


def quantized(tmp_path: Path, config: dict[str, Any], write: Writer, case: str = "llama") -> tuple[Path, Path]:
    """A quantized model folder, and its twin in floats."""
    save(case, tmp_path / "quantized")
    quantize_folder(tmp_path / "quantized", tmp_path / "twin", config, write)
    return tmp_path / "quantized", tmp_path / "twin"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return quantized(tmp_path, *CASES["gptq-act-order"])[0]


def logits(folder: Path) -> torch.Tensor:
    return forward(models.load(folder, torch.float32, CPU), IDS)


def edit(folder: Path, **changed: torch.Tensor | None) -> None:
    """Changes, adds or (None) removes parts of Q_PROJ."""
    tensors: Stored = load_file(folder / "model.safetensors")
    for part, tensor in changed.items():
        tensors.pop(f"{Q_PROJ}.{part}", None)
        if tensor is not None:
            tensors[f"{Q_PROJ}.{part}"] = tensor
    save_file(tensors, folder / "model.safetensors")


def part(folder: Path, name: str) -> torch.Tensor:
    return load_file(folder / "model.safetensors")[f"{Q_PROJ}.{name}"]


def failure(folder: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        models.load(folder, torch.float32, CPU)
    return caught.value


# ------------------------------------------------------------------------------------------------ what must load


@pytest.mark.parametrize("case", CASES)
def test_a_quantized_model_equals_the_floats_it_stands_for(case: str, tmp_path: Path) -> None:
    folder, twin = quantized(tmp_path, *CASES[case])
    found = logits(folder)
    assert found.std() > 0.3
    assert torch.equal(found, logits(twin))


@pytest.mark.parametrize("model", ["phi3", "qwen3_moe", "llama-biases-tied"])
@pytest.mark.parametrize("case", ["gptq", "awq", "fp8-blocks"])
def test_fused_expert_and_biased_matrices(model: str, case: str, tmp_path: Path) -> None:
    config, write = CASES[case]
    write = {"gptq": gptq(4, 8, symmetric=False), "awq": awq(8)}.get(case, write)

    def unbiased(matrix: Any) -> Any:
        stored, meant = write(matrix)
        stored.pop("bias", None)  # this model has its own
        return stored, meant

    folder, twin = quantized(tmp_path, {**config, "group_size": 8}, unbiased, model)
    assert torch.equal(logits(folder), logits(twin))


def test_the_dequantized_weight_is_rounded_once(tmp_path: Path) -> None:
    folder, twin = quantized(tmp_path, *CASES["gptq"])
    found, wanted = (models.load(path, torch.bfloat16, CPU) for path in (folder, twin))
    assert torch.equal(forward(found, IDS), forward(wanted, IDS))


def test_parts_of_a_weight_may_lie_in_several_files(tmp_path: Path) -> None:
    folder, twin = quantized(tmp_path, *CASES["awq"])
    tensors = load_file(folder / "model.safetensors")
    files: dict[str, Stored] = {"a.safetensors": {}, "b.safetensors": {}}
    for number, name in enumerate(sorted(tensors)):
        files[("a.safetensors", "b.safetensors")[number % 2]][name] = tensors[name]
    for file, own in files.items():
        save_file(own, folder / file)
    weight_map = {name: file for file, own in files.items() for name in own}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits(folder), logits(twin))


def test_a_module_may_be_left_as_it_was(tmp_path: Path) -> None:
    folder, twin = quantized(tmp_path, *CASES["gptq"])
    floats = load_file(twin / "model.safetensors")[f"{Q_PROJ}.weight"]
    edit(folder, qweight=None, qzeros=None, scales=None, g_idx=None, bias=None, weight=floats)
    assert torch.equal(logits(folder), logits(twin))


def test_groups_in_order_need_no_index(tmp_path: Path) -> None:
    folder, twin = quantized(tmp_path, *CASES["gptq"])
    edit(folder, g_idx=None)
    assert torch.equal(logits(folder), logits(twin))


def test_scales_of_activations_and_kv_are_left_aside(tmp_path: Path) -> None:
    folder, twin = quantized(tmp_path, *CASES["compressed-tensor"])
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in ("k_scale", "v_scale")}
    tensors["model.layers.0.self_attn.k_proj.output_scale"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(logits(folder), logits(twin))


def test_fp8_blocks_are_those_of_transformers(tmp_path: Path) -> None:
    folder, _ = quantized(tmp_path, *CASES["fp8-blocks"])
    settings = FineGrainedFP8Config(weight_block_size=(32, 32), modules_to_not_convert=["lm_head"], dequantize=True)
    reference = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=settings, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        wanted = reference(IDS[None]).logits[0]
    assert (logits(folder) - wanted).abs().max() <= 1e-4


def test_the_hash_follows_the_settings_and_the_packed_numbers(folder: Path) -> None:
    first = models.model_hash(folder)
    edit(folder, qzeros=part(folder, "qzeros") + 1)
    assert models.model_hash(folder) != first


# ---------------------------------------------------------------------------------------- what must be refused


def test_every_fault_is_named_at_once(folder: Path) -> None:
    edit(
        folder,
        qweight=torch.zeros(8, 65, dtype=torch.int32),
        qzeros=None,
        scales=torch.zeros(4, 64, dtype=torch.float16),
        g_idx=torch.zeros(64, dtype=torch.int64),
        weight_scale=torch.ones(1),
    )
    message = failure(folder).message
    assert message.splitlines()[0] == "the weights are not those of the config (LlamaForCausalLM):"
    assert sorted(message.splitlines()[1:]) == [
        f"  extra: {Q_PROJ}.weight_scale [1]",
        f"  missing: {Q_PROJ}.qzeros [2, 8]",
        f"  unsupported type I64: {Q_PROJ}.g_idx, the quantization needs I32",
        f"  wrong shape: {Q_PROJ}.qweight [8, 65], the config needs [8, 64]",
        f"  wrong shape: {Q_PROJ}.scales [4, 64], the config needs [2, 64]",
    ]


def test_another_group_size_than_the_files(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    message = failure(folder).message
    assert f"wrong shape: {Q_PROJ}.scales [2, 64], the config needs [1, 64]" in message
    assert message.count("wrong shape") == 2 * 7 * 4  # scales and zeros of every matrix


def test_act_order_needs_its_index(folder: Path) -> None:
    edit(folder, g_idx=None)
    assert failure(folder).message.splitlines()[1:] == [f"  missing: {Q_PROJ}.g_idx [64]"]


def test_missing_weights_are_named_as_the_model_knows_them(folder: Path) -> None:
    edit(folder, qweight=None, qzeros=None, scales=None, g_idx=None, bias=None)
    assert failure(folder).message.splitlines()[1:] == [f"  missing: {Q_PROJ}.weight [64, 64]"]


def test_a_bias_that_the_model_has_not(folder: Path) -> None:
    edit(folder, bias=torch.full((64,), 0.5))
    assert failure(folder).message.splitlines()[1:] == [f"  extra: {Q_PROJ}.bias [64]"]


@pytest.mark.parametrize("value", [-1, 2])
def test_an_index_of_a_group_that_is_not_there(folder: Path, value: int) -> None:
    index = part(folder, "g_idx")
    index[5] = value
    edit(folder, g_idx=index)
    wanted = f"{Q_PROJ}.weight cannot be dequantized (GPTQ, 4 bits, groups of 32, reordered): "
    assert failure(folder).message == wanted + "g_idx must name groups 0 to 1"


def test_packed_weights_of_another_shape(tmp_path: Path) -> None:
    folder, _ = quantized(tmp_path, *CASES["compressed-int4"])
    edit(folder, weight_shape=torch.tensor([64, 63]))
    assert failure(folder).message.endswith("weight_shape is [64, 63] and not [64, 64]")


def test_fp8_without_a_scale_or_with_one_of_another_grid(tmp_path: Path) -> None:
    folder, _ = quantized(tmp_path, *CASES["fp8-blocks"])
    edit(folder, weight_scale_inv=None)
    fault = f"  missing: {Q_PROJ}.weight_scale_inv or weight_scale [2, 2]"
    assert failure(folder).message.splitlines()[1:] == [fault]
    edit(folder, weight_scale_inv=torch.ones(1))
    fault = f"  wrong shape: {Q_PROJ}.weight_scale_inv [1], the config needs [2, 2]"
    assert failure(folder).message.splitlines()[1:] == [fault]


def test_fp8_numbers_without_a_quantization_config(tmp_path: Path) -> None:
    folder, twin = quantized(tmp_path, *CASES["fp8-matrix"])
    (folder / "config.json").write_bytes((twin / "config.json").read_bytes())
    assert f"unsupported type F8_E4M3 (quantized?): {Q_PROJ}.weight" in failure(folder).message


def test_a_header_whose_sizes_do_not_agree(folder: Path) -> None:
    path = folder / "model.safetensors"
    damaged = path.read_bytes().replace(b'"dtype":"I32","shape":[8,64]', b'"dtype":"I32","shape":[8,63]', 1)
    path.write_bytes(damaged)
    assert "its shape [8, 63] in I32 needs others" in failure(folder).message


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "aqlm"}, "aqlm"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "auto-round"}, "auto-round"),
        ({"load_in_8bit": True}, "unknown"),
        ({**GPTQ, "bits": 3}, "gptq in 3 bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "gptq in the format marlin"),
        ({**GPTQ, "is_marlin_format": True}, "gptq in the format marlin"),
        ({**GPTQ, "pack_dtype": "int64"}, "gptq packed in int64"),
        (
            {**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}},
            "gptq with settings of their own for some modules (dynamic)",
        ),
        ({**AWQ, "bits": 8}, "awq in 8 bits"),
        ({**AWQ, "version": "gemv"}, "awq in the layout gemv"),
        ({**AWQ, "version": "exllama"}, "awq in the layout exllama"),
        ({**AWQ, "zero_point": False}, "awq without zero points"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "fp8 with experts in fp4"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 in e5m2"),
        (compressed("nvfp4-pack-quantized", num_bits=4), "compressed-tensors in the format nvfp4-pack-quantized"),
        (compressed("pack-quantized", num_bits=2), "compressed-tensors pack-quantized in 2 bits"),
        (fp8(strategy="attn_head"), "compressed-tensors float-quantized by attn_head"),
        (
            {**fp8(strategy="tensor"), "sparsity_config": {"format": "sparse-24-bitmask"}},
            "compressed-tensors with a spar",
        ),
        ({**fp8(strategy="tensor"), "transform_config": {"config_groups": {}}}, "compressed-tensors with a transform"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_read_is_refused_by_name(settings: dict[str, Any], what: str, tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    (tmp_path / "model.safetensors").unlink()  # nothing of it is opened
    error = failure(tmp_path)
    assert error.message.startswith(f"the checkpoint is quantized with {what}")
    assert "unquantized" in str(error.hint)


def test_groups_of_modules_that_differ_are_refused() -> None:
    config = fp8(strategy="tensor")
    config["config_groups"]["group_1"] = fp8(strategy="channel")["config_groups"]["group_0"]
    with pytest.raises(UsageError, match="with groups of modules that differ"):
        models.describe({"quantization_config": config})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq"}, "config.json: quantization_config lacks bits"),
        ({**GPTQ, "bits": "4"}, "bits must be a whole number"),
        ({**GPTQ, "group_size": 0}, "group_size must be a whole number of at least 1"),
        ({**GPTQ, "desc_act": "yes"}, "desc_act must be true or false"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "weight_block_size must be two whole numbers"),
        ({"quant_method": "compressed-tensors"}, "lacks config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups is empty"),
    ],
)
def test_odd_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        models.describe({"quantization_config": settings})
    assert message in caught.value.message
