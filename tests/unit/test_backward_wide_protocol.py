"""The hand-overs of the Hopper backward kernel for head dims above 128, played through as a model.

The model follows `backward_sm90_wide.cu.j2` as `test_backward_protocol` does its neighbour; what both share is in
`tests.unit.backward_protocol`.
"""

from __future__ import annotations

import random

import pytest

from cuflash.kernels import select_config
from cuflash.problem import AttentionProblem
from cuflash.render import render
from tests.unit.backward_protocol import (
    CONSUMERS,
    M_TILES,
    READ,
    SHARED_DIGESTS,
    SHARED_FAULTS,
    Block,
    Case,
    KeyTile,
    WorkReader,
    arrivals,
    assert_modelled,
    assert_seen,
    draw_tiles,
    in_pair,
    once,
    reads,
)
from tests.unit.protocol import (
    WARPS,
    Barrier,
    Process,
    Products,
    Read,
    Schedule,
    Stores,
    claim,
    reading,
    writing,
)


class Kernel(Block):
    adding, columns = tuple((w, warp) for w in range(CONSUMERS) for warp in range(WARPS)), CONSUMERS

    def __init__(self, case: Case, schedule: Schedule, fault: str = "") -> None:
        super().__init__(case, schedule, fault)
        self.k_read, self.k_empty, self.v_empty = Barrier(CONSUMERS), Barrier(1), Barrier(1)
        self.dv_staged, self.dk_staged = Barrier(CONSUMERS * WARPS), Barrier(CONSUMERS * WARPS)
        self.sums_clear = Barrier(1)
        self.p_full, self.p_empty, self.ds_full, self.ds_empty = (Barrier(n) for n in (WARPS, WARPS, WARPS, 1))
        self.may_add = [self.named_barrier(0, waiting=WARPS + 1) for _ in range(CONSUMERS)]
        self.has_added = [self.named_barrier(WARPS, waiting=1) for _ in range(CONSUMERS)]
        self.p: list[object] = [None] * WARPS  # of a warp of the first consumer for the same one of the second
        self.ds: list[object] = [None] * WARPS

    def start(self) -> None:
        self.warp("the storer", Storer(self).run())
        for w in range(CONSUMERS):
            self.warp(f"the turns of consumer {w}", Turns(self, w).run())
            products = Products(self.schedule)
            for warp in range(WARPS):
                self.warp(f"warp {warp} of consumer {w}", Consumer(self, products, w, warp).run())
        self.run()


class Turns:
    def __init__(self, kernel: Kernel, w: int) -> None:
        self.kernel, self.fault, self.w, self.work = kernel, kernel.fault, w, WorkReader(kernel)

    def run(self) -> Process:
        while True:
            yield from self.work.next()
            if not self.work.more():
                break
            t = self.work.taken
            self.work.done()
            if self.kernel.case.deterministic:
                yield from self.keep(t, self.kernel.tiles[t])
            yield from self.kernel.arrive_all_added(t)

    def keep(self, t: int, tile: KeyTile) -> Process:
        for head in range(tile.group):
            for j in range(tile.tiles()):
                yield from self.take(t, head * M_TILES + tile.query_tile_of(j))

    def take(self, t: int, m: int) -> Process:
        kernel, w = self.kernel, self.w
        if self.fault != "additions let in before their turn":
            yield lambda: kernel.turns[m, w] == kernel.turn(t, m)
        yield kernel.may_add[w].sync()
        yield kernel.has_added[w].sync()
        kernel.pass_turn_on(t, m, w)


class Storer:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.fault = kernel, kernel.fault
        self.work, self.stores = WorkReader(kernel), Stores(kernel.schedule)

    def run(self) -> Process:
        kernel = self.kernel
        while True:
            yield from self.work.next()
            if not self.work.more():
                break
            t = self.work.taken
            self.work.done()
            if self.fault != "additions let in before there are zeros":
                yield kernel.wait_for_zeros(t)
            kernel.sums_clear.arrive()
            yield from self.store("dV", t, kernel.dv_staged, kernel.v)
            kernel.v_empty.arrive()
            yield from self.store("dK", t, kernel.dk_staged, kernel.k)
            kernel.k_empty.arrive()
        if self.fault != "results not waited for at last":
            yield self.stores.wait()

    def store(self, name: str, t: int, staged: Barrier, buffer: list[object]) -> Process:
        if self.fault != f"{name} stored without waiting":
            yield staged.wait(once(t))
        results = [(name, t, w) for w in range(CONSUMERS)]
        self.stores.commit(reads(buffer, (name, t)), lambda: self.kernel.stored.extend(results))
        if name == "dV" or self.fault != "K given back before dK is read":
            yield self.stores.wait_read()


class Consumer:
    """A warp of a consumer."""

    def __init__(self, kernel: Kernel, products: Products, w: int, warp: int) -> None:
        self.kernel, self.fault, self.products = kernel, kernel.fault, products
        self.w, self.warp, self.elected = w, warp, warp == 0
        self.part = w * WARPS + warp
        self.work = WorkReader(kernel)
        self.step_index = 0
        self.tile = self.first = 0  # which work tile, and its first step
        self.query_tile = self.m = 0
        self.dk: list[int] = []
        self.dv: list[int] = []

    def run(self) -> Process:
        while True:
            yield from self.work.next()
            if not self.work.more():
                break
            self.tile, self.first = self.work.taken, self.step_index
            if self.fault == "work given back before the tile is done":
                self.work.done()
            yield from self.run_tile()
            if self.fault != "work given back before the tile is done":
                self.work.done()

    def run_tile(self) -> Process:
        kernel, tile = self.kernel, self.kernel.tiles[self.tile]
        steps, at = tile.steps(), once(self.work.taken)
        self.m = self.query_tile = tile.start
        self.dk, self.dv = [], []
        if self.fault != "K used without waiting":
            yield kernel.k_full.wait(at)
        if self.w == 1 or (steps == 0 and self.fault != "V not waited for in a tile without steps"):
            yield kernel.v_full.wait(at)
        if steps > 0:
            yield from self.first_scores()
            if self.fault != "sums not waited for":
                yield kernel.sums_clear.wait(at)
            for j in range(steps):
                yield from self.step(last=j == steps - 1)
        yield from self.epilogue()

    def step(self, last: bool) -> Process:
        if self.w == 0:
            yield from self.step_of_first(self.step_index, last)
        else:
            yield from self.step_of_second(self.step_index, last)
        self.step_index += 1

    def content(self, i: int) -> tuple[int, int]:
        """Of step i's buffers."""
        return self.tile, self.kernel.tiles[self.tile].path()[i - self.first]

    # products

    def issue(self, *operands: list[Read]) -> None:
        self.products.issue(self.warp, [read for operand in operands for read in operand])

    def multiply_scores(self, i: int) -> None:
        kernel = self.kernel
        left, right = (kernel.k, kernel.q) if self.w == 0 else (kernel.v, kernel.dout)
        self.issue(reads(left, self.tile), reads(right, self.content(i), [i & 1]))

    def multiply_dv(self, i: int) -> None:
        self.dv.append(self.content(i)[1])
        self.issue(reads(self.kernel.dout, self.content(i), [i & 1]))

    def multiply_dk(self, i: int) -> None:
        self.dk.append(self.content(i)[1])
        self.issue(reads(self.kernel.ds, self.content(i)), reads(self.kernel.q, self.content(i), [i & 1]))

    def multiply_dq(self, i: int) -> None:
        self.issue(reads(self.kernel.ds, self.content(i)), reads(self.kernel.k, self.tile))

    # steps

    def first_scores(self) -> Process:
        kernel, i = self.kernel, self.step_index
        at = in_pair(i)
        yield (kernel.q_full if self.w == 0 else kernel.dout_full)[at.index].wait(at)
        self.multiply_scores(i)
        yield self.products.wait(self.warp, 0)
        if self.w == 0:
            yield from self.make_probabilities(i, self.m)
            yield kernel.p_empty.wait(once(i - 1))
            yield from self.hand_over_probabilities(i)
        else:
            yield from self.make_ds(i)

    def step_of_first(self, i: int, last: bool) -> Process:
        kernel, at, next_at = self.kernel, in_pair(i), in_pair(i + 1)
        has_dv = kernel.case.dout_readers == CONSUMERS
        if has_dv:
            if self.fault != "dO used without waiting":
                yield kernel.dout_full[at.index].wait(at)
            self.multiply_dv(i)
        if not last:
            if self.fault != "Q used without waiting":
                yield kernel.q_full[next_at.index].wait(next_at)
            self.multiply_scores(i + 1)
        yield self.products.wait(self.warp, 0 if last else 1)
        if has_dv or self.fault == "dO given back by a consumer that has no dV":
            self.arrive(kernel.dout_empty[at.index])
        if not last:
            yield self.products.wait(self.warp, 0)
            yield from self.make_probabilities(i + 1, self.after())
            if self.fault != "P^T written without waiting":
                yield kernel.p_empty.wait(once(i))
            yield from self.hand_over_probabilities(i + 1)
        if self.fault != "dS used without waiting":
            yield kernel.ds_full.wait(once(i))
        self.multiply_dq(i)
        self.multiply_dk(i)
        yield self.products.wait(self.warp, 1)
        yield from self.add()
        if self.fault != "Q and dS given back before dK is done":
            yield self.products.wait(self.warp, 0)
        if not (last and self.fault == "no Q given back by a tile's last step"):
            self.arrive(kernel.q_empty[at.index])
        if not (last and self.fault == "no dS given back by a tile's last step"):
            self.arrive(kernel.ds_empty)
        self.go_on()

    def step_of_second(self, i: int, last: bool) -> Process:
        kernel, at, next_at = self.kernel, in_pair(i), in_pair(i + 1)
        if self.fault != "dS of the other warps used without waiting":
            yield kernel.ds_full.wait(once(i))
        self.multiply_dq(i)
        self.multiply_dk(i)
        yield self.products.wait(self.warp, 1)
        yield from self.add()
        self.go_on()
        if not last:
            yield kernel.dout_full[next_at.index].wait(next_at)
            self.multiply_scores(i + 1)
            yield self.products.wait(
                self.warp, 2 if self.fault == "Q given back by the second before dK is done" else 1
            )
        else:
            yield self.products.wait(self.warp, 0)
        self.arrive(kernel.q_empty[at.index])
        if not last:
            yield self.products.wait(self.warp, 0)
            yield from self.make_ds(i + 1)

    def after(self) -> int:
        return self.kernel.tiles[self.tile].after(self.m)

    def go_on(self) -> None:
        following, start = self.after(), self.kernel.tiles[self.tile].start
        of_the_next_head = following == start and self.fault != "all heads' dQ added to the first one's"
        self.query_tile += following - self.m + (M_TILES if of_the_next_head else 0)
        self.m = following

    def arrive(self, empty: Barrier) -> None:
        if self.elected:
            empty.arrive()

    # P^T and dS^T

    def read_rows(self, i: int) -> Process:
        """What `exponentiate` and `differentials` read."""
        yield from reading(reads(self.kernel.rows, self.content(i), [i & 1]))

    def make_probabilities(self, i: int, m: int) -> Process:
        claim(self.content(i)[1] % M_TILES == m, "another query tile than the one that comes")
        yield from self.read_rows(i)

    def hand_over_probabilities(self, i: int) -> Process:
        yield from writing([(self.kernel.p, self.warp)], self.content(i))
        self.kernel.p_full.arrive()

    def read_probabilities(self, i: int) -> Process:
        yield from reading([Read(self.kernel.p, self.warp, self.content(i))])

    def make_ds(self, i: int) -> Process:
        kernel, at = self.kernel, in_pair(i)
        yield kernel.q_full[at.index].wait(at)
        if self.fault != "P^T used without waiting":
            yield kernel.p_full.wait(once(i))
        yield from self.read_probabilities(i)
        self.multiply_dv(i)
        if self.fault == "P^T given back after the first reading":
            kernel.p_empty.arrive()
        yield from self.read_probabilities(i)
        yield from self.read_rows(i)
        if self.fault != "P^T given back after the first reading":
            kernel.p_empty.arrive()
        if self.fault != "dS written without waiting":
            yield kernel.ds_empty.wait(once(i - 1))
        yield from self.hand_over_ds(i)
        yield self.products.wait(self.warp, 0)
        self.arrive(kernel.dout_empty[at.index])

    def hand_over_ds(self, i: int) -> Process:
        yield from writing([(self.kernel.ds, self.warp)], self.content(i))
        self.kernel.ds_full.arrive()

    # dQ

    def add(self) -> Process:
        kernel, in_turns = self.kernel, self.kernel.case.deterministic
        if in_turns:
            yield kernel.may_add[self.w].sync()
        if in_turns and self.fault == "a turn passed on before the addition":
            kernel.has_added[self.w].arrive()
        yield None
        kernel.add(self.tile, self.query_tile, (self.w, self.warp))
        if in_turns and self.fault != "a turn passed on before the addition":
            kernel.has_added[self.w].arrive()

    # dK and dV

    def epilogue(self) -> Process:
        kernel, path = self.kernel, self.kernel.tiles[self.tile].path()
        self.arrive(kernel.k_read)
        of_dv = path if self.w == 1 or self.kernel.case.dout_readers == CONSUMERS else []
        claim(self.dk == path and self.dv == of_dv, "a step that dK and dV lack")
        yield from writing([(kernel.v, self.part)], ("dV", self.tile))
        kernel.dv_staged.arrive()
        if self.fault != "dK staged before K is read":
            yield kernel.k_read.wait(once(self.work.taken))
        yield from writing([(kernel.k, self.part)], ("dK", self.tile))
        kernel.dk_staged.arrive()


# --- cases -----------------------------------------------------------------------------------------------------


def draw_case(seed: int) -> Case:
    draw = random.Random(seed)
    deterministic = draw.random() < 0.5
    shifted = deterministic and draw.random() < 0.4
    tiles, dead = draw_tiles(draw, shifted), draw.choice((0.0, 0.0, 0.3))
    return Case(tiles, deterministic, shifted, dead, dout_readers=draw.choice((1, CONSUMERS)))


def play(seed: int, fault: str = "") -> None:
    Kernel(draw_case(seed), Schedule(seed), fault).start()


FAULTS = SHARED_FAULTS | {
    "K given back before dK is read": (READ,),
    "dV stored without waiting": (READ,),
    "dK stored without waiting": (READ,),
    "dK staged before K is read": (READ,),
    "additions let in before there are zeros": ("before there are zeros",),
    "sums not waited for": ("before there are zeros",),
    "additions let in before their turn": ("out of turn",),
    "a turn passed on before the addition": ("passed on too early",),
    "all heads' dQ added to the first one's": ("added twice",),
    "K used without waiting": (READ,),
    "Q used without waiting": (READ,),
    "dO used without waiting": (READ,),
    "V not waited for in a tile without steps": (READ,),
    "P^T written without waiting": (READ,),
    "P^T used without waiting": (READ,),
    "P^T given back after the first reading": (READ,),
    "dS used without waiting": (READ,),
    "dS of the other warps used without waiting": (READ,),
    "dS written without waiting": (READ,),
    "dO given back by a consumer that has no dV": ("overtaken",),
    "no dS given back by a tile's last step": ("deadlock",),
    "no Q given back by a tile's last step": ("deadlock",),
    "Q and dS given back before dK is done": (READ,),
    "Q given back by the second before dK is done": (READ,),
}
"""Mistakes, and what each of them leads to in some case.

None would be: V or dO loaded without waiting, nor their buffers given back too early, since K and Q are waited for
before and are given back later; the first P^T of a tile written without waiting, since dS of the step before is later;
Q's constants used without waiting, since P^T is made from them.
"""


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
    "Turns.run": "3117ea9f",
    "Turns.keep": "d74aad74",
    "Turns.take": "268a8cfd",
    "Storer.run": "aedd2239",
    "Storer.store": "52ec17d5",
    "Consumer.run": "6399b09a",
    "Consumer.run_tile": "2a033e3b",
    "Consumer.multiply_scores": "bb8e288c",
    "Consumer.multiply_dv": "55337be7",
    "Consumer.multiply_dk": "3fb8a83a",
    "Consumer.multiply_dq": "d1b70110",
    "Consumer.first_scores": "faa4ee84",
    "Consumer.step": "86b9651c",
    "Consumer.step_of_first": "3b8da9d4",
    "Consumer.step_of_second": "f0543cfc",
    "Consumer.go_on": "0e7d5c70",
    "Consumer.make_probabilities": "80dc0044",
    "Consumer.hand_over_probabilities": "a29b3738",
    "Consumer.make_ds": "a6ede02f",
    "Consumer.exponentiate": "98aee041",
    "Consumer.hand_over_ds": "c6d50990",
    "Consumer.add": "ae8c6ce3",
    "Consumer.epilogue": "bc236fd2",
    "Consumer.stage": "7fa3d849",
    "Consumer.hand_over": "ac6d24a2",
}


def kernel_text() -> str:
    problem = AttentionProblem(256, 256, "bfloat16", "full", 16, False, "sm_90a", "backward")
    return render(problem, select_config(problem)).text


def test_the_text_is_the_one_that_was_modelled() -> None:
    assert_modelled(kernel_text(), ("Turns", "Storer", "Consumer"), DIGESTS)


def test_the_barriers_are_those_that_were_modelled() -> None:
    text = kernel_text()
    assert arrivals(text) == {
        "k_full": "1", "k_read": "kConsumers", "dk_staged": "4 * kConsumers", "k_empty": "1", "v_full": "1",
        "dv_staged": "4 * kConsumers", "v_empty": "1", "landed": "1", "all_added": "2", "sums_clear": "1",
        "p_full": "4", "p_empty": "4", "ds_full": "4", "ds_empty": "1", "q_full": "1", "q_empty": "kConsumers",
        "dout_full": "1", "dout_empty": "kDoutReaders", "work_full": "1", "work_empty": "kWorkReaders",
    }  # fmt: skip
    for line in (
        "constexpr int kWorkReaders = 4 * kConsumers + 3;",
        "constexpr int kStagesQ = 2, kStagesDout = 2;",
        "constexpr int kOneConsumer = 2;",
        "constexpr int kMayAdd = 4, kAdded = 6;",
        "RingPosition<kStagesQ> q_at{0, 1};",
        "RingPosition<kStagesDout> dout_at{0, 1};",
    ):
        assert text.count(line) == 1, line
