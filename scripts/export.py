"""Export the best tuned kernels of a workload, or of several, as one .so, with its manifest inside and its check cases beside it.

    python -m scripts.export --workload d128_f16_causal --output build/attention.so
    python -m scripts.export --all llm --output build/attention.so

The .so needs TVM's runtime and no compiler; `scripts.run` shows how it is called. With --also it holds a kernel for each of several GPU
generations and takes, call by call, the first that can serve. Where several lengths were tuned (scripts.tune --lengths), it holds the plans
of all, and a call takes that of the lengths that it is nearest to. Of several workloads, each has functions of its own, which the manifest
names (schedules/artefact/names.py).
"""
import sys
from pathlib import Path

from schedules.tuning.suites import SUITES
from scripts import cli, options
from scripts.choices import order_of
from scripts.kernels import write_artefact
from scripts.several import PRESETS_SUITE, orders_of, workloads_of, write_several


def make_parser():
    parser = options.parser("export", __doc__)
    options.add_what(parser, several=True)
    parser.add_argument("--all", choices=tuple(SUITES), default=None,
                        help="in the place of --workload, all workloads of a suite of scripts.tune, with --backward the gradients of those "
                             f"of which the suite has some; {PRESETS_SUITE}: all presets")
    options.add_plan(parser)
    parser.add_argument("--archs", nargs="*", default=[], metavar="SM",
                        help="further CUDA architectures for the same fatbin, such as sm_89 sm_90a; --target names the least one")
    parser.add_argument("--also", action="append", nargs="+", default=[], metavar="SM",
                        help="a further variant for calls that those before it cannot serve, such as sm_80 sm_89: lowered for the first of "
                             "these architectures, tuned where a log is for that, else with the default plan; can be repeated")
    options.add_backward(parser, "put the gradients in, too: a function flash_attention_backward")
    parser.add_argument("--gradients-of", nargs="+", default=[], metavar="NAME",
                        help="tensors behind the scale whose gradients it makes, too, such as bias, slopes or sink: further outputs "
                             "behind dlse, in the order of the call")
    parser.add_argument("--output", type=Path, default=None, help="the .so to write; None: build/<device>/<workload or suite>.so")
    parser.add_argument("--seed", type=options.seed, default=0, help="seed of the check cases")
    return parser


def check_options(args, device):
    """UsageError where options do not go together, whatever the workload is."""
    for option, given in (("--archs are", args.archs), ("--also is", args.also)):
        if given and device.kind == "cpu":
            raise cli.UsageError(f"{option} for a CUDA target, found target {device.arch.name}: leave them out")
    if args.output is not None and (args.output.suffix != ".so" or args.output.is_dir()):
        raise cli.UsageError(f"--output must be a file that ends in .so, found {str(args.output)!r}: name one")
    if args.gradients_of and not args.backward:
        raise cli.UsageError(f"--gradients-of goes with --backward, found {' '.join(args.gradients_of)} alone: add it")


def output_of(args, device, workloads):
    """Path of the .so; UsageError where none is named and none is meant, or where it cannot be written."""
    if args.output is None and args.all is None and len(workloads) > 1:
        raise cli.UsageError(f"--output must name the artefact of several workloads, found {len(workloads)} and no --output: add it")
    output = args.output or Path("build", device.slug or device.arch.name, f"{args.all or workloads[0].name}.so")
    cli.require_room_for("--output", output)
    return output


def export_one(args, device, workload, output):
    """Build one workload and write its artefact; the paths of its files."""
    order = order_of(args, device, workload)
    cli.echo(command="export", device=device.description, workload=workload.name, **order.told(), gradients_of=args.gradients_of,
             output=output, seed=args.seed)
    kernels, gradients = order.build()
    for line in [line for kernel in (*kernels, *gradients) for line in kernel.figures()]:
        print(line)
    return write_artefact(kernels, workload, output, args.seed, gradients)


def export_several(args, device, workloads, with_gradients, output):
    """Build several workloads side by side and write their artefact; the paths of its files."""
    orders = orders_of(args, device, workloads, with_gradients)
    cli.echo(command="export", device=device.description, workloads={it.workload.name: it.told() for it in orders},
             gradients_of=args.gradients_of, output=output, seed=args.seed)
    return write_several(orders, output, args.seed)


def run(args):
    device = cli.find_device(args.target)
    check_options(args, device)
    workloads, with_gradients = workloads_of(args, device)
    output = output_of(args, device, workloads)
    if len(workloads) == 1:
        paths = export_one(args, device, workloads[0], output)
    else:
        paths = export_several(args, device, workloads, with_gradients, output)
    for path in paths:
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    sys.exit(cli.main(run, make_parser().parse_args()))
