"""Options that several commands have, each worded once, and what they resolve to."""
import argparse

from schedules import backward, registry
from schedules.buckets import bucket_named, nearest
from schedules.tuning.nearest import Machine, figures_of, gains_of, nearest_records, told
from schedules.tuning.records import ForeignLog, NoRecord, best_records
from schedules.tuning.subjects import ForwardPass, subject_of
from scripts import cli
from scripts.kernels import Gradients, Planned, default_gradients

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


def lengths(text):
    """Type of lengths: the schedules.buckets.Bucket of 512 or 1x8192."""
    try:
        return bucket_named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_logs(group):
    group.add_argument("--logs", default=None, help="folder of tuning logs; None: tuning_logs of this project")


def add_plan(group):
    group.add_argument("--family", default=None, help="schedule family; None: the tuned one, or the first that takes the workload")
    group.add_argument("--plan", choices=("best", "default"), default="best",
                       help="best: the tuned plan, borrowed from the nearest device like it, which is said, where nothing was tuned on "
                            "this one, and refused where there is none; default: the family's seed plan, untuned")
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


def device_meant(args, device):
    """The device whose log is meant: that of --gpu, else the one that --target names."""
    named = getattr(args, "gpu", None)
    return device if named in (None, device.slug) else cli.device_named(named, device.arch)


def tuned_plans(args, device, workload):
    """[Planned, ...] of the best records, one for each bucket of lengths; LogError or UsageError where there is none that counts."""
    device = device_meant(args, device)
    if device.slug is None:
        raise cli.UsageError(f"a tuned plan belongs to a device, found {device.description}: name one with --gpu, or use --plan default")
    return [Planned(*found) for found in _of_device(args, device, workload)]


def _of_device(args, device, workload, order=None):
    """[(name of the family, plan, figures for a manifest), ...] of the best records of a device, one for each bucket; where nothing was
    tuned on it, and enough is known of it, of the nearest one, which is said. Of gradients where an order is given."""
    try:
        return _on_record(args, device.slug, workload, device.arch, order)
    except NoRecord as error:
        if not device.is_here and device.gpu is None:
            raise
        return _borrowed(args, device, subject_of(workload, order), error)


def _borrowed(args, device, subject, error):
    """The same of the nearest device; an error that says of both that there is none."""
    logs = cli.log_folder(args.logs)
    try:
        lent = nearest_records(logs, subject, Machine(device.slug, device.arch, device.gpu))
    except NoRecord as none:
        raise NoRecord(f"{error}; {none}") from error
    for sentence in lent[0].passed_over:
        print(sentence)
    print(f"the plan of {subject.name} was measured on {lent[0].lender}, {lent[0].date}, and is borrowed for {device.slug}, on which it "
          f"was not tuned: {told(gains_of(logs, lent[0].lender, subject.order))}", flush=True)
    described = (_described(it.record, it.lender, subject) for it in lent)
    return [(family, plan, {**figures, "borrowed_for": device.slug}) for family, plan, figures in described]


def _on_record(args, slug, workload, arch, order=None):
    """As `_of_device`, of that device alone."""
    subject = subject_of(workload, order)
    return [_described(record, slug, subject) for record in best_records(cli.log_folder(args.logs), slug, workload, arch, order)]


def _described(record, slug, subject):
    return record.family, record.plan, figures_of(record, slug, subject)


def _first_on_record(args, workload, arch, order=None):
    """The same of the first device, by name, that has a log for the architecture; None where none has."""
    name = subject_of(workload, order).name
    for slug in sorted({path.parent.name for end in ("", "@*") for path in cli.log_folder(args.logs).glob(f"*/{name}{end}")}):
        try:
            return _on_record(args, slug, workload, arch, order)
        except (ForeignLog, NoRecord):
            continue
    return None


def families_of(name, subject, arch):
    """The families that take what is tuned (schedules.tuning.subjects), or of these the one with that name; NoSchedule or UsageError where
    there is none."""
    takers, families = subject.takers(arch), subject.families()
    if name is None:
        return takers
    if name not in families:
        raise cli.UsageError(f"--family is one of {', '.join(families)}, found {name!r}: choose one of these")
    if families[name] not in takers:
        raise registry.NoSchedule(f"{name} does not take {subject.name} on {arch.name}: {subject.declines(arch)[name]}")
    return (families[name],)


def default_plan(args, device, workload):
    """(family, plan) of the seed, of --family or of the first family that takes the workload."""
    family = families_of(args.family, ForwardPass(workload), device.arch)[0]
    return family, family.default_plan(workload, device.arch)


def further_plan(args, workload, arch):
    """(family, plan, figures or None) of an architecture besides the target.

    With --plan best the tuned plan of the first device, by name, that has a log for it, of its first bucket; else the seed of the first
    family that takes the workload.
    """
    found = _first_on_record(args, workload, arch) if args.plan == "best" else None
    if found is not None:
        name, plan, figures = found[0]
        return registry.family_named(name), plan, figures
    family = registry.takers(workload, arch)[0]
    return family, family.default_plan(workload, arch), None


def chosen_plans(args, device, workload):
    """[Planned, ...] by --plan and --family: the tuned ones, one for each bucket of lengths, or the seed."""
    if args.plan == "default":
        family, plan = default_plan(args, device, workload)
        return [Planned(family.NAME, plan)]
    plans = tuned_plans(args, device, workload)
    for found in {it.family for it in plans} - {args.family} if args.family else ():
        raise cli.UsageError(f"--plan best takes the log's best plan, found one of {found} and --family {args.family}: "
                             "use --plan default, or leave --family out")
    return plans


def taken(plans, bucket):
    """Of some Planned, the one that an artefact of them takes for calls with the lengths of a schedules.buckets.Bucket."""
    by_bucket = {it.bucket: it for it in plans}
    return plans[0] if len(plans) == 1 else by_bucket[nearest(by_bucket, bucket.q_len, bucket.kv_len)]


def tuned_gradients(args, device, workload):
    """[Gradients, ...] of the best records of a device, one for each bucket of lengths, or where none is named of the first one that has a
    log for the architecture; LogError."""
    arch, order = device.arch, args.backward
    found = _of_device(args, device, workload, order) if device.slug else _first_on_record(args, workload, arch, order)
    if found is None:
        raise NoRecord(f"a record of {subject_of(workload, order).name} for {arch.name} was wanted, found none in "
                       f"{cli.log_folder(args.logs)}")
    return [Gradients(*each, order) for each in found]


def chosen_gradients(args, device, workload):
    """[Gradients, ...] by --plan: those on record, or where nothing was tuned, which is said, by the default plans. A record that no longer
    fits is a LogError."""
    if args.plan == "best":
        try:
            return tuned_gradients(args, device, workload)
        except NoRecord as error:
            print(f"gradients by their default plans: {error}", flush=True)
    return [default_gradients(workload, device.arch, args.backward)]
