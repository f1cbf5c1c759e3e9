"""Show how a workload is computed on a target: plan and budget, the loop nest after each stage, TensorIR, source, registers and spills.

    python -m scripts.show --workload d64_f16_causal --target sm_80
    python -m scripts.show nests --workload d64_f32_full --target sm_80 --family simt --blocks S O_acc_new
    python -m scripts.show nests --workload d64_f32_full --family split_kv
    python -m scripts.show graph --workload d128_f16_causal --target sm_90a

No GPU is needed, whatever the target.
"""
import re
import signal
import sys
from dataclasses import dataclass
from functools import cached_property

from schedules import build, registry, split_kv
from schedules.nest import excerpt, loop_nest
from schedules.plan import Plan, PlanError, paper_tile
from schedules.relax import front_end
from schedules.relax.flash_attention import KernelCalls
from schedules.relax.modules import Workloads
from scripts import cli, options
from scripts.kernels import build_kernel
from te_defs.workload import Workload

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Subject:
    """What is shown: a plan of a family for a workload on an architecture, the blocks that nests are cut down to, and the Planned of all
    buckets of lengths where there are several."""

    workload: Workload
    arch: object
    family: object
    plan: Plan
    blocks: tuple
    plans: tuple = ()

    @cached_property
    def kernel(self):
        return build_kernel(self.family, self.workload, self.plan, self.arch)

    def schedule(self, stages=None):
        return build.schedule(self.family, self.workload, self.plan, stages)


def show_plan(it):
    """Who takes the workload and why others do not; the plan with its budget; the paper's rule for tiles beside it."""
    for name, reason in registry.declines(it.workload, it.arch).items():
        yield f"{name:<10}{'takes it' if reason is None else 'declines: ' + reason}"
    if it.plans:
        yield "\nan artefact holds what was tuned at several lengths; a call takes what is nearest:"
    for other in it.plans:
        shown = (other.family, other.plan) == (it.family.NAME, it.plan)
        yield f"  {str(other.bucket):<12}{other.family}: {other.plan}{', shown below' * shown}"
    yield f"\n{it.family.NAME}: {it.plan}\n{it.family.budget(it.workload, it.arch, it.plan).table()}"
    yield f"tile shapes to search: {len(it.family.tile_choices(it.workload, it.arch))}; knobs of this one: " + ", ".join(
        f"{name} in {candidates}" for name, candidates in it.family.knobs(it.workload, it.arch, it.plan).items())
    if it.arch.kind == "cuda":
        yield from paper_rule(it)


def paper_rule(it):
    """The FlashAttention paper's tile (algorithm 1, line 1) for this shared memory, and what this family's budget leaves of it.

    The rule fills shared memory with tiles of Q, K, V and O. Where S and O stay in registers, these are what runs out.
    """
    elements = it.arch.smem_bytes // ELEMENT_BYTES[it.workload.dtype]
    q_tile, kv_tile = paper_tile(elements, it.workload.head_dim)
    yield (f"\npaper's rule: M = {elements} elements of shared memory, Bc = ceil(M / 4d) = {kv_tile}, Br = min(Bc, d) = {q_tile}; "
           f"the plan has Bc = {it.plan.kv_tile}, Br = {it.plan.q_tile}")
    refusals = []
    for width in range(kv_tile, 0, -1):
        try:
            budget = it.family.budget(it.workload, it.arch, it.plan.but(q_tile=q_tile, kv_tile=width))
        except PlanError as error:
            refusals.append(str(error).splitlines())
        else:
            yield f"largest Bc within the budget of {it.family.NAME}: {width}\n{budget.table()}"
            break
    else:
        yield f"with that Br no Bc is within the budget of {it.family.NAME}"
    too_large = [reason for reason, *table in refusals if table]  # the others are about divisibility
    yield from (f"the next larger one: {reason}" for reason in too_large[-1:])


def show_nests(it):
    """The loop nest as declared and after each stage, or the lines of it that lead to some blocks."""
    nests = [loop_nest(it.schedule(number)) for number in range(len(it.family.STAGES) + 1)]
    for block in it.blocks:
        if not any(_has(nest, block) for nest in nests):
            raise cli.UsageError(f"--blocks must name blocks of the nests, found {block!r} in none: look at the nests without --blocks")
    for number, nest in enumerate(nests):
        name = it.family.STAGES[number - 1].__name__ if number else "as declared"
        if it.blocks:
            present = [block for block in it.blocks if _has(nest, block)]
            nest = excerpt(nest, present) if present else f"none of the blocks {', '.join(it.blocks)} at this point"
        yield f"--- {number} {name}\n{nest}\n"


def _has(nest, block):
    return re.search(rf"^ *{re.escape(block)}(  |$)", nest, re.MULTILINE) is not None


def show_tir(it):
    """The scheduled function as TVMScript."""
    yield it.schedule().mod.script()


def show_source(it):
    """What the code generator makes of it: CUDA C++ for a GPU, assembly for a CPU."""
    module = it.kernel.variant.module
    yield module.inspect_source("asm") if it.arch.kind == "cpu" else module.imports[0].inspect_source()


def show_resources(it):
    """Registers, spills and shared memory as ptxas tells them, and what it warns of."""
    if it.arch.kind == "cpu":
        yield "registers and spills are told of CUDA kernels only"
        return
    yield str(it.kernel.toolkit)
    yield from it.kernel.figures()
    yield from (warning for compiled in it.kernel.variant.kernels for warning in compiled.warnings)


def show_graph(it):
    """A Transformer block around the workload: what each step of the front end did to its graph, in nodes, and the graph that is left."""
    from scripts.examples.relax_block import module_of, target_of  # here, since TVM's frontend takes a second to import
    if it.workload.name != Workload(it.workload.head_dim, it.workload.head_dim, it.workload.dtype, it.workload.mask).name or (
            it.workload.mask not in ("full", "causal")):
        raise cli.UsageError(f"graph shows blocks whose attention is full or causal, found {it.workload.name}: name such a workload")
    mod, _ = module_of(1, 128, 4, it.workload.head_dim, it.workload.dtype, it.workload.mask == "causal")
    with target_of(it.arch):
        mod, told = front_end.run(mod, KernelCalls(it.arch, Workloads()))
    yield f"{'step':<40}{'before':>7}{'after':>7}  passes"
    for done in told:
        yield f"{done.step.purpose:<40}{done.before.total():>7}{done.after.total():>7}  {', '.join(done.step.names)}\n{'':<56}{done.change}"
    yield f"\n{mod['forward'].script()}"


#: Schedules that are no family: their nests can be shown, and a test runs them on llvm, but nothing exports them.
NESTS_ONLY = {"split_kv": split_kv}
SECTIONS = {"plan": show_plan, "nests": show_nests, "tir": show_tir, "source": show_source, "resources": show_resources,
            "graph": show_graph}


def make_parser():
    parser = options.parser("show", __doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", default=["plan", "nests"], help="any of " + ", ".join(
        f"{name} ({section.__doc__.splitlines()[0].rstrip('.')})" for name, section in SECTIONS.items()))
    parser.add_argument("--graph", action="store_true", help="the section graph alone")
    options.add_what(parser)
    options.add_plan(parser)
    parser.set_defaults(plan="default")
    parser.add_argument("--length", type=options.lengths, default=None, help="show the plan that calls of these lengths take, "
                        "query and key rows or query rows x key rows, such as 512 or 1x8192; None: that of the first log")
    parser.add_argument("--blocks", nargs="*", default=[], help="show the lines of the nests that lead to these blocks; none: all lines")
    return parser


def run(args):
    args.sections = ["graph"] if args.graph else args.sections
    unknown = [name for name in args.sections if name not in SECTIONS]
    if unknown:
        raise cli.UsageError(f"a section is one of {', '.join(SECTIONS)}, found {', '.join(unknown)}: choose among these")
    device = cli.find_device(args.target)
    workload = options.workload_of(args.workload, device)
    if args.family in NESTS_ONLY:
        family, plans = NESTS_ONLY[args.family], []
        plan, name = family.DEFAULT, args.family
        if not set(args.sections) <= {"nests", "tir"}:
            raise cli.UsageError(f"{name} has sections nests and tir, found {', '.join(args.sections)}: name one of these")
    else:
        plans = options.chosen_plans(args, device, workload)
        chosen = options.taken(plans, args.length) if args.length else plans[0]
        family, plan, name = registry.family_named(chosen.family), chosen.plan, chosen.family
    cli.echo(command="show", device=device.description, workload=workload.name, family=name, plan=str(plan), sections=args.sections)
    subject = Subject(workload, device.arch, family, plan, tuple(args.blocks), tuple(plans if len(plans) > 1 else ()))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that it ends quietly in front of `head`
    for name in args.sections:
        for text in SECTIONS[name](subject):
            print(text)


if __name__ == "__main__":
    sys.exit(cli.main(run, make_parser().parse_args()))
