"""The memory budget: the sum holds, and what cannot fit is refused with numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from longbatch.config.kv_formats import kv_format, plain_format
from longbatch.errors import DeviceError
from longbatch.models.spec import LayerSpec, ModelSpec, MoeSpec, RopeSpec
from longbatch.plan import budget, entry_bytes

GIB = 2**30
BF16, FP32, FP8 = plain_format("bfloat16"), plain_format("float32"), kv_format("fp8", "bfloat16")
ROPE = RopeSpec("default", 500_000.0, 128, 131_072, 131_072)
LAYER = LayerSpec(32, 8, 128, ROPE, 0.088, intermediate_size=14_336)
LLAMA_8B = ModelSpec("llama", "LlamaForCausalLM", 128_256, 4096, (LAYER,) * 32, 1e-5, 131_072, False)
SMALL = replace(
    LLAMA_8B, vocab_size=49_152, hidden_size=576, max_length=8192, layers=(replace(LAYER, num_heads=9, num_kv_heads=3),)
)


@pytest.mark.parametrize("memory", [24, 40, 80, 141])
def test_the_parts_fill_a_gpu_and_no_more(memory: int) -> None:
    made = budget(LLAMA_8B, memory * GIB, 2.0, BF16, True)
    page = 64 * 2 * 8 * 128 * 32 * 2
    assert memory * GIB - page <= made.used_bytes <= memory * GIB
    parts = dict(made.parts)
    assert parts["weights"] == LLAMA_8B.num_parameters * 2
    assert parts["K/V pages"] == made.kv_tokens // 64 * page
    assert made.kv_tokens % 64 == 0
    assert made.wave_tokens <= made.kv_tokens // 2
    assert made.memory_bytes == memory * GIB


def test_a_big_gpu_takes_long_waves() -> None:
    made = budget(LLAMA_8B, 141 * GIB, 2.0, BF16, True)
    assert made.wave_tokens == 262_144
    assert made.kv_tokens > 700_000


def test_smaller_entries_give_more_tokens() -> None:
    wide, narrow = (budget(LLAMA_8B, 80 * GIB, 2.0, kv, True) for kv in (BF16, FP8))
    assert narrow.kv_tokens > 1.9 * wide.kv_tokens


def test_float8_counts_its_scales_and_what_lies_beside_it() -> None:
    made = budget(LLAMA_8B, 80 * GIB, 2.0, FP8, True, decode_rows=256)
    parts, token = dict(made.parts), 2 * 8 * 128 * 32
    # 4 bytes for each 64 tokens of a head, K and V.
    assert parts["K/V pages"] == made.kv_tokens * token + made.kv_tokens // 64 * 2 * 8 * 32 * 4
    assert parts["open K/V blocks"] == 256 * 64 * token * 2
    # One layer's history in bfloat16.
    assert parts["converted K/V"] == LLAMA_8B.max_length * 2 * 8 * 128 * 2
    assert 80 * GIB - 64 * token - 2 * 8 * 32 * 4 <= made.used_bytes <= 80 * GIB
    assert entry_bytes(LLAMA_8B, FP8) == pytest.approx(1 + 4 / (64 * 128))
    assert entry_bytes(LLAMA_8B, BF16) == 2
    plain = dict(budget(LLAMA_8B, 80 * GIB, 2.0, BF16, True, decode_rows=256).parts)
    assert not plain.keys() & {"open K/V blocks", "converted K/V"}
    sparse = dict(budget(LLAMA_8B, 80 * GIB, 2.0, FP8, True, sparse_heads=32).parts)
    assert sparse["converted K/V"] == 2 * parts["converted K/V"]
    short = dict(budget(LLAMA_8B, 80 * GIB, 2.0, FP8, True, wave_tokens=640, kv_tokens=6400).parts)
    assert short["converted K/V"] == 6400 * 2 * 8 * 128 * 2
    # A cache of a float32 model in bfloat16 is converted too, but has no open blocks.
    narrow = dict(budget(SMALL, 64 * GIB, 4.0, BF16, False, decode_rows=64).parts)
    assert narrow["converted K/V"] == SMALL.max_length * 2 * 3 * 128 * 4
    assert "open K/V blocks" not in narrow


def test_a_cpu_leaves_memory_to_others() -> None:
    made = budget(SMALL, 64 * GIB, 4.0, FP32, False)
    assert made.used_bytes < 40 * GIB
    assert made.kv_tokens == 65_536
    longer = budget(replace(SMALL, max_length=131_072), 64 * GIB, 4.0, FP32, False)
    assert longer.kv_tokens == 131_072


def test_a_mixture_needs_a_tile_for_its_chosen_experts() -> None:
    moe = MoeSpec(128, 8, 768, "softmax_then_topk", True, "swiglu")
    # With few heads, so that attention takes less than either.
    layer = replace(LAYER, num_heads=3, num_kv_heads=1, intermediate_size=768)
    dense, sparse = layer, replace(layer, intermediate_size=0, moe=moe)
    small, large = (
        dict(budget(replace(SMALL, layers=(layer,)), 80 * GIB, 2.0, BF16, True).parts)["tile"]
        for layer in (dense, sparse)
    )
    assert large > 1.5 * small


def test_fixed_sizes_are_kept() -> None:
    made = budget(LLAMA_8B, 80 * GIB, 2.0, BF16, True, wave_tokens=5000, kv_tokens=10_000)
    assert made.wave_tokens == 5000
    assert 10_000 <= made.kv_tokens < 10_000 + 64


def test_a_fixed_size_that_does_not_fit() -> None:
    for fixed in ({"kv_tokens": 10**7}, {"wave_tokens": 10**8}):
        with pytest.raises(DeviceError, match="no room") as caught:
            budget(LLAMA_8B, 80 * GIB, 2.0, BF16, True, **fixed)
        assert caught.value.hint
    # On a CPU a larger cache than the default one can be asked for.
    assert budget(SMALL, 64 * GIB, 4.0, FP32, False, kv_tokens=200_000).kv_tokens >= 200_000


def test_a_model_that_does_not_fit_says_what_it_needs() -> None:
    with pytest.raises(DeviceError, match=r"at least \d+\.\d GiB and the device has 16\.0 GiB") as caught:
        budget(LLAMA_8B, 16 * GIB, 2.0, BF16, True)
    needed = float(caught.value.message.split("at least ")[1].split()[0])
    budget(LLAMA_8B, int((needed + 1) * GIB), 2.0, BF16, True)
