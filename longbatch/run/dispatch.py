"""Who works on what: waves waiting, handed out, begun; and what becomes of them when a worker dies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

# Waves that a worker holds at a time: the one it works on and one whose prompts it makes meanwhile.
OUTSTANDING = 2
# Deaths after which a row is put aside.
MOST_STRIKES = 2


@dataclass(frozen=True, slots=True)
class Assignment:
    """Index entries that go through a worker together. wave: its number in the plan. alone: nothing else may be
    under way in the worker meanwhile. seconds: predicted prefill."""

    wave: int
    entries: tuple[int, ...]
    alone: bool
    seconds: float


@dataclass(slots=True)
class _Held:
    """What one worker has: assignments not begun, and entries begun and not finished."""

    waiting: deque[Assignment] = field(default_factory=deque)
    begun: dict[int, Assignment] = field(default_factory=dict)

    @property
    def num_entries(self) -> int:
        return len(self.begun) + sum(len(assignment.entries) for assignment in self.waiting)

    @property
    def has_alone(self) -> bool:
        return any(assignment.alone for assignment in (*self.waiting, *islice(self.begun.values(), 1)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a death means. struck: entries that were under way. aside: those of them that had their last chance."""

    struck: tuple[int, ...]
    aside: tuple[int, ...]


class Dispatcher:
    """Hands out assignments in order, those that run alone first.

    deaths: how many deaths of a worker count against an entry from earlier runs. suspects: whether an entry should
    run alone for another reason.
    """

    def __init__(
        self,
        assignments: Iterable[Assignment],
        deaths: Callable[[int], int],
        suspects: Callable[[int], bool],
    ) -> None:
        self._queue: deque[Assignment] = deque()
        self._alone: deque[Assignment] = deque()
        self._held: dict[str, _Held] = {}
        self._strikes: dict[int, int] = {}
        self.aside: list[int] = []
        for assignment in assignments:
            apart: dict[int, None] = {}
            for entry in assignment.entries:
                count = deaths(entry)
                if count:
                    self._strikes[entry] = count
                if count or suspects(entry):
                    apart[entry] = None
            rest = tuple(entry for entry in assignment.entries if entry not in apart)
            if rest:
                self._queue.append(Assignment(assignment.wave, rest, False, assignment.seconds))
            for entry in apart:
                self._give_chance(entry, assignment)

    @property
    def num_left(self) -> int:
        """Entries that have no result yet and are not put aside."""
        return sum(len(assignment.entries) for assignment in (*self._queue, *self._alone)) + self.num_held

    @property
    def num_held(self) -> int:
        """Entries that workers hold, begun or not, and have not finished."""
        return sum(held.num_entries for held in self._held.values())

    def next_for(self, worker: str, fits: Callable[[float], bool]) -> Assignment | None:
        """An assignment for a worker that can take one and for which there is time; None otherwise.

        Beside one that runs alone a worker holds nothing: not even the prompts of others are made meanwhile.
        """
        held = self._held.setdefault(worker, _Held())
        if len(held.waiting) + bool(held.begun) >= OUTSTANDING or held.has_alone:
            return None
        for queue in (self._alone, self._queue):
            for assignment in queue:
                if fits(assignment.seconds):
                    if assignment.alone and held.num_entries:
                        return None
                    queue.remove(assignment)
                    held.waiting.append(assignment)
                    return assignment
        return None

    def anything(self, fits: Callable[[float], bool]) -> bool:
        """Whether something waits that there is time for."""
        return any(fits(assignment.seconds) for assignment in (*self._alone, *self._queue))

    def begin(self, worker: str) -> Assignment:
        """The worker starts on the oldest assignment that it holds."""
        held = self._held[worker]
        assignment = held.waiting.popleft()
        held.begun.update(dict.fromkeys(assignment.entries, assignment))
        return assignment

    def finish(self, worker: str, entry: int) -> None:
        """The worker has a result for the entry."""
        self._held[worker].begun.pop(entry, None)

    def under_way(self, worker: str) -> int:
        """Entries that the worker has begun and not finished."""
        return len(self.begun(worker))

    def begun(self, worker: str) -> tuple[int, ...]:
        """Those entries."""
        return tuple(self._held[worker].begun) if worker in self._held else ()

    def give_back(self, worker: str) -> None:
        """The worker ended, and no row is to blame: whatever it holds goes back to the front."""
        held = self._held.pop(worker, _Held())
        # By identity: hashing an assignment takes time for each of its entries.
        unfinished: dict[int, list[int]] = {}
        assignments = {id(assignment): assignment for assignment in held.begun.values()}
        for entry, assignment in held.begun.items():
            unfinished.setdefault(id(assignment), []).append(entry)
        begun = [replace(assignments[number], entries=tuple(entries)) for number, entries in unfinished.items()]
        self._return([*begun, *held.waiting])

    def lose(self, worker: str, *, blames_waiting: bool = False) -> Verdict:
        """The worker is dead. What it had not begun goes back to the front; what was under way gets a strike, and
        another chance alone or none. blames_waiting: where nothing was, what it was about to begin gets the strike,
        because making the prompts may have killed it."""
        held = self._held.pop(worker, _Held())
        if blames_waiting and not held.begun and held.waiting:
            first = held.waiting.popleft()
            held.begun = dict.fromkeys(first.entries, first)
        self._return(held.waiting)
        struck = list(held.begun)
        aside = []
        for entry in struck:
            self._strikes[entry] = self._strikes.get(entry, 0) + 1
            if self._give_chance(entry, held.begun[entry]):
                aside.append(entry)
        return Verdict(tuple(struck), tuple(aside))

    def _return(self, assignments: Iterable[Assignment]) -> None:
        for assignment in reversed(list(assignments)):
            (self._alone if assignment.alone else self._queue).appendleft(assignment)

    def _give_chance(self, entry: int, assignment: Assignment) -> bool:
        """Queue the entry alone, or put it aside (True)."""
        if self._strikes.get(entry, 0) >= MOST_STRIKES:
            self.aside.append(entry)
            return True
        share = assignment.seconds / max(1, len(assignment.entries))
        self._alone.append(Assignment(assignment.wave, (entry,), True, share))
        return False
