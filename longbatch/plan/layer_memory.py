"""What a layer holds while tiles of a prefill step go through it, beside what the whole step holds. Torch-free.

Each method is a moment and gives the bytes that exist at it: those of the longest line of tensors that are alive at the
same time, as `longbatch.models.blocks`, `longbatch.engine.prefill` and `longbatch.attention` allocate them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from longbatch.config.kv_formats import KVFormat
from longbatch.models.spec import LayerSpec

FLOAT = 4
# Numbers of an e4m3 matrix that are widened, and of a tensor that is quantized, at the same time.
_SOME_NUMBERS = 1 << 24
# Bands of windows that are kept, the most rows that share one, and bytes beside an entry of one that is being made
# (`longbatch.attention.dense`).
_BANDS, _BAND_ROWS, _BAND_BYTES = 8, 1024, 11
# Numbers, ranks and places of a token of one expert.
_ROUTED_BYTES = 40
# Rows and entries of the masks that stand for a selection where there are no kernels (`longbatch.attention.sparse`).
_MASK_ROWS, _MASK_ENTRIES = 1024, 1 << 24
# Bytes of a mask's entry and its bias.
_MASK_BYTES = 5


@dataclass(frozen=True, slots=True)
class Formats:
    """How a device holds numbers. width: bytes of one in the model's dtype. weights_dtype: as in `Settings`. kv: how
    K/V are stored. multiplies_fp8: whether the device has kernels that make e4m3 numbers and products of them."""

    width: int
    weights_dtype: str
    kv: KVFormat
    on_gpu: bool
    multiplies_fp8: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether K/V are stored as they are."""
        return self.kv.entry_bytes == self.width


@dataclass(frozen=True, slots=True)
class Piece:
    """rows of a tile that belong to one sequence. num_states: parts of their keys that are attended to one by one, and
    then merged. num_keys: keys up to their last one."""

    rows: int
    num_states: int
    num_keys: int


class LayerMemory:
    """One layer of a model with `hidden` numbers to a token."""

    def __init__(self, layer: LayerSpec, hidden: int, formats: Formats) -> None:
        self._layer, self._hidden, self._formats = layer, hidden, formats
        self._width = formats.width
        # Numbers of a token's queries, and of its keys or its values.
        self.q = layer.num_heads * layer.head_dim
        self.kv = layer.num_kv_heads * layer.head_dim

    def moments(
        self, tile: Sequence[Piece], *, holds_queries: bool = False, heads_each: int | None = None
    ) -> Iterator[tuple[str, int]]:
        """A tile's moments and their bytes. holds_queries: whether the layer holds them already, as one that runs as
        one tile does. heads_each: query heads that share a selection, None where attention is dense."""
        rows = sum(piece.rows for piece in tile)
        queries = 0
        if not holds_queries:
            queries = self.queries(rows)
            yield "queries", self.projected(rows, self.q, 0)
        yield "attention", queries + (self.attended(tile) if heads_each is None else self.sparse(tile, heads_each))
        yield "output", self.out(rows)
        yield "MLP", self.mlp(rows)

    # ------------------------------------------------------------------------------------- projections

    def queries(self, rows: int) -> int:
        """Queries, and as much attention."""
        return rows * self.q * self._width

    def keys_and_values(self, tokens: int) -> int:
        """Both."""
        return 2 * tokens * self.kv * self._width

    def projected(self, rows: int, q: int, kv: int) -> int:
        """Queries of q numbers, and keys and values of kv, from the normed tokens to the rotated ones."""
        normed, outputs = self._normed(rows), q + 2 * kv
        fused, turned = rows * outputs * self._width, rows * (q + kv) * self._width
        made = self._product(rows, self._hidden, outputs)
        if self._layer.rope is not None:
            made = max(made, fused + turned)
        if self._layer.qk_norm and not self._formats.on_gpu:
            made = max(made, fused + 2 * turned)
        return max(self._norming(rows), normed + made)

    def fused(self, rows: int) -> int:
        """What a layer that runs as one tile holds to its end: the projection, whose part the values are, queries and
        keys."""
        turned = self.q + self.kv if self._layer.rope is not None or self._layer.qk_norm else 0
        return rows * self._width * (self.q + 2 * self.kv + turned)

    def out(self, rows: int) -> int:
        """From the attention's output on."""
        found = rows * self.q * self._width
        product = 0
        if self._formats.weights_dtype == "fp8":
            product = rows * (self.q + FLOAT) + self._product(rows, self.q, self._hidden)
            product = max(product, self._quantizing(rows, self.q))
        if self._layer.sandwich:
            # Its result, and the result normed.
            product = max(product, 2 * rows * self._hidden * self._width)
        return found + product

    # ------------------------------------------------------------------------------------- attention

    def attended(self, pieces: Sequence[Piece]) -> int:
        """Dense attention of a tile's pieces, one after the other, beside their queries."""
        found = outs = 0
        for piece in pieces:
            found = max(found, outs + (self._windowed(piece) if self._is_windowed(piece) else self._causal(piece)))
            outs += piece.rows * self.q * self._width
        return max(found, 2 * outs) if len(pieces) > 1 else found

    def _is_windowed(self, piece: Piece) -> bool:
        window = self._layer.window
        return self._layer.softcap is not None or (window is not None and piece.num_keys > window)

    def _causal(self, piece: Piece) -> int:
        out, sums = piece.rows * self.q, FLOAT * piece.rows * self._layer.num_heads
        held = piece.num_states * (out * self._width + sums)
        if piece.num_states == 1:
            return held
        # The sum so far, the part that is added and the one before; at last the sum in the model's dtype.
        merged = max(min(piece.num_states, 3) * FLOAT, 2 * FLOAT + (self._width if self._width != FLOAT else 0))
        return held + out * merged + 2 * sums

    def _windowed(self, piece: Piece) -> int:
        """A bounded number of rows at a time, under a band."""
        layer = self._layer
        bands = list(self._bands_of(piece))
        rows, keys = max(bands, key=lambda band: band[0] * band[1])
        out = piece.rows * self.q * self._width
        if layer.softcap is not None:
            scores = min(_SOME_NUMBERS, rows * layer.num_heads * keys)
            made = FLOAT * (2 * keys * self.q + 2 * scores)
        elif self._formats.on_gpu:
            # Keys and values for each query head, and the band again, aligned.
            made = (2 * keys * self.q + rows * keys) * self._width
        else:
            made = 0
        return made + (2 if len(bands) > 1 else 1) * out

    def _bands_of(self, piece: Piece) -> Iterator[tuple[int, int]]:
        """Rows and keys of each."""
        window = self._layer.window
        step = piece.rows if window is None else min(max(256, window), _BAND_ROWS)
        first = piece.num_keys - piece.rows
        for start in range(first, piece.num_keys, step):
            stop = min(start + step, piece.num_keys)
            yield stop - start, stop - (0 if window is None else max(0, start - window + 1))

    def bands(self, pieces: Iterable[Piece]) -> tuple[int, int]:
        """The bands of these pieces that stay for others, and the most while they are made one after the other."""
        width = self._width if self._layer.softcap is None else FLOAT
        kept = making = 0
        sizes = (band for piece in pieces if self._is_windowed(piece) for band in self._bands_of(piece))
        for number, (rows, keys) in enumerate(dict.fromkeys(sizes)):
            making = max(making, kept + (width + _BAND_BYTES) * rows * keys)
            kept += width * rows * keys if number < _BANDS else 0
        return kept, making

    @property
    def most_bands(self) -> int:
        """As many bands as are kept, and one more that is being made."""
        window = self._layer.window
        if window is None:
            return 0
        rows = min(max(256, window), _BAND_ROWS)
        return (_BANDS * self._width + _BAND_BYTES) * rows * (rows + window - 1)

    def sparse(self, pieces: Sequence[Piece], heads_each: int) -> int:
        """Sparse attention of a tile's pieces, beside their queries and what was selected."""
        rows, num_keys = sum(piece.rows for piece in pieces), max(piece.num_keys for piece in pieces)
        found = rows * (self.q * self._width + FLOAT * self._layer.num_heads)
        if self._formats.on_gpu:
            return found
        masked = min(rows, _MASK_ROWS, max(1, _MASK_ENTRIES // num_keys))
        own = rows * heads_each * self._layer.head_dim * self._width
        return found + masked * num_keys * _MASK_BYTES + own

    # ------------------------------------------------------------------------------------- MLP

    def mlp(self, rows: int) -> int:
        """From the norm before it on."""
        found = self._dense(rows) if self._layer.moe is None else self._experts(rows)
        # Its result, and the result normed.
        return max(found, 2 * rows * self._hidden * self._width) if self._layer.sandwich else found

    def _dense(self, rows: int) -> int:
        inner, normed = self._layer.intermediate_size, self._normed(rows)
        gate_up = 2 * rows * inner * self._width
        found = max(self._norming(rows), normed + self._product(rows, self._hidden, 2 * inner))
        if self._formats.weights_dtype == "fp8":
            found = max(found, normed + gate_up + self._quantizing(rows, inner))
            return max(found, rows * (inner + FLOAT) + self._product(rows, inner, self._hidden))
        # Where it is normed again, its result is not added at once.
        return max(found, gate_up + rows * self._hidden * self._width) if self._layer.sandwich else found

    def _experts(self, rows: int) -> int:
        """Of a mixture: every token of each of its experts, nothing of which is let go before the end."""
        moe = self._layer.moe
        assert moe is not None
        routed, inner, width = rows * moe.experts_per_token, moe.intermediate_size, self._width
        result = rows * self._hidden * width
        held = result + routed * _ROUTED_BYTES + 2 * routed * inner * width
        outputs = routed * self._hidden * width
        biases = routed * 2 * inner * width if moe.style == "gpt_oss" else 0
        if self._formats.weights_dtype == "fp8":
            held += routed * (self._hidden + FLOAT)
            after = routed * (inner + FLOAT) + 2 * outputs + result
            return held + max(biases, self._quantizing(routed, inner), after)
        return held + outputs + max(biases, 2 * outputs + result)

    # ------------------------------------------------------------------------------------- parts of these

    def _normed(self, rows: int) -> int:
        """Tokens as products take them."""
        if self._formats.weights_dtype == "fp8":
            return rows * (self._hidden + FLOAT)
        return rows * self._hidden * self._width

    def _norming(self, rows: int) -> int:
        """While they become so."""
        if self._formats.weights_dtype != "fp8" or self._formats.multiplies_fp8:
            return self._normed(rows)
        return rows * self._hidden * self._width + self._quantizing(rows, self._hidden)

    def _quantizing(self, rows: int, width: int) -> int:
        """What becomes of rows of so many numbers, and what is float32 meanwhile where no kernel does it."""
        found = rows * (width + FLOAT)
        if self._formats.multiplies_fp8:
            return found
        some = min(rows * width, _SOME_NUMBERS)
        return found + some * (FLOAT + 1 + (FLOAT if self._width != FLOAT else 0))

    def _product(self, rows: int, inputs: int, outputs: int) -> int:
        """The result of a product, and what comes and goes with it where e4m3 numbers are widened."""
        result = rows * outputs * self._width
        if self._formats.weights_dtype != "fp8" or self._formats.multiplies_fp8:
            return result
        wide = 2 if self._formats.on_gpu else FLOAT
        some = min(outputs, max(1, _SOME_NUMBERS // inputs))
        return result + wide * (rows + some) * inputs + FLOAT * rows * some
