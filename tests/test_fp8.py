"""e4m3 weights: their products, decoders of them, and whole runs."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_driver import forward
from run_folders import results, run, settings_of, tiny_model, words, write_manifest
from tiny_models import save

from longbatch import models
from longbatch.config.kv_formats import plain_format
from longbatch.device import Rates
from longbatch.errors import ExitCode, UsageError
from longbatch.models import linear as products
from longbatch.models import loader
from longbatch.models.decoder import Decoder
from longbatch.models.fp8 import FP8, Fp8Weight, QuantizedRows, quantize_rows, quantized
from longbatch.models.linear import add_linear, linear
from longbatch.models.moe import Groups, expert_linear
from longbatch.models.parameters import Parameter, parameters, weight_bytes
from longbatch.models.spec import ModelSpec
from longbatch.output import RunFolder
from longbatch.plan import CostModel, budget
from longbatch.plan.cost import products_speed
from longbatch.run import make_plan

__all__ = ["tiny_model"]

CPU = torch.device("cpu")
FAMILIES = ["llama-biases-tied", "mistral", "qwen2", "qwen3", "phi3", "gemma3", "qwen3_moe", "gpt_oss"]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(num_tokens: int) -> torch.Tensor:
    return torch.randint(3, 200, (num_tokens,), generator=torch.Generator().manual_seed(1))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error of the whole."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def value(x: Fp8Weight | QuantizedRows) -> torch.Tensor:
    """What quantized numbers stand for, in float64."""
    return x.data.double() * x.scale.double().unsqueeze(-1)


# ------------------------------------------------------------------------------------- numbers and products


def test_a_row_is_rounded_to_four_bits_of_its_largest_number() -> None:
    x = normal(50, 300) * torch.logspace(-8, 8, 50)[:, None]
    data, scale = quantized(x)
    assert data.dtype == FP8
    torch.testing.assert_close(scale, x.abs().amax(-1) / 448)
    assert (data.float().abs().amax(-1) == 448).all()
    off = (data.double() * scale.double()[:, None] - x.double()).abs()
    # Half a step: 2^-4 of the number, or 2^-10 of the scale where e4m3 is subnormal.
    assert (off <= 1.001 * torch.maximum(x.double().abs() / 16, scale.double()[:, None] / 1024)).all()


def test_zeros_and_what_is_not_finite() -> None:
    data, scale = quantized(torch.zeros(2, 16))
    assert (data.float() == 0).all()
    assert scale.isfinite().all()
    weight = Fp8Weight.of(normal(8, 16))
    x = normal(3, 16)
    x[1, 4] = float("nan")
    assert linear(x, weight).isnan().any(-1).tolist() == [False, True, False]
    assert linear(normal(0, 16), weight).shape == (0, 8)


def test_parts_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(37, 64)
    whole = quantized(x)
    monkeypatch.setattr("longbatch.models.fp8._PART_NUMBERS", 5 * 64)
    for found, wanted in zip(quantized(x), whole, strict=True):
        assert torch.equal(found.float(), wanted.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_that_of_the_rounded_numbers(
    dtype: torch.dtype, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_WIDE_NUMBERS", 100 * 48)
    x, weight = normal(7, 48).to(dtype), Fp8Weight.of(normal(250, 48, seed=1).to(dtype))
    bias = normal(250, seed=2).to(dtype) if with_bias else None
    wanted = value(quantize_rows(x)) @ value(weight).T + (0 if bias is None else bias.double())
    found = linear(x, weight, bias)
    assert found.dtype == dtype
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert error(found, wanted) < tolerance
    assert torch.equal(linear(quantize_rows(x), weight, bias), found)
    residual = normal(7, 250, seed=3).to(dtype)
    sum_of_both = residual.double() + wanted
    assert error(add_linear(residual, x, weight, bias), sum_of_both) < tolerance


def test_the_error_is_that_of_rounding_both_factors() -> None:
    """Each number errs by about 2^-4 / sqrt(6) / sqrt(1.5) of itself, and both do."""
    x, weight = normal(300, 512), normal(400, 512, seed=1)
    assert 0.03 < error(linear(x, Fp8Weight.of(weight)), x @ weight.T) < 0.042


def test_some_rows_are_a_weight_too() -> None:
    x, weight = normal(12, 64), Fp8Weight.of(normal(100, 64, seed=1))
    part = weight[20:60]
    assert part.shape == (40, 64)
    assert part.nbytes == 40 * 64 + 40 * 4
    assert part.device == CPU
    torch.testing.assert_close(linear(x, part), linear(x, weight)[:, 20:60], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 3, 17, 63, 255, 257])
def test_rows_do_not_depend_on_their_number(num_rows: int) -> None:
    x, weight, residual = normal(300, 576), Fp8Weight.of(normal(960, 576, seed=1)), normal(300, 960, seed=2)
    assert torch.equal(linear(x[:num_rows], weight), linear(x, weight)[:num_rows])
    assert torch.equal(
        add_linear(residual[:num_rows].clone(), x[:num_rows], weight),
        add_linear(residual.clone(), x, weight)[:num_rows],
    )


def test_experts_each_have_their_scales() -> None:
    weight = Fp8Weight.of(normal(3, 20, 32) * torch.tensor([1.0, 100.0, 1e-3])[:, None, None])
    assert weight.scale.shape == (3, 20)
    chosen = torch.tensor([0, 0, 2, 2, 2])
    rows, bias = quantize_rows(normal(5, 32, seed=1)), normal(3, 20, seed=2)
    found = expert_linear(rows, weight, bias, Groups(chosen, torch.tensor([2, 2, 5], dtype=torch.int32)))
    for i, expert in enumerate(chosen.tolist()):
        wanted = value(rows)[i] @ value(weight[expert]).T + bias[expert].double()
        assert error(found[i], wanted) < 1e-6


# ------------------------------------------------------------------------------------- decoders


@pytest.mark.parametrize("case", FAMILIES)
def test_every_family(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    exact, rough = models.load(tmp_path, torch.float32, CPU), models.load(tmp_path, torch.float32, CPU, "fp8")
    wanted, found = forward(exact, ids(120)), forward(rough, ids(120))
    off = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    # Four layers of four products that err by 4% each; a wrong scale or a wrong row would make it more than 1.
    assert 0.02 < off.median() < 0.25
    assert (found.log_softmax(-1) - wanted.log_softmax(-1)).abs().mean() < 0.3
    # The order of sums decides which way a number is rounded that lies between two.
    tiled = forward(rough, ids(120), tile=50)
    assert ((tiled - found).norm(dim=-1) / found.norm(dim=-1)).median() < 0.05
    # One byte for each number of the layers' matrices, instead of four.
    count = sum(torch.Size(each.shape).numel() for each in parameters(exact.spec) if each.is_product)
    saved = exact.num_bytes - rough.num_bytes
    assert 2.6 * count < saved < 3 * count


def test_what_is_not_a_matrix_of_a_layer_stays() -> None:
    spec = models.describe(MOE)
    kept = {each.key for each in parameters(spec) if not each.is_product}
    quantizes = {each.key for each in parameters(spec) if each.is_product}
    assert quantizes == {"qkv", "out", "expert_gate_up", "expert_down"}
    assert {"embed", "head", "router", "router_bias", "sinks", "input_norm", "qkv_bias", "expert_down_bias"} <= kept


MOE: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "max_position_embeddings": 512,
    "sliding_window": 64,
}


@pytest.mark.parametrize("case", ["llama", "gpt_oss"])
def test_random_weights_are_quantized_as_they_are_drawn(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    spec = models.read_spec(tmp_path)
    plain, rough, again = (
        models.random_weights(spec, torch.float32, CPU, 3, weights_dtype) for weights_dtype in ("auto", "fp8", "fp8")
    )
    assert rough.num_bytes < plain.num_bytes
    assert torch.equal(forward(rough, ids(20)), forward(again, ids(20)))
    assert 0 < error(forward(rough, ids(20)), forward(plain, ids(20))) < 0.3


def test_few_matrices_are_there_unquantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is quantized as soon as all its parts are read."""
    save("llama", tmp_path)
    alive: dict[int, int] = {}
    most = 0
    allocate = loader._allocate

    def watched(spec: ModelSpec, parameter: Parameter, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        nonlocal most
        tensor = allocate(spec, parameter, dtype, device)
        if parameter.is_product:
            alive[id(tensor)] = tensor.nbytes
            weakref.finalize(tensor, alive.pop, id(tensor))
            most = max(most, sum(alive.values()))
        return tensor

    monkeypatch.setattr(loader, "_allocate", watched)
    decoder = models.load(tmp_path, torch.float32, CPU, "fp8")
    whole = sum(4 * torch.Size(each.shape).numel() for each in parameters(decoder.spec) if each.is_product)
    assert not alive
    assert 0 < most < whole / 3


# ------------------------------------------------------------------------------------- plans and runs


@pytest.mark.parametrize("case", ["llama", "llama-biases-tied", "gemma3", "qwen3_moe", "gpt_oss"])
def test_planned_bytes_are_those_of_the_weights(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    decoder = models.load(tmp_path, torch.bfloat16, CPU, "fp8")
    small = sum(
        torch.Size(each.shape).numel() * (4 if each.role == "norm" and decoder.spec.norm_offset else 2)
        for each in parameters(decoder.spec)
        if each.role != "matrix"
    )
    assert weight_bytes(decoder.spec, 2, "fp8") == decoder.num_bytes - small
    assert weight_bytes(decoder.spec, 2, "auto") == 2 * decoder.spec.num_parameters


LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}


def test_the_planner_gives_the_saved_memory_to_the_cache() -> None:
    spec = models.describe(LLAMA_8B)
    plain, small = (
        budget(spec, 40 << 30, 2, plain_format("bfloat16"), True, weight_bytes=weight_bytes(spec, 2, weights_dtype))
        for weights_dtype in ("auto", "fp8")
    )
    saved = dict(plain.parts)["weights"] - dict(small.parts)["weights"]
    assert 6.9e9 < saved < 7e9
    assert small.kv_tokens > plain.kv_tokens + 40_000
    assert small.used_bytes <= 40 << 30


def test_the_layers_products_are_priced_at_their_speed() -> None:
    assert products_speed("fp8", "bfloat16", (9, 0)) == 2
    assert {products_speed(*case) for case in (("auto", "bfloat16", (9, 0)), ("fp8", "bfloat16", (8, 0)))} == {1}
    assert {products_speed(*case) for case in (("fp8", "float32", (0, 0)), ("fp8", "float16", (9, 0)))} == {1}
    spec = models.describe(LLAMA_8B)
    plain = CostModel(spec, Rates(7e14, 6e14, 4e12))
    fast = replace(plain, products_speed=2.0, weight_bytes=weight_bytes(spec, 2, "fp8") / spec.num_parameters)
    length = torch.tensor([4096]).numpy()
    saved = float((plain.prefill(length) - fast.prefill(length))[0])
    assert saved == pytest.approx(4096 * spec.matmul_flops_per_token / 2 / 7e14)
    few = torch.tensor([100]).numpy()
    assert 1.6 < plain.decode(length, few, 100_000) / fast.decode(length, few, 100_000) < 1.9


def test_a_run(tmp_path: Path, tiny_model: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": f"r{i}", "prompt": words(20 + 30 * i, i), "logprobs": True} for i in range(4)]
    rows.append({"id": "score", "task": "score", "prompt": words(100, 9)})
    manifest = write_manifest(tmp_path / "manifest.jsonl", rows)
    assert run(manifest, tiny_model, tmp_path / "fp8", weights_dtype="fp8") is ExitCode.OK
    assert run(manifest, tiny_model, tmp_path / "plain") is ExitCode.OK
    rough, exact = results(tmp_path / "fp8"), results(tmp_path / "plain")
    assert [row["finish_reason"] for row in rough[:4]] == ["length"] * 4
    found, wanted = (
        torch.tensor([each["logprob"] for each in table[4]["logprobs"] if each["logprob"] is not None])
        for table in (rough, exact)
    )
    assert 0.001 < (found - wanted).abs().mean() < 0.5
    # The same run again has nothing left to do, and no other setting continues it.
    assert run(manifest, tiny_model, tmp_path / "fp8", weights_dtype="fp8") is ExitCode.OK
    with pytest.raises(UsageError, match="weights_dtype"):
        run(manifest, tiny_model, tmp_path / "fp8")
    assert RunFolder.open(tmp_path / "fp8").identity["weights_dtype"] == "fp8"
    assert "weights_dtype" not in RunFolder.open(tmp_path / "plain").identity


def test_a_plan_names_the_format(tmp_path: Path, tiny_model: Path) -> None:
    manifest = write_manifest(tmp_path / "manifest.jsonl", [{"id": "a", "prompt": words(50)}])
    plain, small = (
        make_plan(settings_of(tiny_model, tmp_path / name, weights_dtype=name), [str(manifest)])
        for name in ("auto", "fp8")
    )
    assert small.as_dict()["weights_dtype"] == "fp8"
    assert dict(small.plan.budget.parts)["weights"] < dict(plain.plan.budget.parts)["weights"]


# ------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 17, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_devices_product_is_the_same(num_rows: int, with_bias: bool) -> None:
    x, weight = normal(num_rows, 1024).bfloat16(), Fp8Weight.of(normal(768, 1024, seed=1).bfloat16())
    bias = normal(768, seed=2).bfloat16() if with_bias else None
    moved = Fp8Weight(weight.data.cuda(), weight.scale.cuda())
    on_device = None if bias is None else bias.cuda()
    wanted = linear(x, weight, bias)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found = linear(x.cuda().to(dtype), moved, None if on_device is None else on_device.to(dtype))
        assert found.dtype == dtype
        assert error(found.cpu(), wanted) < 0.01
    part = moved[128:640]
    assert error(linear(x.cuda(), part).cpu(), linear(x, weight[128:640])) < 0.01


@pytest.mark.gpu
def test_experts_in_one_launch() -> None:
    weight = Fp8Weight.of(normal(4, 64, 128).bfloat16())
    rows = quantize_rows(normal(50, 128, seed=1).bfloat16())
    ends = torch.tensor([13, 13, 40, 50], dtype=torch.int32)
    chosen = torch.repeat_interleave(torch.tensor([0, 2, 3]), torch.tensor([13, 27, 10]))
    wanted = expert_linear(rows, weight, None, Groups(chosen, ends))
    moved = QuantizedRows(rows.data.cuda(), rows.scale.cuda(), rows.dtype)
    groups = Groups(chosen.cuda(), ends.cuda())
    found = expert_linear(moved, Fp8Weight(weight.data.cuda(), weight.scale.cuda()), None, groups)
    assert error(found.cpu(), wanted) < 0.01


WIDER = {"vocab_size": 512, "hidden_size": 256, "head_dim": 64, "intermediate_size": 384, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.gpu
@pytest.mark.parametrize("config", [{**LLAMA_8B, **WIDER, **HEADS}, {**MOE, **WIDER}], ids=["llama", "gpt_oss"])
def test_decoders_on_a_gpu(config: dict[str, Any]) -> None:
    spec = models.describe(config)
    generator = torch.Generator().manual_seed(0)
    exact: dict[str, torch.Tensor] = {}
    own: dict[str, torch.Tensor | Fp8Weight] = {}
    moved: dict[str, torch.Tensor | Fp8Weight] = {}
    for parameter in parameters(spec):
        mean = 1.0 if parameter.role == "norm" else 0.0
        here = torch.empty(parameter.shape).normal_(mean, 0.06, generator=generator)
        there = here.to("cuda", torch.bfloat16)
        exact[parameter.name] = here
        own[parameter.name] = Fp8Weight.of(here) if parameter.is_product else here
        moved[parameter.name] = Fp8Weight.of(there) if parameter.is_product else there
    wanted = forward(Decoder(spec, exact), ids(300))
    rough = forward(Decoder(spec, own), ids(300))
    found = forward(Decoder(spec, moved), ids(300).cuda()).cpu()
    expected, off = (((each - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median() for each in (rough, found))
    assert 0.8 * expected < off < 1.2 * expected
