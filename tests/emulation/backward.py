"""Runs the three kernels of the backward pass on the CPU the way the product runs them on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from unittest import mock

import numpy as np

from cuflash import backward_plan, driver, jit, kernels
from cuflash.arch import ARCHES
from cuflash.backward import _check
from cuflash.backward_config import BackwardConfig
from cuflash.backward_request import BackwardRequest
from cuflash.cpu import causal_offset
from cuflash.problem import AttentionProblem
from cuflash.reference import oracle
from tests.emulation.cases import Case
from tests.emulation.launch import EARLY, INSTRUCTION_LIMIT, Report, Timing, emulator_for
from tests.emulation.tensors import Tensor, allocate, dense_strides, place
from tests.gradients import Backward, assert_gradients
from tests.mutation import Mutation

GRADS = ("dq", "dk", "dv")
TASKS = ("backward_rows", "backward", "backward_dq")


@dataclass(frozen=True)
class BackwardCase(Case):
    """A call of the backward pass; fields as in `Case`, whose ``want_lse`` and ``rise`` mean nothing here.

    `deterministic` is the call's; `with_dlse`: a gradient arrives at the LSE, too.
    """

    deterministic: bool = False
    with_dlse: bool = False

    def gradients(self) -> dict[str, Tensor]:
        """Outputs, full of NaN."""
        (nq, nk), (hq, hk), (d, dv) = self.lengths, self.heads, self.dims
        shapes = {"dq": (self.batch, hq, nq, d), "dk": (self.batch, hk, nk, d), "dv": (self.batch, hk, nk, dv)}
        return {
            name: allocate(shape, self.strides(shape), self.dtype, align=self.align, output=True)
            for name, shape in shapes.items()
        }

    def arguments(self, values: dict[str, np.ndarray] | None = None) -> dict[str, Tensor]:
        """q, k, v and dout; the output and LSE of an exact forward pass; dlse if it is wanted."""
        tensors = self.inputs(values)
        rng = np.random.default_rng(self.seed + 1)
        q, k, v = (tensors[name].view for name in "qkv")
        out, lse = oracle(q, k, v, causal=self.causal, scale=self.scale)
        dout = place(rng.standard_normal(out.shape), self.dtype, strides=self.strides(out.shape), align=self.align)
        tensors["dout"] = dout
        tensors["out"] = place(out, self.dtype, strides=self.strides(out.shape), align=self.align)
        rows = dense_strides(lse.shape, (2, 0, 1), (0, 3, 1)) if any(self.pad) else dense_strides(lse.shape, (0, 1, 2))
        tensors["lse"] = place(lse, "float32", strides=rows, align=4)
        if self.with_dlse:
            tensors["dlse"] = place(rng.standard_normal(lse.shape), "float32", strides=rows, align=4)
        return tensors


@dataclass
class Run:
    """What a run of the three kernels did."""

    request: BackwardRequest
    config: BackwardConfig
    plan: backward_plan.BackwardPlan
    workspace: dict[str, Tensor]
    report: Report = field(default_factory=Report)


def _plan(request: BackwardRequest, arch: str, config: BackwardConfig | None) -> backward_plan.BackwardPlan:
    """The product's own plan, of a device that has ``arch`` and Ampere-style kernels that need no loading."""

    def load(problem: AttentionProblem, device: int) -> mock.Mock:
        chosen = config if config and problem.task == "backward" else kernels.select_config(problem)
        return mock.Mock(problem=problem, config=chosen)

    with (
        kernels.use_family("backward_sm80"),
        mock.patch.object(jit, "kernel_for", side_effect=load),
        mock.patch.object(jit, "device_arch", return_value=ARCHES[arch]),
        mock.patch.object(driver, "multiprocessors", return_value=132),
    ):
        return backward_plan.make_plan(request)


def _workspace(plan: backward_plan.BackwardPlan) -> dict[str, Tensor]:
    """The pieces of the workspace, each a tensor of its own, so that no kernel leaves its piece unseen."""
    layout = plan.workspace
    assert layout is not None
    row_tiles = plan.launches[0].blocks
    sizes = {"dq_sums": layout.rows, "rows": 8 * backward_plan.ROW_TILE * row_tiles}
    if layout.turns is not None:
        sizes["turns"] = 4 * backward_plan.TURNS * row_tiles
    assert 0 <= layout.size - sum(sizes.values()) < backward_plan.WORKSPACE_ALIGN
    return {name: allocate((size // 4,), (1,), "float32", align=16, output=True) for name, size in sizes.items()}


def backward(
    case: BackwardCase,
    tensors: dict[str, Tensor],
    *,
    timing: Timing = EARLY,
    mutation: Mutation | None = None,
    mutated: str = "backward",
    reverse: bool = False,
    patience: int = INSTRUCTION_LIMIT,
) -> Run:
    """One call in the emulator.

    Parameters
    ----------
    case : BackwardCase
    tensors : dict
        Of `BackwardCase.arguments` and `BackwardCase.gradients`.
    timing : Timing
    mutation : Mutation, optional
        For the kernel ``mutated``.
    reverse : bool
        Run the blocks of the main kernel in the reverse of the order in which a GPU starts them.
    patience : int
        Instructions of one block, from which on it is taken to run for ever.
    """
    arrays = {name: x.view for name, x in tensors.items() if name not in GRADS}
    arrays |= {f"grads[{i}]": tensors[name].view for i, name in enumerate(GRADS)}
    request = _check(arrays, causal=case.causal, scale=case.scale, layout="bhsd", deterministic=case.deterministic)
    plan = _plan(request, case.arch, case.config)  # type: ignore[arg-type]
    if plan.workspace is None:
        return Run(request, None, plan, {})  # type: ignore[arg-type]
    workspace = _workspace(plan)
    run = Run(request, plan.launches[1].loaded.config, plan, workspace)  # type: ignore[arg-type]
    everything = {**tensors, **workspace}
    absent = dict.fromkeys(("dlse", "turns", "counts"), 0)
    at = absent | {name: x.address for name, x in everything.items()}
    heads = (
        [at[n] for n in ("dout", "out", "lse", "dlse", "rows", "dq_sums", "turns", "counts")],
        [at[n] for n in ("dout", "q", "k", "v", "dk", "dv", "rows", "dq_sums", "turns")],
        [at[n] for n in ("rows", "dq_sums", "dq")],
    )
    for task, launch, pointers in zip(TASKS, plan.launches, heads, strict=True):
        order = range(launch.blocks)
        blocks = reversed(order) if reverse and task == "backward" else order
        changed = mutation if task == mutated else None
        _run_kernel(launch, pointers, blocks, everything, timing, changed, run.report, patience)
    return run


def _run_kernel(
    launch: backward_plan.Launch,
    pointers: Sequence[int],
    blocks: Sequence[int],
    tensors: dict[str, Tensor],
    timing: Timing,
    mutation: Mutation | None,
    report: Report,
    patience: int,
) -> None:
    problem, config = launch.loaded.problem, launch.loaded.config
    emulator = emulator_for(problem, config, mutation)
    block = np.array(pointers, np.uint64).tobytes() + launch.tail
    emulator.launch(
        block,
        (launch.blocks, 1, 1),
        config.threads,
        config.smem_bytes(problem),
        tensors,
        report,
        blocks=[(i, 0, 0) for i in blocks],
        timing=timing,
        patience=patience,
    )


def assert_clean(case: BackwardCase, tensors: dict[str, Tensor], run: Run) -> None:
    """No fault, every element of a gradient written once, and every turn taken."""
    assert not run.report.faults, str(run.report)
    for name in GRADS:
        assert tensors[name].unwritten() == 0, f"{name}: {tensors[name].unwritten()} bytes were never written"
    assert run.workspace["dq_sums"].unwritten() == 0 and run.workspace["rows"].unwritten() == 0
    if case.deterministic:
        turns = run.workspace["turns"].view.view(np.int32)
        # These kernels need one for as many rows, and have them side by side.
        turns = turns[: len(turns) // backward_plan.TURNS].reshape(case.batch * case.heads[0], -1)
        (nq, nk), config = case.lengths, run.config
        last_queries = np.minimum(np.arange(1, -(-nq // config.block_m) + 1) * config.block_m, nq) - 1
        offset = causal_offset(case.causal, nq, nk)
        seen = np.clip(last_queries + offset + 1, 0, nk) if case.causal else np.full(len(last_queries), nk)
        expected = -(-seen // config.block_n)
        # A block's last release comes from the first query tile that its keys need: all turns are taken.
        np.testing.assert_array_equal(
            turns[:, :: config.block_m // 32], np.broadcast_to(expected, (len(turns), len(expected)))
        )


def call_of(case: BackwardCase, tensors: dict[str, Tensor]) -> Backward:
    dlse = tensors["dlse"].view if "dlse" in tensors else None
    arrays = (tensors[name].view for name in ("dout", "q", "k", "v", "out", "lse"))
    return Backward(*arrays, dlse=dlse, causal=case.causal, scale=case.scale)


def check(case: BackwardCase, values: dict[str, np.ndarray] | None = None) -> Run:
    """Run a case with copies landing early and late, in two warp orders, and check all of it; returns the last run."""
    bits = set()
    for timing in (Timing(late=False, seed=case.seed), Timing(late=True, seed=case.seed + 1)):
        tensors = {**case.arguments(values), **case.gradients()}
        run = backward(case, tensors, timing=timing)
        assert_clean(case, tensors, run)
        bits.add(b"".join(np.ascontiguousarray(tensors[name].view).tobytes() for name in GRADS))
    assert len(bits) == 1, "the result depends on timing"
    assert_gradients(tuple(np.array(tensors[name].view) for name in GRADS), call_of(case, tensors))
    return run


def with_config(case: BackwardCase, **changes: int) -> BackwardCase:
    """The case with a config of its own: that of the tuning table, changed."""
    d, dv = case.dims
    mask = "causal" if case.causal else "full"
    problem = AttentionProblem(d, dv, case.dtype, mask, 16, False, case.arch, "backward")  # type: ignore[arg-type]
    return replace(case, config=replace(kernels.select_config(problem), **changes))  # type: ignore[type-var]
