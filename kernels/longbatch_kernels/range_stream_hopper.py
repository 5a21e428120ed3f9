"""The stream of key tiles that `range_attention_hopper` computes on: its order, and the warp that loads it.

A stream is: masked tiles; tiles that both blocks of rows take; tiles that only one of them takes, in turns; columns.
Tiles of runs are gathered 16 keys at a time by the tensor memory accelerator, columns lie gathered already.
"""

from __future__ import annotations

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

    GLUON = True
except ImportError:
    GLUON = False

if GLUON:
    # Names that changed between Triton 3.6 and 3.9.
    barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
    load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
    HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

    @gluon.jit
    def _view(memory, dtype: gl.constexpr, first: gl.constexpr, rows: gl.constexpr, layout: gl.constexpr):
        """Shared memory as `first` tiles of rows x 64."""
        if HAS_REINTERPRET:
            view = memory.reinterpret(dtype, [first, rows, 64], layout)
        else:
            view = memory._reinterpret(dtype, [first, rows, 64], layout)
        return view

    @gluon.jit
    def load_tiles(inputs, memory, barriers, index, D: gl.constexpr, STAGES: gl.constexpr, PAIRED: gl.constexpr):
        """The loading warp."""
        q_desc, k_desc, v_desc, ck_desc, cv_desc = inputs
        k_smem, v_smem, q_smem = memory
        k_full, k_empty, v_full, v_empty, q_full, q_empty, _ = barriers
        items, num_items, runs, _, _, _, width, capacity = index
        HALVES: gl.constexpr = D // 64
        dtype: gl.constexpr = k_desc.dtype
        layout: gl.constexpr = k_desc.layout
        # A tile is stored as halves of 64 columns, each of which is a stack of runs.
        k_views = (
            _view(k_smem, dtype, STAGES * HALVES * 8, 16, layout),
            _view(k_smem, dtype, STAGES * HALVES, 128, layout),
        )
        v_views = (
            _view(v_smem, dtype, STAGES * HALVES * 8, 16, layout),
            _view(v_smem, dtype, STAGES * HALVES, 128, layout),
        )
        q_wide = _view(q_smem, dtype, 2 * HALVES, 64, layout)
        keys, values = (k_desc, ck_desc), (v_desc, cv_desc)
        count = 0
        turn = 0
        for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
            p_item = items + item * 24
            end = gl.load(p_item + 2)
            i_s = gl.load(p_item + 9)
            stream = stream_of(p_item)
            n_column = gl.load(p_item + 18)
            p_runs = runs + i_s.to(gl.int64) * capacity * 2
            # K/V head, row of key 0, last key where a run may begin, first row of the columns.
            place = (end, gl.load(p_item + 3), gl.load(p_item + 7), gl.load(p_item + 8) - 16, i_s * width)
            mbarrier.wait(q_empty, (turn & 1) ^ 1)
            mbarrier.expect(q_full, 2 * 64 * D * 2)
            for w in gl.static_range(2):
                head = gl.load(p_item + (0 if PAIRED else w))
                row = gl.load(p_item + 4) + end - 64 + (64 * w if PAIRED else 0)
                for half in gl.static_range(HALVES):
                    load(q_desc, [row, head * D + half * 64], q_full, q_wide.index(w * HALVES + half))
            turn += 1  # noqa: SIM113 (a program of the GPU)
            n_all = stream[0] + stream[1] + stream[2] + stream[3] + n_column
            if PAIRED:
                # The keys of a tile go before the values of the last one: they are wanted first.
                for i in range(n_all + 1):
                    if i < n_all:
                        at = count + i
                        mbarrier.wait(k_empty.index(at % STAGES), ((at // STAGES) & 1) ^ 1)
                        mbarrier.expect(k_full.index(at % STAGES), 128 * D * 2)
                        _load_tile(keys, k_views, k_full.index(at % STAGES), at, i, place, p_runs, stream, D, STAGES)
                    if i > 0:
                        at = count + i - 1
                        mbarrier.wait(v_empty.index(at % STAGES), ((at // STAGES) & 1) ^ 1)
                        mbarrier.expect(v_full.index(at % STAGES), 128 * D * 2)
                        _load_tile(
                            values, v_views, v_full.index(at % STAGES), at, i - 1, place, p_runs, stream, D, STAGES
                        )
            else:
                for i in range(n_all):
                    at = count + i
                    full = k_full.index(at % STAGES)
                    mbarrier.wait(k_empty.index(at % STAGES), ((at // STAGES) & 1) ^ 1)
                    mbarrier.expect(full, 2 * 128 * D * 2)
                    _load_tile(keys, k_views, full, at, i, place, p_runs, stream, D, STAGES)
                    _load_tile(values, v_views, full, at, i, place, p_runs, stream, D, STAGES)
            count += n_all

    @gluon.jit
    def stream_of(p_item):
        """Tiles of each class, and the first runs of the classes after the masked one."""
        return (
            gl.load(p_item + 14),
            gl.load(p_item + 15),
            gl.load(p_item + 16),
            gl.load(p_item + 17),
            gl.load(p_item + 11),
            gl.load(p_item + 12),
            gl.load(p_item + 13),
        )

    @gluon.jit
    def _load_tile(inputs, views, full, at, i, place, p_runs, stream, D: gl.constexpr, STAGES: gl.constexpr):
        """Copy the keys, or the values, of tile i of a stream to their stage; it is the at-th of this program."""
        desc, column_desc = inputs
        stacks, wide = views
        end, i_kv, first_key, last, first_column = place
        HALVES: gl.constexpr = D // 64
        stage = at % STAGES
        n_run = stream[0] + stream[1] + stream[2] + stream[3]
        if i < n_run:
            base, _, _ = tile_at(i, stream)
            for r in gl.static_range(8):
                key = end - gl.load(p_runs + (base + r) * 2)
                key = first_key + gl.minimum(gl.maximum(key, 0), last)
                for half in gl.static_range(HALVES):
                    load(desc, [key, i_kv * D + half * 64], full, stacks.index((stage * HALVES + half) * 8 + r))
        else:
            for half in gl.static_range(HALVES):
                row = first_column + (i - n_run) * 128
                load(column_desc, [row, half * 64], full, wide.index(stage * HALVES + half))

    @gluon.jit
    def tile_at(i, stream):
        """First run of tile i of the stream, its class, and 1 where it is the last tile of that class."""
        n_masked, n_both, n_first, n_second, c_both, c_first, c_second = stream
        j = i - n_masked
        x = j - n_both
        pairs = gl.minimum(n_first, n_second)
        # Tiles of one block only: in turns, then what one of them has more.
        in_turn = x < 2 * pairs
        second = gl.where(in_turn, x & 1, (n_second > n_first).to(gl.int32))
        t = gl.where(in_turn, x >> 1, x - pairs)
        base = gl.where(second > 0, c_second, c_first) + t * 8
        size = gl.where(second > 0, n_second, n_first)
        t = gl.where(x < 0, j, t)
        base = gl.where(x < 0, gl.where(j < 0, i * 8, c_both + j * 8), base)
        size = gl.where(x < 0, n_both, size)
        kind = gl.where(x < 0, gl.where(j < 0, 0, 1), 2 + second)
        return base, kind, (t == size - 1).to(gl.int32)

    @gluon.jit
    def own_tile(i, stream, WHICH: gl.constexpr):
        """Place in the stream of the i-th tile that warpgroup WHICH computes: all but the other's tiles that have a
        partner of its own. So a warpgroup skips one tile at a time, and never waits for a stage that it holds."""
        n_masked, n_both, n_first, n_second, _, _, _ = stream
        y = i - n_masked - n_both
        both = gl.minimum(n_first, n_second)
        x = gl.where(y < both, 2 * y + WHICH, y + both)
        return gl.where(y < 0, i, n_masked + n_both + x)
