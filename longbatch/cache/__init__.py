"""K/V memory: fixed-size pages, block tables that name them, and the tensors behind them."""

from longbatch.cache.kv import KVCache
from longbatch.cache.pages import PAGE_TOKENS, PagePool
from longbatch.cache.writes import Blocks, Stretch, Writes

__all__ = ["PAGE_TOKENS", "Blocks", "KVCache", "PagePool", "Stretch", "Writes"]
