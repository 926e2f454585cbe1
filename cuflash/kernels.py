"""The kernel families: which template, parameter block, config and grid serve a problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from . import params
from .errors import UnsupportedError
from .problem import DTYPES, MASKS, AttentionProblem, Task
from .request import WIDEST_ACCESS, Request

if TYPE_CHECKING:
    from .config import ForwardConfig, KernelConfig

L2_SECTION_BYTES = 32 * 2**20
"""K and V of the heads that run at the same time should fit this much of the L2 cache."""
WAVES = 7
"""Work tiles for each multiprocessor that a section of a persistent kernel should have, so that they end together."""
SHARERS = 8
"""Multiprocessors that read a key tile at about the same time, at least: then the L2 need not hold the section."""
MAX_GRID_YZ = 65535


class KernelFamily(NamedTuple):
    """One template and all that belongs to it."""

    name: str
    template: str
    symbol_stem: str
    params: params.ParameterBlock
    config_for: Callable[[AttentionProblem], KernelConfig]


# The tables load when they are first asked: a process that takes the kernels of one family needs no other.
def _sm80_config(problem: AttentionProblem) -> KernelConfig:
    from .arch import sm80

    return sm80.forward_config(problem)


def _sm90_config(problem: AttentionProblem) -> KernelConfig:
    from .arch import sm90

    return sm90.forward_config(problem)


def _fp8_sm80_config(problem: AttentionProblem) -> KernelConfig:
    from .arch import fp8_sm80

    return fp8_sm80.forward_config(problem)


def _fp8_sm90_config(problem: AttentionProblem) -> KernelConfig:
    from .arch import fp8_sm90

    return fp8_sm90.forward_config(problem)


FAMILIES = {
    family.name: family
    for family in (
        KernelFamily("forward_sm80", "forward_sm80.cu.j2", "cuflash_fwd_sm80", params.FORWARD_SM80, _sm80_config),
        KernelFamily("forward_sm90", "forward_sm90.cu.j2", "cuflash_fwd_sm90", params.FORWARD_SM90, _sm90_config),
        KernelFamily(
            "forward_fp8_sm80",
            "forward_fp8_sm80.cu.j2",
            "cuflash_fwd_fp8_sm80",
            params.FORWARD_FP8_SM80,
            _fp8_sm80_config,
        ),
        KernelFamily(
            "forward_fp8_sm90",
            "forward_fp8_sm90.cu.j2",
            "cuflash_fwd_fp8_sm90",
            params.FORWARD_FP8_SM90,
            _fp8_sm90_config,
        ),
    )
}
"""Of the forward pass; those of the backward pass are in `cuflash.backward_kernels`."""

TMA_TARGETS = {"sm_90": "sm_90a"}
"""By the target that names a device: that of its kernels which load by TMA, where it has such."""


def family_of(arch: str, task: Task = "forward") -> KernelFamily:
    """The family of the kernels for a compile target and a task."""
    generation = "sm90" if arch in TMA_TARGETS.values() else "sm80"
    return family_named(f"{task}_{generation}" if task in ("forward", "backward") else task)


def family_serving(problem: AttentionProblem) -> KernelFamily:
    """The family of a problem's kernel."""
    family = family_of(problem.arch, problem.task)
    return family if problem.input_dtype is None else FAMILIES[family.name.replace("forward_", "forward_fp8_")]


def family_named(name: str) -> KernelFamily:
    """The family of a config, by its name."""
    if name in FAMILIES:
        return FAMILIES[name]
    if name.startswith("quantize"):
        from .quantize_kernels import FAMILIES as QUANTIZE_FAMILIES

        return QUANTIZE_FAMILIES[name]
    if name == "prepare":
        from .prepare_kernels import FAMILIES as PREPARE_FAMILIES

        return PREPARE_FAMILIES[name]
    from .backward_kernels import FAMILIES as BACKWARD_FAMILIES

    return BACKWARD_FAMILIES[name]


def select_config(problem: AttentionProblem) -> KernelConfig:
    """The tuned config of a problem; its ``family`` names the kernel."""
    return family_serving(problem).config_for(problem)


# --- which family serves a call --------------------------------------------------------------------------------


def problem_for(request: Request, arch: str) -> AttentionProblem:
    """The kernel that serves a call on a device.

    Parameters
    ----------
    request : Request
    arch : str
        The target that names the device.

    Raises
    ------
    UnsupportedError
        `use_family` asks for a family that cannot take the call.
    """
    if _family_in_use == "forward_sm90" and (reason := _hopper_refusal(request, arch)):
        raise UnsupportedError(f"forward_sm90 is asked for, and {reason}")
    if _family_in_use != "forward_sm80" and _hopper_refusal(request, arch) is None:
        from .arch import sm90

        problem = request.problem(TMA_TARGETS[arch], WIDEST_ACCESS)
        return replace(problem, short=sm90.is_short(problem, request.seqlen_q))
    return request.problem(arch)


def fp8_target(arch: str) -> str:
    """The target of the kernel for quantized operands on a device that ``arch`` names: these TMA can always take."""
    return arch if _family_in_use == "forward_fp8_sm80" else TMA_TARGETS.get(arch, arch)


def _hopper_refusal(request: Request, arch: str) -> str | None:
    if arch not in TMA_TARGETS:
        return f"it has no kernels for {arch}"
    return request.tma_refusal and f"TMA cannot take {request.tma_refusal}"


def device_targets(arch: str, access_bytes: int = WIDEST_ACCESS, task: Task = "forward") -> tuple[str, ...]:
    """The targets of all kernels that calls may take on a device that ``arch`` names; ordinary calls take the last."""
    own = TMA_TARGETS.get(arch)
    ampere = "forward_sm80" if task == "forward" else "backward_sm80"
    if own is None or access_bytes < WIDEST_ACCESS or _family_in_use == ampere:
        return (arch,)
    return arch, own


_family_in_use: str | None = None


def family_in_use() -> str | None:
    """What `use_family` asks for."""
    return _family_in_use


@contextmanager
def use_family(name: str) -> Iterator[None]:
    """Inside, all calls of the process take kernels of one family: for tests and benchmarks.

    Only those of the pass that it serves. Calls that it cannot serve are refused. Plans made before or inside are
    forgotten at both ends; a plan that another thread is making at that moment is not, so let no other thread make
    first calls meanwhile.
    """
    global _family_in_use
    from . import jit

    previous, _family_in_use = _family_in_use, family_named(name).name
    jit.forget_plans()
    try:
        yield
    finally:
        _family_in_use = previous
        jit.forget_plans()


# --- names -----------------------------------------------------------------------------------------------------


def symbol(problem: AttentionProblem, config: KernelConfig) -> str:
    """The kernel's name, which spells out problem and config so that a profiler's row explains itself."""
    parts = [family_named(config.family).symbol_stem, f"d{problem.head_dim}"]
    if problem.head_dim_v != problem.head_dim:
        parts.append(f"dv{problem.head_dim_v}")
    parts += [{"float16": "f16", "bfloat16": "bf16"}[problem.dtype], problem.mask]
    if set(problem.formats) - {"e4m3"}:
        parts.append("".join(problem.formats))
    if problem.access_bytes != 16:
        parts.append(f"a{problem.access_bytes}")
    if problem.scale_first:
        parts.append("sf")
    return "_".join([*parts, config.label])


# --- grids -----------------------------------------------------------------------------------------------------


class ForwardGrid(NamedTuple):
    """The launches of one forward call: more than one only beyond 65535 query tiles.

    ``launches`` holds (first query tile, grid) pairs.
    """

    m_tiles: int
    launches: tuple[tuple[int, tuple[int, int, int]], ...]


def forward_grid(
    problem: AttentionProblem, config: ForwardConfig, batch_heads: int, group: int, seqlen_q: int, seqlen_k: int
) -> ForwardGrid:
    """Thread blocks of a forward call, in the order in which they start: x fastest, then y, then z.

    x runs over the query heads of a section, y over the query tiles (the kernel takes the last, longest one first),
    z over sections. Under a causal mask a section is as many heads as have their K and V in the L2 cache together, so
    that long tiles of many heads start before short ones; without one, all tiles are alike and a section is one head.
    """
    section = min(max(section_heads(problem, group, seqlen_k), -(-batch_heads // MAX_GRID_YZ)), batch_heads)
    sections = -(-batch_heads // section)
    m_tiles = -(-seqlen_q // config.block_m)
    launches = tuple(
        (first, (section, min(MAX_GRID_YZ, m_tiles - first), sections)) for first in range(0, m_tiles, MAX_GRID_YZ)
    )
    return ForwardGrid(m_tiles, launches)


class PersistentGrid(NamedTuple):
    """The one launch of a persistent kernel.

    ``section`` query heads run side by side before the next ones begin; ``blocks`` thread blocks share all ``tiles``.
    """

    m_tiles: int
    section: int
    tiles: int
    blocks: int

    @property
    def last_section(self) -> int:
        """Query heads of the last section."""
        return (self.tiles // self.m_tiles - 1) % self.section + 1

    @property
    def parameters(self) -> dict[str, Any]:
        """What parameter blocks have of it."""
        return {
            "section_tiles": params.fast_div(self.section * self.m_tiles),
            "section": params.fast_div(self.section),
            "last_section": params.fast_div(self.last_section),
            "m_tiles": self.m_tiles,
            "tiles": self.tiles,
        }


def persistent_grid(
    problem: AttentionProblem,
    config: ForwardConfig,
    batch_heads: int,
    group: int,
    seqlen_q: int,
    seqlen_k: int,
    multiprocessors: int,
) -> PersistentGrid:
    """The work tiles of a forward call, taken in the order of `forward_grid`, and the blocks that share them.

    Under a causal mask a section may be larger than there: the heads that the L2 holds together, or as many as make
    `WAVES` tiles for each multiprocessor, if `SHARERS` of these have each head between them.
    """
    m_tiles = -(-seqlen_q // config.block_m)
    tiles = m_tiles * batch_heads
    section = section_heads(problem, group, seqlen_k)
    if problem.mask == "causal":
        groups = -(-WAVES * multiprocessors // (m_tiles * group))
        section = max(section, group * min(1 << (groups - 1).bit_length(), multiprocessors // SHARERS))
    section = min(section, batch_heads)
    return PersistentGrid(m_tiles, section, tiles, min(multiprocessors * config.ctas, tiles))


def section_heads(problem: AttentionProblem, group: int, seqlen_k: int) -> int:
    """How many query heads run side by side: under a causal mask, a power of two of groups whose K and V L2 holds."""
    if problem.mask != "causal":
        return 1
    kv_bytes = max(1, seqlen_k) * (problem.head_dim + problem.head_dim_v) * problem.input_bytes
    resident = max(1, L2_SECTION_BYTES // kv_bytes)
    return group << (resident.bit_length() - 1)


# --- what is shipped -------------------------------------------------------------------------------------------

SHIPPED_HEAD_DIMS = (
    (32, 32),
    (64, 64),
    (80, 80),
    (96, 96),
    (112, 112),
    (128, 128),
    (160, 160),
    (192, 192),
    (192, 128),
    (256, 256),
)


def shipped_problems(arch: str) -> Iterator[AttentionProblem]:
    """What ``cuflash compile --all`` builds for a target: common head dims, and each variant of some."""
    for (d, dv), dtype, mask in product(SHIPPED_HEAD_DIMS, DTYPES, MASKS):
        yield from variants_by_length(AttentionProblem(d, dv, dtype, mask, 16, False, arch))
    for d, mask in product((64, 128, 256), MASKS):
        base = AttentionProblem(d, d, "bfloat16", mask, 16, False, arch)
        yield from variants_by_length(replace(base, scale_first=True))
        for access_bytes in () if arch in TMA_TARGETS.values() else (8, 4, 2):
            yield replace(base, access_bytes=access_bytes)
    if arch not in TMA_TARGETS:  # calls on such devices take the kernels that load by TMA
        yield from _shipped_fp8_problems(arch)
    from .backward_kernels import shipped_problems as shipped_backward_problems

    yield from shipped_backward_problems(arch)
    from .quantize_kernels import shipped_problems as shipped_quantize_problems

    yield from shipped_quantize_problems(arch)


def _shipped_fp8_problems(arch: str) -> Iterator[AttentionProblem]:
    for (d, dv), dtype, mask in product(SHIPPED_HEAD_DIMS, DTYPES, MASKS):
        yield AttentionProblem(d, dv, dtype, mask, 16, False, arch, input_dtype="float8_e4m3fn")
    for d, mask in product((64, 128), MASKS):
        base = AttentionProblem(d, d, "bfloat16", mask, 16, False, arch, input_dtype="float8_e4m3fn")
        yield replace(base, scale_first=True)
        if select_config(one_level := replace(base, one_level=True)) != select_config(base):
            yield from variants_by_length(one_level)
        yield replace(base, input_dtype="float8_e5m2")
        yield replace(base, k_dtype="float8_e5m2", v_dtype="float8_e5m2")


def variants_by_length(problem: AttentionProblem) -> Iterator[AttentionProblem]:
    """A problem, and that of few queries if it has a kernel of its own."""
    from .arch import fp8_sm90, sm90

    yield problem
    if (fp8_sm90 if problem.input_dtype else sm90).is_short(problem, 0):
        yield replace(problem, short=True)
