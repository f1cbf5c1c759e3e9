"""What an artefact gets of a workload: which plans its kernels are built of, for which architectures, as the options of export say."""
import itertools
from dataclasses import dataclass

from schedules import registry
from schedules.arch import cuda_arch
from schedules.artefact.names import ALONE
from schedules.artefact.variant import limits_of
from schedules.plan import fitting
from scripts import cli, options
from scripts.kernels import Planned, build_gradients, build_kernels
from te_defs.operand_gradients import require_gradient
from te_defs.workload import Workload


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


@dataclass(frozen=True)
class Order:
    """What is built for a workload. Another process can be sent it.

    choices    Choices, best first
    gradients  for each of them its Gradients, where the artefact has some
    operands   names of tensors behind the scale whose gradients are made, too
    """

    workload: Workload
    choices: list
    gradients: list
    operands: tuple = ()

    def told(self):
        """What the command says of it first."""
        first, *further = self.choices
        return {**first.told(), "also": [it.told() for it in further], "backward": [
            {"order": by.order, "family": by.family, "plan": str(by.plan), "record": by.measured and by.measured["record"]}
            for some in self.gradients for by in some]}

    def build(self, share=ALONE):
        """(Kernels of the forward pass, those of gradients), in the places of the workload's Share of the artefact."""
        kernels, gradients, first = [], [], share.first_place
        for it in self.choices:
            kernels += build_kernels(it.plans, self.workload, it.arch, it.archs, first + len(kernels))
        for it, some in zip(self.choices, self.gradients):
            gradients += build_gradients(self.workload, it.arch, it.archs, first + len(gradients), some, self.operands)
        return kernels, gradients


def order_of(args, device, workload, with_gradients=True):
    """The Order of a workload; an error where something that the options name is not there, or does not go together."""
    operands = tuple(args.gradients_of) if with_gradients else ()
    for name in operands:
        require_gradient(workload, name)
    choices = chosen(args, device, workload)
    return Order(workload, choices, gradients_for(args, device, workload, choices) if with_gradients else [], operands)
