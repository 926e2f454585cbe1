"""The hand-overs of the Hopper backward kernel for head dims above 128, played through as a model.

The model follows `backward_sm90_wide.cu.j2` as `test_backward_protocol` does its neighbour; what both share is in
`tests.unit.backward_protocol`. Here two blocks work on a tile together, each with barriers and memory of its own; what
one sends to the other, arrivals and copies, takes effect at any later time and in any order. Found is also what is sent
to a block that has ended.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
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
    in_pair,
    once,
    parts,
    reads,
)
from tests.unit.protocol import (
    WARPS,
    Barrier,
    Condition,
    Entry,
    Position,
    Process,
    Products,
    Read,
    Result,
    Schedule,
    claim,
    reading,
    writing,
)

pytestmark = pytest.mark.slow

STAGES_Q, STAGES_DOUT = 3, 2


@dataclass(frozen=True, kw_only=True)
class WideCase(Case):
    """``second_adds``: whether the second block has columns of dQ."""

    second_adds: bool


class ClusterBlock(Block):
    """One of the two: `Smem`, whose barriers both have."""

    case: WideCase
    peer: ClusterBlock

    def __init__(self, grid: Grid, cluster: Cluster, first: bool) -> None:
        name = f"the {'first' if first else 'second'} block of {cluster.name}"
        case, fault = grid.case, grid.fault
        assert isinstance(case, WideCase)
        adders = CONSUMERS * (2 if case.second_adds and fault != "the second's additions not counted" else 1)
        super().__init__(grid, name, adders)
        self.cluster, self.first, self.adds = cluster, first, first or case.second_adds
        self.stages = STAGES_Q if first else STAGES_DOUT
        self.number_full, self.number_empty = Barrier(1), Barrier(1)
        all_warps = CONSUMERS * WARPS
        self.left_full, self.left_empty = Barrier(1), Barrier(all_warps - (fault == "a warp that has K not counted"))
        self.columns_full = Barrier(1)
        self.columns_empty = Barrier(all_warps - (fault == "a warp that has columns of K not counted"))
        self.sums_clear = barriers(2, 1)
        self.ds_full = barriers(2, all_warps - (fault == "a warp's dS not counted"))
        self.ds_empty = barriers(2, CONSUMERS if fault == "dS given back by one block alone" else 2 * CONSUMERS)
        p_readers = WARPS - (fault == "a warp that reads P^T not counted")
        self.p_full = [barriers(2, 1) for _ in range(CONSUMERS)]
        self.p_empty = [barriers(2, p_readers) for _ in range(CONSUMERS)]
        readers = CONSUMERS - (fault == "a consumer of Q and dO not counted")
        self.right_full, self.right_empty = barriers(self.stages, 1), barriers(self.stages, readers)
        self.may_add = barriers(CONSUMERS, 1)
        adding = WARPS - (fault == "a warp that adds not counted")
        self.has_added = [barriers(2, adding) for _ in range(CONSUMERS)]
        self.has_barriers = False
        self.number: list[object] = [None]
        self.left: list[object] = [None] * all_warps  # K; V
        self.columns: list[object] = [None] * all_warps
        self.right: list[object] = [None] * self.stages  # Q; dO
        self.rows: list[object] = [None] * self.stages
        self.p: list[list[list[object]]] = [[[None] * WARPS for _ in range(2)] for _ in range(CONSUMERS)]
        self.ds: list[list[object]] = [[None] * all_warps for _ in range(2)]  # of the first: as received

    def start(self) -> None:
        self.warp("the loader", self.between_syncs(Loader(self).run(), self.init_barriers()))
        self.warp("the cleaner", self.between_syncs(Cleaner(self).run()))
        for w in range(CONSUMERS):
            self.warp(f"the turns of consumer {w}", self.between_syncs(Turns(self, w).run()))
            products = Products(self.schedule)
            for warp in range(WARPS):
                consumer = (FirstConsumer if self.first else SecondConsumer)(self, products, w, warp)
                self.warp(f"warp {warp} of consumer {w}", self.between_syncs(consumer.run()))

    def between_syncs(self, process: Process, before: Iterable[None] = ()) -> Process:
        yield from before
        for i, when in enumerate(("at first", "at last")):
            if self.fault != f"no sync of the cluster {when}":
                yield from self.cluster.sync(i)
            if i == 0:
                yield from process

    def init_barriers(self) -> Iterator[None]:
        yield None
        self.has_barriers = True
        if not self.first and self.fault != "no P^T expected at first":
            for w in range(CONSUMERS):
                for full in self.p_full[w]:
                    full.arrive_expect(WARPS)

    # from the other block

    def claim_running(self) -> None:
        claim(self.has_barriers, "sent to a block that has not begun")
        claim(self.warps > 0, "sent to a block that has ended")

    def receive_arrival(self, arrive: Callable[[], None]) -> None:
        def arriving() -> Process:
            yield None
            self.claim_running()
            arrive()

        self.schedule.start("an arrival", arriving())

    def receive(self, to: Iterable[Entry], content: object, full: Barrier, source: Iterable[Read] = ()) -> None:
        """Whatever was there is lost from now on, what comes is there later, and read from its source until then."""

        def landing() -> Process:
            yield None
            yield from reading(source)
            self.claim_running()
            for buffer, i in to:
                buffer[i] = content
            full.land()

        for buffer, i in to:
            buffer[i] = "a copy on its way"
        self.schedule.start("a copy", landing())


class Cluster:
    def __init__(self, grid: Grid, name: str) -> None:
        self.name, self.arrived = name, [0, 0]
        self.blocks = [ClusterBlock(grid, self, first) for first in (True, False)]
        first, second = self.blocks
        first.peer, second.peer = second, first

    def start(self) -> None:
        for block in self.blocks:
            block.start()
        self.warps = sum(block.warps for block in self.blocks)

    def sync(self, i: int) -> Process:
        """Arrivals of a warp have been made when it has synchronized; of copies it knows nothing."""
        self.arrived[i] += 1
        yield lambda: self.arrived[i] == self.warps and not any(b.schedule.under_way("an arrival") for b in self.blocks)


class Loader(TileLoads):
    block: ClusterBlock

    def __init__(self, block: ClusterBlock) -> None:
        super().__init__(block)
        self.chooses = block.first
        self.at = Position(block.stages, round=-1)

    def take(self) -> Process:
        block, peer = self.block, self.block.peer
        if block.first:
            if self.fault != "a number sent without waiting":
                yield block.number_empty.wait(once(self.taken - 1))
            number = self.grid.take()
            block.numbers.append(number)
            if self.fault == "a number's bytes not announced":
                peer.receive_arrival(peer.number_full.arrive)
            else:
                peer.receive_arrival(peer.number_full.arrive_expect)
            peer.receive(entries(peer.number), number, peer.number_full)
        else:
            if self.fault == "a number given back before it is read":
                peer.receive_arrival(peer.number_empty.arrive)
            if self.fault != "a number read without waiting":
                yield block.number_full.wait(once(self.taken))
            yield None
            claim(block.number[0] in peer.numbers[self.taken : self.taken + 1], f"a number {block.number[0]} received")
            block.numbers.append(peer.numbers[self.taken])
            if self.fault != "a number given back before it is read":
                peer.receive_arrival(peer.number_empty.arrive)

    def load_tile(self, t: int, tile: KeyTile) -> Process:
        block, tiles, before = self.block, tile.tiles(), once(self.taken - 1)
        if tiles > 0:
            yield from self.load(t, tile, 0, tile.start)
        if self.fault != f"{'K' if block.first else 'V'} loaded without waiting":
            yield block.left_empty.wait(before)
        yield from self.fill(entries(block.left), t, block.left_full)
        if not block.first and block.adds:
            if self.fault != "columns of K loaded without waiting":
                yield block.columns_empty.wait(before)
            yield from self.fill(entries(block.columns), t, block.columns_full)
        for head in range(tile.group):
            for j in range(head == 0, tiles):
                yield from self.load(t, tile, head, tile.query_tile_of(j))

    def load(self, t: int, tile: KeyTile, head: int, m: int) -> Process:
        block, i, content = self.block, self.at.index, (t, tile.query_tile(head, m))
        if self.fault != f"{'Q' if block.first else 'dO'} loaded without waiting":
            yield block.right_empty[i].wait(self.at)
        yield from self.fill([(block.right, i), (block.rows, i)], content, block.right_full[i], self.is_dead())
        self.at = self.at.next()


class Turns:
    def __init__(self, block: ClusterBlock, w: int) -> None:
        self.block, self.grid, self.fault, self.w, self.work = block, block.grid, block.fault, w, WorkReader(block)
        self.said = 0

    def run(self) -> Process:
        block = self.block
        of_all = block if block.first else block.peer
        while True:
            yield from self.work.next()
            if not self.work.more():
                break
            t, all_added = self.work.number, of_all.all_added[block.added(self.work.taken).index]
            if not block.adds:
                self.work.done()
                continue
            waited_for, beforehand = block.case.turn_shift != 0, self.fault == "all said to be added beforehand"
            if waited_for and beforehand:
                of_all.receive_arrival(all_added.arrive)
            if block.case.deterministic:
                yield from self.keep(t, block.tiles[t])
            elif self.fault != "additions counted before they are made":
                yield self.wait_for_additions()
            yield from block.schedule.pause()  # nobody waits for the warp
            if block.case.converts:
                self.grid.count_added(t)
            if waited_for and not beforehand:
                of_all.receive_arrival(all_added.arrive)
            self.work.done()

    def keep(self, t: int, tile: KeyTile) -> Process:
        for head in range(tile.group):
            for j in range(tile.tiles()):
                yield from self.take(t, tile.query_tile(head, tile.query_tile_of(j)))

    def take(self, t: int, query_tile: int) -> Process:
        block, column = self.block, (self.block.first, self.w)
        if self.fault != "additions let in before their turn":
            yield lambda: self.grid.is_turn(t, query_tile, column)
        block.may_add[self.w].arrive()
        waits = self.wait_for_additions()
        if self.fault != "a turn passed on without waiting":
            yield waits
        self.grid.pass_turn_on(t, query_tile, column)

    def wait_for_additions(self) -> Condition:
        at = in_pair(self.said)
        self.said += 1
        return self.block.has_added[self.w][at.index].wait(at)


class Cleaner:
    def __init__(self, block: ClusterBlock) -> None:
        self.block, self.grid, self.fault, self.work = block, block.grid, block.fault, WorkReader(block)

    def run(self) -> Process:
        block = self.block
        while True:
            yield from self.work.next()
            if not self.work.more():
                break
            t = self.work.number
            if self.fault != "additions let in before there are zeros":
                yield self.grid.wait_for_zeros(t)
            block.sums_clear[sums_clear(block, self.work.taken).index].arrive()
            if block.first:
                yield from self.grid.clear_sums_ahead(t)
            self.work.done()


def sums_clear(block: ClusterBlock, taken: int) -> Position:
    return once(taken) if block.fault == "one barrier for all sums" else in_pair(taken)


class Consumer:
    """A warp of a consumer of either block."""

    def __init__(self, block: ClusterBlock, products: Products, w: int, warp: int) -> None:
        self.block, self.peer, self.grid, self.fault = block, block.peer, block.grid, block.fault
        self.products, self.w, self.warp, self.elected = products, w, warp, warp == 0
        self.part = w * WARPS + warp
        self.work = WorkReader(block)
        self.step_index = self.made = 0
        self.tile = self.first = 0  # which work tile, and its first step
        self.query_tile = self.m = 0
        self.tiles_with_steps = 0
        self.summed: list[int] = []  # query tiles that dK, or dV, has
        self.scores = self.sum = Result(products, 0, None)  # sum: the last product of dK, or of dV

    def run(self) -> Process:
        while True:
            yield from self.work.next()
            if not self.work.more():
                break
            self.tile, self.first, self.summed = self.work.number, self.step_index, []
            self.tiles_with_steps += self.block.tiles[self.tile].steps() > 0
            if self.fault == "work given back before the tile is done":
                self.work.done()
            yield from self.run_tile()
            if self.fault != "work given back before the tile is done":
                self.work.done()
        yield from self.grid.convert_sums(CONSUMERS * (2 if self.block.case.second_adds else 1))

    def run_tile(self) -> Process:
        raise NotImplementedError

    def phase(self) -> Position:
        """Of `WorkReader.phase`."""
        with_steps = self.fault == "phases of K and V without tiles that have no steps"
        return once(max(0, self.tiles_with_steps - 1) if with_steps else self.work.taken)

    def begin(self, tile: KeyTile) -> None:
        self.m = tile.start
        self.query_tile = tile.query_tile(0, tile.start)

    def go_on(self, tile: KeyTile) -> None:
        following = tile.after(self.m)
        of_the_next_head = following == tile.start and self.fault != "all heads' dQ added to the first one's"
        self.query_tile += following - self.m + (M_TILES if of_the_next_head else 0)
        self.m = following
        self.step_index += 1

    def release_left(self) -> None:
        self.block.left_empty.arrive()

    def wait_for_clear_sums(self) -> Process:
        at = sums_clear(self.block, self.work.taken)
        if self.fault != f"sums not waited for by the {self.name}":
            yield self.block.sums_clear[at.index].wait(at)

    @property
    def name(self) -> str:
        return "first" if self.block.first else "second"

    def content(self, i: int) -> tuple[int, int]:
        """Of step i's buffers."""
        return self.tile, self.block.tiles[self.tile].path()[i - self.first]

    # products

    def issue(self, *operands: list[Read], content: object = None) -> Result:
        return self.products.issue(self.warp, [read for operand in operands for read in operand], content)

    def multiply_scores(self, i: int, stage: int) -> None:
        left = reads(self.block.left, self.tile, parts(self.w))
        self.scores = self.issue(left, reads(self.block.right, self.content(i), [stage]), content=self.content(i))

    def multiply_dq(self, i: int, columns: list[object]) -> Result:
        if not self.block.adds:
            return self.issue()
        operands = reads(self.ds(self.block, i), self.content(i)), reads(columns, self.tile)
        return self.issue(*operands, content=self.content(i))

    def ds(self, block: ClusterBlock, i: int) -> list[object]:
        """Of step i."""
        return block.ds[0 if self.fault == "one buffer of dS" else i & 1]

    def finished(self, pending: int) -> Process:
        """`wgmma_wait`."""
        yield self.products.wait(self.warp, pending)

    def add(self, dq: Result) -> Process:
        block, in_turns = self.block, self.block.case.deterministic
        if not block.adds:
            return
        if in_turns and self.fault != "added without being let in":
            yield block.may_add[self.w].wait(once(self.step_index))
        if in_turns and self.fault == "a turn passed on before the addition":
            block.has_added[self.w][self.step_index & 1].arrive()
        yield None
        claim(dq.take() == (self.tile, self.query_tile), "another dQ than that of the sums")
        self.grid.add(self.tile, self.query_tile, (block.first, self.w, self.warp))
        if in_turns and self.fault != "a turn passed on before the addition":
            block.has_added[self.w][self.step_index & 1].arrive()

    def end_additions(self) -> None:
        """Of the work tile, where turns do not say it step by step."""
        if self.block.adds and not self.block.case.deterministic:
            self.block.has_added[self.w][self.work.taken & 1].arrive()

    def read_rows(self, i: int, stage: int) -> Process:
        """What `exponentiate` and `differentials` read."""
        yield from reading(reads(self.block.rows, self.content(i), [stage]))

    def store(self) -> Process:
        block = self.block
        self.sum.take()
        claim(self.summed == block.tiles[self.tile].path(), "a step that dK or dV lacks")
        yield from self.grid.join_shares(self.tile, (block.first, self.w), self.warp, block.one_consumer[self.w])
        self.grid.store(self.tile, (block.first, self.w, self.warp))


class FirstConsumer(Consumer):
    def __init__(self, block: ClusterBlock, products: Products, w: int, warp: int) -> None:
        super().__init__(block, products, w, warp)
        self.q_at = self.s_at = Position(STAGES_Q)
        self.s_m = 0

    def run_tile(self) -> Process:
        tile = self.block.tiles[self.tile]
        steps = tile.steps()
        self.begin(tile)
        self.s_m = self.m
        if self.fault != "K used without waiting":
            yield self.block.left_full.wait(self.phase())
        if steps > 0:
            yield from self.scores_of_next(tile)
            if steps > 1:
                yield from self.scores_of_next(tile)
            yield from self.wait_for_clear_sums()
            for j in range(steps):
                yield from self.step(tile, more=j < steps - 2)
        yield from self.epilogue()

    def scores_of_next(self, tile: KeyTile) -> Process:
        """`scores`."""
        if self.fault != "a tile's first Q used without waiting":
            yield self.block.right_full[self.s_at.index].wait(self.s_at)
        self.multiply_scores(self.made, self.s_at.index)
        if self.fault != "a tile's first S^T used before it is done":
            yield from self.finished(0)
        yield from self.make_probabilities(tile)

    def step(self, tile: KeyTile, more: bool) -> Process:
        block, at = self.block, in_pair(self.step_index)
        if more and self.fault != "Q used without waiting":
            yield block.right_full[self.s_at.index].wait(self.s_at)
        if self.fault != "dS used by the first without waiting":
            yield block.ds_full[at.index].wait(at)
        if self.fault == "K given back before the last dQ is done" and self.is_last():
            self.release_left()
        dq = self.multiply_dq(self.step_index, block.left)
        self.multiply_dk(self.step_index)
        if more:
            self.multiply_scores(self.made, self.s_at.index)
        if self.fault == "dS given back by the first before dQ is done":
            self.give_back_ds(at.index)
        if self.fault != "dQ added by the first before it is done":
            yield from self.finished(2 if more else 1)
        if self.fault == "Q given back before dK is done":
            self.give_back_q()
        if self.fault == "dS given back by the first before dK is done":
            self.give_back_ds(at.index)
        yield from self.add(dq)
        yield from self.finished(1 if more else 0)
        if self.fault != "Q given back before dK is done":
            self.give_back_q()
        if self.fault not in (
            "dS given back by the first before dQ is done",
            "dS given back by the first before dK is done",
        ):
            self.give_back_ds(at.index)
        self.q_at = self.q_at.next()
        self.go_on(tile)
        if more:
            if self.fault != "S^T used before it is done":
                yield from self.finished(0)
            yield from self.make_probabilities(tile)

    def is_last(self) -> bool:
        return self.step_index - self.first == self.block.tiles[self.tile].steps() - 1

    def give_back_q(self) -> None:
        if self.elected and not (self.is_last() and self.fault == "no Q given back by a tile's last step"):
            self.block.right_empty[self.q_at.index].arrive()

    def give_back_ds(self, buffer: int) -> None:
        if self.elected and not (self.is_last() and self.fault == "no dS given back by the first's last step"):
            self.peer.receive_arrival(self.peer.ds_empty[buffer].arrive)

    def multiply_dk(self, i: int) -> None:
        self.summed.append(self.content(i)[1])
        ds = reads(self.ds(self.block, i), self.content(i), parts(self.w))
        self.sum = self.issue(ds, reads(self.block.right, self.content(i), [self.q_at.index]))

    def make_probabilities(self, tile: KeyTile) -> Process:
        i, peer = self.made, self.peer
        claim(self.content(i)[1] % M_TILES == self.s_m, "another query tile than the one that comes")
        yield from self.read_rows(i, self.s_at.index)
        claim(self.scores.take() == self.content(i), "another S^T than the one that is due")
        buffer = 0 if self.fault == "one buffer of P^T" else i & 1
        if self.fault != "P^T written without waiting":
            yield self.block.p_empty[self.w][i & 1].wait(in_pair(i - 2))
        peer.receive([(peer.p[self.w][buffer], self.warp)], self.content(i), peer.p_full[self.w][i & 1])
        self.made += 1
        self.s_at = self.s_at.next()
        self.s_m = tile.after(self.s_m)

    def epilogue(self) -> Process:
        steps = self.block.tiles[self.tile].steps()
        if steps == 0 or self.fault != "K given back before the last dQ is done":
            self.release_left()
        self.end_additions()
        yield from self.store()


class SecondConsumer(Consumer):
    def __init__(self, block: ClusterBlock, products: Products, w: int, warp: int) -> None:
        super().__init__(block, products, w, warp)
        self.dout_at = self.dp_at = Position(STAGES_DOUT)

    def run_tile(self) -> Process:
        block, tile = self.block, self.block.tiles[self.tile]
        steps, at = tile.steps(), self.phase()
        self.begin(tile)
        if self.fault != "V used without waiting":
            yield block.left_full.wait(at)
        if block.adds and self.fault != "columns of K used without waiting":
            yield block.columns_full.wait(at)
        if steps > 0:
            yield from self.first_ds()
            yield from self.wait_for_clear_sums()
            for j in range(steps - 1):
                yield from self.step(tile, more=True, first=j == 0)
            if steps == 1 or self.fault != "V given back before the last dP^T is done":
                self.release_left()
            yield from self.step(tile, more=False, first=steps == 1)
            yield from self.last_dq(tile)
        elif self.fault != "V not given back by a tile without steps":
            self.release_left()
        yield from self.epilogue()

    def first_ds(self) -> Process:
        if self.fault != "a tile's first dO used without waiting":
            yield self.block.right_full[self.dp_at.index].wait(self.dp_at)
        self.multiply_scores(self.made, self.dp_at.index)
        if self.fault != "a tile's first dP^T used before it is done":
            yield from self.finished(0)
        yield from self.make_ds()

    def step(self, tile: KeyTile, more: bool, first: bool) -> Process:
        block, before = self.block, in_pair(self.made - 2)
        if more and self.fault != "dO used without waiting":
            yield block.right_full[self.dp_at.index].wait(self.dp_at)
        if self.fault != "dS used by the second without waiting":
            yield block.ds_full[before.index].wait(before)
        # Of a tile's first step it is nobody's.
        dq = self.issue(content="nobody's") if first else self.multiply_dq(self.step_index, block.columns)
        self.multiply_dv()
        if more:
            last = self.made - self.first == tile.steps() - 1
            if last and self.fault == "V given back before the last dP^T is done":
                self.release_left()
            self.multiply_scores(self.made, self.dp_at.index)
        if not first and self.fault == "dS given back by the second before dQ is done":
            self.give_back_ds()
        if self.fault != "dQ added by the second before it is done":
            yield from self.finished(2 if more else 1)
        if not first or self.fault == "nobody's dQ added":
            yield from self.finish_dq(tile, dq)
        if self.fault != "dO given back before dV is done":
            yield from self.finished(1 if more else 0)
        if self.elected and not (not more and self.fault == "no dO given back by a tile's last step"):
            block.right_empty[self.dout_at.index].arrive()
        self.dout_at = self.dout_at.next()
        if more:
            if self.fault != "dP^T used before it is done":
                yield from self.finished(0)
            yield from self.make_ds()

    def give_back_ds(self) -> None:
        if self.elected:
            self.block.ds_empty[self.step_index & 1].arrive()

    def finish_dq(self, tile: KeyTile, dq: Result) -> Process:
        if self.fault != "dS given back by the second before dQ is done":
            self.give_back_ds()
        yield from self.add(dq)
        self.go_on(tile)

    def last_dq(self, tile: KeyTile) -> Process:
        last = in_pair(self.step_index)
        if self.fault != "the last dS used without waiting":
            yield self.block.ds_full[last.index].wait(last)
        if self.fault == "columns of K given back before the last dQ is done":
            self.block.columns_empty.arrive()
        dq = self.multiply_dq(self.step_index, self.block.columns)
        if self.fault == "dS given back by the second before dQ is done":
            self.give_back_ds()
        if self.fault != "the last dQ added before it is done":
            yield from self.finished(0)
        yield from self.finish_dq(tile, dq)

    def multiply_dv(self) -> None:
        i = self.made - 1
        self.summed.append(self.content(i)[1])
        self.sum = self.issue(reads(self.block.right, self.content(i), [self.dout_at.index]))

    # dS^T, for both blocks

    def expect_probabilities(self, buffer: int) -> None:
        if self.elected:
            self.block.p_full[self.w][buffer].arrive_expect(WARPS)

    def read_probabilities(self, i: int) -> Process:
        buffer = 0 if self.fault == "one buffer of P^T" else i & 1
        yield from reading(reads(self.block.p[self.w][buffer], self.content(i), [self.warp]))

    def make_ds(self) -> Process:
        block, peer, i = self.block, self.peer, self.made
        at, buffer = in_pair(i), i & 1
        if self.fault != "P^T used without waiting":
            yield block.p_full[self.w][buffer].wait(at)
        self.sum.take()  # it has P^T of the step before in registers
        yield from self.read_probabilities(i)
        yield from self.read_rows(i, self.dp_at.index)
        claim(self.scores.take() == self.content(i), "another dP^T than the one that is due")
        if self.fault not in ("P^T not expected again", "P^T expected after it is given back"):
            self.expect_probabilities(buffer)
        if self.fault != "P^T not given back":
            peer.receive_arrival(peer.p_empty[self.w][buffer].arrive)
        if self.fault == "P^T expected after it is given back":
            yield from block.schedule.pause()
            self.expect_probabilities(buffer)
        if self.fault != "dS written without waiting":
            yield block.ds_empty[buffer].wait(in_pair(i - 2))
        yield from self.hand_over_ds(i)
        self.made += 1
        self.dp_at = self.dp_at.next()

    def hand_over_ds(self, i: int) -> Process:
        block, peer, buffer, content = self.block, self.peer, i & 1, self.content(i)
        if self.fault == "dS said to be there before it is":
            block.ds_full[buffer].arrive()
        yield from writing([(self.ds(block, i), self.part)], content)
        if self.fault != "dS said to be there before it is":
            block.ds_full[buffer].arrive()
        full = peer.ds_full[buffer]
        peer.receive_arrival(full.arrive if self.fault == "dS's bytes not announced" else full.arrive_expect)
        source = reads(self.ds(block, i), content, [self.part])
        peer.receive([(self.ds(peer, i), self.part)], content, full, source)

    def epilogue(self) -> Process:
        steps = self.block.tiles[self.tile].steps()
        if steps == 0 or self.fault != "columns of K given back before the last dQ is done":
            self.block.columns_empty.arrive()
        self.end_additions()
        yield from self.store()


# --- cases -----------------------------------------------------------------------------------------------------


def draw_case(seed: int, fault: str) -> WideCase:
    draw = random.Random(seed)
    return WideCase(**draw_call(draw, 16, fault), second_adds=draw.random() < 0.8)


def play(seed: int, fault: str = "") -> None:
    case, schedule = draw_case(seed, fault), Schedule(seed)
    consumers = [(first, w) for first in (True, False) for w in range(CONSUMERS)]
    warps = {consumer: tuple((*consumer, warp) for warp in range(WARPS)) for consumer in consumers}
    adding: dict[object, tuple[object, ...]] = {
        (first, w): parts for (first, w), parts in warps.items() if first or case.second_adds
    }
    grid = Grid(case, schedule, fault, adding, tuple(part for parts in warps.values() for part in parts))
    for i in range(case.room):
        Cluster(grid, f"cluster {i}").start()
    schedule.run()
    grid.check()


IN_USE, ARRIVALS, RECEIVED = "registers used", "more arrivals", "a number"
FAULTS = SHARED_FAULTS | {
    # the cluster
    "a number sent without waiting": (RECEIVED, OVERTAKEN, ARRIVALS),
    "a number read without waiting": (RECEIVED,),
    "a number given back before it is read": (RECEIVED, OVERTAKEN),
    "a number's bytes not announced": (RECEIVED, "deadlock"),
    "no sync of the cluster at first": ("has not begun",),
    "no sync of the cluster at last": ("a block that has ended", "the block ends too early"),
    # K, V and columns of K
    "K loaded without waiting": (READ, OVERTAKEN),
    "V loaded without waiting": (READ,),
    "columns of K loaded without waiting": (READ,),
    "K used without waiting": (READ, OVERTAKEN),
    "V used without waiting": (READ, OVERTAKEN),
    "columns of K used without waiting": (READ, OVERTAKEN),
    "phases of K and V without tiles that have no steps": (OVERTAKEN,),
    "K given back before the last dQ is done": (READ,),
    "V given back before the last dP^T is done": (READ,),
    "columns of K given back before the last dQ is done": (READ,),
    "V not given back by a tile without steps": ("deadlock",),
    "a warp that has K not counted": (READ, OVERTAKEN),
    "a warp that has columns of K not counted": (READ, OVERTAKEN),
    # Q and dO
    "Q loaded without waiting": (READ, OVERTAKEN, ARRIVALS),
    "dO loaded without waiting": (READ, OVERTAKEN, ARRIVALS),
    "a tile's first Q used without waiting": (READ,),
    "a tile's first dO used without waiting": (READ,),
    "Q used without waiting": (READ,),
    "dO used without waiting": (READ,),
    "Q given back before dK is done": (READ,),
    "dO given back before dV is done": (READ,),
    "no Q given back by a tile's last step": ("deadlock",),
    "no dO given back by a tile's last step": ("deadlock",),
    "a consumer of Q and dO not counted": (READ, OVERTAKEN),
    # P^T
    "P^T used without waiting": (READ,),
    "P^T not given back": ("deadlock",),
    "P^T not expected again": ("deadlock",),
    "no P^T expected at first": ("deadlock",),
    "a warp that reads P^T not counted": (OVERTAKEN,),
    "one buffer of P^T": (READ,),
    # dS^T
    "dS used by the first without waiting": (READ,),
    "dS used by the second without waiting": (READ,),
    "the last dS used without waiting": (READ,),
    "dS written without waiting": (READ,),
    "dS said to be there before it is": (READ,),
    "dS's bytes not announced": ("deadlock",),
    "a warp's dS not counted": (READ, ARRIVALS),
    "dS given back by one block alone": (READ, OVERTAKEN),
    "dS given back by the first before dQ is done": (READ,),
    "dS given back by the second before dQ is done": (READ,),
    "no dS given back by the first's last step": ("deadlock",),
    "one buffer of dS": (READ,),
    # products in registers
    "a tile's first S^T used before it is done": (IN_USE,),
    "a tile's first dP^T used before it is done": (IN_USE,),
    "S^T used before it is done": (IN_USE,),
    "dP^T used before it is done": (IN_USE,),
    "dQ added by the first before it is done": (IN_USE,),
    "dQ added by the second before it is done": (IN_USE,),
    "the last dQ added before it is done": (IN_USE,),
    # sums of dQ
    "nobody's dQ added": ("another dQ",),
    "all heads' dQ added to the first one's": ("another dQ",),
    "additions let in before there are zeros": ("before there are zeros",),
    "sums not waited for by the first": ("before there are zeros",),
    "sums not waited for by the second": ("before there are zeros",),
    "one barrier for all sums": (OVERTAKEN,),
    "additions let in before their turn": ("out of turn",),
    "added without being let in": ("out of turn",),
    "a turn passed on without waiting": ("passed on too early",),
    "a turn passed on before the addition": ("passed on too early",),
    "a warp that adds not counted": ("passed on too early", "sums that lack some"),
    "all said to be added beforehand": ("deadlock",),
    "the second's additions not counted": ("deadlock",),
}
"""Mistakes, and what each of them leads to in some case."""

HARMLESS = (
    "P^T written without waiting",
    "P^T expected after it is given back",
    "dS given back by the first before dK is done",
)
"""What could be another way.

P^T may be written, since dS of the step before the last is waited for first, which a warp hands over when it has read
P^T of that step. It may be expected late, since its phase cannot end without that arrival, whatever has landed before.
dK reads a consumer's own rows of dS, which are overwritten after the P^T that the consumer makes when dK is done.
"""


CASES = 320


@pytest.mark.parametrize("first", range(0, CASES, CASES // 4))
def test_the_protocol_holds(first: int) -> None:
    for seed in range(first, first + CASES // 4):
        play(seed)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_seen(fault: str) -> None:
    assert_seen(play, CASES, fault, FAULTS[fault])


@pytest.mark.parametrize("change", HARMLESS)
def test_what_could_be_another_way(change: str) -> None:
    for seed in range(CASES // 8):
        play(seed, change)


# --- the text --------------------------------------------------------------------------------------------------

STRUCTS = ("Loader", "Turns", "Cleaner", "Consumer", "FirstConsumer", "SecondConsumer")
DIGESTS = SHARED_DIGESTS | {
    "Loader.take": "a272b82d",
    "Loader.load_tile": "a7742132",
    "Loader.load": "f6516255",
    "Turns.run": "b1952098",
    "Turns.keep": "97a63952",
    "Turns.take": "932eeda1",
    "Turns.wait_for_additions": "fd1bfc41",
    "Cleaner.run": "52065546",
    "Consumer.begin": "7e368152",
    "Consumer.go_on": "8d17c827",
    "Consumer.release_left": "79c7968a",
    "Consumer.wait_for_clear_sums": "fdf6a53f",
    "Consumer.multiply_scores": "27eac82f",
    "Consumer.multiply_dq": "0d16195f",
    "Consumer.add": "ab0a1aab",
    "Consumer.say_added": "d9bacfd7",
    "Consumer.end_additions": "1cd60a97",
    "FirstConsumer.run": "6399b09a",
    "FirstConsumer.run_tile": "13e51e3b",
    "FirstConsumer.scores": "fcec4749",
    "FirstConsumer.step": "7d5358bd",
    "FirstConsumer.multiply_dk": "8bbd2f78",
    "FirstConsumer.make_probabilities": "8280ce6b",
    "FirstConsumer.epilogue": "606e2848",
    "SecondConsumer.run": "6399b09a",
    "SecondConsumer.run_tile": "61486001",
    "SecondConsumer.first_ds": "adf92546",
    "SecondConsumer.step": "94ec2580",
    "SecondConsumer.finish_dq": "2b726861",
    "SecondConsumer.last_dq": "2393290f",
    "SecondConsumer.multiply_dv": "4b9e6575",
    "SecondConsumer.expect_probabilities": "7eadbcb1",
    "SecondConsumer.make_ds": "412e73ce",
    "SecondConsumer.hand_over_ds": "88f9d79c",
    "SecondConsumer.epilogue": "cbbf852b",
}


def kernel_text() -> str:
    problem = AttentionProblem(256, 256, "bfloat16", "full", 16, False, "sm_90a", "backward")
    return render(problem, select_config(problem)).text


def test_the_text_is_the_one_that_was_modelled() -> None:
    assert_modelled(kernel_text(), STRUCTS, DIGESTS)


def test_the_barriers_are_those_that_were_modelled() -> None:
    text = kernel_text()
    assert arrivals(text) == {
        "number_full": "1", "number_empty": "1", "left_full": "1", "left_empty": "4 * kConsumers", "columns_full": "1",
        "columns_empty": "4 * kConsumers", "landed": "1", "work_full": "1", "sums_clear": "1",
        "work_empty": "kWorkReaders", "all_added": "kAdders",
        "ds_full": "4 * kConsumers", "ds_empty": "2 * kConsumers", "p_full": "1", "p_empty": "4", "right_full": "1",
        "right_empty": "kConsumers", "may_add": "1", "added": "4",
    }  # fmt: skip
    for line in (
        "constexpr int kWorkReaders = 4 * kConsumers + 3;",
        "constexpr int kAdders = kConsumers * (kChunksSecond > 0 ? 2 : 1);",
        f"constexpr int kStagesQ = {STAGES_Q};",
        f"constexpr int kStagesDout = {STAGES_DOUT};",
        "constexpr int kOneConsumer = 2;",
        "static constexpr bool kChooses = kFirst;",
        "static constexpr bool kAdds = (kFirst ? kChunksFirst : kChunksSecond) > 0;",
        "RingPosition<kStages> at{0, 1};",
        "RingPosition<kStagesQ> q_at{0, 0};",
        "RingPosition<kStagesQ> s_at{0, 0};",
        "RingPosition<kStagesDout> dout_at{0, 0};",
        "RingPosition<kStagesDout> dp_at{0, 0};",
        "if (!first) for (int i = 0; i < 2 * kConsumers; i++) mbarrier_arrive_expect(smem.p_full(i / 2, i % 2), ",
        "else run<false>(p, smem, warp);\n    cluster_sync();",
    ):
        assert text.count(line) == 1, line


def test_every_barrier_has_a_place_of_its_own() -> None:
    found = re.findall(r"DEVICE u32 (\w+)\((.*?)\) const { return barrier\((.*)\); }", kernel_text())
    places = []
    for name, arguments, place in found:
        consumers, buffers = (CONSUMERS if "int w" in arguments else 1), (2 if "int i" in arguments else 1)
        buffers = STAGES_Q if name.startswith("right") else buffers
        for w in range(consumers):
            places += [eval(place, {"w": w, "i": i, "kStagesQ": STAGES_Q}) for i in range(buffers)]
    assert sorted(places) == list(range(33 + 2 * STAGES_Q))
