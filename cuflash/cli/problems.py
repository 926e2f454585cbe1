"""Command-line options that name kernels."""

from __future__ import annotations

import argparse
import dataclasses

from ..backward_config import BackwardConfig, BackwardRowsConfig, BackwardSm90Config, BackwardWideConfig
from ..config import KernelConfig
from ..fp8_sm80_config import Fp8Sm80Config
from ..fp8_sm90_config import Fp8Sm90Config
from ..problem import INPUT_DTYPES, TASKS, AttentionProblem
from ..sm80_config import Sm80Config
from ..sm90_config import Sm90Config


def add_problem_options(parser: argparse._ActionsContainer) -> None:
    """One kernel, as the first lines of its source name it; its target is an option of each command."""
    parser.add_argument("--head-dim", type=int, default=128, metavar="D")
    parser.add_argument("--head-dim-v", type=int, metavar="DV", help="default: as --head-dim")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--task", choices=TASKS, default="forward", help="what the kernel computes; default: forward")
    parser.add_argument(
        "--access-bytes", type=int, choices=(16, 8, 4, 2, 1), help="default: the widest that the head dims allow"
    )
    parser.add_argument(
        "--scale-first", action="store_true", help="the variant for scales that are 0, negative or extreme"
    )
    parser.add_argument("--input-dtype", choices=INPUT_DTYPES, help="type of quantized Q, K and V")
    parser.add_argument("--k-dtype", choices=INPUT_DTYPES, help="type of quantized K where it is another")
    parser.add_argument("--v-dtype", choices=INPUT_DTYPES, help="type of quantized V where it is another")
    parser.add_argument("--one-level", action="store_true", help="of these, the kernel of precision='fp8-fast'")
    parser.add_argument("--short", action="store_true", help="the variant for few queries, where there is one")


def problem_from(args: argparse.Namespace, arch: str) -> AttentionProblem:
    """The kernel that the options name, for a target.

    Raises
    ------
    ValueError
        A head dim that no kernel takes, or one whose rows no access of ``--access-bytes`` fits.
    """
    head_dim_v = args.head_dim if args.head_dim_v is None else args.head_dim_v
    item = 1 if args.task == "prepare" else 2
    widest = 16 if args.input_dtype else widest_access(args.head_dim, head_dim_v, item)
    if args.access_bytes and args.access_bytes > widest:
        raise ValueError(
            f"--access-bytes is {args.access_bytes}; head dims {args.head_dim} and {head_dim_v} take at most {widest}"
        )
    return AttentionProblem(
        head_dim=args.head_dim,
        head_dim_v=head_dim_v,
        dtype=args.dtype,
        mask="causal" if args.causal else "full",
        access_bytes=args.access_bytes or widest,
        scale_first=args.scale_first,
        arch=arch,
        task=args.task,
        short=args.short,
        input_dtype=args.input_dtype,
        one_level=args.one_level,
        k_dtype=args.k_dtype,
        v_dtype=args.v_dtype,
    )


def widest_access(head_dim: int, head_dim_v: int, item: int = 2) -> int:
    """The widest global access, in bytes, of contiguous rows of elements of ``item`` bytes."""
    bits = 16 | item * head_dim | item * head_dim_v
    widest = bits & -bits
    return widest if widest >= 4 else item


def default_arch() -> str:
    """The first GPU's target; sm_90 without a GPU."""
    from .. import driver, jit
    from ..errors import DriverError

    try:
        if driver.device_count():
            return jit.device_arch(0).name
    except DriverError:
        pass
    return "sm_90"


def parse_override(text: str) -> dict[str, int]:
    """``block_n=48,ctas=2``: fields of the tuning table's config to change, of whichever family."""
    hopper = (BackwardSm90Config, BackwardWideConfig)
    families = (Sm80Config, Sm90Config, Fp8Sm80Config, Fp8Sm90Config, BackwardConfig, *hopper, BackwardRowsConfig)
    types = {field.name: field.type for family in families for field in dataclasses.fields(family) if field.compare}
    override: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in types or not value.isdigit() or (types[name] == "bool" and int(value) > 1):
            raise argparse.ArgumentTypeError(
                f"{part!r} is not FIELD=NUMBER (0 or 1 for a switch) with FIELD one of {', '.join(sorted(types))}"
            )
        override[name] = bool(int(value)) if types[name] == "bool" else int(value)
    return override


def overridden(config: KernelConfig, changes: dict[str, int]) -> KernelConfig:
    """A config with other values in some fields.

    Raises
    ------
    ValueError
        Its family has no such field, or not with this value.
    """
    accepted = {field.name for field in dataclasses.fields(config) if field.compare}
    if unknown := sorted(changes.keys() - accepted):
        raise ValueError(
            f"{config.family} has no {', '.join(unknown)} in its configs; it has {', '.join(sorted(accepted))}"
        )
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]
