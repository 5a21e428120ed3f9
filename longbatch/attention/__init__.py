"""Attention over packed segments: what a step sees, the dense states, and one-token decode over pages."""

from longbatch.attention.choice import DenseKernels
from longbatch.attention.decode import DecodeStep, decode_attention
from longbatch.attention.dense import attend
from longbatch.attention.sparse import SparseLayer
from longbatch.attention.step import Executed, Extent, Piece, Segment, Step, Tile

__all__ = [
    "DecodeStep",
    "DenseKernels",
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
