"""What selecting takes in a layer whose rows are prefilled sparse, and what stays of it for the tiles. Torch-free.

Patterns of the kind `ranges` select once for a whole prompt, the others tile by tile.
"""

from __future__ import annotations

from longbatch.models.spec import LayerSpec
from longbatch.sparsity import LayerPatterns, PatternSpec

# Selections of sparse rows, whatever their patterns: on a GPU counting them, or sums by sampled queries with what sorts
# them out and the keys and values gathered for some runs; and for each key and head two float32 scores, what sorts them
# and a map of what is covered. On a CPU a mask and its bias.
_GPU_BYTES = 3 << 29
_KEY_BYTES = 12
_CPU_BYTES = 1 << 28
# Where the last queries look (`longbatch_kernels.last_query`), and what sorts that out (`top_places`).
_LAST_QUERIES, _KEYS_PER_SUM = 64, 2048
_BINS, _MOST_CHUNKS, _CHUNK = 2048, 64, 4096
# Counting pairs (`longbatch.attention.selection`): bytes for each key, of so many keys at once, and for each column.
_COUNTED_BYTES, _COUNTED_KEYS, _COUNTED_COLUMN_BYTES = 14, 1 << 24, 100
# Made ready (`range_index`, `range_columns`): rows of a block, keys of a run, columns of a tile, a run's bytes.
_ROWS, _RUN, _COLUMNS, _RUN_BYTES = 64, 16, 128, 8


def bound(heads: int, longest: int, on_gpu: bool) -> int:
    """The most that any patterns take in a layer of so many query heads, for prompts of up to `longest` tokens."""
    return _GPU_BYTES + _KEY_BYTES * heads * longest if on_gpu else _CPU_BYTES


class SelectionMemory:
    """For prompts of num_keys tokens in a layer. width: bytes of a number of K or V."""

    def __init__(self, patterns: LayerPatterns, layer: LayerSpec, num_keys: int, width: int, on_gpu: bool) -> None:
        self._layer, self._num_keys, self._width, self._on_gpu = layer, num_keys, width, on_gpu
        self._shared = patterns.shared
        self._ranges = [spec for spec in patterns.heads if spec.kind == "ranges"]
        self._scored = [spec for spec in self._ranges if spec.name == "vertical_slash"]
        self._by_tile = len(self._ranges) < len(patterns.heads)
        self.heads_each = layer.num_heads // len(patterns.heads)

    @property
    def estimate(self) -> int:
        """While it is selected."""
        keys = self._num_keys
        width = min(len(self._ranges) * keys, _COUNTED_KEYS)
        counted = _COUNTED_BYTES * width + _COUNTED_COLUMN_BYTES * (width // keys) * self._num_columns
        found = max(self._scoring(), counted) if self._ranges else 0
        return max(found, bound(0, 0, self._on_gpu)) if self._by_tile else found

    @property
    def kept(self) -> int:
        """Until the last of its tiles."""
        count, keys = len(self._ranges), self._num_keys
        columns = self._num_columns
        slots = -(-keys // (_ROWS + 1)) if self._scored else 0
        lists = 8 * count * slots + 4 * count * columns
        if not self._on_gpu:
            return 4 * count * (2 * max((_count(spec, "slash", keys) for spec in self._scored), default=0) + columns)
        padded = max(_COLUMNS, -(-columns // _COLUMNS) * _COLUMNS)
        runs = count * (keys // _RUN + 11 * slots + 64) * _RUN_BYTES
        gathered = count * padded * (4 + 2 * self._layer.head_dim * self._width)
        bits = count * -(-keys // (2 * _ROWS)) * 2 * (padded // 8 + padded // _COLUMNS)
        return (lists + runs + gathered + bits if count else 0) + (bound(0, 0, True) if self._by_tile else 0)

    def _scoring(self) -> int:
        """Sums over the last queries by key and by distance, float32, and the largest of them."""
        if not self._scored:
            return 0
        layer, keys = self._layer, self._num_keys
        group = layer.num_heads // layer.num_kv_heads
        scores = 8 * len(self._scored) * keys
        if not self._on_gpu:
            # Scores of a group's last queries before and after they are scaled, scores and weights of the group before.
            return scores + 4 * 4 * group * _LAST_QUERIES * keys
        heads = 2 if group > 1 else 1
        tiles = -(-group // heads)
        both = 8 * layer.num_kv_heads * tiles * (1 if self._shared else heads) * keys
        whole = 8 * (layer.num_kv_heads if self._shared else layer.num_heads) * keys
        copied = 0 if both == whole else whole
        sums = 4 * layer.num_heads * _LAST_QUERIES * -(-keys // _KEYS_PER_SUM)
        picked = 0 if scores == whole else scores
        chunk = -(-keys // (_MOST_CHUNKS * _CHUNK)) * _CHUNK
        sorting = 2 * len(self._scored) * -(-keys // chunk) * _BINS * 4
        return max(both + copied + sums, whole + picked + scores + sorting)

    @property
    def _num_columns(self) -> int:
        names = {"vertical_slash": "vertical", "a_shape": "sinks", "tri_shape": "sinks"}
        counts = (_count(spec, names[spec.name], self._num_keys) for spec in self._ranges if spec.name in names)
        return max(counts, default=0)


def _count(spec: PatternSpec, name: str, most: int) -> int:
    return min(most, spec.count(name))
