"""The machine on which the Hopper kernels are played through as models: warps, barriers, loads, products and stores.

Warps are processes; a schedule may stop any of them between two actions for as long as it likes. Loads land, products
end and stores read at any time after their issue. Taken for granted is that products of a warpgroup run in order and
end when all of its warps have issued them, and that waits and arrivals order memory (proxies, fences).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

WARPS = 2
"""Warps of a consumer in the model: the one whose first thread is elected, and one for the three others."""


class Fault(Exception):
    """What a wrong protocol leads to."""


def claim(fine: bool, what: str) -> None:
    if not fine:
        raise Fault(what)


Condition = Callable[[], bool]
Process = Iterator[Condition | None]
"""Yields what it waits for, or None where others may come in between."""


class Schedule:
    """Runs processes until all have ended, one action at a time.

    Of those that can go on the one with the highest rank does; now and then the one that runs is put last. So a process
    may sleep for as long as the others find something to do, which draws by lot would hardly ever show. Every other
    schedule draws by lot all the same.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.by_lot, self.tired = seed % 2 == 1, False
        self.processes: dict[Process, tuple[str, Condition | None]] = {}
        self.order: list[Process] = []

    def start(self, name: str, process: Process) -> None:
        self.processes[process] = name, None
        self.order.insert(self.random.randint(0, len(self.order)), process)

    def run(self) -> None:
        while self.order:
            process = next((x for x in self._candidates() if self._can_go_on(x)), None)
            if process is None:
                raise Fault("deadlock of " + ", ".join(sorted(name for name, _ in self.processes.values())))
            name, _ = self.processes[process]
            try:
                self.processes[process] = name, next(process)
            except StopIteration:
                del self.processes[process]
                self.order.remove(process)
                continue
            if self.tired or self.random.random() < 0.02:
                self.tired = False
                self.order.remove(process)
                self.order.append(process)

    def pause(self) -> Process:
        """Of a process that may well sleep for long here."""
        for _ in range(self.random.choice((1, 1, 20))):
            self.tired = self.random.random() < 0.3
            yield None

    def under_way(self, *names: str) -> bool:
        """Whether processes of these names have not ended."""
        return any(name in names for name, _ in self.processes.values())

    def _candidates(self) -> Iterator[Process]:
        """In the order of their ranks; or drawn one by one, which leaves those drawn in front."""
        for i in range(len(self.order)):
            if self.by_lot:
                j = i + int(self.random.random() * (len(self.order) - i))
                self.order[i], self.order[j] = self.order[j], self.order[i]
            yield self.order[i]

    def _can_go_on(self, process: Process) -> bool:
        _, condition = self.processes[process]
        return condition is None or condition()


class OfBlock(Schedule):
    """The schedule as one of several thread blocks sees it, which knows what it has under way itself."""

    def __init__(self, schedule: Schedule, block: str) -> None:
        self.all, self.block, self.random = schedule, block, schedule.random

    def start(self, name: str, process: Process) -> None:
        self.all.start(f"{name} of {self.block}", process)

    def run(self) -> None:
        self.all.run()

    def pause(self) -> Process:
        return self.all.pause()

    def under_way(self, *names: str) -> bool:
        return self.all.under_way(*(f"{name} of {self.block}" for name in names))


class Barrier:
    """An mbarrier: a phase ends with its last arrival and the last byte announced. Waits know its parity alone.

    What lands before it is announced counts for the phase all the same, as long as that lacks an arrival.
    """

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.pending = arrivals
        self.loads = self.completed = 0

    def arrive(self) -> None:
        claim(self.pending > 0, "more arrivals than a phase has")
        self.pending -= 1
        self._complete()

    def arrive_expect(self, loads: int = 1) -> None:
        self.loads += loads
        self.arrive()

    def land(self) -> None:
        self.loads -= 1
        self._complete()

    def _complete(self) -> None:
        if self.pending == self.loads == 0:
            self.pending = self.arrivals
            self.completed += 1

    def passes(self, phase: int) -> bool:
        return self.completed % 2 != phase

    def wait(self, at: Position) -> Condition:
        """For the phase of a round; the answer must be that of a counter which never wraps."""
        number, phase = at.round, at.phase

        def passed() -> bool:  # is asked most often of all
            done = self.completed > number
            claim(self.passes(phase) == done, "a wait that two phases have overtaken")
            return done

        return passed


@dataclass(frozen=True)
class Position:
    """A `RingPosition`. Rounds are counted on, and their lowest bit is the phase."""

    size: int
    index: int = 0
    round: int = 0

    @property
    def phase(self) -> int:
        return self.round % 2

    def next(self) -> Position:
        last = self.index + 1 == self.size
        return Position(self.size, 0 if last else self.index + 1, self.round + last)


class NamedBarrier:
    """A hardware barrier: so many warps wait at it, and as many others as ``arrivals`` says only arrive."""

    def __init__(self, arrivals: int, waiting: int = WARPS) -> None:
        self.expected, self.counts, self.generation = [waiting, arrivals], [0, 0], 0

    def arrive(self) -> None:
        self._count(1)

    def sync(self) -> Condition:
        generation = self.generation
        self._count(0)
        return lambda: self.generation > generation

    def _count(self, which: int) -> None:
        self.counts[which] += 1
        claim(self.counts[which] <= self.expected[which], "a turn that was passed on twice")
        if self.counts == self.expected:
            self.counts, self.generation = [0, 0], self.generation + 1


Entry = tuple[list[object], int]
"""Of a buffer."""


@dataclass(frozen=True)
class Read:
    """What a product reads, or a store: an entry of a buffer that must hold this as long as it does."""

    buffer: list[object]
    index: int
    expected: object

    def check(self) -> None:
        found = self.buffer[self.index]
        claim(found == self.expected, f"a read of {found} where {self.expected} is due")


def reading(reads: Iterable[Read]) -> Process:
    """What is read must be there from the first moment to the last."""
    for moment in range(2):
        for read in reads:
            read.check()
        if moment == 0:
            yield None


def writing(to: Iterable[Entry], content: object) -> Process:
    """By ordinary stores."""
    for buffer, i in to:
        buffer[i] = "what is being written"
    yield None
    for buffer, i in to:
        buffer[i] = content


def load(schedule: Schedule, to: Iterable[Entry], content: object, full: Barrier) -> None:
    """A TMA load: whatever was there is lost from now on, what comes is there later."""

    def landing() -> Process:
        yield None
        for buffer, i in to:
            buffer[i] = content
        full.land()

    full.arrive_expect()
    for buffer, i in to:
        buffer[i] = "a load on its way"
    schedule.start("a load", landing())


@dataclass
class Products:
    """The products of a warpgroup, one after the other: each begins when a warp has issued it, and needs all."""

    schedule: Schedule
    issued: list[int] = field(default_factory=lambda: [0] * WARPS)
    done: int = 0

    def issue(self, warp: int, reads: list[Read], content: object = None) -> Result:
        self.issued[warp] += 1
        number = self.issued[warp]
        if self.issued.count(number) == 1 and max(self.issued) == number:
            self.schedule.start("a product", self._run(number, reads))
        return Result(self, number, content)

    def _run(self, number: int, reads: list[Read]) -> Process:
        yield lambda: self.done == number - 1
        for read in reads:
            read.check()
        yield lambda: min(self.issued) >= number
        yield from reading(reads)
        self.done = number

    def wait(self, warp: int, pending: int) -> Condition:
        number = self.issued[warp] - pending
        return lambda: self.done >= number


@dataclass(frozen=True)
class Result:
    """A product's in registers."""

    products: Products
    number: int
    content: object

    def take(self) -> object:
        """For ordinary instructions; or for an end of those that use its operands in registers."""
        claim(self.products.done >= self.number, "registers used while a product has them")
        return self.content


class Stores:
    """The bulk stores of a thread, in groups, and additions to memory: a group reads, and is done some time later."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.issued = schedule, 0
        self.unread: set[int] = set()
        self.under_way: set[int] = set()

    def commit(self, reads: list[Read], done: Callable[[], None]) -> None:
        self.issued += 1
        self.unread.add(self.issued)
        self.under_way.add(self.issued)
        self.schedule.start("a store", self._run(self.issued, reads, done))

    def _run(self, number: int, reads: list[Read], done: Callable[[], None]) -> Process:
        yield None
        yield from reading(reads)
        self.unread.remove(number)
        yield from self.schedule.pause()
        done()
        self.under_way.remove(number)

    def wait_read(self, pending: int = 0) -> Condition:
        last = self.issued - pending
        return lambda: all(number > last for number in self.unread)

    def wait(self) -> Condition:
        last = self.issued
        return lambda: all(number > last for number in self.under_way)
