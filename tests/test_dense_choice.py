"""The choice among kernels of dense attention: how it is made, measured, remembered, and what a wrong kernel costs."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longbatch.attention import measure
from longbatch.attention.choice import (
    CHOICES_FILE,
    FLASH_2,
    FLASH_3,
    OWN,
    POINTS,
    TORCH,
    DenseChoice,
    DenseKernels,
    DenseShape,
    choices_key,
    has_flash_3,
    read_choices,
    remember_choices,
    shapes_of,
)
from longbatch.attention.measure import MOST_TOKENS, TILE_ROWS, Tokens, by_pieces, dense_kernels, measure_shape, tile_of
from longbatch.attention.packed import TileWork
from longbatch.device import DeviceInfo, cpu_info, gpu_infos
from longbatch.models import describe

CPU = torch.device("cpu")
A_GPU = DeviceInfo("cuda", 0, "Some GPU", 80 << 30, (9, 0), 79 << 30)
SHAPE = DenseShape(32, 8, 128)
CHOICE = DenseChoice(((128, 128), (8192, 8192)), {TORCH: (2.0, 1.0), OWN: (1.0, 2.0)})
SMALL = ((16, 16), (8, 64), (40, 200), (1, 100))


# ------------------------------------------------------------------------------------------ choosing


def test_the_fastest_at_the_nearest_point_is_picked() -> None:
    points = ((128, 128), (8192, 8192), (8192, 65536), (128, 8192))
    seconds = {TORCH: (4.0, 1.0, 3.0, 9.0), OWN: (1.0, 2.0, 2.0, 8.0), FLASH_3: (2.0, 3.0, 1.0, 1.0)}
    choice = DenseChoice(points, seconds)
    for (queries, keys), name in zip(points, (OWN, TORCH, FLASH_3, FLASH_3), strict=True):
        assert choice.pick(queries, keys) == name
    assert choice.pick(1, 1) == OWN
    assert choice.pick(700.5, 900) == OWN
    assert choice.pick(6000, 9000) == TORCH
    assert choice.pick(8192, 10**6) == FLASH_3
    assert choice.pick(30, 5000) == FLASH_3


def test_a_choice_says_where_each_kernel_runs() -> None:
    choice = DenseChoice(((128, 128), (8192, 8192), (128, 8192)), {TORCH: (2.0, 1.0, 2.0), OWN: (1.0, 2.0, 1.0)})
    assert choice.describe() == "longbatch for 128 | 128 of 8,192; torch for 8,192"


@pytest.mark.parametrize(
    ("points", "seconds"),
    [
        ((), {TORCH: ()}),
        (((1, 1),), {OWN: (1.0,)}),
        (((1, 1),), {TORCH: (1.0, 2.0)}),
        (((1, 1),), {TORCH: (0.0,)}),
        (((1, 1),), {TORCH: (float("nan"),)}),
        (((1, 1),), {TORCH: (1.0,), OWN: (float("inf"),)}),
        (((0, 1),), {TORCH: (1.0,)}),
    ],
)
def test_a_choice_is_whole(points: tuple[tuple[int, int], ...], seconds: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match=r"point|not measured"):
        DenseChoice(points, seconds)


def test_layers_of_a_model_have_few_shapes() -> None:
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "max_position_embeddings": 4096,
        "sliding_window": 512,
    }
    shapes = shapes_of(describe(config).layers)
    assert shapes == [DenseShape(4, 1, 256, 512), DenseShape(4, 1, 256)]
    assert [str(shape) for shape in shapes] == ["4/1 heads of 256, window 512", "4/1 heads of 256"]
    # What caps scores has no choice.
    assert shapes_of(replace(layer, softcap=50.0) for layer in describe(config).layers) == []
    assert DenseKernels({}).of(None) is None


# ------------------------------------------------------------------------------------------ remembering


def test_choices_are_remembered(tmp_path: Path) -> None:
    folder, key = tmp_path / "not" / "yet", choices_key(A_GPU, "bfloat16")
    assert read_choices(folder, key) == {}
    remember_choices(folder, key, {str(SHAPE): CHOICE})
    remember_choices(folder, key, {"another": CHOICE})
    remember_choices(folder, "another key", {str(SHAPE): CHOICE})
    assert read_choices(folder, key) == {str(SHAPE): CHOICE, "another": CHOICE}
    assert read_choices(folder, choices_key(A_GPU, "float16")) == {}
    assert [path.name for path in folder.iterdir()] == [CHOICES_FILE]


def test_the_key_names_what_choices_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    key = choices_key(A_GPU, "bfloat16")
    assert key.startswith("Some GPU, 80 GiB, bfloat16, torch ")
    assert ", triton " in key
    assert ", longbatch " in key
    # A package that comes or goes brings or takes a kernel.
    monkeypatch.setattr("longbatch.attention.choice.has_flash_3", lambda: not has_flash_3())
    assert choices_key(A_GPU, "bfloat16") != key


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", '{"KEY": 5}', '{"KEY": {"SHAPE": 1}}', '{"KEY": {"SHAPE": {"points": [[1, 1]]}}}', "\xff"],
)
def test_what_is_damaged_is_left_out_and_mended(text: str, tmp_path: Path) -> None:
    (tmp_path / CHOICES_FILE).write_bytes(text.replace("SHAPE", str(SHAPE)).encode("latin-1"))
    assert read_choices(tmp_path, "KEY") == {}
    remember_choices(tmp_path, "KEY", {str(SHAPE): CHOICE})
    assert read_choices(tmp_path, "KEY") == {str(SHAPE): CHOICE}


@pytest.mark.parametrize("value", [None, "fast", -1, float("nan")])
def test_one_damaged_choice_costs_no_other(value: object, tmp_path: Path) -> None:
    remember_choices(tmp_path, "KEY", {"whole": CHOICE, "damaged": CHOICE})
    table = json.loads((tmp_path / CHOICES_FILE).read_text())
    table["KEY"]["damaged"]["seconds"][OWN][0] = value
    (tmp_path / CHOICES_FILE).write_text(json.dumps(table))
    assert read_choices(tmp_path, "KEY") == {"whole": CHOICE}


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    remember_choices(tmp_path / "file", "KEY", {str(SHAPE): CHOICE})
    assert read_choices(tmp_path / "file", "KEY") == {}


def test_what_is_remembered_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the shapes that are new; a kernel that fails everywhere leaves them to torch."""
    layers = [SHAPE_LAYER, WINDOW_LAYER]
    remember_choices(tmp_path, choices_key(A_GPU, "bfloat16"), {str(SHAPE): CHOICE})
    measured: list[DenseShape] = []

    def no_measure(shape: DenseShape, device: torch.device, dtype: torch.dtype) -> None:
        assert (device, dtype) == (torch.device("cuda:0"), torch.bfloat16)
        measured.append(shape)

    monkeypatch.setattr(measure, "measure_shape", no_measure)
    found = dense_kernels(layers, A_GPU, "bfloat16", tmp_path)
    assert found is not None
    assert found.of(SHAPE) == CHOICE
    assert found.of(DenseShape(32, 8, 128, 100)) is None
    assert measured == [DenseShape(32, 8, 128, 100)]


def test_a_choice_outlives_a_device_that_breaks_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the process that comes next does not run what broke it."""

    def breaks(shape: DenseShape, device: torch.device, dtype: torch.dtype) -> DenseChoice:
        if shape.window is not None:
            raise RuntimeError("an illegal memory access was encountered")
        return CHOICE

    monkeypatch.setattr(measure, "measure_shape", breaks)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        dense_kernels([SHAPE_LAYER, WINDOW_LAYER], A_GPU, "bfloat16", tmp_path)
    assert read_choices(tmp_path, choices_key(A_GPU, "bfloat16")) == {str(SHAPE): CHOICE}


class _Layer:
    """What is asked of a layer."""

    num_heads, num_kv_heads, head_dim = 32, 8, 128
    softcap = None

    def __init__(self, window: int | None) -> None:
        self.window = window


SHAPE_LAYER, WINDOW_LAYER = _Layer(None), _Layer(100)


@pytest.mark.parametrize(("info", "dtype"), [(cpu_info(), "bfloat16"), (A_GPU, "float32")])
def test_there_is_no_choice_on_a_cpu_and_in_float32(info: DeviceInfo, dtype: str, tmp_path: Path) -> None:
    assert dense_kernels([SHAPE_LAYER], info, dtype, tmp_path) is None
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------ measuring


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few rows and tokens, as the points of `SMALL` are."""
    monkeypatch.setattr(measure, "TILE_ROWS", 64)
    monkeypatch.setattr(measure, "MOST_TOKENS", 256)


@pytest.mark.parametrize("point", [*POINTS, *SMALL])
def test_tiles_have_the_pieces_of_their_point(point: tuple[int, int]) -> None:
    tile, (queries, keys) = tile_of(point), point
    assert tile.num_rows <= TILE_ROWS
    assert all(piece.stop - piece.start == queries and piece.stop == keys for piece in tile.pieces)
    work = TileWork.of(tile, None, exact_pages=False, dense=lambda piece: True)
    assert (work.num_queries, work.num_keys) == point
    last = tile.pieces[-1].segment
    assert last.base + last.length <= MOST_TOKENS + TILE_ROWS


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("window", [None, 30])
def test_kernels_are_timed_where_they_are_right(window: int | None, caplog: pytest.LogCaptureFixture) -> None:
    """Beside torch and the interpreted kernel, three that are not: wrong, wrong in what a sink needs, and failing."""
    pytest.importorskip("triton")

    def off(q: Tensor, work: TileWork, tokens: Tokens, scale: float) -> tuple[Tensor, Tensor | None]:
        out, lse = by_pieces(q, work, tokens, scale)
        out[-1] *= 1.1
        return out, lse

    def other_base(q: Tensor, work: TileWork, tokens: Tokens, scale: float) -> tuple[Tensor, Tensor | None]:
        out, lse = measure.all_kernels()[OWN](q, work, tokens, scale)
        assert lse is not None
        return out, lse * 1.4427

    def failing(q: Tensor, work: TileWork, tokens: Tokens, scale: float) -> tuple[Tensor, Tensor | None]:
        raise RuntimeError("no kernel image\nfor this device")

    kernels = {TORCH: by_pieces, OWN: measure.all_kernels()[OWN], "a": off, "b": other_base, "c": failing}
    shape = DenseShape(2, 1, 16, window)
    with caplog.at_level(logging.WARNING, logger="longbatch"):
        choice = measure_shape(shape, CPU, torch.float32, points=SMALL[:3], kernels=kernels)
    assert choice is not None
    assert choice.points == SMALL[:3]
    assert set(choice.seconds) == {TORCH, OWN}
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert "a is left out: ValueError: its output is wrong by" in messages[0]
    assert "b is left out: ValueError: its log-sum-exp is wrong by" in messages[1]
    assert messages[2].endswith("c is left out: RuntimeError: no kernel image")


@pytest.mark.usefixtures("small_tiles")
def test_every_kernel_is_checked_at_every_point() -> None:
    """A kernel that is wrong at one point only is left out at all of them."""

    def wrong_for_one_query(q: Tensor, work: TileWork, tokens: Tokens, scale: float) -> tuple[Tensor, Tensor | None]:
        out, lse = by_pieces(q, work, tokens, scale)
        return (out + 1 if work.num_queries == 1 else out), lse

    kernels = {TORCH: by_pieces, "a": wrong_for_one_query}
    choice = measure_shape(DenseShape(2, 2, 16), CPU, torch.float32, points=SMALL, kernels=kernels)
    assert choice is not None
    assert set(choice.seconds) == {TORCH}


@pytest.mark.usefixtures("small_tiles")
def test_without_torch_there_is_no_choice() -> None:
    def failing(q: Tensor, work: TileWork, tokens: Tokens, scale: float) -> tuple[Tensor, Tensor | None]:
        raise MemoryError("too much")

    assert measure_shape(DenseShape(2, 2, 16), CPU, torch.float32, SMALL[:1], {TORCH: failing}) is None


@pytest.mark.usefixtures("small_tiles")
def test_points_without_room_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, points = DenseShape(2, 2, 16), ((16, 16), (40, 200))
    needed = [measure._num_bytes(shape, point, torch.float32) for point in points]
    assert needed[0] < needed[1]
    for room, expected in ((4 * needed[1], points), (4 * needed[1] - 1, points[:1])):
        monkeypatch.setattr(measure, "_free_bytes", lambda device, room=room: room)
        choice = measure_shape(shape, CPU, torch.float32, points, {TORCH: by_pieces})
        assert choice is not None
        assert choice.points == expected
    monkeypatch.setattr(measure, "_free_bytes", lambda device: 0)
    assert measure_shape(shape, CPU, torch.float32, points, {TORCH: by_pieces}) is None


# ------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "shape",
    [
        DenseShape(32, 8, 128),
        DenseShape(28, 4, 128, 4096),
        DenseShape(64, 8, 64, 128),
        DenseShape(32, 32, 96),
        DenseShape(8, 4, 256, 1024),
        DenseShape(8, 4, 256),
    ],
    ids=str,
)
def test_every_kernel_holds_on_the_gpu(shape: DenseShape, dtype: str) -> None:
    choice = measure_shape(shape, torch.device("cuda:0"), getattr(torch, dtype))
    assert choice is not None
    assert choice.points == POINTS
    assert {TORCH, OWN, FLASH_2} <= set(choice.seconds)
    assert (FLASH_3 in choice.seconds) == has_flash_3()
    if shape.window is not None:
        # By masks and repeated keys it is never the fastest.
        assert TORCH not in {choice.pick(*point) for point in POINTS}


@pytest.mark.gpu
def test_a_machine_measures_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = gpu_infos()[0]
    first = dense_kernels([SHAPE_LAYER, WINDOW_LAYER], info, "bfloat16", tmp_path)
    monkeypatch.setattr(measure, "measure_shape", None)
    assert dense_kernels([SHAPE_LAYER, WINDOW_LAYER], info, "bfloat16", tmp_path) == first
    assert first is not None
    assert len(first.choices) == 2
