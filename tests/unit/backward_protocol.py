"""What the models of both Hopper backward kernels share: work tiles, who takes and loads them, and global memory.

With the names of `partials/backward_tiles.j2` and `backward_loads.j2`. Several blocks, or clusters of them, take their
tiles from one count and wait for each other; how many need to find room is tried with more of them, step by step, in
`test_backward_gpu`.
"""

from __future__ import annotations

import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.unit.protocol import (
    WARPS,
    Barrier,
    Condition,
    Entry,
    Fault,
    NamedBarrier,
    OfBlock,
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
"""Query tiles of a head, at most."""


class Walk(NamedTuple):
    """The query tiles of each head to which a key tile adds: from ``start`` down, then from the last one."""

    begin: int
    end: int
    start: int


class KeyTile(NamedTuple):
    """A work tile. ``place``: in its group of turns."""

    head: int
    n_tile: int
    begin: int
    end: int
    start: int
    group: int
    place: int

    def tiles(self) -> int:
        return self.end - self.begin

    def steps(self) -> int:
        return self.group * self.tiles()

    def query_tile_of(self, j: int) -> int:
        return self.start - j if self.start - j >= self.begin else self.start - j + self.tiles()

    def after(self, m: int) -> int:
        return m - 1 if m > self.begin else self.end - 1

    def query_tile(self, head: int, m: int) -> int:
        return (self.head * self.group + head) * M_TILES + m

    def path(self) -> list[int]:
        """What the texts have to find: the query tile of each step, of those of all heads."""
        down = [*reversed(range(self.begin, self.start + 1)), *reversed(range(self.start + 1, self.end))]
        return [self.query_tile(head, m) for head in range(self.group) for m in down] if self.tiles() else []


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call: ``walks`` of the key tiles of each of ``heads``, which have a ``group`` of query heads each.

    ``room``: for how many blocks, or clusters, there is. ``dead``: how many of the query tiles have rows that see
    nothing. ``converts``: dQ is made of its sums, too. The others are as in `BackwardGrid`.
    """

    walks: tuple[Walk, ...]
    heads: int
    group: int
    shares: int
    section: int
    cleared_heads: int
    turn_group: int
    turn_shift: int
    deterministic: bool
    room: int
    dead: float
    converts: bool

    def tiles(self) -> list[KeyTile]:
        """In the order in which they are begun."""
        n_tiles, size = len(self.walks), self.turn_group
        tiles = []
        for first in range(0, self.heads, self.section):
            here = range(first, min(self.heads, first + self.section))
            if self.turn_shift:
                groups = [range(n_tiles)[i : i + size] for i in range(0, n_tiles, size)]
                tiles += [self.tile(head, i) for group in groups for head in here for i in group]
            else:
                tiles += [self.tile(head, i) for i in range(n_tiles) for head in here]
        return tiles

    def tile(self, head: int, n_tile: int) -> KeyTile:
        begin, end, start = self.walks[n_tile]
        place = n_tile % self.turn_group
        start += self.turn_shift * place
        return KeyTile(head, n_tile, begin, end, start - (end - begin if start >= end else 0), self.group, place)

    def group_size(self, tile: KeyTile) -> int:
        return min(self.turn_group, len(self.walks) - (tile.n_tile - tile.place))

    def turn(self, tile: KeyTile, m: int) -> int:
        """Without a shift the key tiles before it; under a causal mask all of these add to the query tile."""
        if self.turn_shift == 0:
            return sum(walk.begin <= m < walk.end for walk in self.walks[: tile.n_tile])
        group_start, size = tile.n_tile - tile.place, self.group_size(tile)
        first = min(size, -(-(m + 1) // self.turn_shift))
        return group_start + (tile.place - first if tile.place >= first else size - first + tile.place)


def in_pair(i: int) -> Position:
    """Of the i-th use of two buffers."""
    return Position(2, i & 1, i >> 1)


def once(t: int) -> Position:
    """Of what is filled once a work tile."""
    return Position(1, 0, t)


def barriers(count: int, arrivals: int) -> list[Barrier]:
    return [Barrier(arrivals) for _ in range(count)]


class Grid:
    """Global memory, and what has to stand there at last.

    ``fault`` names a deliberate mistake. ``adding``: the parts in which a query tile's dQ is added, by the columns that
    have turns of their own. ``results``: the parts of a work tile's dK and dV.
    """

    def __init__(
        self,
        case: Case,
        schedule: Schedule,
        fault: str,
        adding: Mapping[object, tuple[object, ...]],
        results: tuple[object, ...],
    ) -> None:
        self.case, self.schedule, self.fault, self.tiles = case, schedule, fault, case.tiles()
        self.adding, self.results = adding, results
        self.column_of = {part: column for column, parts in adding.items() for part in parts}
        self.count = 0
        self.cleared = Counter[int]()
        self.turns = Counter[tuple[int, object]]()
        self.sums: set[tuple[int, int, object]] = set()
        self.joined = Counter[tuple[int, int, object]]()
        self.kv_sums: dict[object, int] = {}
        self.added = Counter[int]()
        self.converted = 0
        self.made: set[int] = set()
        self.stored: list[tuple[int, object]] = []

    def check(self) -> None:
        parts = [part for parts in self.adding.values() for part in parts]
        all_of_them = {(t, m, part) for t, tile in enumerate(self.tiles) for m in tile.path() for part in parts}
        claim(self.sums == all_of_them, "dQ that was not added")
        claim(self.made == set(range(self.query_heads if self.case.converts else 0)), "dQ that was not made")
        results = [(t, part) for t in range(len(self.tiles)) for part in self.results if self.is_stored(t)]
        claim(Counter(self.stored) == Counter(results), "results that were not stored")

    def take(self) -> int:
        """The next number; beyond the last: there is none any more."""
        self.count += 1
        return self.count - 1

    def group_end(self, t: int) -> int:
        return t - self.tiles[t].place + self.case.group_size(self.tiles[t])

    # sums of dQ

    def clear(self, t: int) -> bool:
        """Whether there are zeros for the tile."""
        head = self.tiles[t].head
        return head < self.case.cleared_heads or self.cleared[head] == len(self.case.walks)

    def wait_for_zeros(self, t: int) -> Condition:
        return lambda: self.clear(t)

    def clear_sums_ahead(self, t: int) -> Process:
        yield from self.schedule.pause()
        self.cleared[self.tiles[t].head + self.case.cleared_heads] += 1

    def turn(self, t: int, query_tile: int) -> int:
        return self.case.turn(self.tiles[t], query_tile % M_TILES)

    def is_turn(self, t: int, query_tile: int, column: object) -> bool:
        return self.turns[query_tile, column] == self.turn(t, query_tile)

    def add(self, t: int, query_tile: int, part: object) -> None:
        claim(self.clear(t), "dQ added before there are zeros")
        claim(query_tile in self.tiles[t].path(), "dQ added to the sums of another query tile")
        claim((t, query_tile, part) not in self.sums, "dQ added twice")
        if self.case.deterministic:
            claim(self.is_turn(t, query_tile, self.column_of[part]), "dQ added out of turn")
        self.sums.add((t, query_tile, part))

    def pass_turn_on(self, t: int, query_tile: int, column: object) -> None:
        claim(self.is_turn(t, query_tile, column), "a turn that was not its own")
        added = all((t, query_tile, part) in self.sums for part in self.adding[column])
        claim(added, "a turn that was passed on too early")
        self.turns[query_tile, column] += 1

    # dQ

    @property
    def query_heads(self) -> int:
        return self.case.heads * self.case.group

    def count_added(self, t: int) -> None:
        self.added[self.tiles[t].head] += 1

    def convert_sums(self, adders: int) -> Process:
        """By a warp; a query head at a time, for the sake of speed, instead of 64 of its rows."""
        while self.case.converts:
            yield None
            query_head, self.converted = self.converted, self.converted + 1
            if query_head >= self.query_heads:
                break
            head = query_head // self.case.group
            if self.fault != "dQ made of its sums without waiting":
                yield lambda head=head: self.added[head] == adders * len(self.case.walks)
            yield None
            parts = [part for parts in self.adding.values() for part in parts]
            paths = [(t, m) for t, tile in enumerate(self.tiles) for m in tile.path() if m // M_TILES == query_head]
            claim(all((*at, part) in self.sums for at in paths for part in parts), "dQ made of sums that lack some")
            claim(query_head not in self.made, "dQ made twice")
            self.made.add(query_head)

    # dK and dV

    def share(self, t: int) -> int:
        return self.tiles[t].head % self.case.shares

    def is_stored(self, t: int) -> bool:
        return self.share(t) == self.case.shares - 1

    def join_shares(self, t: int, part: object, warp: int, barrier: NamedBarrier) -> Process:
        """By a warp of the consumer that has this part of dK and dV."""
        if self.case.shares == 1:
            return
        share, place = self.share(t), (self.tiles[t].head // self.case.shares, self.tiles[t].n_tile, part)
        if share > 0:
            if warp == 0 and self.fault != "shares joined without waiting":
                yield lambda: self.joined[place] == share
            yield barrier.sync()
            claim(self.kv_sums.get((*place, warp)) == share - 1, "dK and dV that lack a share")
        if self.is_stored(t):
            return
        yield None
        self.kv_sums[(*place, warp)] = share
        if self.fault != "shares handed on before all warps have stored them":
            yield barrier.sync()
        if warp == 0:
            self.joined[place] = share + 1

    def store(self, t: int, part: object) -> None:
        if self.is_stored(t):
            self.stored.append((t, part))


class Block:
    """A thread block: what both kernels have in shared memory, and its warps."""

    def __init__(self, grid: Grid, name: str, adders: int) -> None:
        self.grid, self.case, self.fault, self.tiles, self.name = grid, grid.case, grid.fault, grid.tiles, name
        self.schedule = OfBlock(grid.schedule, name)
        readers = WARPS * CONSUMERS + 3 - (self.fault == "a reader of work not counted")
        self.numbers: list[int] = []  # that were taken
        self.work: list[object] = [None] * 2
        self.work_full, self.work_empty = barriers(2, 1), barriers(2, readers)
        self.all_added = barriers(2, adders)
        self.landed = Barrier(1)
        self.named: list[NamedBarrier] = []
        self.one_consumer = [self.named_barrier(0) for _ in range(CONSUMERS)]
        self.warps = 0  # that have not ended

    def named_barrier(self, arrivals: int, waiting: int = WARPS) -> NamedBarrier:
        self.named.append(NamedBarrier(arrivals, waiting))
        return self.named[-1]

    def warp(self, name: str, process: Process) -> None:
        def until_the_end() -> Process:
            yield from process
            self.warps -= 1
            if self.warps == 0:
                claim(not self.schedule.under_way(*UNDER_WAY), "the block ends too early")
                claim(all(barrier.counts == [0, 0] for barrier in self.named), "a turn that nobody took")

        self.warps += 1
        self.schedule.start(name, until_the_end())

    def added(self, taken: int) -> Position:
        """Of `all_added`."""
        return once(taken) if self.fault == "one barrier for all that was added" else in_pair(taken)


UNDER_WAY = ("a load", "a store", "a product", "a copy", "an arrival")


class WorkReader:
    def __init__(self, block: Block) -> None:
        self.block, self.taken, self.number = block, 0, 0

    def next(self) -> Process:
        at = in_pair(self.taken)
        if self.block.fault != "work read without waiting":
            yield self.block.work_full[at.index].wait(at)
        number = self.block.work[at.index]
        claim(number in self.block.numbers[self.taken : self.taken + 1], f"work {number} received as the next")
        yield None
        claim(self.block.work[at.index] == number, f"work {number} overwritten")
        self.number = self.block.numbers[self.taken]

    def more(self) -> bool:
        return self.number < len(self.block.tiles)

    def done(self) -> None:
        self.block.work_empty[in_pair(self.taken).index].arrive()
        self.taken += 1


class TileLoads:
    """The loader's loop. `take`, `load_tile` and what they call are each kernel's own."""

    chooses = True

    def __init__(self, block: Block) -> None:
        self.block, self.grid, self.schedule, self.fault = block, block.grid, block.schedule, block.fault
        self.landed = once(0)
        self.taken = 0

    def take(self) -> Process:
        """Appends to the block's numbers."""
        raise NotImplementedError

    def load_tile(self, t: int, tile: KeyTile) -> Process:
        raise NotImplementedError

    def run(self) -> Process:
        while True:
            yield from self.schedule.pause()  # other blocks may be faster
            yield from self.take()
            t = self.block.numbers[self.taken]
            yield from self.publish(t)
            if t >= len(self.block.tiles):
                break
            yield from self.load_tile(t, self.block.tiles[t])
            if self.chooses and self.block.case.turn_shift != 0:
                yield from self.leave_group(self.grid.group_end(t))
            self.taken += 1

    def leave_group(self, group_end: int) -> Process:
        if self.grid.count < group_end and self.fault != "two tiles of a group taken":
            at = self.block.added(self.taken)
            yield self.block.all_added[at.index].wait(at)

    def publish(self, t: int) -> Process:
        at = in_pair(self.taken)
        if self.fault != "work published without waiting":
            yield self.block.work_empty[at.index].wait(Position(2, at.index, at.round - 1))
        self.block.work[at.index] = t
        yield None
        self.block.work_full[at.index].arrive()

    def fill(self, to: list[Entry], content: object, full: Barrier, dead: bool = False) -> Process:
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

    def is_dead(self) -> bool:
        return self.schedule.random.random() < self.block.case.dead


def entries(buffer: list[object]) -> list[Entry]:
    return [(buffer, i) for i in range(len(buffer))]


def reads(buffer: list[object], expected: object, indices: Iterable[int] | None = None) -> list[Read]:
    """Of the entries of a buffer, or some of them."""
    return [Read(buffer, i, expected) for i in (range(len(buffer)) if indices is None else indices)]


def parts(w: int) -> range:
    """What the warps of a consumer have, where each has its own."""
    return range(w * WARPS, w * WARPS + WARPS)


def draw_call(draw: random.Random, most_steps: int, fault: str) -> dict[str, Any]:
    """The fields of a `Case`: short tiles and longer ones, of ``most_steps`` about, often without steps at last."""
    in_groups = fault in OF_GROUPS
    deterministic = in_groups or draw.random() < 0.5
    common = {"deterministic": deterministic, "dead": draw.choice((0.0, 0.0, 0.3))}
    if in_groups or (deterministic and draw.random() < 0.4):
        m_tiles = draw.choice((1, 4, 4, 4, 5, 6))
        n_tiles = draw.choice((1, 2, 2, 2, 3, 4))
        turn_group = max(1, min(n_tiles, m_tiles // 2, draw.choice((2, 3))))
        walks = (Walk(0, m_tiles, m_tiles - 1),) * n_tiles
        group = 1
        heads = max(1, min(4, 2 * most_steps // (n_tiles * m_tiles)))
        section = draw.randint(1, heads)
        shift = min(2, m_tiles // turn_group)
        room = turn_group + draw.choice((0, 0, 1))
        order = {"turn_group": turn_group, "turn_shift": shift, "section": section, "room": room, "shares": 1}
    else:
        group = draw.choice((1, 1, 1, 2, 3))
        shares, heads = draw.choice(((1, 1), (1, 2), (1, 3), (2, 2), (2, 4), (3, 3)))
        walks = tuple(draw_walk(draw, most_steps // (heads * group)) for _ in range(draw.choice((1, 1, 2, 3))))
        section, room = draw.randint(1, heads), draw.choice((1, 1, 2))
        order = {"turn_group": len(walks), "turn_shift": 0, "section": section, "room": room, "shares": shares}
    cleared = min(heads, section * draw.choice((1, 1, 2)))
    common["converts"] = draw.random() < 0.7
    return common | order | {"walks": walks, "heads": heads, "group": group, "cleared_heads": cleared}


def draw_walk(draw: random.Random, most_steps: int) -> Walk:
    steps = min(most_steps, draw.choice((0, 0, 1, 1, 2, 2, 3, 5)))
    begin = draw.randint(0, M_TILES - steps)
    return Walk(begin, begin + steps, begin + draw.randrange(steps) if steps else begin - 1)


READ, OVERTAKEN, TWICE = "a read of", "overtaken", "passed on twice"
OF_GROUPS = (
    "two tiles of a group taken",
    "one barrier for all that was added",
    "the second's additions not counted",
    "all said to be added beforehand",
)
"""Mistakes that only tiles with a shift of turns would show."""
SHARED_FAULTS = {
    "work read without waiting": ("received as the next",),
    "work published without waiting": (OVERTAKEN,),
    "a reader of work not counted": (OVERTAKEN,),
    "work given back before the tile is done": (OVERTAKEN,),
    "rows cleared before they are there": (READ,),
    "two tiles of a group taken": ("deadlock",),
    "one barrier for all that was added": (OVERTAKEN,),
    "shares joined without waiting": ("lack a share",),
    "shares handed on before all warps have stored them": ("lack a share",),
    "dQ made of its sums without waiting": ("sums that lack some",),
    "additions counted before they are made": ("sums that lack some",),
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
    r"|differenti\w+|read_probabilities|wait_for_zeros|clear_sums_ahead|join_shares|convert_\w+|st_peer_\w+|cluster_sync"
)
STATE = (
    r"\b(?:if|else|for|while|return|break|first|last|kLast|steps?|step_index|j|m|head|query_tile|number|taken|phase|parity"
    r"|buffer|before|other|made|stage|turn|share|\w+_at|next_\w+|k(?:More|First|Adds|Chooses|Chunks\w*))\b"
)
SHARED_STRUCTS = ("WorkReader", "KeyTile", "TileLoads")
WALK = ("KeyTile.tiles", "KeyTile.query_tile_of", "KeyTile.after", "KeyTile.turn", "KeyTile.query_tile")
OF_MEMORY = ("clear_sums_ahead", "wait_for_zeros", "join_shares", "convert_sums")
SHARED_DIGESTS: dict[str, str] = {
    "WorkReader.next": "3c392d2c",
    "WorkReader.done": "c9723d71",
    "KeyTile.KeyTile": "2bee466e",
    "KeyTile.tiles": "ee3b4d81",
    "KeyTile.query_tile_of": "4430c8db",
    "KeyTile.after": "ddcfe7e7",
    "KeyTile.turn": "ee960516",
    "KeyTile.query_tile": "574840a5",
    "TileLoads.run": "262b7192",
    "TileLoads.leave_group": "9daf62f5",
    "TileLoads.publish": "00beb0e8",
    "TileLoads.fill": "5358a391",
    "TileLoads.clear": "a16802be",
    "clear_sums_ahead": "7c062784",
    "wait_for_zeros": "a1079146",
    "join_shares": "de50ec67",
    "convert_sums": "086341d1",
}
"""Of what a model has of the partials that both kernels include; below it, of a kernel."""


def functions(text: str, structs: Iterable[str]) -> dict[str, str]:
    """Of structs, and of those outside of them that have to do with global memory."""
    text, found = re.sub(r"//.*|#pragma.*", "", text), {}
    for struct in structs:
        found_at = re.search(rf"\nstruct {struct}\b[^;{{]*{{", text)
        assert found_at, struct
        body = text[found_at.start() :]
        for function in re.split(r"\n    DEVICE ", body[: body.index("\n};")])[1:]:
            head, _, rest = function.partition("{")
            found[f"{struct}.{head.partition('(')[0].split()[-1]}"] = rest
    for name in OF_MEMORY:
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
        call = calls(known)
        found |= {name for name, body in bodies.items() if call.search(body)}
    # What the partials say is the same for both kernels: of these they call the loader's functions alone.
    call_of_shared = calls(name for name in known if is_shared(name) or name.startswith("Loader."))
    said = {}
    for name in found:
        statement = re.compile(f"{(call_of_shared if is_shared(name) else call).pattern}|{STATE}")
        said[name] = "; ".join(" ".join(x.split()) for x in re.split(r"[;{}]", bodies[name]) if statement.search(x))
    return said


def is_shared(name: str) -> bool:
    return name.partition(".")[0] in (*SHARED_STRUCTS, *OF_MEMORY)


def calls(names: Iterable[str]) -> re.Pattern[str]:
    called = "|".join(sorted({name.rpartition(".")[2] for name in names}))
    return re.compile(rf"\b(?:{PRIMITIVES}|{called})\b")


def assert_modelled(text: str, structs: Iterable[str], digests: dict[str, str]) -> None:
    found = hand_overs(text, structs)
    of_text = {name: f"{zlib.crc32(statements.encode()):08x}" for name, statements in found.items()}
    changed = {name: of_text.get(name) for name in of_text.keys() | digests if of_text.get(name) != digests.get(name)}
    said = "\n".join(f"{name}: {found.get(name)}" for name in changed)
    assert not changed, f"the model has to follow the text; then these digests: {changed}\n{said}"


def arrivals(text: str) -> dict[str, str]:
    """Of each mbarrier."""
    return dict(re.findall(r"mbarrier_init\((\w+)\(.*?\), (.*?)\);", text))
