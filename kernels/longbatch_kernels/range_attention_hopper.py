"""`range_attention` for Hopper: one warp loads, two warpgroups compute, each 64 rows of its own, one stream of keys.

A tile of queries is two blocks of 64 rows: two heads that share a selection, or two adjacent blocks of one head (see
`range_index`). The loading warp walks the tiles of keys, 128 at a time in runs of 16, and copies them by the tensor
memory accelerator into a ring of stages; tiles that only one of the blocks takes are interleaved, so that both have
work. Each warpgroup issues the scores of its next tile before the weighted values of its last one, and computes the
softmax of one while the tensor cores work on the other, as FlashAttention-3 does (arXiv 2407.08608). The grid is
persistent: while a tile is written, the keys of the next one arrive.

In Gluon, whose interface is young: `serves` is false where this Triton has another one, and the portable kernel runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from longbatch_kernels.range_attention import Carry
    from longbatch_kernels.range_index import RangeIndex

from longbatch_kernels.range_stream_hopper import GLUON

if GLUON:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from longbatch_kernels.range_stream_hopper import barrier, load_tiles, own_tile, stream_of, tile_at

    @gluon.jit
    def _compute(
        memory,
        barriers,
        results,
        index,
        sizes,
        D: gl.constexpr,
        STAGES: gl.constexpr,
        PAIRED: gl.constexpr,
        CARRY_IN: gl.constexpr,
        CARRY_OUT: gl.constexpr,
        WHICH: gl.constexpr,
    ):
        """One computing warpgroup."""
        k_smem, v_smem, q_smem = memory
        k_full, k_empty, v_full, v_empty, q_full, q_empty, turns = barriers
        out, lse, acc_in, top_in, total_in, acc_out, top_out, total_out = results
        items, num_items, runs, columns, column_bits, column_clean, width, capacity = index
        num_rows, num_heads, scale_log2, stride_o_t, stride_o_h = sizes
        dtype: gl.constexpr = k_smem.dtype
        s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
        o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
        p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
        rows: gl.constexpr = gl.SliceLayout(1, s_layout)
        rows_o: gl.constexpr = gl.SliceLayout(1, o_layout)
        o_n = gl.arange(0, 128, gl.SliceLayout(0, s_layout))
        o_d = gl.arange(0, D, gl.SliceLayout(0, o_layout))
        q_tile = q_smem.index(WHICH)
        count = 0
        turn = 0
        step = 0
        for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
            p_item = items + item * 24
            head = gl.load(p_item + (0 if PAIRED else WHICH)).to(gl.int64)
            end = gl.load(p_item + 2)
            num_keys = gl.load(p_item + 8)
            i_s = gl.load(p_item + 9).to(gl.int64)
            tiles = stream_of(p_item)
            n_masked, n_both, n_first, n_second, c_both, _, _ = tiles
            n_column = gl.load(p_item + 18)
            i_block = gl.load(p_item + 19).to(gl.int64) + (WHICH if PAIRED else 0)
            window = gl.load(p_item + 20)
            crossing = gl.load(p_item + 21)
            # Distances are compared without a sign: behind a row, they are beyond every reach.
            reach = gl.where(window > 0, window, 2147483647).to(gl.uint32, bitcast=True)
            p_runs = runs + i_s * capacity * 2
            # `end` is where the first block ends.
            first_row = end - 64 + (64 * WHICH if PAIRED else 0)
            row = first_row + gl.arange(0, 64, rows)
            n_run = n_masked + n_both + gl.maximum(n_first, n_second)

            if CARRY_IN:
                place, m_row = _rows(p_item, first_row, o_layout)
                p_acc = (place[:, None] * num_heads + head) * D + o_d[None, :]
                p_row = head * num_rows + place
                acc = gl.load(acc_in + p_acc, mask=m_row[:, None], other=0.0)
                top = gl.convert_layout(gl.load(top_in + p_row, mask=m_row, other=float("-inf")), rows) / scale_log2
                total = gl.convert_layout(gl.load(total_in + p_row, mask=m_row, other=0.0), rows)
            else:
                acc = gl.zeros([64, D], gl.float32, o_layout)
                top = gl.full([64], float("-inf"), gl.float32, rows)
                total = gl.zeros([64], gl.float32, rows)

            # The first tile is one of masked runs.
            mbarrier.wait(q_full, turn & 1)
            stage = count % STAGES
            mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
            s = _scores(q_tile, k_smem.index(stage))
            s = warpgroup_mma_wait(0, deps=[s])
            s = _mask_runs(s, p_runs, o_n, end, row, num_keys, reach, WHICH)
            p, top, keep, row_sum = _softmax(s, top, scale_log2)
            total = total * keep + row_sum
            if PAIRED:
                barrier()
                mbarrier.arrive(k_empty.index(stage), count=1)
            acc = acc * gl.convert_layout(keep, rows_o)[:, None]
            p = gl.convert_layout(p.to(dtype), p_layout)
            at = count
            start = count + n_masked + n_both + n_first + n_second
            for i in range(1, n_run + n_column):
                if PAIRED:
                    following = count + own_tile(i, tiles, WHICH)
                    following = gl.where(i < n_run, following, start + i - n_run)
                    base, kind, part = tile_at(following - count, tiles)
                    # Masked runs, a tile at the prompt's start, and what the other block has more.
                    masked = (kind == 0) | ((part == 1) & (((crossing >> kind) & 1) > 0)) | (kind == 3 - WHICH)
                    for skipped in range(at + 1, following):
                        mbarrier.wait(k_full.index(skipped % STAGES), (skipped // STAGES) & 1)
                        mbarrier.arrive(k_empty.index(skipped % STAGES), count=1)
                else:
                    following = at + 1
                    base = gl.where(i < n_masked, i * 8, c_both + (i - n_masked) * 8)
                    masked = (i < n_masked) | ((i == n_run - 1) & ((crossing & 2) > 0))
                masked = masked & (i < n_run)
                stage = following % STAGES
                mbarrier.wait(k_full.index(stage), (following // STAGES) & 1)
                if PAIRED:
                    mbarrier.wait(v_full.index(at % STAGES), (at // STAGES) & 1)
                if not PAIRED:
                    # In turns, so that one warpgroup's softmax runs beside the other's products. Pairs, whose tiles
                    # are not all the same ones, are slower so.
                    mbarrier.wait(turns.index(WHICH), (step & 1) ^ (1 - WHICH))
                s = _scores(q_tile, k_smem.index(stage))
                acc = warpgroup_mma(p, v_smem.index(at % STAGES), acc, is_async=True)
                if not PAIRED:
                    mbarrier.arrive(turns.index(1 - WHICH), count=1)
                    step += 1
                s = warpgroup_mma_wait(1, deps=[s])
                if masked:
                    s = _mask_runs(s, p_runs + base * 2, o_n, end, row, num_keys, reach, WHICH)
                if i >= n_run:
                    clean = gl.load(column_clean + i_block * (width // 128) + i - n_run)
                    if clean < 2:
                        o_c = (i - n_run) * 128 + o_n
                        taken = (gl.load(column_bits + i_block * (width // 32) + o_c // 32) >> (o_c % 32)) & 1
                        s = gl.where((taken > 0)[None, :], s, float("-inf"))
                        if clean == 0:
                            away = row[:, None] - gl.load(columns + i_s * width + o_c)[None, :]
                            s = gl.where(away >= window, s, float("-inf"))
                p_next, top, keep, row_sum = _softmax(s, top, scale_log2)
                total = total * keep + row_sum
                acc = warpgroup_mma_wait(0, deps=[acc])
                barrier()
                if PAIRED:
                    mbarrier.arrive(k_empty.index(stage), count=1)
                    mbarrier.arrive(v_empty.index(at % STAGES), count=1)
                else:
                    mbarrier.arrive(k_empty.index(at % STAGES), count=1)
                if PAIRED:
                    for skipped in range(at + 1, following):
                        mbarrier.wait(v_full.index(skipped % STAGES), (skipped // STAGES) & 1)
                        mbarrier.arrive(v_empty.index(skipped % STAGES), count=1)
                acc = acc * gl.convert_layout(keep, rows_o)[:, None]
                p = gl.convert_layout(p_next.to(dtype), p_layout)
                at = following
            mbarrier.arrive(q_empty, count=1)
            if PAIRED:
                mbarrier.wait(v_full.index(at % STAGES), (at // STAGES) & 1)
            acc = warpgroup_mma(p, v_smem.index(at % STAGES), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()
            if PAIRED:
                mbarrier.arrive(v_empty.index(at % STAGES), count=1)
            else:
                mbarrier.arrive(k_empty.index(at % STAGES), count=1)
            if PAIRED:
                # The last tile may be the other block's alone.
                for skipped in range(at + 1, start):
                    mbarrier.wait(k_full.index(skipped % STAGES), (skipped // STAGES) & 1)
                    mbarrier.arrive(k_empty.index(skipped % STAGES), count=1)
                    mbarrier.wait(v_full.index(skipped % STAGES), (skipped // STAGES) & 1)
                    mbarrier.arrive(v_empty.index(skipped % STAGES), count=1)
            count = start + n_column
            turn += 1  # noqa: SIM113 (a program of the GPU)
            place, m_row = _rows(p_item, first_row, o_layout)
            p_row = head * num_rows + place
            top = gl.convert_layout(top, rows_o) * scale_log2
            total_o = gl.convert_layout(total, rows_o)
            if CARRY_OUT:
                p_acc = (place[:, None] * num_heads + head) * D + o_d[None, :]
                gl.store(acc_out + p_acc, acc, mask=m_row[:, None])
                gl.store(top_out + p_row, top, mask=m_row)
                gl.store(total_out + p_row, total_o, mask=m_row)
            else:
                # Where no key was seen, `top` is -inf and so is the logarithm.
                some = gl.where(total_o > 0.0, total_o, 1.0)
                acc = acc / some[:, None]
                p_out = out + place[:, None] * stride_o_t + head * stride_o_h + o_d[None, :]
                gl.store(p_out, acc.to(dtype), mask=m_row[:, None])
                gl.store(lse + p_row, (top + gl.log2(some)) * 0.6931471805599453, mask=m_row)

    @gluon.jit
    def _rows(p_item, first_row, o_layout: gl.constexpr):
        """Rows of q and out of a block's 64 positions, and which of them are there."""
        row = first_row + gl.arange(0, 64, gl.SliceLayout(1, o_layout))
        there = (row >= gl.load(p_item + 5)) & (row < gl.load(p_item + 6))
        return (gl.load(p_item + 4) + row).to(gl.int64), there

    @gluon.jit
    def _scores(q_tile, k_tile):
        """q k^T [64, 128], not waited for."""
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
        zero = gl.zeros([64, 128], gl.float32, layout)
        return warpgroup_mma(q_tile, k_tile.permute([1, 0]), zero, use_acc=False, is_async=True)

    @gluon.jit
    def _softmax(s, top, scale_log2):
        """Weights of a tile, the greatest score so far, the factor for what was summed before, and the sums."""
        new = gl.maximum(top, gl.max(s, 1))
        safe = gl.where(new == float("-inf"), 0.0, new) * scale_log2
        p = gl.exp2(s * scale_log2 - safe[:, None])
        keep = gl.exp2(top * scale_log2 - safe)
        return p, new, keep, gl.sum(p, 1)

    @gluon.jit
    def _mask_runs(s, p_runs, o_n, end, row, num_keys, reach, WHICH: gl.constexpr):
        """-inf where a row does not see a key of the tile of 8 runs at `p_runs`."""
        p_run = p_runs + o_n // 16 * 2
        begin = end - gl.load(p_run)
        # A run that leaves the prompt was moved inside, and holds keys that are not its own.
        key = gl.minimum(gl.maximum(begin, 0), num_keys - 16) + o_n % 16
        place = (key - begin).to(gl.uint32, bitcast=True)
        bits = gl.load(p_run + 1).to(gl.uint32, bitcast=True) >> (gl.minimum(place, 15) + 16 * WHICH)
        # A key that is not taken is moved behind every row.
        key = gl.where((place < 16) & ((bits & 1) > 0), key, 2147483647)
        away = (row[:, None] - key[None, :]).to(gl.uint32, bitcast=True)
        return gl.where(away < reach, s, float("-inf"))

    @gluon.jit(do_not_specialize=["num_items", "width", "num_rows", "num_heads", "stride_o_t", "stride_o_h"])
    def range_attention_hopper_kernel(
        q_desc,
        k_desc,
        v_desc,
        ck_desc,
        cv_desc,
        out,
        lse,
        acc_in,
        top_in,
        total_in,
        acc_out,
        top_out,
        total_out,
        items,
        num_items,
        runs,
        columns,
        column_bits,
        column_clean,
        width,
        capacity,
        num_rows,
        num_heads,
        scale_log2,
        stride_o_t,
        stride_o_h,
        D: gl.constexpr,
        STAGES: gl.constexpr,
        PAIRED: gl.constexpr,
        CARRY_IN: gl.constexpr,
        CARRY_OUT: gl.constexpr,
    ):
        dtype: gl.constexpr = k_desc.dtype
        layout: gl.constexpr = k_desc.layout
        k_smem = gl.allocate_shared_memory(dtype, [STAGES, 128, D], layout)
        v_smem = gl.allocate_shared_memory(dtype, [STAGES, 128, D], layout)
        q_smem = gl.allocate_shared_memory(dtype, [2, 64, D], layout)
        stages: gl.constexpr = mbarrier.MBarrierLayout()
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], stages)
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], stages)
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], stages)
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], stages)
        q_full = gl.allocate_shared_memory(gl.int64, [1], stages)
        q_empty = gl.allocate_shared_memory(gl.int64, [1], stages)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=2)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(v_empty.index(i), count=2)
        turns = gl.allocate_shared_memory(gl.int64, [2, 1], stages)
        for i in gl.static_range(2):
            mbarrier.init(turns.index(i), count=1)
        mbarrier.init(q_full, count=1)
        mbarrier.init(q_empty, count=2)
        memory = (k_smem, v_smem, q_smem)
        barriers = (k_full, k_empty, v_full, v_empty, q_full, q_empty, turns)
        results = (out, lse, acc_in, top_in, total_in, acc_out, top_out, total_out)
        index = (items, num_items, runs, columns, column_bits, column_clean, width, capacity)
        sizes = (num_rows, num_heads, scale_log2, stride_o_t, stride_o_h)
        inputs = (q_desc, k_desc, v_desc, ck_desc, cv_desc)
        gl.warp_specialize(
            [
                (_compute, (memory, barriers, results, index, sizes, D, STAGES, PAIRED, CARRY_IN, CARRY_OUT, 0)),
                (_compute, (memory, barriers, results, index, sizes, D, STAGES, PAIRED, CARRY_IN, CARRY_OUT, 1)),
                (load_tiles, (inputs, memory, barriers, index, D, STAGES, PAIRED)),
            ],
            [4, 1],
            [240, 24],
        )


def serves(k: Tensor, num_keys: int) -> bool:
    """Whether this kernel can take keys [Tk, Hkv, D] of prompts of at least `num_keys` tokens."""
    return (
        GLUON
        and k.is_cuda
        and torch.cuda.get_device_capability(k.device)[0] == 9
        and k.dtype in (torch.bfloat16, torch.float16)
        and k.shape[2] in (64, 128)
        and num_keys >= 128
    )


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: RangeIndex,
    items: Tensor,
    out: Tensor,
    lse: Tensor,
    carry_in: Carry | None,
    carry_out: Carry | None,
    scale_log2: float,
) -> None:
    """Run every item; the arguments are those of `range_attention`, checked by `serves`."""
    dim = q.shape[2]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    def described(x: Tensor, rows: int) -> TensorDescriptor:
        if x.stride(1) != x.shape[2]:
            x = x.contiguous()
        flat = x.as_strided((x.shape[0], x.shape[1] * x.shape[2]), (x.stride(0), 1))
        return TensorDescriptor.from_tensor(flat, [rows, 64], layout)

    # Absent carries are not read, but a pointer must be given.
    read = carry_in or (lse, lse, lse)
    write = carry_out or (lse, lse, lse)
    num_items = items.shape[0]
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    range_attention_hopper_kernel[(min(num_items, processors),)](
        described(q, 64),
        described(k, 16),
        described(v, 16),
        described(index.columns.keys.view(-1, 1, dim), 128),
        described(index.columns.values.view(-1, 1, dim), 128),
        out,
        lse,
        *read,
        *write,
        items,
        num_items,
        index.runs,
        index.columns.places,
        index.columns.bits,
        index.columns.clean,
        index.columns.places.shape[1],
        index.runs.shape[1],
        q.shape[0],
        q.shape[1],
        scale_log2,
        out.stride(0),
        out.stride(1),
        D=dim,
        STAGES=3,
        PAIRED=index.paired,
        CARRY_IN=carry_in is not None,
        CARRY_OUT=carry_out is not None,
        num_warps=4,
    )
