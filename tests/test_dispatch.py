"""Who gets which rows, and what a worker's death means for them."""

from __future__ import annotations

from collections.abc import Callable

from longbatch.run.dispatch import Assignment, Dispatcher


def always(seconds: float) -> bool:
    return True


def wave(number: int, *entries: int, alone: bool = False, seconds: float = 1.0) -> Assignment:
    return Assignment(number, entries, alone, seconds)


def dispatcher(
    *waves: Assignment,
    deaths: Callable[[int], int] = lambda entry: 0,
    suspects: Callable[[int], bool] = lambda entry: False,
) -> Dispatcher:
    return Dispatcher(waves, deaths, suspects)


def take(found: Dispatcher, worker: str = "w0") -> Assignment:
    """The next assignment, begun at once."""
    assert found.next_for(worker, always) is not None
    return found.begin(worker)


def test_waves_in_order_two_at_a_time() -> None:
    found = dispatcher(wave(0, 0, 1), wave(1, 2), wave(2, 3))
    assert found.next_for("w0", always) == wave(0, 0, 1)
    assert found.next_for("w0", always) == wave(1, 2)
    assert found.next_for("w0", always) is None
    assert found.next_for("w1", always) == wave(2, 3)
    assert (found.num_left, found.num_held) == (4, 4)


def test_a_wave_that_is_under_way_counts_until_its_last_row() -> None:
    found = dispatcher(wave(0, 0, 1), wave(1, 2), wave(2, 3))
    take(found)
    assert found.next_for("w0", always) is not None
    assert found.next_for("w0", always) is None
    found.finish("w0", 0)
    assert found.next_for("w0", always) is None
    found.finish("w0", 1)
    assert found.next_for("w0", always) == wave(2, 3)


def test_only_what_fits_is_handed_out() -> None:
    found = dispatcher(wave(0, 0, seconds=100.0), wave(1, 1, seconds=5.0))
    assert found.next_for("w0", lambda seconds: seconds < 10) == wave(1, 1, seconds=5.0)
    assert not found.anything(lambda seconds: seconds < 10)
    assert found.anything(always)


def test_rows_under_way_at_a_death_run_alone_before_all_others() -> None:
    found = dispatcher(wave(0, 0, 1, 2, seconds=3.0), wave(1, 3), wave(2, 4))
    take(found)
    assert found.next_for("w0", always) == wave(1, 3)
    found.finish("w0", 1)
    verdict = found.lose("w0")
    assert (verdict.struck, verdict.aside) == ((0, 2), ())
    order = [take(found, f"w{i}") for i in range(4)]
    assert order == [wave(0, 0, alone=True), wave(0, 2, alone=True), wave(1, 3), wave(2, 4)]


def test_two_deaths_put_a_row_aside() -> None:
    found = dispatcher(wave(0, 0, 1))
    take(found)
    found.lose("w0")
    assert take(found).entries == (0,)
    verdict = found.lose("w0")
    assert (verdict.struck, verdict.aside) == ((0,), (0,))
    assert found.num_left == 1
    assert take(found).entries == (1,)
    found.finish("w0", 1)
    assert found.num_left == 0


def test_the_rows_of_another_worker_are_left_alone() -> None:
    found = dispatcher(wave(0, 0), wave(1, 1))
    take(found, "w0")
    take(found, "w1")
    assert found.lose("w0").struck == (0,)
    assert found.begun("w1") == (1,)


def test_nothing_is_held_beside_a_row_that_runs_alone() -> None:
    found = dispatcher(wave(0, 0, 1), wave(1, 2), suspects={0}.__contains__)
    assert found.next_for("w0", always) == wave(0, 0, alone=True, seconds=0.5)
    assert found.next_for("w0", always) is None
    found.begin("w0")
    assert found.next_for("w0", always) is None
    found.finish("w0", 0)
    assert take(found) == wave(0, 1)
    assert found.next_for("w0", always) == wave(1, 2)


def test_a_row_that_runs_alone_waits_for_what_the_worker_holds() -> None:
    found = dispatcher(wave(0, 0), wave(1, 1))
    take(found, "w0")
    take(found, "w1")
    found.lose("w0")
    assert found.next_for("w1", always) is None
    found.finish("w1", 1)
    assert found.next_for("w1", always) == wave(0, 0, alone=True)


def test_deaths_of_earlier_runs_count() -> None:
    found = dispatcher(wave(0, 0, 1, 2, 3), deaths={1: 1, 2: 2}.get, suspects={3}.__contains__)  # type: ignore[arg-type]
    assert found.aside == [2]
    assert [take(found, f"w{i}").entries for i in range(3)] == [(1,), (3,), (0,)]


def test_deaths_of_earlier_runs_count_as_the_first_of_two() -> None:
    found = dispatcher(wave(0, 1), deaths=lambda entry: 1)
    take(found)
    assert found.lose("w0").aside == (1,)


def test_a_suspect_has_two_lives_of_its_own() -> None:
    found = dispatcher(wave(0, 5), suspects=lambda entry: True)
    assert take(found).alone
    assert found.lose("w0").aside == ()


def test_a_worker_that_ends_well_gives_back_what_it_holds_without_blame() -> None:
    found = dispatcher(wave(0, 0, 1, 2), wave(1, 3))
    take(found)
    assert found.next_for("w0", always) is not None
    found.finish("w0", 1)
    found.give_back("w0")
    assert (found.num_left, found.num_held) == (3, 0)
    assert take(found).entries == (0, 2)
    assert take(found, "w1").entries == (3,)
    assert found.lose("w0").aside == ()


def test_a_death_before_anything_began_blames_nobody_the_first_time() -> None:
    found = dispatcher(wave(0, 0, 1))
    assert found.next_for("w0", always) is not None
    assert found.lose("w0").struck == ()
    assert found.next_for("w0", always) == wave(0, 0, 1)
    assert found.lose("w0", blames_waiting=True).struck == (0, 1)
    assert found.next_for("w0", always) == wave(0, 0, alone=True, seconds=0.5)
    assert found.lose("w0").struck == ()
    assert found.next_for("w0", always) == wave(0, 0, alone=True, seconds=0.5)
    verdict = found.lose("w0", blames_waiting=True)
    assert (verdict.struck, verdict.aside) == ((0,), (0,))


def test_a_worker_that_held_nothing() -> None:
    found = dispatcher(wave(0, 0))
    assert found.lose("w0").struck == ()
    found.give_back("w1")
    assert found.num_left == 1
