"""Launch plans of the quantizer: the means of K and V, then the codes of all tensors of a call in one kernel."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from . import driver, jit
from .arch import ARCHES
from .arrays import ITEM_BYTES, Operand
from .cpu_quantize import signs
from .errors import UnsupportedError
from .fp8_layout import row_strides, tiles
from .params import ParameterBlock, fast_div, stride_values
from .problem import AttentionProblem, Dtype, Task
from .quantize_kernels import MEANS, QUANTIZE
from .request import AXES, TILE_ROWS, WIDEST_ACCESS

if TYPE_CHECKING:
    from .jit import LoadedKernel

__all__ = ["QuantizePlan", "Sources", "make_plan", "plan_for", "plan_with"]

MAX_WORK = 2**30
"""Tiles of a call: the kernel counts them in 32 bits, and goes at most a grid beyond."""


class Sources(NamedTuple):
    """What is to be quantized, by role (some of "q", "k" and "v"), and how."""

    operands: Mapping[str, Operand]
    layout: str
    e5m2: bool
    seed: int | None
    center: bool

    @property
    def device(self) -> int:
        return next(iter(self.operands.values())).device

    def sizes(self, role: str) -> tuple[int, int, int, int]:
        """(batch, length, heads, dim) of a tensor; nothing of one that the call has not."""
        if role not in self.operands:
            return 0, 0, 0, 0
        shape = self.operands[role].shape
        batch, seq, heads, dim = (shape[axis] for axis in AXES[self.layout])
        return batch, seq, heads, dim

    def strides(self, role: str) -> tuple[int, ...]:
        """In elements along (batch, seq, heads, dim); 0 of axes of one element, 1 on the last."""
        if role not in self.operands:
            return 0, 0, 0, 1
        x = self.operands[role]
        item = ITEM_BYTES[x.dtype]
        return tuple(x.strides[i] // item if x.shape[i] > 1 else int(i == 3) for i in AXES[self.layout])

    def head_dims(self) -> tuple[int, int]:
        """Of Q and K, and of V; where a call has only one of both, that one."""
        dims = {role: self.sizes(role)[3] for role in self.operands}
        qk = dims.get("q", dims.get("k", dims.get("v", 0)))
        return qk, dims.get("v", qk)

    def access_bytes(self) -> int:
        """The widest access that all addresses, strides and rows allow."""
        bits = WIDEST_ACCESS
        for role, x in self.operands.items():
            item = ITEM_BYTES[x.dtype]
            batch, seq, heads, dim = self.strides(role)
            # The wide loads add an unsigned 32-bit offset within a tile to an address that all threads share.
            if dim != 1 or not 0 <= seq * item * TILE_ROWS < 2**31:
                return item
            bits |= x.address | (batch | seq | heads | x.shape[3]) * item
        return bits & -bits

    def problem(self, arch: str, task: Task) -> AttentionProblem:
        dtype = cast(Dtype, next(iter(self.operands.values())).dtype)
        return AttentionProblem(*self.head_dims(), dtype, "full", self.access_bytes(), False, arch, task)


class Launch(NamedTuple):
    """A kernel, its grid, and its packed parameters behind the pointers.

    ``early``: it may begin while the kernel before it runs, for which it waits itself.
    """

    loaded: LoadedKernel
    params: ParameterBlock
    blocks: int
    tail: bytes
    early: bool = False

    def pack_into(self, block: Any, addresses: Mapping[str, int]) -> None:
        """Write the parameters; ``addresses`` by the names of the pointers, 0 of those that are not there."""
        pointers = (addresses.get(field.name, 0) for field in self.params.fields[: self.params.per_launch])
        self.params.launch_block.pack_into(block, 0, *pointers, self.tail)


class QuantizePlan:
    """Everything about a call but its pointers.

    Attributes
    ----------
    device : int
    launches : tuple of Launch
        In order: none where there is no tile, and the kernel of the means only where they are wanted.
    """

    __slots__ = ("_arguments", "device", "launches")

    def __init__(self, device: int, launches: tuple[Launch, ...]) -> None:
        self.device = device
        self.launches = launches
        self._arguments = []
        for loaded, _, blocks, _, early in launches:
            config = loaded.config
            shape = (blocks, 1, 1), (config.threads, 1, 1), config.smem_bytes(loaded.problem)
            self._arguments.append((early, (loaded.kernel.handle, *shape)))

    def launch(self, addresses: Mapping[str, int], stream: int) -> None:
        """Launch on a stream of the plan's device, whose context must be current.

        Parameters
        ----------
        addresses : mapping of str to int
            Of the arrays, by the names of the kernels' parameters: ``"q"``, ``"q_payload"``, ``"q_scales"``,
            ``"k_mean"`` and so on.
        stream : int
        """
        buffer = jit.argument_buffer(self.device)
        for launch, (early, arguments) in zip(self.launches, self._arguments, strict=True):
            launch.pack_into(buffer.block, addresses)
            (driver.launch_early if early else driver.launch)(*arguments, stream, buffer.address)


def plan_for(sources: Sources) -> QuantizePlan:
    """The plan of a GPU call, from the table if there was one like it."""
    aligned = functools.reduce(operator.or_, (x.address for x in sources.operands.values())) % WIDEST_ACCESS
    arrays = tuple((role, x.dtype, x.device, x.shape, x.strides) for role, x in sources.operands.items())
    key: Hashable = (arrays, aligned, *sources[1:])
    plan = jit.QUANTIZE_PLANS.get(key)
    if plan is None:
        plan = make_plan(sources)
        jit.keep(jit.QUANTIZE_PLANS, key, plan, jit.MAX_PLANS)
    return plan


def make_plan(sources: Sources) -> QuantizePlan:
    """Plan a GPU call; compiles and loads its kernels if that was not done before.

    Raises
    ------
    UnsupportedError
        There are more tiles than a launch takes.
    """
    device = sources.device
    arch, multiprocessors = jit.device_arch(device).name, driver.multiprocessors(device)
    return plan_with(sources, arch, multiprocessors, lambda problem: jit.kernel_for(problem, device))


def plan_with(
    sources: Sources, arch: str, multiprocessors: int, load: Callable[[AttentionProblem], LoadedKernel]
) -> QuantizePlan:
    """The same for a device with so many multiprocessors, by the kernels that ``load`` gives."""
    tiles_of_call = _work(sources)[-1]
    if tiles_of_call > MAX_WORK:
        raise UnsupportedError(f"the call has {tiles_of_call} tiles of 128 tokens of a head; accepted are {MAX_WORK}")
    launches = []
    heads = sum(sources.sizes(role)[0] * sources.sizes(role)[2] for role in ("k", "v"))
    if sources.center and heads:
        means = load(sources.problem(arch, "quantize_means"))
        launches.append(Launch(means, MEANS, heads, _means_tail(sources)))
    if tiles_of_call:
        quantize = load(sources.problem(arch, "quantize"))
        blocks = min(tiles_of_call, multiprocessors * quantize.config.ctas)
        early = bool(launches) and ARCHES[arch].overlaps_launches
        launches.append(Launch(quantize, QUANTIZE, blocks, _quantize_tail(sources), early))
    return QuantizePlan(sources.device, tuple(launches))


def _work(sources: Sources) -> list[int]:
    """How many tiles have come with Q, with K and with V."""
    ends, end = [], 0
    for role in ("q", "k", "v"):
        batch, seq, heads, _ = sources.sizes(role)
        end += batch * heads * tiles(seq)
        ends.append(end)
    return ends


def _sign_words(sources: Sources) -> tuple[int, ...]:
    if sources.seed is None:
        return (0,) * 8
    negated = signs(sources.seed, sources.head_dims()[0])
    bits = sum(int(bit) << column for column, bit in enumerate(negated))
    return tuple(bits >> 32 * word & 0xFFFFFFFF for word in range(8))


def _of_keys(sources: Sources) -> tuple[int, int, int, int]:
    return sources.sizes("k" if "k" in sources.operands else "v")


def _quantize_tail(sources: Sources) -> bytes:
    values: dict[str, Any] = {}
    for role in ("q", "k", "v"):
        values |= stride_values(role, sources.strides(role))
    for role in ("q", "k"):
        shape = sources.operands[role].shape if role in sources.operands else (1, 1, 1, 1)
        values |= stride_values(f"{role}_payload", row_strides(shape, sources.layout))
    (_, seqlen_q, heads_q, _), (_, seqlen_k, heads_k, _) = sources.sizes("q"), _of_keys(sources)
    k_begin, v_begin, work = _work(sources)
    values |= {
        "q_heads": fast_div(max(heads_q, 1)),
        "q_tiles": fast_div(max(tiles(seqlen_q), 1)),
        "k_heads": fast_div(max(heads_k, 1)),
        "k_tiles": fast_div(max(tiles(seqlen_k), 1)),
        "k_begin": k_begin,
        "v_begin": v_begin,
        "work": work,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "e5m2": int(sources.e5m2),
        "rotated": int(sources.seed is not None),
        "signs": _sign_words(sources),
    }
    return QUANTIZE.pack_tail(values)


def _means_tail(sources: Sources) -> bytes:
    _, seqlen, heads, _ = _of_keys(sources)
    batch_k, _, heads_k, _ = sources.sizes("k")
    values: dict[str, Any] = {
        **stride_values("k", sources.strides("k")),
        **stride_values("v", sources.strides("v")),
        "heads": fast_div(max(heads, 1)),
        "v_begin": batch_k * heads_k,
        "seqlen": seqlen,
        "rotated": int(sources.seed is not None),
        "signs": _sign_words(sources),
    }
    return MEANS.pack_tail(values)
