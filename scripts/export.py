"""Export a workload's best tuned kernel as one .so, with its manifest inside and its check cases beside it.

    python -m scripts.export --workload d128_f16_causal --output build/attention.so

The .so needs TVM's runtime and no compiler; `scripts.run` shows how it is called. With --also it holds a kernel for each of several GPU
generations and takes, call by call, the first that can serve. Where several lengths were tuned (scripts.tune --lengths), it holds the plans
of all, and a call takes that of the lengths that it is nearest to.
"""
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

from schedules import registry
from schedules.arch import cuda_arch
from schedules.artefact.variant import limits_of
from schedules.plan import fitting
from scripts import cli, options
from scripts.kernels import Planned, build_gradients, build_kernels, write_artefact
from te_defs.operand_gradients import require_gradient


@dataclass(frozen=True)
class Choice:
    """What variants are built from: a Planned for each bucket of lengths, the row of schedules.arch that they are lowered for, and the
    names of the architectures that get device code (none on a CPU)."""

    plans: tuple
    arch: object
    archs: tuple

    @property
    def first(self):
        """The Planned of the workload's first log."""
        return self.plans[0]

    @property
    def limits(self):
        """(most elements of a tensor, alignment in bytes) that some plan takes: that of another bucket serves what one's own cannot."""
        limits = [limits_of(registry.family_named(it.family), self.arch.kind) for it in self.plans]
        return max(most for most, _ in limits), min(alignment for _, alignment in limits)

    def serves(self, arch, limits):
        """Whether it runs on the GPUs that an architecture is named for, with limits as wide as these."""
        (most, alignment), (wanted_most, wanted_alignment) = self.limits, limits
        return most >= wanted_most and alignment <= wanted_alignment and any(cuda_arch(name).serves(arch.capability) for name in self.archs)

    def told(self):
        """What the command says of it first: of several buckets what each has."""
        by_bucket = {str(it.bucket): f"{it.family} {it.plan}" for it in self.plans if len(self.plans) > 1}
        return {"family": self.first.family, "plan": str(self.first.plan), "archs": self.archs,
                "tuned_on": self.first.measured and self.first.measured["device"], **({"buckets": by_bucket} if by_bucket else {})}


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
    for name, it in itertools.product(choice.archs[1:], choice.plans):
        family = registry.family_named(it.family)
        reason = family.decline(workload, cuda_arch(name))
        if reason is not None:
            raise cli.UsageError(f"{option} must be served by {it.family}, found that it declines {name} ({reason}): leave it out")
        if not fitting([it.plan], family.budget, workload, cuda_arch(name)):
            raise cli.UsageError(f"{option} must have room for the plan of {it.family} ({it.plan}), found that {name} "
                                 "has not: leave it out, or give it a variant of its own with --also")
        if cuda_arch(name).capability < choice.arch.capability:
            raise cli.UsageError(f"{least} must be the least of all architectures, found {choice.arch.name} and {name}: exchange them")


def check_order(choices):
    """UsageError where device code of a variant would never be chosen, since variants before it serve the same GPUs and calls."""
    for number, choice in enumerate(choices):
        for arch in map(cuda_arch, choice.archs):
            first = next((it for it in choices[:number] if it.serves(arch, choice.limits)), None)
            if first is not None:
                raise cli.UsageError(f"--also must add what the variants before it cannot serve, found that {first.first.family} for "
                                     f"{first.arch.name} serves {arch.name} too: name {arch.name} before it, or leave it out")


def chosen(args, device, workload):
    """Choices of --target and of each --also, best first."""
    plans = tuple(options.chosen_plans(args, device, workload))
    archs = (device.arch.name, *(cuda_arch(name).name for name in args.archs)) if device.kind == "cuda" else ()
    choices = [Choice(plans, device.arch, archs)]
    check_archs(choices[0], workload, "--archs", "--target")
    for names in args.also:
        arch, *_ = rows = [cuda_arch(name) for name in names]
        family, plan, measured = options.further_plan(args, workload, arch)
        choices.append(Choice((Planned(family.NAME, plan, measured),), arch, tuple(row.name for row in rows)))
        check_archs(choices[-1], workload, "--also", "the first of --also")
    check_order(choices)
    return choices


def gradients_for(args, device, workload, choices):
    """[Gradients, ...] for each choice, where they are asked for: on record for the device of --target, one for each bucket, and for --also
    one, for the device that its kernel was tuned on, or any."""
    if not args.backward:
        return []
    further = [cli.device_named(it.first.measured and it.first.measured["device"], it.arch) for it in choices[1:]]
    own = options.chosen_gradients(args, options.device_meant(args, device), workload)
    return [own, *(options.chosen_gradients(args, of, workload)[:1] for of in further)]


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
    cli.echo(command="export", device=device.description, workload=workload.name, **first.told(), also=[it.told() for it in further],
             backward=[{"order": by.order, "family": by.family, "plan": str(by.plan), "record": by.measured and by.measured["record"]}
                       for some in of_gradients for by in some], gradients_of=args.gradients_of, output=output, seed=args.seed)
    kernels = []
    for it in choices:
        kernels += build_kernels(it.plans, workload, it.arch, it.archs, len(kernels) + 1)
    gradients = []
    for it, some in zip(choices, of_gradients):
        gradients += build_gradients(workload, it.arch, it.archs, len(gradients) + 1, some, args.gradients_of)
    for line in [line for kernel in (*kernels, *gradients) for line in kernel.figures()]:
        print(line)
    for path in write_artefact(kernels, workload, output, args.seed, gradients):
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    sys.exit(cli.main(run, make_parser().parse_args()))
