"""The page pool: runs, fragmentation, shared pages and misuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longbatch.cache import PAGE_TOKENS, KVCache, PagePool, Writes
from longbatch.cache.pages import pages_for
from longbatch.cache.writes import slots_of


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages


def test_pages_come_in_runs_and_return() -> None:
    pool = PagePool(10)
    first, second = pool.allocate(4), pool.allocate(6)
    assert first.tolist() == [0, 1, 2, 3]
    assert second.tolist() == [4, 5, 6, 7, 8, 9]
    assert pool.num_free == 0
    pool.release(first)
    assert pool.num_free == 4
    assert pool.allocate(4).tolist() == [0, 1, 2, 3]


def test_a_run_is_found_between_held_pages() -> None:
    pool = PagePool(12)
    held = [pool.allocate(3) for _ in range(4)]
    pool.release(held[0])
    pool.release(held[2])
    assert pool.allocate(3).tolist() in ([0, 1, 2], [6, 7, 8])
    assert pool.num_free == 3


def test_a_fragmented_pool_gives_scattered_pages() -> None:
    pool = PagePool(8)
    held = [pool.allocate(1) for _ in range(8)]
    for pages in held[::2]:
        pool.release(pages)
    assert pool.allocate(3).tolist() == [0, 2, 4]
    assert pool.num_free == 1


def test_too_many_pages_are_refused_and_nothing_is_taken() -> None:
    pool = PagePool(4)
    pool.allocate(2)
    with pytest.raises(MemoryError, match="3 pages asked for, 2 of 4 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    assert len(pool.allocate(2)) == 2


def test_no_pages() -> None:
    pool = PagePool(0)
    assert pool.allocate(0).tolist() == []
    pool.release(np.zeros(0, dtype=np.int32))
    assert pool.num_free == 0


def test_a_shared_page_is_free_after_its_last_holder() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool.retain(pages)
    pool.release(pages)
    assert pool.num_free == 1
    pool.release(pages[:1])
    assert pool.num_free == 2
    pool.release(pages[1:])
    assert pool.num_free == 3


def test_releasing_what_nobody_holds_is_an_error() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool.release(pages)
    with pytest.raises(ValueError, match="released more often"):
        pool.release(pages)
    held = pool.allocate(1)
    with pytest.raises(ValueError, match="released more often"):
        pool.release([*held.tolist(), (int(held[0]) + 1) % 3])
    assert pool.num_free == 2, "the page that was held still is"


def test_sharing_what_nobody_holds_is_an_error() -> None:
    pool = PagePool(3)
    with pytest.raises(ValueError, match="nobody holds"):
        pool.retain([1])
    assert pool.num_free == 3
    assert len(pool.allocate(3)) == 3


def test_random_use_keeps_the_count() -> None:
    pool, random = PagePool(37), np.random.default_rng(0)
    held: list[np.ndarray] = []
    for _ in range(500):
        if held and random.random() < 0.45:
            pool.release(held.pop(int(random.integers(len(held)))))
        elif held and random.random() < 0.3:
            pages = held[int(random.integers(len(held)))]
            pool.retain(pages)
            held.append(pages)
        elif (count := int(random.integers(1, 8))) <= pool.num_free:
            pages = pool.allocate(count)
            assert len(set(pages.tolist())) == count
            assert not set(pages.tolist()) & {int(page) for other in held for page in other}
            held.append(pages)
        assert pool.num_free == 37 - len({int(page) for pages in held for page in pages})
    for pages in held:
        pool.release(pages)
    assert pool.num_free == 37


@pytest.mark.parametrize("table", [[2, 3, 4], [4, 0, 3]], ids=["run", "scattered"])
@pytest.mark.parametrize(("start", "stop"), [(0, 192), (0, 1), (63, 65), (100, 190), (128, 129)])
def test_what_was_written_is_read(table: list[int], start: int, stop: int) -> None:
    pages = np.array(table, dtype=np.int32)
    cache = KVCache([(2, 3)], 5, dtype=torch.float32, device=torch.device("cpu"))
    k, v = torch.randn(192, 2, 3), torch.randn(192, 2, 3)
    cache.write(0, Writes(torch.from_numpy(slots_of(pages, 0, 192))), k, v)
    found_k, found_v = cache.read(0, pages, start, stop)
    assert torch.equal(found_k, k[start:stop])
    assert torch.equal(found_v, v[start:stop])
    in_pool = found_k.untyped_storage().data_ptr() == cache.keys[0][0].untyped_storage().data_ptr()
    one_run = table == [2, 3, 4] or start // PAGE_TOKENS == (stop - 1) // PAGE_TOKENS
    assert in_pool is one_run, "consecutive pages are read without a copy"


def test_bytes() -> None:
    cache = KVCache([(2, 16), (1, 8)], 3, dtype=torch.bfloat16, device=torch.device("cpu"))
    # One page more than is handed out.
    assert cache.num_bytes == 4 * PAGE_TOKENS * (2 * 16 + 8) * 2 * 2
