"""Attention over packed segments: what a step sees, the dense states, and one-token decode over pages."""

from longbatch.attention.choice import DenseKernels
from longbatch.attention.decode import SPLIT_TOKENS, DecodeStep, DeviceRows, decode_attention
from longbatch.attention.dense import attend
from longbatch.attention.sparse import SparseLayer
from longbatch.attention.step import Executed, Extent, Piece, Segment, Step, Tile

__all__ = [
    "SPLIT_TOKENS",
    "DecodeStep",
    "DenseKernels",
    "DeviceRows",
    "Executed",
    "Extent",
    "Piece",
    "Segment",
    "SparseLayer",
    "Step",
    "Tile",
    "attend",
    "decode_attention",
]
