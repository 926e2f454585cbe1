"""The hand-overs of the Hopper kernel, played through as a model: who waits for whom, and what lies in which buffer.

The model follows `forward_sm90.cu.j2` function by function, with the names of that text. Loaders, storer and the warps
of each consumer are processes of their own (`tests.unit.protocol`). Found are:

- a deadlock: nobody can go on;
- a wait that two phases have overtaken: parity cannot tell it from none;
- a read of another tile than the one that is due, or of a buffer that is overwritten meanwhile;
- more arrivals at a barrier than its phase has; a turn that is passed on twice.

Not seen is what the model takes for granted: that products of a warpgroup run in order and need all of its warps, that
waits and arrivals order memory (proxies, fences), that the compiler leaves all in its place; nor registers (P, O),
masks and arithmetic, nor what exactly is asked of TMA. The model is kept by hand: when the kernel has changed,
`test_the_text_is_the_one_that_was_modelled` says that the model has to follow.
"""

from __future__ import annotations

import random
import re
from functools import partial
from typing import NamedTuple

import pytest

from cuflash.kernels import select_config
from cuflash.problem import AttentionProblem
from cuflash.render import render
from cuflash.sm90_config import Sm90Config
from tests.unit.protocol import (
    WARPS,
    Barrier,
    Fault,
    NamedBarrier,
    Position,
    Process,
    Products,
    Read,
    Schedule,
    claim,
    load,
)

pytestmark = pytest.mark.slow

# --- the kernel ------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """A work tile: its key tiles, and how many of them each consumer's rows see, 0 where the rows do not exist."""

    steps: int
    needed: tuple[int, ...]


def across(config: Sm90Config) -> bool:
    """Whether the products of two work tiles overlap."""
    return config.q_stages > 1 or one_buffer(config)


def one_buffer(config: Sm90Config) -> bool:
    """Whether O leaves through the only Q buffer. Q is then held in registers, all of it."""
    return config.q_stages == 1 and config.tma_store


class Kernel:
    """One thread block and its work. ``fault`` names a deliberate mistake."""

    def __init__(self, config: Sm90Config, work: list[Work], schedule: Schedule, fault: str = "") -> None:
        self.config, self.tiles, self.schedule, self.fault = config, work, schedule, fault
        consumers, stages, q_stages = config.consumers, config.stages, config.q_stages

        def barriers(count: int, arrivals: int) -> list[Barrier]:
            return [Barrier(arrivals) for _ in range(count)]

        def per_consumer(arrivals: int) -> list[list[Barrier]]:
            return [barriers(consumers, arrivals) for _ in range(q_stages)]

        readers = WARPS * consumers + (2 if config.tma_store else 1) - (fault == "a reader of work not counted")
        self.work_full, self.work_empty = barriers(config.work_stages, 1), barriers(config.work_stages, readers)
        self.q_full, self.q_empty, self.o_full = per_consumer(1), per_consumer(1), per_consumer(WARPS)
        self.k_full, self.v_full = barriers(stages, 1), barriers(stages, 1)
        self.k_empty, self.v_empty = barriers(stages, consumers), barriers(stages, consumers)
        self.turns = [NamedBarrier(WARPS) for _ in range(consumers)]
        self.joins = [NamedBarrier(0) for _ in range(consumers)]
        self.work: list[int | None] = [None] * config.work_stages
        self.k: list[object] = [None] * stages
        self.v: list[object] = [None] * stages
        self.q: list[list[list[object]]] = [[[None] * WARPS for _ in range(consumers)] for _ in range(q_stages)]

    def run(self) -> None:
        self.schedule.start("the key/value loader", self.load_keys_and_values())
        self.schedule.start("the query loader", self.load_queries())
        if self.config.tma_store:
            self.schedule.start("the storer", self.store_outputs())
        for w in range(self.config.consumers):
            products = Products(self.schedule)
            for warp in range(WARPS):
                self.schedule.start(f"warp {warp} of consumer {w}", Consumer(self, products, w, warp).run())
        self.schedule.run()

    # KeyValueLoader

    def load_keys_and_values(self) -> Process:
        stage, work_at = Position(self.config.stages, round=-1), Position(self.config.work_stages, round=-1)
        yield from self.publish(0, work_at)
        for t, tile in enumerate(self.tiles):
            for j in range(tile.steps):
                if not across(self.config) and j == 1:
                    for w in range(self.config.consumers):  # this wait may pass early: it only paces
                        yield partial(self.q_full[0][w].passes, t % 2)
                for buffer, full, empty in (
                    (self.k, self.k_full, self.k_empty), (self.v, self.v_full, self.v_empty)
                ):  # fmt: skip
                    if self.fault != "loads without waiting" or buffer is self.k:
                        yield empty[stage.index].wait(stage)
                    load(self.schedule, [(buffer, stage.index)], (t, j), full[stage.index])
                stage = stage.next()
                if j == min(1, tile.steps - 1):
                    work_at = work_at.next()
                    yield from self.publish(t + 1, work_at)

    def publish(self, t: int, work_at: Position) -> Process:
        if self.fault != "work published without waiting":
            yield self.work_empty[work_at.index].wait(work_at)
        self.work[work_at.index] = t
        yield None
        self.work_full[work_at.index].arrive()

    # receive_work, and the part of next_work that does the same

    def receive_work(self, t: int) -> Process:
        """The work tile that is due. Past the last one there is no more work."""
        stages = self.config.work_stages
        work_at = Position(stages, t % stages, t // stages)
        yield self.work_full[work_at.index].wait(work_at)
        claim(self.work[work_at.index] == t, f"work {self.work[work_at.index]} received for {t}")
        yield None
        claim(self.work[work_at.index] == t, f"work {t} overwritten")
        self.work_empty[work_at.index].arrive()

    # QueryLoader

    def load_queries(self) -> Process:
        buffer = Position(self.config.q_stages, round=-1)
        for t in range(len(self.tiles)):
            yield from self.receive_work(t)
            for w in range(self.config.consumers):
                if self.fault != "Q loaded without waiting":
                    yield self.q_empty[buffer.index][w].wait(buffer)
                parts = [(self.q[buffer.index][w], warp) for warp in range(WARPS)]
                load(self.schedule, parts, ("Q", t), self.q_full[buffer.index][w])
            buffer = buffer.next()
        yield from self.receive_work(len(self.tiles))

    # Storer

    def store_outputs(self) -> Process:
        buffer = Position(self.config.q_stages)
        for t in range(len(self.tiles)):
            yield from self.receive_work(t)
            for w in range(self.config.consumers):
                if self.fault != "O stored without waiting":
                    yield self.o_full[buffer.index][w].wait(buffer)
                for moment in range(2):
                    if moment == 0 and self.fault == "Q given back before O is read":
                        self.q_empty[buffer.index][w].arrive()
                    for warp in range(WARPS):
                        Read(self.q[buffer.index][w], warp, ("O", t)).check()
                    yield None
                if self.fault != "Q given back before O is read":
                    self.q_empty[buffer.index][w].arrive()
            buffer = buffer.next()
        yield from self.receive_work(len(self.tiles))


class Consumer:
    """A warp of a consumer."""

    def __init__(self, kernel: Kernel, products: Products, warpgroup: int, warp: int) -> None:
        self.kernel, self.config, self.products = kernel, kernel.config, products
        self.warpgroup, self.warp, self.elected = warpgroup, warp, warp == 0
        self.k_stage = self.v_stage = Position(self.config.stages)
        self.buffer = Position(self.config.q_stages)
        self.loading = False  # Q is on its way to registers
        self.t = self.received = 0  # the work tile, and how many have been received
        self.first = self.skipped = 0  # the tile's first step that is the consumer's own; steps still to hand back
        self.key_tile: tuple[int, int] = (0, 0)  # of the last S: what P V will need

    def run(self) -> Process:
        if self.warpgroup == self.config.consumers - 1 and self.kernel.fault != "no first turn":
            self.pass_turn()
        yield from self.next_work()
        yield from self.first_step()
        while True:
            yield from self.later_steps()
            yield from self.next_work()
            more = self.received <= len(self.kernel.tiles)
            if across(self.config):  # run_across
                if not more:
                    yield from self.last_step()
                    break
                yield from self.boundary_step()
            else:  # run_drained
                yield from self.last_step()
                if not more:
                    break
                self.t += 1
                self.buffer = self.buffer.next()
                yield from self.first_step()
        if self.warpgroup == 0:
            yield from self.take_turn()

    def later_steps(self) -> Process:
        for j in range(self.first + 1, self.kernel.tiles[self.t].steps):
            yield from self.step(j)

    def next_work(self) -> Process:
        t, tiles = self.received, self.kernel.tiles
        yield from self.kernel.receive_work(t)
        self.received += 1
        self.first = self.skipped = self.skipped_steps(tiles[t]) if t < len(tiles) else 0

    def skipped_steps(self, tile: Work) -> int:
        skipped = tile.steps - min(tile.steps, max(1, tile.needed[self.warpgroup]))
        return skipped if self.kernel.fault == "no cap on skipped steps" else min(skipped, self.config.stages - 1)

    def skip_steps(self) -> Process:
        kernel, fault = self.kernel, self.kernel.fault
        for _ in range(self.skipped):
            if fault != "no turn for a skipped step":
                yield from self.take_turn()
                self.pass_turn()
            if fault != "handed back before full":
                yield kernel.k_full[self.k_stage.index].wait(self.k_stage)
                if fault == "handed back before all warps have seen it full":
                    self.release(kernel.k_empty, self.k_stage)
                yield kernel.v_full[self.k_stage.index].wait(self.k_stage)
            if fault != "handed back before all warps have seen it full":
                yield kernel.joins[self.warpgroup].sync()
                self.release(kernel.k_empty, self.k_stage)
            if fault != "skipped V not handed back":
                self.release(kernel.v_empty, self.k_stage)
            self.k_stage = self.k_stage.next()
        self.skipped = 0

    # turns

    def take_turn(self) -> Process:
        if self.config.ping_pong:
            yield self.kernel.turns[self.warpgroup].sync()

    def pass_turn(self) -> None:
        if self.config.ping_pong:
            self.kernel.turns[(self.warpgroup + 1) % self.config.consumers].arrive()

    # products

    def multiply_qk(self, t: int, j: int, buffer: Position) -> Process:
        kernel = self.kernel
        if kernel.fault != "K used without waiting":
            yield kernel.k_full[self.k_stage.index].wait(self.k_stage)
        yield from self.take_turn()
        reads = [Read(kernel.k, self.k_stage.index, (t, j))]
        if not self.config.q_registers or self.loading:
            reads += [Read(kernel.q[buffer.index][self.warpgroup], warp, ("Q", t)) for warp in range(WARPS)]
        self.loading = False
        self.products.issue(self.warp, reads)
        if kernel.fault == "K given back before its product is done":
            self.release(kernel.k_empty, self.k_stage)

    def multiply_pv(self) -> Process:
        yield self.kernel.v_full[self.v_stage.index].wait(self.v_stage)
        self.products.issue(self.warp, [Read(self.kernel.v, self.v_stage.index, self.key_tile)])
        if self.kernel.fault == "V given back before its product is done":
            self.release(self.kernel.v_empty, self.v_stage)

    def multiply_both(self, t: int, j: int, buffer: Position) -> Process:
        yield from self.multiply_qk(t, j, buffer)
        yield from self.multiply_pv()
        self.pass_turn()
        self.key_tile = t, j

    def advance(self) -> None:
        self.v_stage, self.k_stage = self.k_stage, self.k_stage.next()

    def receive_queries(self, at: Position) -> Process:
        if self.kernel.fault != "Q used without waiting":
            yield self.kernel.q_full[at.index][self.warpgroup].wait(at)
        self.loading = True  # no barrier waits for what ldmatrix reads; the first product does
        if self.kernel.fault == "next Q let in before the first product is done":
            self.let_next_queries_in()

    def let_next_queries_in(self) -> None:
        if one_buffer(self.config) and self.elected and self.kernel.fault != "no Q let in":
            self.kernel.q_empty[0][self.warpgroup].arrive()

    def release_queries(self, buffer: Position, last: bool) -> None:
        if self.kernel.fault == "Q given back after the first step":
            last = True
        if not self.config.tma_store and last and self.elected:
            self.kernel.q_empty[buffer.index][self.warpgroup].arrive()

    def release(self, empty: list[Barrier], stage: Position) -> None:
        if self.elected:
            empty[stage.index].arrive()

    def release_k(self, stage: Position) -> None:
        if self.kernel.fault != "K given back before its product is done":
            self.release(self.kernel.k_empty, stage)

    def release_v(self, stage: Position) -> None:
        if self.kernel.fault != "V given back before its product is done":
            self.release(self.kernel.v_empty, stage)

    # steps

    def last_of(self, t: int, j: int) -> bool:
        steps = self.kernel.tiles[t].steps
        if self.kernel.fault == "Q given back by the work tile's steps":
            return j - self.first == steps - 1
        return j == steps - 1

    def first_step(self) -> Process:
        t, j = self.t, self.first
        yield from self.skip_steps()
        yield from self.receive_queries(self.buffer)
        yield from self.multiply_qk(t, j, self.buffer)
        self.pass_turn()
        self.key_tile = t, j
        yield self.products.wait(self.warp, 0)
        self.release_k(self.k_stage)
        self.release_queries(self.buffer, self.last_of(t, j))
        if self.kernel.fault != "next Q let in before the first product is done":
            self.let_next_queries_in()
        self.advance()
        yield None

    def step(self, j: int) -> Process:
        yield from self.multiply_both(self.t, j, self.buffer)
        k, v = self.k_stage, self.v_stage
        self.advance()
        yield self.products.wait(self.warp, 1)
        self.release_queries(self.buffer, self.last_of(self.t, j))
        yield from self.finish_products(k, v)

    def boundary_step(self) -> Process:
        t, j, next_buffer = self.t + 1, self.first, self.buffer.next()
        yield from self.skip_steps()
        if self.kernel.fault == "O before the next Q is read" and one_buffer(self.config):
            self.kernel.q[0][self.warpgroup][self.warp] = "O", self.t
        yield from self.receive_queries(next_buffer)
        yield from self.multiply_both(t, j, next_buffer)
        k, v = self.k_stage, self.v_stage
        self.advance()
        yield self.products.wait(self.warp, 1)
        self.release_queries(next_buffer, self.last_of(t, j))
        yield from self.finish_products(k, v)
        self.epilogue(next_buffer if self.kernel.fault == "O into the next tile's buffer" else self.buffer)
        self.t, self.buffer = t, next_buffer
        yield None

    def last_step(self) -> Process:
        yield from self.take_turn()
        yield from self.multiply_pv()
        self.pass_turn()
        yield self.products.wait(self.warp, 0)
        self.release_v(self.v_stage)
        if one_buffer(self.config) and self.kernel.fault != "last O before the one before has left":
            yield self.kernel.q_empty[0][self.warpgroup].wait(self.buffer)
        self.epilogue(self.buffer)
        yield None

    def finish_products(self, k: Position, v: Position) -> Process:
        yield None
        self.release_k(k)
        if self.kernel.fault == "K given back twice":
            self.release_k(k)
        yield self.products.wait(self.warp, 0)
        self.release_v(v)

    def epilogue(self, buffer: Position) -> None:
        if self.config.tma_store:
            if self.kernel.fault != "O announced, but not there":
                self.kernel.q[buffer.index][self.warpgroup][self.warp] = "O", self.t
            self.kernel.o_full[buffer.index][self.warpgroup].arrive()


# --- cases -----------------------------------------------------------------------------------------------------


def draw_case(seed: int) -> tuple[Sm90Config, list[Work]]:
    """A config, and work of short and long tiles, of which consumers need any part."""
    draw = random.Random(seed)
    q_stages, q_registers = draw.choice((1, 1, 2, 3)), draw.choice((0, 8))
    config = Sm90Config(
        block_m=64 * draw.choice((1, 2, 2, 3, 3)),
        block_n=64,
        stages=draw.choice((2, 2, 3, 4)),
        q_stages=q_stages,
        q_registers=q_registers,
        ping_pong=draw.random() < 0.7,
        tma_store=(q_stages > 1 or q_registers > 0) and draw.random() < 0.7,
    )
    longest, skipping = draw.choice((1, 2, 3, 4, 7)), draw.choice((0.0, 0.5, 1.0))
    work = []
    for _ in range(draw.randint(1, 8)):
        steps = draw.randint(1, longest)
        needed = (draw.randint(0, steps) if draw.random() < skipping else steps for _ in range(config.consumers))
        work.append(Work(steps, tuple(needed)))
    return config, work


def play(config: Sm90Config, work: list[Work], seed: int, fault: str = "") -> None:
    Kernel(config, work, Schedule(seed), fault).run()


CASES = 600
READ, OVERTAKEN, ARRIVALS = "a read of", "overtaken", "more arrivals"
FAULTS = {
    "no cap on skipped steps": ("deadlock",),
    "handed back before full": (READ, OVERTAKEN, ARRIVALS),
    "handed back before all warps have seen it full": (OVERTAKEN,),
    "skipped V not handed back": ("deadlock",),
    "no turn for a skipped step": ("deadlock",),
    "no first turn": ("deadlock",),
    "K given back twice": (OVERTAKEN, READ),
    "K given back before its product is done": (READ,),
    "V given back before its product is done": (READ,),
    "K used without waiting": (READ,),
    "Q used without waiting": (READ,),
    "Q loaded without waiting": (READ, ARRIVALS),
    "next Q let in before the first product is done": (READ,),
    "no Q let in": ("deadlock",),
    "last O before the one before has left": (READ,),
    "O before the next Q is read": (READ,),
    "Q given back after the first step": (READ,),
    "Q given back by the work tile's steps": ("deadlock",),
    "Q given back before O is read": (READ,),
    "O stored without waiting": (READ,),
    "O announced, but not there": (READ,),
    "O into the next tile's buffer": (READ, "deadlock"),
    "loads without waiting": (READ, OVERTAKEN),
    "work published without waiting": (OVERTAKEN, "overwritten", "received for"),
    "a reader of work not counted": (OVERTAKEN, "overwritten", "received for"),
}
"""Mistakes, and what each of them leads to in some case."""


@pytest.mark.parametrize("first", range(0, CASES, CASES // 8))
def test_the_protocol_holds(first: int) -> None:
    for seed in range(first, first + CASES // 8):
        play(*draw_case(seed), seed)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_seen(fault: str) -> None:
    missing = set(FAULTS[fault])
    for seed in range(CASES):
        try:
            play(*draw_case(seed), seed, fault)
        except Fault as error:
            missing -= {what for what in missing if what in str(error)}
        if not missing:
            return
    raise AssertionError(f"never seen: {missing}")


def problem(d: int) -> AttentionProblem:
    return AttentionProblem(d, d, "bfloat16", "causal", 16, False, "sm_90a")


def table_config(d: int) -> Sm90Config:
    config = select_config(problem(d))
    assert isinstance(config, Sm90Config)
    return config


# Work tiles of the table's configs with consumers that skip: tiles on a causal diagonal, and the last one of a length
# that leaves consumers without rows.
@pytest.mark.parametrize("config", [table_config(64), table_config(256)], ids=lambda config: config.label)
def test_the_tables_configs_that_skip(config: Sm90Config) -> None:
    def tiles(length: int, row: int) -> int:
        return -(-min(length, row) // config.block_n)

    def causal(length: int) -> list[Work]:
        return [
            Work(
                tiles(length, m0 + config.block_m),
                tuple(tiles(length, m + 64) if m < length else 0 for m in range(m0, m0 + config.block_m, 64)),
            )
            for m0 in reversed(range(0, length, config.block_m))
        ]

    seen = False
    for seed in range(60):
        work = random.Random(seed).sample([*causal(5 * config.block_m), *causal(4 * config.block_m + 7)], 6)
        play(config, work, seed)
        try:
            play(config, work, seed, "handed back before all warps have seen it full")
        except Fault as fault:
            seen = seen or OVERTAKEN in str(fault)
    assert seen


# --- the text --------------------------------------------------------------------------------------------------

HAND_OVERS = re.compile(
    r"mbarrier_wait\((?:smem\.)?(\w+)|mbarrier_arrive(?:_expect|_after)?\((?:smem\.)?(\w+)"
    r"|\b(named_barrier_\w+|wgmma_wait<\d>|wgmma_commit|tma_load|tma_store\w*)\("
    r"|\b((?:take|pass)_turn|(?:skip|first|later|last|boundary)_steps?|advance|multiply_(?:qk|pv|both)|next_work|receive_work"
    r"|receive_queries|let_next_queries_in|release_queries|finish_products|epilogue|publish|let_queries_pass|load|store)\("
)
MODELLED = {
    "KeyValueLoader.run": "publish let_queries_pass load load advance publish",
    "KeyValueLoader.let_queries_pass": "wait:q_full",
    "KeyValueLoader.publish": "wait:work_empty arrive:work_full advance",
    "KeyValueLoader.load": "wait:empty arrive:full tma_load",
    "QueryLoader.run": "receive_work load advance",
    "QueryLoader.load": "wait:q_empty arrive:full tma_load",
    "Storer.run": "receive_work store advance tma_store_wait",
    "Storer.store": "wait:o_full tma_store tma_store_commit tma_store_wait_read arrive:q_empty",
    "Consumer.run": "pass_turn next_work take_turn",
    "Consumer.run_across": "first_step later_steps next_work boundary_step last_step",
    "Consumer.run_drained": "first_step later_steps next_work last_step advance first_step",
    "Consumer.next_work": "wait:work_full arrive:work_empty advance",
    "Consumer.skip_steps": "take_turn pass_turn wait:k_full wait:v_full named_barrier_sync"
    " arrive:k_empty arrive:v_empty advance",
    "Consumer.take_turn": "named_barrier_sync",
    "Consumer.pass_turn": "named_barrier_arrive",
    "Consumer.multiply_qk": "wait:k_full take_turn wgmma_commit",
    "Consumer.multiply_pv": "wait:v_full wgmma_commit",
    "Consumer.multiply_both": "multiply_qk multiply_pv pass_turn",
    "Consumer.advance": "advance",
    "Consumer.receive_queries": "wait:q_full",
    "Consumer.release_queries": "arrive:q_empty",
    "Consumer.let_next_queries_in": "arrive:q_empty",
    "Consumer.first_step": "skip_steps receive_queries multiply_qk pass_turn wgmma_wait<0> arrive:k_empty"
    " release_queries let_next_queries_in advance",
    "Consumer.step": "multiply_both advance wgmma_wait<1> release_queries finish_products",
    "Consumer.boundary_step": "advance skip_steps receive_queries multiply_both advance wgmma_wait<1> release_queries"
    " finish_products epilogue",
    "Consumer.last_step": "take_turn multiply_pv pass_turn wgmma_wait<0> arrive:v_empty wait:q_empty epilogue",
    "Consumer.finish_products": "arrive:k_empty wgmma_wait<0> arrive:v_empty",
    "Consumer.epilogue": "arrive:o_full",
}
"""By function: who waits, arrives, issues and calls, in the order of the text. The model has the same."""


def hand_overs(text: str) -> dict[str, str]:
    """What `MODELLED` says, of a kernel's text."""
    text = re.sub(r"//.*", "", text)
    found = {}
    for struct in ("KeyValueLoader", "QueryLoader", "Storer", "Consumer"):
        body = text[text.index(f"\nstruct {struct} {{") :]
        body = body[: body.index("\n};")]
        for function in re.split(r"\n    DEVICE ", body)[1:]:
            head, _, rest = function.partition("{")
            calls = []
            for waited, arrived, instruction, call in HAND_OVERS.findall(rest):
                calls.append((waited and "wait:" + waited) or (arrived and "arrive:" + arrived) or instruction or call)
            if calls:
                name = head.partition("(")[0].split()[-1]
                found[f"{struct}.{name}"] = " ".join(calls)
    return found


def kernel_text() -> str:
    return render(problem(64), table_config(64)).text


def test_the_text_is_the_one_that_was_modelled() -> None:
    """Else the model above has to follow the text; then this list."""
    assert hand_overs(kernel_text()) == MODELLED


def test_the_barriers_are_those_that_were_modelled() -> None:
    text = kernel_text()
    assert f"constexpr int kWorkStages = {Sm90Config.work_stages};" in text
    assert "constexpr int kWorkReaders = 4 * kConsumers + (kTmaStore ? 2 : 1);" in text
    arrivals = dict(re.findall(r"mbarrier_init\((\w+)\(.*?\), (\w+)\);", text))
    assert arrivals == {
        "work_full": "1", "work_empty": "kWorkReaders", "q_full": "1", "q_empty": "1", "o_full": "4",
        "k_full": "1", "v_full": "1", "k_empty": "kConsumers", "v_empty": "kConsumers",
    }  # fmt: skip
    assert "return min_int(tile.steps - min_int(tile.steps, max_int(1, needed)), kStages - 1);" in text
    assert "if (j == min_int(1, steps - 1)) {" in text
    for line in (  # conditions, parities and first positions, which names alone do not tell
        "constexpr bool kOneBuffer = kQStages == 1 && kTmaStore;",
        "constexpr bool kAcross = kQStages > 1 || kOneBuffer;",
        "if constexpr (kAcross) run_across();",
        "if (!kAcross && j == 1) let_queries_pass();",
        "if (kOneBuffer) mbarrier_wait(smem.q_empty(0, warpgroup), buffer.phase);",
        "{ if (kOneBuffer && elected) mbarrier_arrive(smem.q_empty(0, warpgroup)); }",
        "if (!kTmaStore && last && elected) mbarrier_arrive(smem.q_empty(q_buffer, warpgroup));",
        "RingPosition<kQStages> buffer{0, 1};",
        "RingPosition<kStages> stage{0, 1};",
        "RingPosition<kStages> k_stage{0, 0}, v_stage{0, 0};",
    ):
        assert text.count(line) == 1, line
    staged = text.index("stage_output_chunks<kBf16, kBlockM, kColumnsOut>(")
    announced = text.index("mbarrier_arrive(smem.o_full(buffer.index, warpgroup))")
    assert staged < text.index("async_proxy_fence();", staged) < announced
