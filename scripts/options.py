"""Options that several commands have, each worded once, and what they resolve to."""
import argparse

from schedules import backward, registry
from schedules.tuning.log import data_of
from schedules.tuning.records import ForeignLog, NoRecord, best_record
from scripts import cli

#: What `--workload auto` means: the commonest case of a GPU, and the one that a CPU is good at.
AUTO_WORKLOAD = {"cuda": "d128_f16_causal", "cpu": "d64_f32_causal"}
#: Shapes that are timed: on a GPU the field's (tokens = batch x length, hidden = heads x head dimension), on a CPU what takes some 20 ms.
TOKENS = {"cuda": 16384, "cpu": 1024}
HIDDEN = {"cuda": 2048, "cpu": 512}


def parser(module, doc):
    """Parser of `python -m scripts.<module>` that shows the first paragraph of the module's docstring, and every default."""
    return argparse.ArgumentParser(prog=f"python -m scripts.{module}", description=doc.split("\n\n")[0],
                                   formatter_class=argparse.ArgumentDefaultsHelpFormatter)


def add_what(group, several=False):
    """--workload and --target; with `several`, any number of workloads."""
    group.add_argument("--workload", default=["auto"] if several else "auto", nargs="+" if several else None,
                       help="a preset such as d64_f32_full, a name such as fwd_d192_dv128_f16_causal, or auto: "
                            + ", ".join(f"{workload} for {kind}" for kind, workload in AUTO_WORKLOAD.items()))
    group.add_argument("--target", default="auto", help="auto: the GPU of this machine, else its CPU; or cpu, sm_80, sm_90a, ...")


def seed(text):
    """Type of --seed: what both NumPy and MetaSchedule take."""
    value = int(text)
    if not 0 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"a whole number from 0 to 2^31 - 1 is wanted, found {text}")
    return value


def add_logs(group):
    group.add_argument("--logs", default=None, help="folder of tuning logs; None: tuning_logs of this project")


def add_plan(group):
    group.add_argument("--family", default=None, help="schedule family; None: the tuned one, or the first that takes the workload")
    group.add_argument("--plan", choices=("best", "default"), default="best",
                       help="best: the tuned plan, refused where the log has none; default: the family's seed plan, untuned")
    group.add_argument("--gpu", default=None, help="folder of the device whose log is meant, such as nvidia-h200; None: this machine's")
    add_logs(group)


def add_backward(group, what):
    """--backward, alone or with an order of sums."""
    group.add_argument("--backward", nargs="?", const=backward.IN_ORDER, choices=tuple(backward.FAMILIES), default=None,
                       help=f"{what}; {backward.IN_ORDER}, which it means alone: two runs give the same bits; {backward.ANY_ORDER}: dQ is "
                            "added up in float32 memory, which is faster where it is offered")


def workload_of(text, device):
    """Workload that --workload names on a device."""
    return cli.parse_workload(AUTO_WORKLOAD[device.kind] if text == "auto" else text)


def uniform(workload):
    """The workload, for commands that time kernels on batches whose entries are all as long as the tensors."""
    if workload.lengths != "uniform":
        raise cli.UsageError(f"a workload with uniform lengths is wanted, found {workload.name}: leave out its +{workload.lengths}")
    return workload


def tuned_plan(args, device, workload):
    """(family, plan, figures for a manifest) of the best record; LogError or UsageError where there is none that counts."""
    slug = getattr(args, "gpu", None) or device.slug
    if slug is None:
        raise cli.UsageError(f"a tuned plan belongs to a device, found {device.description}: name one with --gpu, or use --plan default")
    return _plan_on_record(args, slug, workload, device.arch)


def _plan_on_record(args, slug, workload, arch):
    record = best_record(cli.log_folder(args.logs), slug, workload, arch)
    figures = {"seconds": record.seconds, "shape": data_of(record.shape), "device": slug}
    return registry.family_named(record.family), record.plan, figures


def families_of(name, workload, arch):
    """The families that take the workload, or of these the one with that name; NoSchedule or UsageError where there is none."""
    takers = registry.takers(workload, arch)
    if name is None:
        return takers
    names = [family.NAME for family in registry.FAMILIES]
    if name not in names:
        raise cli.UsageError(f"--family is one of {', '.join(names)}, found {name!r}: choose one of these")
    family = registry.family_named(name)
    if family not in takers:
        raise registry.NoSchedule(f"{name} does not take {workload.name} on {arch.name}: {family.decline(workload, arch)}")
    return (family,)


def default_plan(args, device, workload):
    """(family, plan) of the seed, of --family or of the first family that takes the workload."""
    family = families_of(args.family, workload, device.arch)[0]
    return family, family.default_plan(workload, device.arch)


def further_plan(args, workload, arch):
    """(family, plan, figures or None) of an architecture besides the target.

    With --plan best the tuned plan of the first device, by name, that has a log for it; else the seed of the first family that takes the
    workload.
    """
    folders = sorted(cli.log_folder(args.logs).glob(f"*/{workload.name}")) if args.plan == "best" else ()
    for folder in folders:
        try:
            return _plan_on_record(args, folder.parent.name, workload, arch)
        except (ForeignLog, NoRecord):
            continue
    family = registry.takers(workload, arch)[0]
    return family, family.default_plan(workload, arch), None


def chosen_plan(args, device, workload):
    """(family, plan, figures or None) by --plan and --family."""
    if args.plan == "default":
        return *default_plan(args, device, workload), None
    family, plan, figures = tuned_plan(args, device, workload)
    if args.family not in (None, family.NAME):
        raise cli.UsageError(f"--plan best takes the log's best plan, found one of {family.NAME} and --family {args.family}: "
                             "use --plan default, or leave --family out")
    return family, plan, figures
