"""What the models of both Hopper backward kernels share: work tiles, their loader, and the sums of dQ.

With the names of `partials/backward_tiles.j2` and `backward_loads.j2`. Other blocks are there as far as they clear sums
and add to them in turns; a model of many blocks is in `test_backward_gpu`.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tests.unit.protocol import (
    WARPS,
    Barrier,
    Condition,
    Entry,
    Fault,
    NamedBarrier,
    Position,
    Process,
    Read,
    Schedule,
    claim,
    load,
    writing,
)

CONSUMERS = 2
M_TILES = 8
"""Query tiles of a head."""


class KeyTile(NamedTuple):
    """A work tile: for each query head of the group its query tiles, from ``start`` down, then from the last one."""

    begin: int
    end: int
    start: int
    group: int

    def tiles(self) -> int:
        return self.end - self.begin

    def steps(self) -> int:
        return self.group * self.tiles()

    def query_tile_of(self, j: int) -> int:
        return self.start - j if self.start - j >= self.begin else self.start - j + self.tiles()

    def after(self, m: int) -> int:
        return m - 1 if m > self.begin else self.end - 1

    def path(self) -> list[int]:
        """What the texts have to find: the query tile of each step, of those of all heads."""
        down = [*reversed(range(self.begin, self.start + 1)), *reversed(range(self.start + 1, self.end))]
        return [head * M_TILES + m for head in range(self.group) for m in down] if self.tiles() else []


@dataclass(frozen=True)
class Case:
    """A block's work and what its kernel is. ``in_turns`` and the stages are of the narrow kernel.

    ``dout_readers``: consumers that have a part of dV; of the wide kernel perhaps the second alone.
    """

    tiles: tuple[KeyTile, ...]
    deterministic: bool
    shifted: bool
    dead: float  # how many of the query tiles have rows that see nothing
    in_turns: bool = False
    waits_for_dk: bool = False
    q_stages: int = 2
    dout_stages: int = 2
    dout_readers: int = CONSUMERS


def in_pair(i: int) -> Position:
    """Of the i-th use of two buffers."""
    return Position(2, i & 1, i >> 1)


def once(t: int) -> Position:
    """Of what is filled once a work tile."""
    return Position(1, 0, t)


class Block:
    """A thread block: shared memory and barriers that both kernels have, and the sums of dQ.

    ``fault`` names a deliberate mistake. ``adding``: the parts in which a query tile's dQ is added; ``columns``: for
    how many of its columns turns are counted, as many parts each.
    """

    adding: tuple[object, ...]
    columns: int

    def __init__(self, case: Case, schedule: Schedule, fault: str) -> None:
        self.case, self.tiles, self.schedule, self.fault = case, case.tiles, schedule, fault
        readers = WARPS * CONSUMERS + 3 - (fault == "a reader of work not counted")
        self.work: list[int | None] = [None] * 2
        self.work_full, self.work_empty = barriers(2, 1), barriers(2, readers)
        self.k_full, self.v_full, self.landed = Barrier(1), Barrier(1), Barrier(1)
        self.all_added = barriers(2, 2)
        self.q_full, self.q_empty = barriers(case.q_stages, 1), barriers(case.q_stages, CONSUMERS)
        self.dout_full, self.dout_empty = barriers(case.dout_stages, 1), barriers(case.dout_stages, case.dout_readers)
        self.k_empty: Barrier
        self.v_empty: Barrier
        self.named: list[NamedBarrier] = []
        self.k: list[object] = [None] * (CONSUMERS * WARPS)
        self.v: list[object] = [None] * (CONSUMERS * WARPS)
        self.q: list[object] = [None] * case.q_stages
        self.rows: list[object] = [None] * case.q_stages
        self.dout: list[object] = [None] * case.dout_stages
        self.cleared = [False] * len(self.tiles)
        self.sums: set[tuple[int, int, object]] = set()
        self.stored: list[tuple[str, int, int]] = []
        self.warps = 0  # that have not ended
        # Of a query tile's sums: the tiles that add to it, with one of another block before each of them.
        self.own = {m: [t for t, tile in enumerate(self.tiles) if m in tile.path()] for m in range(4 * M_TILES)}
        self.turns = {(m, column): 0 for m in self.own for column in range(self.columns)}

    def named_barrier(self, arrivals: int, waiting: int = WARPS) -> NamedBarrier:
        self.named.append(NamedBarrier(arrivals, waiting))
        return self.named[-1]

    def warp(self, name: str, process: Process) -> None:
        def until_the_end() -> Process:
            yield from process
            self.warps -= 1
            if self.warps == 0:
                claim(not self.schedule.under_way("a load", "a store", "a product"), "the block ends too early")

        self.warps += 1
        self.schedule.start(name, until_the_end())

    def run(self) -> None:
        """The warps that both kernels have; then all of them."""
        self.warp("the loader", Loader(self).run())
        self.schedule.start("blocks that clear sums", self.clear_sums())
        if self.case.deterministic:
            for m, column in self.turns:
                self.let_others_add(m, column)
        self.schedule.run()
        all_of_them = {(t, m, part) for t, tile in enumerate(self.tiles) for m in tile.path() for part in self.adding}
        claim(self.sums == all_of_them, "dQ that was not added")
        results = [(x, t, w) for t in range(len(self.tiles)) for x in ("dV", "dK") for w in range(CONSUMERS)]
        claim(sorted(self.stored) == sorted(results), "results that were not stored")
        claim(all(barrier.counts == [0, 0] for barrier in self.named), "a turn that nobody took")

    # sums of dQ

    def clear_sums(self) -> Process:
        for t in range(len(self.tiles)):
            yield from self.schedule.pause()
            self.cleared[t] = True

    def added(self, t: int) -> Position:
        """Of `all_added`."""
        return once(t) if self.fault == "one barrier for all that was added" else in_pair(t)

    def arrive_all_added(self, t: int) -> Process:
        yield from self.schedule.pause()  # the warp has nothing more to do, and nobody waits for it
        self.all_added[self.added(t).index].arrive()

    def wait_for_zeros(self, t: int) -> Condition:
        return lambda: self.cleared[t]

    def add(self, t: int, m: int, part: object) -> None:
        claim(self.cleared[t], "dQ added before there are zeros")
        claim(m in self.tiles[t].path(), "dQ added to the sums of another query tile")
        claim((t, m, part) not in self.sums, "dQ added twice")
        if self.case.deterministic:
            column = self.adding.index(part) * self.columns // len(self.adding)
            claim(self.turns[m, column] == self.turn(t, m), "dQ added out of turn")
        self.sums.add((t, m, part))

    def turn(self, t: int, m: int) -> int:
        return 2 * self.own[m].index(t) + 1

    def pass_turn_on(self, t: int, m: int, column: int) -> None:
        claim(self.turns[m, column] == self.turn(t, m), "a turn that was not its own")
        size = len(self.adding) // self.columns
        parts = self.adding[column * size : (column + 1) * size]
        claim(all((t, m, part) in self.sums for part in parts), "a turn that was passed on too early")
        self.turns[m, column] += 1
        self.let_others_add(m, column)

    def let_others_add(self, m: int, column: int) -> None:
        def another_block() -> Process:
            yield from self.schedule.pause()
            self.turns[m, column] += 1

        self.schedule.start("another block", another_block())


def barriers(count: int, arrivals: int) -> list[Barrier]:
    return [Barrier(arrivals) for _ in range(count)]


class WorkReader:
    def __init__(self, block: Block) -> None:
        self.block, self.taken, self.number = block, 0, 0

    def next(self) -> Process:
        at = in_pair(self.taken)
        yield self.block.work_full[at.index].wait(at)
        number = self.block.work[at.index]
        claim(number == self.taken, f"work {number} received for {self.taken}")
        yield None
        claim(self.block.work[at.index] == number, f"work {number} overwritten")

    def more(self) -> bool:
        return self.taken < len(self.block.tiles)

    def done(self) -> None:
        self.block.work_empty[in_pair(self.taken).index].arrive()
        self.taken += 1


class Loader:
    def __init__(self, block: Block) -> None:
        self.block, self.schedule, self.fault = block, block.schedule, block.fault
        self.q_at = Position(block.case.q_stages, round=-1)
        self.dout_at = Position(block.case.dout_stages, round=-1)
        self.landed = once(0)
        self.taken = 0

    def run(self) -> Process:
        yield from self.publish()
        for tile in self.block.tiles:
            yield from self.load_tile(tile)
            if self.block.case.shifted:
                yield from self.leave_group()
            self.taken += 1
            yield from self.publish()

    def leave_group(self) -> Process:
        if self.schedule.random.random() < 0.5:  # blocks have not taken the whole group
            at = self.block.added(self.taken)
            yield self.block.all_added[at.index].wait(at)

    def publish(self) -> Process:
        at = in_pair(self.taken)
        if self.fault != "work published without waiting":
            yield self.block.work_empty[at.index].wait(Position(2, at.index, at.round - 1))
        self.block.work[at.index] = self.taken
        yield None
        self.block.work_full[at.index].arrive()

    def load_tile(self, tile: KeyTile) -> Process:
        block, t = self.block, self.taken
        tiles, before = tile.tiles(), once(t - 1)
        if tiles > 0:
            yield from self.load(tile, 0, tile.start)
        if self.fault != "K loaded without waiting":
            yield block.k_empty.wait(before)
        load(self.schedule, entries(block.k), t, block.k_full)
        if self.fault != "V loaded without waiting":
            yield block.v_empty.wait(before)
        load(self.schedule, entries(block.v), t, block.v_full)
        for head in range(tile.group):
            for j in range(head == 0, tiles):
                yield from self.load(tile, head, tile.query_tile_of(j))

    def load(self, tile: KeyTile, head: int, m: int) -> Process:
        block, content = self.block, (self.taken, head * M_TILES + m)
        dead = self.schedule.random.random() < block.case.dead
        if self.fault != "Q loaded without waiting":
            yield block.q_empty[self.q_at.index].wait(self.q_at)
        i = self.q_at.index
        yield from self.fill([(block.q, i), (block.rows, i)], content, block.q_full[i], dead)
        self.q_at = self.q_at.next()
        if self.fault != "dO loaded without waiting":
            yield block.dout_empty[self.dout_at.index].wait(self.dout_at)
        i = self.dout_at.index
        yield from self.fill([(block.dout, i)], content, block.dout_full[i], dead)
        self.dout_at = self.dout_at.next()

    def fill(self, to: list[Entry], content: object, full: Barrier, dead: bool) -> Process:
        """And ``clear``."""
        if not dead:
            load(self.schedule, to, content, full)
            return
        load(self.schedule, to, "rows that see nothing", self.block.landed)
        if self.fault != "rows cleared before they are there":
            yield self.block.landed.wait(self.landed)
        self.landed = self.landed.next()
        yield from writing(to, content)
        full.arrive()


def entries(buffer: list[object]) -> list[Entry]:
    return [(buffer, i) for i in range(len(buffer))]


def reads(buffer: list[object], expected: object, indices: Iterable[int] | None = None) -> list[Read]:
    """Of the entries of a buffer, or some of them."""
    return [Read(buffer, i, expected) for i in (range(len(buffer)) if indices is None else indices)]


def parts(w: int) -> range:
    """What the warps of a consumer have, where each has its own."""
    return range(w * WARPS, w * WARPS + WARPS)


def draw_tiles(draw: random.Random, shifted: bool) -> tuple[KeyTile, ...]:
    """Short tiles and longer ones, often without steps at last."""
    tiles = []
    for _ in range(draw.randint(1, 6)):
        steps = draw.choice((0, 0, 1, 1, 2, 2, 3, 5))
        if shifted:
            steps = draw.choice(SHIFTED_STEPS)
        begin = draw.randint(0, M_TILES - steps)
        start = begin + draw.randrange(steps) if steps else begin - 1
        tiles.append(KeyTile(begin, begin + steps, start, draw.choice((1, 1, 1, 2, 3))))
    if not shifted and draw.random() < 0.3:
        tiles.append(KeyTile(0, 0, -1, 1))
    return tuple(tiles)


SHIFTED_STEPS = (4, 5, 6)
"""A group of tiles that wait for each other has two query tiles for each of them; a group of one does not wait."""

READ, OVERTAKEN, TWICE = "a read of", "overtaken", "passed on twice"
SHARED_FAULTS = {
    "K loaded without waiting": (READ,),
    "Q loaded without waiting": (READ,),
    "work published without waiting": (OVERTAKEN, "overwritten"),
    "a reader of work not counted": (OVERTAKEN,),
    "work given back before the tile is done": (OVERTAKEN, "deadlock"),
    "rows cleared before they are there": (READ,),
    "results not waited for at last": ("the block ends too early",),
}
"""Mistakes that both kernels could have, and what each of them leads to in some case."""


def assert_seen(play: Callable[[int, str], None], cases: int, fault: str, expected: Iterable[str]) -> None:
    missing = set(expected)
    for seed in range(cases):
        try:
            play(seed, fault)
        except Fault as error:
            missing -= {what for what in missing if what in str(error)}
        if not missing:
            return
    raise AssertionError(f"never seen: {missing}")


# --- the text --------------------------------------------------------------------------------------------------

PRIMITIVES = (
    r"mbarrier_\w+|named_barrier_\w+|wgmma_(?:wait|commit)|(?:tma|bulk)_\w+|ld_acquire_gpu|(?:st|add)_release_gpu"
    r"|atomic_add|warp_sync|async_proxy_fence\w*|st(?:_shared|matrix)_\w+|stage_output_chunks|red_add_\w+|exponentiate"
    r"|differenti\w+|read_probabilities|wait_for_zeros|clear_sums_ahead|join_shares"
)
STATE = (
    r"\b(?:if|else|for|while|return|break|first|last|kLast|steps?|step_index|j|m|head|query_tile|number|taken|phase|parity"
    r"|buffer|other|stage|turn|\w+_at|next_\w+)\b"
)
SHARED_STRUCTS = ("WorkReader", "KeyTile", "Loader")
WALK = ("KeyTile.tiles", "KeyTile.query_tile_of", "KeyTile.after")
SHARED_DIGESTS: dict[str, str] = {
    "WorkReader.next": "3c392d2c",
    "WorkReader.done": "c9723d71",
    "KeyTile.KeyTile": "c78f58c5",
    "KeyTile.tiles": "ee3b4d81",
    "KeyTile.query_tile_of": "4430c8db",
    "KeyTile.after": "ddcfe7e7",
    "Loader.run": "5bcfce7c",
    "Loader.leave_group": "9daf62f5",
    "Loader.take": "3555b713",
    "Loader.publish": "00beb0e8",
    "Loader.load_tile": "1a3187a9",
    "Loader.load": "681b6a43",
    "Loader.fill": "52989180",
    "Loader.clear": "a16802be",
    "clear_sums_ahead": "7437ca2f",
    "wait_for_zeros": "a1079146",
}
"""Of what a model has of the partials that both kernels include; below it, of a kernel."""


def functions(text: str, structs: Iterable[str]) -> dict[str, str]:
    """Of structs, and of those outside of them that have to do with sums of dQ."""
    text, found = re.sub(r"//.*|#pragma.*", "", text), {}
    for struct in structs:
        body = text[text.index(f"\nstruct {struct} {{") :]
        for function in re.split(r"\n    DEVICE ", body[: body.index("\n};")])[1:]:
            head, _, rest = function.partition("{")
            found[f"{struct}.{head.partition('(')[0].split()[-1]}"] = rest
    for name in ("clear_sums_ahead", "wait_for_zeros"):
        body = text[text.index(f"\nDEVICE void {name}(") :]
        found[name] = body[body.index("{") : body.index("\n}")]
    return found


def hand_overs(text: str, structs: Iterable[str]) -> dict[str, str]:
    """Of functions that wait, arrive, issue, or call such functions: where they do, and what decides."""
    bodies = functions(text, [*SHARED_STRUCTS, *structs])
    known: set[str] = set()
    found = set(WALK)
    while found != known:
        known = set(found)
        calls = "|".join(sorted({name.rpartition(".")[2] for name in known}))
        call = re.compile(rf"\b(?:{PRIMITIVES}|{calls})\b")
        found |= {name for name, body in bodies.items() if call.search(body)}
    statement = re.compile(f"{call.pattern}|{STATE}")
    return {
        name: "; ".join(" ".join(x.split()) for x in re.split(r"[;{}]", body) if statement.search(x))
        for name, body in bodies.items()
        if name in found
    }


def assert_modelled(text: str, structs: Iterable[str], digests: dict[str, str]) -> None:
    found = hand_overs(text, structs)
    of_text = {name: f"{zlib.crc32(statements.encode()):08x}" for name, statements in found.items()}
    changed = {name: of_text.get(name) for name in of_text.keys() | digests if of_text.get(name) != digests.get(name)}
    said = "\n".join(f"{name}: {found.get(name)}" for name in changed)
    assert not changed, f"the model has to follow the text; then these digests: {changed}\n{said}"


def arrivals(text: str) -> dict[str, str]:
    """Of each mbarrier."""
    return dict(re.findall(r"mbarrier_init\((\w+)\(.*?\), (.*?)\);", text))
