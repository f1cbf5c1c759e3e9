"""Export a workload's best tuned kernel as one .so, with its manifest inside and its check cases beside it.

    python -m scripts.export --workload d128_f16_causal --output build/attention.so

The .so needs TVM's runtime and no compiler; `scripts.run` shows how it is called.
"""
import sys
from pathlib import Path

from schedules.arch import cuda_arch
from scripts import cli, options
from scripts.kernels import build_kernel, write_artefact


def make_parser():
    parser = options.parser("export", __doc__)
    options.add_what(parser)
    options.add_plan(parser)
    parser.add_argument("--archs", nargs="*", default=[], metavar="SM",
                        help="further CUDA architectures for the same fatbin, such as sm_89 sm_90a; --target names the least one")
    parser.add_argument("--output", type=Path, default=None, help="the .so to write; None: build/<device>/<workload>.so")
    parser.add_argument("--seed", type=options.seed, default=0, help="seed of the check cases")
    return parser


def check_archs(archs, family, workload):
    """UsageError where one fatbin cannot serve all architectures: code is lowered for the first, which the others must be able to run."""
    for name in archs[1:]:
        reason = family.decline(workload, cuda_arch(name))
        if reason is not None:
            raise cli.UsageError(f"--archs must be served by {family.NAME}, found that it declines {name} ({reason}): leave it out")
        if _number(name) < _number(archs[0]):
            raise cli.UsageError(f"--target must be the least of all architectures, found {archs[0]} and {name}: exchange them")


def _number(arch):
    return int("".join(filter(str.isdigit, arch)))


def run(args):
    device = cli.find_device(args.target)
    workload = options.workload_of(args.workload, device)
    if args.archs and device.kind == "cpu":
        raise cli.UsageError(f"--archs are for a CUDA target, found target {device.arch.name}: leave them out")
    archs = (device.arch.name, *(cuda_arch(name).name for name in args.archs)) if device.kind == "cuda" else ()
    if args.output is not None and (args.output.suffix != ".so" or args.output.is_dir()):
        raise cli.UsageError(f"--output must be a file that ends in .so, found {str(args.output)!r}: name one")
    output = args.output or Path("build", device.slug or device.arch.name, f"{workload.name}.so")
    family, plan, measured = options.chosen_plan(args, device, workload)
    check_archs(archs, family, workload)
    cli.echo(command="export", device=device.description, workload=workload.name, family=family.NAME, plan=str(plan), archs=archs,
             output=output, seed=args.seed)
    kernel = build_kernel(family, workload, plan, device.arch, archs)
    for line in kernel.figures():
        print(line)
    for path in write_artefact(kernel, family, workload, plan, device.arch, output, measured, args.seed):
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    sys.exit(cli.main(run, make_parser().parse_args()))
