"""The kernel families of the backward pass: as `cuflash.kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from . import kernels
from .arch import backward
from .backward_config import HopperConfig, MainConfig
from .backward_params import BACKWARD_DQ, BACKWARD_ROWS, BACKWARD_SM80, BACKWARD_SM90, BACKWARD_WIDE
from .backward_request import BackwardRequest
from .errors import UnsupportedError
from .kernels import L2_SECTION_BYTES, SHIPPED_HEAD_DIMS, TMA_TARGETS, KernelFamily
from .problem import DTYPES, AttentionProblem, Task
from .request import WIDEST_ACCESS

FAMILIES = {
    family.name: family
    for family in (
        KernelFamily(
            "backward_rows", "backward_rows.cu.j2", "cuflash_bwd_rows", BACKWARD_ROWS, backward.backward_rows_config
        ),
        KernelFamily(
            "backward_sm80", "backward_sm80.cu.j2", "cuflash_bwd_sm80", BACKWARD_SM80, backward.backward_config
        ),
        KernelFamily(
            "backward_sm90", "backward_sm90.cu.j2", "cuflash_bwd_sm90", BACKWARD_SM90, backward.backward_sm90_config
        ),
        KernelFamily(
            "backward_sm90_wide",
            "backward_sm90_wide.cu.j2",
            "cuflash_bwd_sm90",
            BACKWARD_WIDE,
            backward.backward_sm90_config,
        ),
        KernelFamily("backward_dq", "backward_dq.cu.j2", "cuflash_bwd_dq", BACKWARD_DQ, backward.backward_dq_config),
    )
}


HOPPER = ("backward_sm90", "backward_sm90_wide")
"""What loads by TMA; the head dims decide between them."""

FEW_TILES = 8
"""Key tiles of a head up to which a causal section of a Hopper kernel is no larger than the device."""

FEWEST_IN_TURN = 32
"""Heads side by side where Hopper's tiles add in turns under a causal mask, as far as four times the L2 cache goes."""

FEWEST_WAVES = 2
"""Key tiles for each place below which tiles share the query heads of a key/value head."""

TASKS: tuple[Task, ...] = ("backward_rows", "backward", "backward_dq")
"""Of a call's kernels, in the order of their launches; Hopper's main kernels may do the last one's work themselves."""


def problems_for(request: BackwardRequest, arch: str) -> tuple[AttentionProblem, ...]:
    """The kernels that serve a call on a device, all for one target: the main kernel's, which the others fit.

    Hopper's main kernels make dQ of its sums themselves if it can be written 16 bytes at a time.

    Parameters
    ----------
    request : BackwardRequest
    arch : str
        The target that names the device.

    Raises
    ------
    UnsupportedError
        `cuflash.kernels.use_family` asks for a Hopper family, which cannot take the call.
    """
    asked, refusal = kernels.family_in_use(), _hopper_refusal(request, arch)
    if asked in HOPPER and refusal:
        raise UnsupportedError(f"{asked} is asked for, and {refusal}")
    if asked == "backward_sm80" or refusal:
        return tuple(request.problem(arch, task) for task in TASKS)
    rows, main, dq = (request.problem(TMA_TARGETS[arch], task) for task in TASKS)
    if dq.access_bytes == WIDEST_ACCESS:
        return rows, main
    return rows, replace(main, access_bytes=WIDEST_ACCESS), dq


def _hopper_refusal(request: BackwardRequest, arch: str) -> str | None:
    if arch not in TMA_TARGETS:
        return f"it has no kernels for {arch}"
    return request.tma_refusal and f"TMA cannot take {request.tma_refusal}"


class BackwardGrid(NamedTuple):
    """The work of the backward pass's main kernel, by tiles of keys, and the thread blocks that do it.

    ``work_tiles`` are the key tiles of all heads: ``section`` heads side by side before the next ones begin, the first
    key tiles of all of them first: under a causal mask these are the longest. Each is a thread block of the
    Ampere-style kernel; the ``blocks`` of a Hopper kernel, one for each multiprocessor, or the clusters that they make,
    take one after the other: so many tiles have their places on a device at a time. Where
    there are few key tiles, ``shares`` tiles of a Hopper kernel have some of the query heads of a key/value head each,
    and count as so many heads; they add up dK and dV one after the other. The sums of dQ of the first
    ``cleared_heads``, whole sections, are clear when a Hopper kernel begins; it clears those of a head while it works
    on the tiles of the head so many before. Without a mask these are tiles for all multiprocessors; where causal
    sections meet, a tile may wait for zeros that others have just begun to write.

    With a ``turn_shift``, tiles of Hopper kernels that add to sums of dQ in turns follow each other through the query
    tiles: of ``turn_group`` neighbours each starts that many query tiles after the one before it (Qiang et al., DASH:
    Deterministic Attention Scheduling for High-throughput Reproducible LLM Training, 2026). They wait for each other,
    so all of them must find room at the same time, and are begun one right after the other: in a section the groups
    in order, in each of them the heads.
    """

    m_tiles: int
    n_tiles: int
    section: int
    work_tiles: int
    blocks: int
    turn_group: int
    turn_shift: int
    shares: int
    cleared_heads: int

    @property
    def last_section(self) -> int:
        """Heads of the last section."""
        return (self.work_tiles // self.n_tiles - 1) % self.section + 1


def backward_grid(
    problem: AttentionProblem,
    config: MainConfig,
    sizes: tuple[int, int, int, int],
    multiprocessors: int,
    deterministic: bool,
) -> BackwardGrid:
    """Work of a backward call, in the order in which it is begun.

    Parameters
    ----------
    problem : AttentionProblem
    config : BackwardConfig, BackwardSm90Config or BackwardWideConfig
    sizes : (batch * query heads, query heads for each key/value head, query length, key length)
    multiprocessors : int
    deterministic : bool
    """
    batch_heads, group, seqlen_q, seqlen_k = sizes
    hopper = isinstance(config, HopperConfig)
    places = max(1, multiprocessors // config.cluster)
    m_tiles, n_tiles = -(-seqlen_q // config.block_m), -(-seqlen_k // config.block_n)
    shares = _shares(group, n_tiles * batch_heads // group, places) if hopper else 1
    group //= shares
    heads = batch_heads // group
    turn_group, turn_shift = n_tiles, 0
    shifted = _turns(m_tiles, n_tiles, heads, places)
    if deterministic and problem.mask == "full" and hopper and shifted:
        turn_group, turn_shift = shifted
        section = places // turn_group
    else:
        of_a_head = group * seqlen_q, n_tiles
        section = _section(problem, hopper, heads, of_a_head, places, deterministic)
    work_tiles, section = n_tiles * heads, min(section, heads)
    blocks, cleared_heads = work_tiles, heads
    if hopper:
        blocks = min(work_tiles, places) * config.cluster
        cleared_heads = min(heads, section * -(-places // (section * n_tiles)))
    return BackwardGrid(m_tiles, n_tiles, section, work_tiles, blocks, turn_group, turn_shift, shares, cleared_heads)


def _section(
    problem: AttentionProblem,
    hopper: bool,
    heads: int,
    of_a_head: tuple[int, int],
    places: int,
    deterministic: bool,
) -> int:
    """Heads side by side: as many as have their Q, dO and sums of dQ in the L2 cache together.

    Without a mask all tiles are alike, and one head at a time keeps these the longest. Hopper's causal sections have a
    tile for every multiprocessor at least, and the last is no small rest: its longest tiles would be waited for. Of
    short heads they have no more, so that sums are in the L2 cache from their clearing on. Where tiles add in turns,
    those of many heads wait for each other less. ``of_a_head``: query rows and key tiles.
    """
    (rows, n_tiles), causal = of_a_head, problem.mask == "causal"
    if not causal and not deterministic:
        return 1
    row_bytes = 2 * (problem.head_dim + problem.head_dim_v) + 4 * problem.head_dim
    section = max(1, L2_SECTION_BYTES // (rows * row_bytes))
    if not hopper or not causal:
        return section
    whole_device = -(-places // n_tiles)
    if n_tiles <= FEW_TILES and not deterministic:
        return whole_device
    section = max(section, whole_device, min(4 * section, FEWEST_IN_TURN) if deterministic else 1)
    if section >= heads:
        return heads
    return max(range(section, min(2 * section, heads) + 1), key=lambda some: ((heads - 1) % some + 1) / some)


def _shares(group: int, tiles: int, places: int) -> int:
    """Of the query heads of a key/value head: the fewest, alike, that make tiles enough for blocks to end together."""
    divisors = (n for n in range(1, group + 1) if group % n == 0)
    return next((n for n in divisors if n * tiles >= FEWEST_WAVES * places), group)


def _turns(m_tiles: int, n_tiles: int, heads: int, places: int) -> tuple[int, int] | None:
    """Group and shift of the turns; None where groups of all heads together would leave multiprocessors idle.

    Key tiles are two query tiles apart: passing a turn on takes longer than a step, and what one has read and added to
    must still lie in the L2 cache for the next. A group that waits for room holds what it has: so it is small beside
    the device, of which other work may have taken a part.
    """
    group = max(1, min(n_tiles, m_tiles // 2, places // 4))
    if group < n_tiles and group * heads < places:
        return None
    return group, max(1, min(2, m_tiles // group))


def problems_beside(forward: AttentionProblem, target: str) -> tuple[AttentionProblem, ...]:
    """The kernels of the gradients of a forward problem's calls, in order; ``target`` is that of the main one."""
    main = replace(forward, task="backward", scale_first=False, short=False, arch=target)
    rows = replace(main, task="backward_rows", mask="full")
    if target in TMA_TARGETS.values():  # arrays that TMA can take, so that the main kernel makes dQ as well
        return rows, main
    return rows, main, replace(rows, task="backward_dq", head_dim_v=main.head_dim)


def shipped_problems(arch: str) -> Iterator[AttentionProblem]:
    """What ``cuflash compile --all`` builds for a target: its main kernel under each mask, and those beside it.

    Hopper's main kernels make dQ themselves where accesses are whole, and others are not shipped for them.
    """
    forms = [(dims, dtype, 16) for dims, dtype in product(SHIPPED_HEAD_DIMS, DTYPES)]
    makes_dq = arch in TMA_TARGETS.values()
    if not makes_dq:
        forms += [((d, d), "bfloat16", access_bytes) for d, access_bytes in product((64, 128, 256), (8, 4, 2))]
    last = set()
    for (d, dv), dtype, access_bytes in forms:
        base = AttentionProblem(d, dv, dtype, "full", access_bytes, False, arch, "backward")
        yield base
        yield replace(base, mask="causal")
        yield replace(base, task="backward_rows")
        last.add(replace(base, task="backward_dq", head_dim_v=d))
    yield from () if makes_dq else sorted(last, key=repr)
