"""The benchmarks at sizes of seconds: what they report, what they check, and that the checks can fail."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from longbatch.bench import BENCHES, find, job, job_gpu, llama, reference, scale
from longbatch.bench.limits import Limits, measure_limits
from longbatch.bench.llama import LlamaShape
from longbatch.bench.process import CommandRun, clean_environment, in_child, peak_bytes, run_command
from longbatch.bench.report import Measurement, print_table, write_json
from longbatch.bench.texts import Prose
from longbatch.cli import main
from longbatch.errors import DiskError, LongbatchError, UsageError
from longbatch.prompt import Tokenizer

TINY = LlamaShape(64, 128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, vocab=1000, max_length=16_384)
ROW = Measurement("ours", "speed", 3.0, "rows/s", "theirs", 1.5, True)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the GPU benchmark writes it, in several shards."""
    folder = tmp_path_factory.mktemp("bench") / "model"
    llama.write_model(folder, TINY, "cpu", 1, shard_bytes=200_000)
    return folder


# ------------------------------------------------------------------------------------------ registry, report


def test_every_registered_name_is_found() -> None:
    for name in BENCHES:
        assert callable(find(name))


def test_unknown_name() -> None:
    with pytest.raises(UsageError, match="no benchmark 'jobs'") as caught:
        find("jobs")
    names = "attention, decode, fidelity, job, manifest, memory, prefill, resume, soak, weights"
    assert caught.value.hint == f"one of: {names}"


@pytest.mark.parametrize(("checked", "exit_code"), [(True, 0), (False, 7)])
def test_command(
    checked: bool, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Measurement("ours", "speed", 3.0, "rows/s", "theirs", 1.5, checked)]
    module = types.ModuleType("made_up_bench")
    module.measure = lambda: rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_bench", module)
    monkeypatch.setitem(BENCHES, "made-up", "made_up_bench")
    file = tmp_path / "result.json"
    assert main(["bench", "made-up", "--json", str(file)]) == exit_code
    report = json.loads(file.read_text())
    assert list(report) == ["bench", "date", "commit", "hardware", "versions", "complete", "rows"]
    assert report["bench"] == "made-up"
    assert report["complete"] is True
    assert set(report["hardware"]) == {"cpu", "memory_gib", "gpus"}
    assert report["versions"]["torch"] == torch.__version__
    names = ("case", "metric", "value", "unit", "against", "ratio", "checked")
    assert report["rows"] == [dict(zip(names, ("ours", "speed", 3.0, "rows/s", "theirs", 1.5, checked), strict=True))]
    assert "1.50" in capsys.readouterr().out


def test_table_keeps_words_whole(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([ROW, Measurement("theirs", "speed", 12345.6, "rows/s", None, None, False)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["ours", "speed", "3", "rows/s", "theirs", "1.50", "yes"]
    assert lines[2] == ["theirs", "speed", "1.235e+04", "rows/s", "NO"]


def test_result_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="nowhere"):
        write_json("job", [ROW], tmp_path / "nowhere" / "result.json", complete=True)


# ------------------------------------------------------------------------------------------ texts, processes


def test_prose() -> None:
    assert Prose(1).characters(50_000) == Prose(1).characters(50_000) != Prose(2).characters(50_000)
    assert len(Prose(1).characters(1_000_000)) == 1_000_000
    text = Prose(1).tokens(500, lambda text: len(text.split(" ")))
    assert 495 <= len(text.split(" ")) <= 500


def test_child_answers_and_raises() -> None:
    assert in_child(os.getpid) != os.getpid()
    with pytest.raises(ZeroDivisionError):
        in_child(divmod, 1, 0)


def test_memory_of_a_child_is_its_own() -> None:
    held = np.ones(400_000_000, dtype=np.uint8)
    assert peak_bytes() > held.nbytes > in_child(peak_bytes)


def test_command_that_fails_says_why(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text('{"prompt": "Hello."}\n')
    with pytest.raises(LongbatchError, match=r"ended with 2: error: .*no-such-model"):
        run_command(manifest, tmp_path / "out", ["--model", str(tmp_path / "no-such-model")], [])


def test_settings_of_the_user_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGBATCH_MAX_TOKENS", "1")
    monkeypatch.setenv("LONGBATCH_CACHE_DIR", "kept")
    environment = clean_environment(tmp_path)
    assert "LONGBATCH_MAX_TOKENS" not in environment
    assert environment["LONGBATCH_CACHE_DIR"] == "kept"
    assert Path(environment["LONGBATCH_CONFIG"]).read_text() == ""


# ------------------------------------------------------------------------------------------ job on the CPU


def command_run(answers: list[list[int]], seconds: float) -> CommandRun:
    usage = {"prompt_tokens": 90, "completion_tokens": 10}
    rows = [{"usage": usage, "logprobs": [{"id": token} for token in answer]} for answer in answers]
    return CommandRun({"run": {"seconds": seconds}}, rows, 1.0, seconds + 1.0)


def test_job_is_compared_with_the_fastest_batch() -> None:
    reference = [[1, 2], [3]]
    rivals = {1: job.Answers(4.0, reference, 200), 4: job.Answers(2.0, [[1, 2], [4]], 200)}
    rows = {(row.case, row.metric): row for row in job.compare(command_run(reference, 1.0), rivals)}
    ours = rows["longbatch", "throughput"]
    assert (ours.value, ours.against, ours.ratio, ours.checked) == (200.0, "transformers, batch 4", 2.0, True)
    assert rows["longbatch", "throughput, whole command"].ratio == 1.0
    assert rows["longbatch", "rows equal"].value == 2
    assert rows["transformers, batch 1", "throughput"].checked
    assert not rows["transformers, batch 4", "throughput"].checked


def test_job_with_another_answer_is_not_checked() -> None:
    rivals = {1: job.Answers(4.0, [[1, 2], [3]], 200)}
    rows = [row for row in job.compare(command_run([[1, 2], [3, 3]], 1.0), rivals) if row.case == "longbatch"]
    assert [row.value for row in rows if row.metric == "rows equal"] == [1]
    assert not any(row.checked for row in rows)


@pytest.mark.slow
def test_whole_job(smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longbatch.models.bundled.sample_weights", lambda say: smollm2_dir)
    rows = job.measure(job.Sizes(num_rows=4, shortest=60, longest=200, max_tokens=8, batch_sizes=(1, 2)))
    assert {row.case for row in rows} == {"transformers, batch 1", "transformers, batch 2", "longbatch"}
    assert all(row.checked and row.value > 0 for row in rows)


# ------------------------------------------------------------------------------------------ job on a GPU


def test_default_shape_is_that_of_8b() -> None:
    shape = LlamaShape()
    sizes = [int(np.prod(size)) for _, size in shape.tensors()]
    assert sum(sizes) == 8_030_261_248
    assert shape.num_read_in_decode == sum(sizes) - shape.vocab * shape.hidden - 65 * shape.hidden
    assert shape.num_kv_per_token * 2 == 131_072


def test_bounds() -> None:
    sizes = job_gpu.Sizes(TINY, num_rows=2, prompt_tokens=100, max_tokens=3)
    limits = Limits(rows=50, gemm_seconds=(0.2, 0.1, 0.1, 0.1), bandwidth=1e6)
    # Two layers, and K and V of the third: half of its first product.
    assert job_gpu.prefill_bound(limits, sizes) == pytest.approx((2 * 0.5 + 0.1) * 4)
    # Two steps, over 2 x 101 and 2 x 102 tokens.
    numbers = 2 * TINY.num_read_in_decode + 406 * TINY.num_kv_per_token
    assert job_gpu.decode_bound(limits, sizes) == pytest.approx(2 * numbers / 1e6)


def test_limits_of_this_machine() -> None:
    limits = measure_limits([(64, 96), (32, 64)], 128, "cpu", "float32", seconds=0.01)
    assert limits.rows == 128
    assert len(limits.gemm_seconds) == 2
    assert all(0 < seconds < 1 for seconds in limits.gemm_seconds)
    assert limits.bandwidth > 1e8


def test_words_are_tokens(tiny_model: Path) -> None:
    (ids,) = llama.make_prompts(TINY, 1, 50, seed=2)
    text = llama.words(ids)
    tokenizer = Tokenizer.load(tiny_model)
    assert tokenizer.encode(text, allow_special=False, add_special=True) == ids
    assert llama.ids_of(tokenizer.decode(ids)) == ids
    assert len(list(tiny_model.glob("*.safetensors"))) > 2


def compare(folder: Path, answers: list[list[int]]) -> reference.Reference:
    probe, *prompts = llama.make_prompts(TINY, 3, 150, seed=3)
    return reference.compare_model(folder, "cpu", "bfloat16", probe, prompts, answers)


def greedy(folder: Path, num_tokens: int) -> list[list[int]]:
    """What transformers itself answers, in bfloat16."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    _, *prompts = llama.make_prompts(TINY, 3, 150, seed=3)
    ids = torch.tensor(prompts)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return output[:, 150:].tolist()


def test_logits_and_answers_are_compared(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = greedy(tiny_model, 6)
    good = compare(tiny_model, answers)
    assert good.logits_hold
    assert good.answers_hold
    assert 0 < good.error < 0.02
    assert good.agreement > 0.9
    assert max(good.prefixes) == 6
    # One wrong token in one answer, and logits that are a little off.
    answers[1][3] = (answers[1][3] + 1) % TINY.vocab
    true_logits = reference._our_logits
    monkeypatch.setattr(reference, "_our_logits", lambda *arguments: true_logits(*arguments) * 1.02)
    bad = compare(tiny_model, answers)
    assert not bad.logits_hold
    assert not bad.answers_hold
    assert bad.prefixes[1] == 3


@pytest.mark.slow
def test_whole_job_of_the_gpu_bench() -> None:
    """Everything but the sizes and the device, the command included."""
    sizes = job_gpu.Sizes(TINY, num_rows=3, prompt_tokens=200, max_tokens=16, num_runs=2, probe_tokens=300)
    rows = job_gpu.measure(sizes, "cpu")
    assert all(row.checked for row in rows)
    assert [row.value for row in rows if row.metric == "job throughput"][1] > 0
    assert {row.case for row in rows} >= {"GEMM bound", "longbatch, run 1", "longbatch, run 2", "longbatch"}


# ------------------------------------------------------------------------------------------ manifests


def test_manifest_bench(smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = scale.Sizes("short rows", 250, 20, (80, 400))
    manifest = tmp_path / "manifest.jsonl"
    model_dir = scale.long_model(smollm2_dir, tmp_path / "model")
    num_tokens = scale.write_rows(manifest, sizes, model_dir)
    monkeypatch.setattr(Tokenizer, "encodings", Tokenizer.encodings)  # undone at the end: the bench replaces it

    def rows() -> list[Measurement]:
        observed = [scale.parse(manifest), scale.validate(manifest), scale.plan(manifest, model_dir)]
        return scale.compare(sizes, *observed, num_tokens)

    found = {(row.case, row.metric): row for row in rows()}
    assert all(row.checked for row in found.values())
    assert 0 < found["plan, short rows", "time in the tokenizer"].value < 1
    lines = manifest.read_text().splitlines()
    manifest.write_text("\n".join([*lines[:-1], '{"id": "row-249"}']) + "\n")
    assert {row.case for row in rows() if not row.checked} == {"validate, short rows", "plan, short rows"}
