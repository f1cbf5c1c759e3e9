"""Export a workload's best tuned kernel as one .so, with its manifest inside and its check cases beside it.

    python -m scripts.export --workload d128_f16_causal --output build/attention.so

The .so needs TVM's runtime and no compiler; `scripts.run` shows how it is called. With --also it holds a kernel for each of several GPU
generations and takes, call by call, the first that can serve.
"""
import sys
from dataclasses import dataclass
from pathlib import Path

from schedules.arch import cuda_arch
from schedules.artefact.variant import limits_of
from schedules.plan import Plan, fitting
from scripts import cli, options
from scripts.kernels import build_kernels, write_artefact
from te_defs.operand_gradients import require_gradient


@dataclass(frozen=True)
class Choice:
    """What a variant is built from: family, plan, the row of schedules.arch that it is lowered for, the names of the architectures that
    get device code (none on a CPU), and figures for the manifest or None."""

    family: object
    plan: Plan
    arch: object
    archs: tuple
    measured: dict | None

    def serves(self, arch, limits):
        """Whether it runs on the GPUs that an architecture is named for, with limits as wide as these."""
        (most, alignment), (wanted_most, wanted_alignment) = limits_of(self.family, self.arch.kind), limits
        return most >= wanted_most and alignment <= wanted_alignment and any(cuda_arch(name).serves(arch.capability) for name in self.archs)


def make_parser():
    parser = options.parser("export", __doc__)
    options.add_what(parser)
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
    parser.add_argument("--output", type=Path, default=None, help="the .so to write; None: build/<device>/<workload>.so")
    parser.add_argument("--seed", type=options.seed, default=0, help="seed of the check cases")
    return parser


def check_archs(choice, workload, option, least):
    """UsageError where one fatbin cannot serve all architectures: code is lowered for the first, which the others must be able to run.

    option, least  how the user named the architectures, and the first of them
    """
    for name in choice.archs[1:]:
        reason = choice.family.decline(workload, cuda_arch(name))
        if reason is not None:
            raise cli.UsageError(f"{option} must be served by {choice.family.NAME}, found that it declines {name} ({reason}): "
                                 "leave it out")
        if not fitting([choice.plan], choice.family.budget, workload, cuda_arch(name)):
            raise cli.UsageError(f"{option} must have room for the plan of {choice.family.NAME} ({choice.plan}), found that {name} "
                                 "has not: leave it out, or give it a variant of its own with --also")
        if cuda_arch(name).capability < choice.arch.capability:
            raise cli.UsageError(f"{least} must be the least of all architectures, found {choice.arch.name} and {name}: exchange them")


def check_order(choices):
    """UsageError where device code of a variant would never be chosen, since variants before it serve the same GPUs and calls."""
    for number, choice in enumerate(choices):
        for arch in map(cuda_arch, choice.archs):
            first = next((it for it in choices[:number] if it.serves(arch, limits_of(choice.family, choice.arch.kind))), None)
            if first is not None:
                raise cli.UsageError(f"--also must add what the variants before it cannot serve, found that {first.family.NAME} for "
                                     f"{first.arch.name} serves {arch.name} too: name {arch.name} before it, or leave it out")


def chosen(args, device, workload):
    """Choices of --target and of each --also, best first."""
    family, plan, measured = options.chosen_plan(args, device, workload)
    archs = (device.arch.name, *(cuda_arch(name).name for name in args.archs)) if device.kind == "cuda" else ()
    choices = [Choice(family, plan, device.arch, archs, measured)]
    check_archs(choices[0], workload, "--archs", "--target")
    for names in args.also:
        arch, *_ = rows = [cuda_arch(name) for name in names]
        family, plan, measured = options.further_plan(args, workload, arch)
        choices.append(Choice(family, plan, arch, tuple(row.name for row in rows), measured))
        check_archs(choices[-1], workload, "--also", "the first of --also")
    check_order(choices)
    return choices


def gradients_for(args, device, workload, choices):
    """Gradients for each choice, where they are asked for: on record for the device of --target, and for --also for the one that its
    kernel was tuned on, or any."""
    if not args.backward:
        return []
    further = [cli.device_named(it.measured and it.measured["device"], it.arch) for it in choices[1:]]
    return [options.chosen_gradients(args, of, workload) for of in (options.device_meant(args, device), *further)]


def run(args):
    device = cli.find_device(args.target)
    workload = options.workload_of(args.workload, device)
    for option, given in (("--archs are", args.archs), ("--also is", args.also)):
        if given and device.kind == "cpu":
            raise cli.UsageError(f"{option} for a CUDA target, found target {device.arch.name}: leave them out")
    if args.output is not None and (args.output.suffix != ".so" or args.output.is_dir()):
        raise cli.UsageError(f"--output must be a file that ends in .so, found {str(args.output)!r}: name one")
    if args.gradients_of and not args.backward:
        raise cli.UsageError(f"--gradients-of goes with --backward, found {' '.join(args.gradients_of)} alone: add it")
    for name in args.gradients_of:  # before anything is built
        require_gradient(workload, name)
    output = args.output or Path("build", device.slug or device.arch.name, f"{workload.name}.so")
    cli.require_room_for("--output", output)
    first, *further = choices = chosen(args, device, workload)
    of_gradients = gradients_for(args, device, workload, choices)
    cli.echo(command="export", device=device.description, workload=workload.name, family=first.family.NAME, plan=str(first.plan),
             tuned_on=first.measured and first.measured["device"], archs=first.archs,
             also=[{"family": it.family.NAME, "plan": str(it.plan), "archs": it.archs, "tuned_on": it.measured and it.measured["device"]}
                   for it in further],
             backward=[{"order": by.order, "family": by.family, "plan": str(by.plans), "record": by.measured and by.measured["record"]}
                       for by in of_gradients], gradients_of=args.gradients_of, output=output, seed=args.seed)
    kernels = []
    for it in choices:
        kernels += build_kernels(it.family, workload, it.plan, it.arch, it.archs, it.measured, len(kernels) + 1)
    gradients = []
    for it, by in zip(choices, of_gradients):
        gradients += by.build(workload, it.arch, it.archs, len(gradients) + 1, args.gradients_of)
    for line in [line for kernel in (*kernels, *gradients) for line in kernel.figures()]:
        print(line)
    for path in write_artefact(kernels, workload, output, args.seed, gradients):
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    sys.exit(cli.main(run, make_parser().parse_args()))
