"""The memory budget: the sum holds, and what cannot fit is refused with numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from longbatch.errors import DeviceError
from longbatch.models.spec import LayerSpec, ModelSpec, MoeSpec, RopeSpec
from longbatch.plan import budget

GIB = 2**30
ROPE = RopeSpec("default", 500_000.0, 128, 131_072, 131_072)
LAYER = LayerSpec(32, 8, 128, ROPE, 0.088, intermediate_size=14_336)
LLAMA_8B = ModelSpec("llama", "LlamaForCausalLM", 128_256, 4096, (LAYER,) * 32, 1e-5, 131_072, False)
SMALL = replace(
    LLAMA_8B, vocab_size=49_152, hidden_size=576, max_length=8192, layers=(replace(LAYER, num_heads=9, num_kv_heads=3),)
)


@pytest.mark.parametrize("memory", [24, 40, 80, 141])
def test_the_parts_fill_a_gpu_and_no_more(memory: int) -> None:
    made = budget(LLAMA_8B, memory * GIB, 2.0, 2.0, True)
    page = 64 * 2 * 8 * 128 * 32 * 2
    assert memory * GIB - page <= made.used_bytes <= memory * GIB
    parts = dict(made.parts)
    assert parts["weights"] == LLAMA_8B.num_parameters * 2
    assert parts["K/V pages"] == made.kv_tokens // 64 * page
    assert made.kv_tokens % 64 == 0
    assert made.wave_tokens <= made.kv_tokens // 2
    assert made.memory_bytes == memory * GIB


def test_a_big_gpu_takes_long_waves() -> None:
    made = budget(LLAMA_8B, 141 * GIB, 2.0, 2.0, True)
    assert made.wave_tokens == 262_144
    assert made.kv_tokens > 700_000


def test_smaller_entries_give_more_tokens() -> None:
    wide, narrow = (budget(LLAMA_8B, 80 * GIB, 2.0, kv_bytes, True) for kv_bytes in (2.0, 1.0))
    assert narrow.kv_tokens > 1.9 * wide.kv_tokens


def test_a_cpu_leaves_memory_to_others() -> None:
    made = budget(SMALL, 64 * GIB, 4.0, 4.0, False)
    assert made.used_bytes < 40 * GIB
    assert made.kv_tokens == 65_536
    longer = budget(replace(SMALL, max_length=131_072), 64 * GIB, 4.0, 4.0, False)
    assert longer.kv_tokens == 131_072


def test_a_mixture_needs_a_tile_for_its_chosen_experts() -> None:
    moe = MoeSpec(128, 8, 768, "softmax_then_topk", True, "swiglu")
    dense, sparse = replace(LAYER, intermediate_size=768), replace(LAYER, intermediate_size=0, moe=moe)
    small, large = (
        dict(budget(replace(SMALL, layers=(layer,)), 80 * GIB, 2.0, 2.0, True).parts)["tile"]
        for layer in (dense, sparse)
    )
    assert large > 1.5 * small


def test_fixed_sizes_are_kept() -> None:
    made = budget(LLAMA_8B, 80 * GIB, 2.0, 2.0, True, wave_tokens=5000, kv_tokens=10_000)
    assert made.wave_tokens == 5000
    assert 10_000 <= made.kv_tokens < 10_000 + 64


def test_a_fixed_size_that_does_not_fit() -> None:
    for fixed in ({"kv_tokens": 10**7}, {"wave_tokens": 10**8}):
        with pytest.raises(DeviceError, match="no room") as caught:
            budget(LLAMA_8B, 80 * GIB, 2.0, 2.0, True, **fixed)
        assert caught.value.hint
    # On a CPU a larger cache than the default one can be asked for.
    assert budget(SMALL, 64 * GIB, 4.0, 4.0, False, kv_tokens=200_000).kv_tokens >= 200_000


def test_a_model_that_does_not_fit_says_what_it_needs() -> None:
    with pytest.raises(DeviceError, match=r"at least \d+\.\d GiB and the device has 16\.0 GiB") as caught:
        budget(LLAMA_8B, 16 * GIB, 2.0, 2.0, True)
    needed = float(caught.value.message.split("at least ")[1].split()[0])
    budget(LLAMA_8B, int((needed + 1) * GIB), 2.0, 2.0, True)
