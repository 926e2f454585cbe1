"""The hand-overs of the Hopper backward kernel for head dims up to 128, played through as a model.

The model follows `backward_sm90.cu.j2` function by function, with the names of that text, as `test_hopper_protocol`
does the forward kernel. Loader, adders, storer and the warps of each consumer are processes of their own
(`tests.unit.protocol`). Found are:

- a deadlock: nobody can go on;
- a wait that two phases have overtaken: parity cannot tell it from none;
- a read of another tile than the one that is due, or of a buffer that is overwritten meanwhile;
- more arrivals at a barrier than its phase has; a staging buffer or turn that is passed on twice, or that nobody takes;
- dQ that is added twice or not at all, to another query tile, out of turn or before there are zeros;
- shares of dK and dV that are not joined;
- loads, products and stores that are under way when a block ends.

Not seen is what `test_hopper_protocol` names. The models are kept by hand: when a kernel has changed,
`test_the_text_is_the_one_that_was_modelled` says that its model has to follow.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import pytest

from cuflash.kernels import select_config
from cuflash.problem import AttentionProblem
from cuflash.render import render
from tests.unit.backward_protocol import (
    CONSUMERS,
    M_TILES,
    OVERTAKEN,
    READ,
    SHARED_DIGESTS,
    SHARED_FAULTS,
    TWICE,
    Block,
    Case,
    Grid,
    KeyTile,
    TileLoads,
    WorkReader,
    arrivals,
    assert_modelled,
    assert_seen,
    barriers,
    draw_call,
    entries,
    functions,
    once,
    parts,
    reads,
)
from tests.unit.protocol import (
    WARPS,
    Barrier,
    Condition,
    Position,
    Process,
    Products,
    Read,
    Schedule,
    Stores,
    claim,
    load,
    reading,
    writing,
)

pytestmark = pytest.mark.slow

ADDERS = 2


@dataclass(frozen=True, kw_only=True)
class NarrowCase(Case):
    waits_for_dk: bool
    q_stages: int
    dout_stages: int


class Kernel(Block):
    case: NarrowCase

    def __init__(self, grid: Grid, name: str) -> None:
        super().__init__(grid, name, ADDERS)
        case = self.case
        self.k_full, self.v_full, self.k_empty, self.v_empty = (Barrier(n) for n in (1, 1, CONSUMERS, 1))
        self.q_full, self.q_empty = barriers(case.q_stages, 1), barriers(case.q_stages, CONSUMERS)
        self.dout_full, self.dout_empty = barriers(case.dout_stages, 1), barriers(case.dout_stages, CONSUMERS)
        self.dv_staged, self.dk_staged = barriers(CONSUMERS, WARPS), barriers(CONSUMERS, WARPS)
        self.consumers_turn = [self.named_barrier(WARPS) for _ in range(CONSUMERS)]
        self.both_consumers = self.named_barrier(0, waiting=CONSUMERS * WARPS)
        self.staging_empty = [[self.named_barrier(1) for _ in range(CONSUMERS)] for _ in range(2)]
        self.staging_full = [[self.named_barrier(WARPS, waiting=1) for _ in range(CONSUMERS)] for _ in range(2)]
        self.k: list[object] = [None] * (CONSUMERS * WARPS)
        self.v: list[object] = [None] * (CONSUMERS * WARPS)
        self.q: list[object] = [None] * case.q_stages
        self.rows: list[object] = [None] * case.q_stages
        self.dout: list[object] = [None] * case.dout_stages
        self.ds: list[list[object]] = [[None] * (CONSUMERS * WARPS) for _ in range(2)]
        self.staged: list[object] = [None] * (CONSUMERS * WARPS)

    def start(self) -> None:
        self.warp("the loader", Loader(self).run())
        for parity in range(ADDERS):
            self.warp(f"adder {parity}", Adder(self, parity).run())
        self.warp("the storer", Storer(self).run())
        for w in range(CONSUMERS):
            products = Products(self.schedule)
            for warp in range(WARPS):
                self.warp(f"warp {warp} of consumer {w}", Consumer(self, products, w, warp).run())


class Loader(TileLoads):
    block: Kernel

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.q_at = Position(kernel.case.q_stages, round=-1)
        self.dout_at = Position(kernel.case.dout_stages, round=-1)

    def take(self) -> Process:
        self.block.numbers.append(self.grid.take())
        yield None

    def load_tile(self, t: int, tile: KeyTile) -> Process:
        block, tiles, before = self.block, tile.tiles(), once(self.taken - 1)
        if tiles > 0:
            yield from self.load(t, tile, 0, tile.start)
        if self.fault != "K loaded without waiting":
            yield block.k_empty.wait(before)
        load(self.schedule, entries(block.k), t, block.k_full)
        if self.fault != "V loaded without waiting":
            yield block.v_empty.wait(before)
        load(self.schedule, entries(block.v), t, block.v_full)
        for head in range(tile.group):
            for j in range(head == 0, tiles):
                yield from self.load(t, tile, head, tile.query_tile_of(j))

    def load(self, t: int, tile: KeyTile, head: int, m: int) -> Process:
        block, content, dead = self.block, (t, tile.query_tile(head, m)), self.is_dead()
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


class Adder:
    def __init__(self, kernel: Kernel, parity: int) -> None:
        self.kernel, self.grid, self.fault, self.parity = kernel, kernel.grid, kernel.fault, parity
        self.work, self.stores = WorkReader(kernel), Stores(kernel.schedule)

    def run(self) -> Process:
        first = 0
        while True:
            yield from self.work.next()
            if not self.work.more():
                break
            t = self.work.number
            tile, all_added = self.kernel.tiles[t], self.kernel.all_added[self.kernel.added(self.work.taken).index]
            self.work.done()
            head, j = 0, (first ^ self.parity) & 1
            for _ in range(j, tile.steps(), 2):
                while j >= tile.tiles():
                    j -= tile.tiles()
                    head += 1
                yield from self.add(t, tile.query_tile(head, tile.query_tile_of(j)))
                j += 2
            if self.fault != "the adders' steps begin anew with each tile":
                first += tile.steps()
            yield from self.kernel.schedule.pause()  # nobody waits for the warp
            if self.kernel.case.converts:
                if self.fault != "additions counted before they are made":
                    yield self.stores.wait()
                self.grid.count_added(t)
            if self.kernel.case.turn_shift:
                all_added.arrive()
        if self.fault != "additions not waited for at last":
            yield self.stores.wait()

    def add(self, t: int, m: int) -> Process:
        kernel = self.kernel
        in_turns = kernel.case.deterministic
        if in_turns and self.fault != "dQ added without waiting for its turn":
            yield lambda: self.grid.is_turn(t, m, 0)
        for w in range(CONSUMERS):
            yield kernel.staging_full[self.parity][w].sync()
            self.add_staged(t, m, w)
        yield from self.return_buffers()
        if in_turns:
            if self.fault != "a turn passed on before additions are made":
                yield self.stores.wait()
            self.grid.pass_turn_on(t, m, 0)

    def return_buffers(self) -> Process:
        kernel, other = self.kernel, self.parity ^ (self.fault != "a staging buffer returned for the same parity")
        if self.fault != "dQ returned before it is read":
            yield self.stores.wait_read(1)
        kernel.staging_empty[other][0].arrive()
        yield self.stores.wait_read(1 if self.fault == "the second dQ returned before it is read" else 0)
        kernel.staging_empty[other][1].arrive()

    def add_staged(self, t: int, m: int, w: int) -> None:
        staged = reads(self.kernel.staged, ("dQ", t, m), parts(w))
        self.stores.commit(staged, lambda: self.grid.add(t, m, w))


class Storer:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.fault = kernel, kernel.fault
        self.work, self.stores = WorkReader(kernel), Stores(kernel.schedule)

    def run(self) -> Process:
        kernel, steps = self.kernel, 0
        while True:
            yield from self.work.next()
            if not self.work.more():
                break
            t, at = self.work.number, once(self.work.taken)
            self.work.done()
            if self.fault != "staging buffers handed out before there are zeros":
                yield kernel.grid.wait_for_zeros(t)
            for w in range(CONSUMERS):
                kernel.staging_empty[steps & 1][w].arrive()
            if self.fault != "the storer's steps are not counted":
                steps += kernel.tiles[t].steps()
            yield from kernel.grid.clear_sums_ahead(t)
            for w in range(CONSUMERS):
                yield from self.store("dV", t, w, kernel.dv_staged[w].wait(at), kernel.v)
            if self.fault != "V given back before dV is read":
                yield self.stores.wait_read()
            kernel.v_empty.arrive()
            for w in range(CONSUMERS):
                yield from self.store("dK", t, w, kernel.dk_staged[w].wait(at), kernel.staged)
            if self.fault != "staging buffers returned before dK is read":
                yield self.stores.wait_read()
        if self.fault != "results not waited for at last":
            yield self.stores.wait()

    def store(self, name: str, t: int, w: int, staged: Condition, buffer: list[object]) -> Process:
        if self.fault != f"{name} stored without waiting":
            yield staged
        if self.kernel.grid.is_stored(t):
            self.stores.commit(reads(buffer, (name, t), parts(w)), lambda: self.kernel.grid.store(t, (name, w)))


class Consumer:
    """A warp of a consumer."""

    def __init__(self, kernel: Kernel, products: Products, w: int, warp: int) -> None:
        self.kernel, self.case, self.fault = kernel, kernel.case, kernel.fault
        self.products, self.w, self.warp, self.elected = products, w, warp, warp == 0
        self.part = w * WARPS + warp
        self.work = WorkReader(kernel)
        self.q_at, self.dout_at = Position(self.case.q_stages), Position(self.case.dout_stages)
        self.step_index = 0
        self.tile = 0  # which
        self.j = 0  # step of the tile whose scores are there, or are on the way
        self.tiles_with_steps = 0  # that are done
        self.dk: list[int] = []
        self.dv: list[int] = []

    def run(self) -> Process:
        while True:
            yield from self.work.next()
            if not self.work.more():
                break
            self.tile = self.work.number
            if self.fault == "work given back before the tile is done":
                self.work.done()
            yield from self.run_tile()
            if self.fault != "work given back before the tile is done":
                self.work.done()
        yield from self.kernel.grid.convert_sums(ADDERS)

    def phase(self) -> Position:
        """Of `WorkReader.phase`."""
        with_steps = self.fault == "phases of K and V without tiles that have no steps"
        return once(self.tiles_with_steps if with_steps else self.work.taken)

    def run_tile(self) -> Process:
        kernel, tile = self.kernel, self.kernel.tiles[self.tile]
        steps, m = tile.steps(), tile.start
        self.j, self.dk, self.dv = 0, [], []
        if steps > 0:
            yield from self.first_scores()
            for j in range(steps):
                self.check_path(tile, m)
                yield from self.step(first=j == 0, last=j == steps - 1)
                m = tile.after(m)
            self.tiles_with_steps += 1
        else:
            yield kernel.k_full.wait(self.phase())
            if self.fault != "V not waited for in a tile without steps":
                yield kernel.v_full.wait(self.phase())
        yield from self.epilogue(steps > 0)

    def check_path(self, tile: KeyTile, m: int) -> None:
        """The query tile by which pairs are hidden."""
        claim(tile.path()[self.j] % M_TILES == m, "another query tile than the one that comes")

    def query_tile(self, j: int) -> tuple[int, int]:
        return self.tile, self.kernel.tiles[self.tile].path()[j]

    # turns

    def take_turn(self) -> Process:
        yield self.kernel.consumers_turn[self.w].sync()

    def pass_turn(self) -> None:
        self.kernel.consumers_turn[1 - self.w].arrive()

    # products

    def issue(self, *operands: list[Read]) -> None:
        self.products.issue(self.warp, [read for operand in operands for read in operand])

    def multiply_s(self, stage: int, j: int) -> None:
        k = reads(self.kernel.k, self.tile, parts(self.w))
        self.issue(k, reads(self.kernel.q, self.query_tile(j), [stage]))

    def multiply_dp(self, stage: int, j: int) -> None:
        v = reads(self.kernel.v, self.tile, parts(self.w))
        self.issue(v, reads(self.kernel.dout, self.query_tile(j), [stage]))

    def multiply_dq(self, buffer: int, j: int) -> object:
        """Before a tile's first step it is nobody's."""
        if j < 0:
            self.issue()
            return "a dQ that is nobody's"
        self.issue(reads(self.kernel.ds[buffer], self.query_tile(j)), reads(self.kernel.k, self.tile))
        return "dQ", *self.query_tile(j)

    def multiply_dv(self) -> None:
        self.dv.append(self.query_tile(self.j)[1])
        self.issue(reads(self.kernel.dout, self.query_tile(self.j), [self.dout_at.index]))

    def multiply_dk(self) -> None:
        self.dk.append(self.query_tile(self.j)[1])
        self.issue(reads(self.kernel.q, self.query_tile(self.j), [self.q_at.index]))

    # steps

    def first_scores(self) -> Process:
        kernel = self.kernel
        if self.fault != "K used without waiting":
            yield kernel.k_full.wait(self.phase())
        yield kernel.q_full[self.q_at.index].wait(self.q_at)
        if self.w == 1 and self.fault != "no first turn":
            self.pass_turn()
        self.multiply_s(self.q_at.index, 0)
        if self.fault != "V used without waiting":
            yield kernel.v_full.wait(self.phase())
        yield kernel.dout_full[self.dout_at.index].wait(self.dout_at)
        self.multiply_dp(self.dout_at.index, 0)
        yield self.products.wait(self.warp, 1)
        yield from self.read_rows()
        yield self.products.wait(self.warp, 0)

    def read_rows(self) -> Process:
        """What `exponentiate` and `differentiate` read."""
        yield from reading(reads(self.kernel.rows, self.query_tile(self.j), [self.q_at.index]))

    def step(self, first: bool, last: bool) -> Process:
        kernel, buffer = self.kernel, self.step_index & 1
        other = buffer ^ 1
        next_q, next_dout = self.q_at.next(), self.dout_at.next()
        yield from self.read_rows()
        if self.fault == "dS written before the turn":
            yield from self.store_ds(buffer)
        yield from self.take_turn()
        dq = self.multiply_dq(other, self.j - 1)
        if self.fault != "dS written before the turn":
            yield from self.store_ds(buffer)
        self.multiply_dv()
        self.multiply_dk()
        early = self.fault == "the turn passed on before dQ is done" and not last
        if early:
            self.pass_turn()
        yield self.products.wait(self.warp, 2)
        if not first or self.fault == "nobody's dQ staged":
            yield from self.stage_dq(dq, other)
        if self.fault != "dO given back before dV is done":
            yield self.products.wait(self.warp, 1)
        self.arrive(kernel.dout_empty[self.dout_at.index])
        if not last:
            if self.fault != "Q used without waiting":
                yield kernel.q_full[next_q.index].wait(next_q)
            if self.case.waits_for_dk:
                yield from self.finish_dk(0)
            self.multiply_s(next_q.index, self.j + 1)
            if self.fault != "dO used without waiting":
                yield kernel.dout_full[next_dout.index].wait(next_dout)
            self.multiply_dp(next_dout.index, self.j + 1)
        if not early and (not last or self.w == 0 or self.fault == "the last turn passed on by both"):
            self.pass_turn()
        if not first or self.fault == "nobody's dQ staged":
            self.hand_over_dq(other)
        if last and self.fault != "no Q given back by a tile's last step":
            yield from self.finish_dk(0)
        elif not last and not self.case.waits_for_dk:
            yield from self.finish_dk(3 if self.fault == "Q given back before dK is done" else 2)
        self.q_at, self.dout_at = next_q, next_dout
        self.step_index += 1
        self.j += 1
        if not last:
            yield self.products.wait(self.warp, 1)
            yield from self.read_rows()
            yield self.products.wait(self.warp, 0)

    def finish_dk(self, pending: int) -> Process:
        yield self.products.wait(self.warp, pending)
        self.arrive(self.kernel.q_empty[self.q_at.index])

    def last_dq(self) -> Process:
        kernel, last = self.kernel, (self.step_index - 1) & 1
        if self.fault != "the last dS used without waiting":
            yield kernel.both_consumers.sync()
        dq = self.multiply_dq(last, self.j - 1)
        if self.fault == "K given back before the last dQ is done":
            self.arrive(kernel.k_empty)
        yield self.products.wait(self.warp, 0)
        if self.fault != "K given back before the last dQ is done":
            self.arrive(kernel.k_empty)
        yield from self.stage_dq(dq, last)
        self.hand_over_dq(last)

    def arrive(self, empty: Barrier) -> None:
        if self.elected:
            empty.arrive()

    # what stands between the products

    def store_ds(self, buffer: int) -> Process:
        yield from writing([(self.kernel.ds[buffer], self.part)], self.query_tile(self.j))

    def stage_dq(self, dq: object, parity: int) -> Process:
        if self.fault != "dQ staged without waiting":
            yield self.kernel.staging_empty[parity][self.w].sync()
        yield from writing([(self.kernel.staged, self.part)], dq)

    def hand_over_dq(self, parity: int) -> None:
        self.kernel.staging_full[parity][self.w].arrive()

    # dK and dV

    def epilogue(self, has_steps: bool) -> Process:
        kernel, path = self.kernel, self.kernel.tiles[self.tile].path()
        claim(self.dv == self.dk == path, "a step that dK and dV lack")
        yield from kernel.grid.join_shares(self.tile, self.w, self.warp, kernel.one_consumer[self.w])
        yield from writing([(kernel.v, self.part)], ("dV", self.tile))
        kernel.dv_staged[self.w].arrive()
        if has_steps:
            yield from self.last_dq()
        elif self.fault == "K given back before all warps have seen it full":
            self.arrive(kernel.k_empty)
        if self.fault != "dK staged without waiting":
            yield kernel.staging_empty[self.step_index & 1][self.w].sync()
        if not has_steps and self.fault != "K given back before all warps have seen it full":
            self.arrive(kernel.k_empty)
        yield from writing([(kernel.staged, self.part)], ("dK", self.tile))
        kernel.dk_staged[self.w].arrive()


# --- cases -----------------------------------------------------------------------------------------------------


def draw_case(seed: int, fault: str) -> NarrowCase:
    draw = random.Random(seed)
    return NarrowCase(
        **draw_call(draw, 16, fault),
        waits_for_dk=draw.random() < 0.4,
        q_stages=draw.choice((2, 2, 3)),
        dout_stages=draw.choice((2, 2, 3)),
    )


def play(seed: int, fault: str = "") -> None:
    case, schedule = draw_case(seed, fault), Schedule(seed)
    results = tuple((name, w) for name in ("dK", "dV") for w in range(CONSUMERS))
    grid = Grid(case, schedule, fault, {0: (0, 1)}, results)  # a consumer's part of dQ, in the turn of both
    for i in range(case.room):
        Kernel(grid, f"block {i}").start()
    schedule.run()
    grid.check()


FAULTS = SHARED_FAULTS | {
    "K loaded without waiting": (READ,),
    "Q loaded without waiting": (READ,),
    "results not waited for at last": ("the block ends too early",),
    "V loaded without waiting": (READ,),
    "dO loaded without waiting": (READ,),
    "staging buffers returned before dK is read": (READ,),
    "V given back before dV is read": (READ,),
    "staging buffers handed out before there are zeros": ("before there are zeros",),
    "the storer's steps are not counted": ("deadlock",),
    "dV stored without waiting": (READ,),
    "dK stored without waiting": (READ,),
    "dK staged without waiting": (READ, TWICE),
    "dQ staged without waiting": (READ, TWICE),
    "dQ returned before it is read": (READ,),
    "the second dQ returned before it is read": (READ,),
    "a staging buffer returned for the same parity": ("deadlock",),
    "the adders' steps begin anew with each tile": ("deadlock",),
    "nobody's dQ staged": ("deadlock",),
    "dQ added without waiting for its turn": ("out of turn",),
    "a turn passed on before additions are made": ("passed on too early",),
    "additions not waited for at last": ("the block ends too early",),
    "K used without waiting": (READ,),
    "V used without waiting": (READ,),
    "Q used without waiting": (READ,),
    "dO used without waiting": (READ,),
    "the last dS used without waiting": (READ,),
    "dS written before the turn": (READ,),
    "no Q given back by a tile's last step": ("deadlock",),
    "Q given back before dK is done": (READ,),
    "dO given back before dV is done": (READ,),
    "K given back before the last dQ is done": (READ,),
    "K given back before all warps have seen it full": (OVERTAKEN,),
    "V not waited for in a tile without steps": (READ,),
    "phases of K and V without tiles that have no steps": (OVERTAKEN, READ),
    "no first turn": ("deadlock",),
    "the turn passed on before dQ is done": (READ,),
    "the last turn passed on by both": (TWICE, "a turn that nobody took"),
}
"""Mistakes, and what each of them leads to in some case."""


CASES = 400


@pytest.mark.parametrize("first", range(0, CASES, CASES // 4))
def test_the_protocol_holds(first: int) -> None:
    for seed in range(first, first + CASES // 4):
        play(seed)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_seen(fault: str) -> None:
    assert_seen(play, CASES, fault, FAULTS[fault])


# --- the text --------------------------------------------------------------------------------------------------

DIGESTS = SHARED_DIGESTS | {
    "Loader.take": "3555b713",
    "Loader.load_tile": "1a3187a9",
    "Loader.load": "681b6a43",
    "Adder.run": "070a093d",
    "Adder.add": "8031b05d",
    "Adder.return_buffers": "a7c0e595",
    "Adder.add_staged": "ddb8a699",
    "Adder.count_added": "fd17848f",
    "Storer.run": "205540de",
    "Storer.store": "87d4667b",
    "Consumer.run": "6399b09a",
    "Consumer.run_tile": "d71f49ed",
    "Consumer.take_turn": "92ef2388",
    "Consumer.pass_turn": "9bade3f3",
    "Consumer.multiply_s": "95841c75",
    "Consumer.multiply_dp": "a837ecf3",
    "Consumer.multiply_dq": "eb0becd9",
    "Consumer.multiply_dv": "4b9e6575",
    "Consumer.multiply_dk": "cf2ae5fb",
    "Consumer.first_scores": "b70be4c5",
    "Consumer.step": "79a9bc28",
    "Consumer.finish_dk": "156b797b",
    "Consumer.last_dq": "c052c3ec",
    "Consumer.differentiate": "39f292d9",
    "Consumer.store_ds": "63fb80c7",
    "Consumer.stage_dq": "2ddaef0c",
    "Consumer.epilogue": "6d80efaf",
    "Consumer.hand_over": "ac6d24a2",
    "Consumer.multiply_scores": "27eac82f",
    "Consumer.hand_over_dq": "e8c18679",
}


def kernel_text() -> str:
    problem = AttentionProblem(128, 128, "bfloat16", "full", 16, False, "sm_90a", "backward")
    return render(problem, select_config(problem)).text


def test_the_text_is_the_one_that_was_modelled() -> None:
    assert_modelled(kernel_text(), ("Loader", "Adder", "Storer", "Consumer"), DIGESTS)


def test_what_other_units_read_is_fenced_before_it_is_handed_over() -> None:
    """Which the model does not know: wgmma and TMA see what threads have stored only behind a fence."""
    bodies = functions(kernel_text(), ["Consumer"])
    for name, order in {
        "step": ("store_ds(", "async_proxy_fence(", "pass_turn("),
        "hand_over_dq": ("async_proxy_fence(", "named_barrier_arrive("),
        "hand_over": ("async_proxy_fence(", "mbarrier_arrive("),
    }.items():
        found = [bodies[f"Consumer.{name}"].find(call) for call in order]
        assert -1 not in found and found == sorted(found), (name, order)


def test_the_barriers_are_those_that_were_modelled() -> None:
    text = kernel_text()
    assert arrivals(text) == {
        "k_full": "1", "k_empty": "kConsumers", "v_full": "1", "v_empty": "1", "landed": "1", "all_added": "2",
        "q_full": "1", "q_empty": "kConsumers", "dout_full": "1", "dout_empty": "kConsumers",
        "work_full": "1", "work_empty": "kWorkReaders", "dv_staged": "4", "dk_staged": "4",
    }  # fmt: skip
    assert "constexpr int kWorkReaders = 4 * kConsumers + 3;" in text and f"constexpr int kAdders = {ADDERS};" in text
    for line in (  # first positions, and a condition which names alone do not tell
        "RingPosition<kStagesQ> q_at{0, 1};",
        "RingPosition<kStagesDout> dout_at{0, 1};",
        "RingPosition<kStagesQ> q_at{0, 0};",
        "RingPosition<kStagesDout> dout_at{0, 0};",
        "constexpr bool kWaitsForDk = kBlockM == 128;",
    ):
        assert text.count(line) == 1, line


def test_every_named_barrier_has_a_number_of_its_own() -> None:
    """Of the 16 that there are; 0 is that of all threads."""
    text = kernel_text()
    pairs = [eval(number) for number in re.findall(r"constexpr int k(?:Turn|OneConsumer) = (\d+);", text)]
    for name in ("staging_empty", "staging_full"):
        number = re.search(rf"constexpr int {name}\(int parity, int w\) {{ return (.*?) \+ w; }}", text)
        assert number
        pairs += [eval(number[1], {"parity": parity}) for parity in range(2)]
    numbers = [pair + w for pair in pairs for w in range(CONSUMERS)]
    numbers += map(int, re.findall(r"constexpr int kBothConsumers = (\d+);", text))
    assert len(numbers) == len(set(numbers)) == 13 and min(numbers) > 0 and max(numbers) < 16
