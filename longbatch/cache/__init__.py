"""K/V memory: fixed-size pages, block tables that name them, and the tensors behind them."""

from longbatch.cache.kv import KVCache
from longbatch.cache.pages import PAGE_TOKENS, PagePool

__all__ = ["PAGE_TOKENS", "KVCache", "PagePool"]
