"""cpu, backward: the two functions of te_defs/flash_attention_backward.py on vector units.

The idea is that of cpu.py: each lane of a vector register serves one row, and nothing is summed across a vector. Whose row decides
everything else:

* dQ is summed over keys, so lanes serve queries: Q, dO, S, P, dP, dS and dQ lie in panels of queries; K and V give scalars.
* dK and dV are summed over queries, so lanes serve keys: K, V, S, P, dP, dS, dK and dV lie in panels of keys; Q and dO give scalars.

All products, three and four of them, are then outer products, a few scalars times the vectors of a panel, with a block of accumulators in
registers. The budget is that of cpu.py, but that more tiles share L2: an accumulator twice, and the scores in five forms.

Pictures are those of dK and dV, d 64, float32, causal, AVX-512.
"""
from dataclasses import dataclass
from functools import partial

from schedules import roles
from schedules.families import cpu
from schedules.families.cpu import CONFIG, PIPELINE, compiler_options, split_panel, write_by_lanes  # noqa: F401, the same here
from schedules.lowering import cpu_pipeline
from schedules.plan import Budget, first_of, fitting, require
from schedules.stages import loops_of, unroll_all
from te_defs.flash_attention_backward import attention_dk_dv, attention_dq

NAME = "cpu_backward"
STRIDED = (True,)

PLAN = cpu.CpuPlan


@dataclass(frozen=True)
class Role:
    """What one of the two functions is made of.

    lane      loop whose rows the lanes serve: "i", queries, or "j", keys
    panels    blocks that load or set matrices which lie in panels, beside scores
    scalars   blocks that load what products read scalar by scalar
    products  blocks of the products
    sweeps    (block that leads, blocks that join it): what is done with scores, element by element
    states    blocks that set or copy accumulators
    """

    declare: object
    lane: str
    panels: tuple
    scalars: tuple
    products: tuple
    sweeps: tuple
    states: tuple


DQ = Role(attention_dq, "i", ("Q_load", "dO_load"), ("K_load", "V_load"), ("S", "dP", "dQ_acc_new"),
          (("P", ("P_masked",)), ("dS", ("dS_cast",))), ("dQ_acc_init", "dQ_acc"))
DK_DV = Role(attention_dk_dv, "j", ("K_load", "V_load"), ("Q_load", "dO_load"), ("S", "dP", "dV_acc_new", "dK_acc_new"),
             (("P", ("P_masked", "P_cast")), ("dS", ("dS_cast",))), ("dK_acc_init", "dV_acc_init", "dK_acc", "dV_acc"))
ROLES = {"dq": DQ, "dk_dv": DK_DV}

#: (q_tile, kv_tile, panel_vectors, rows) for each role: long tiles of the rows that stay, short ones of those that stream by.
TILES = {"dq": ((128, 64, 2, 8), (64, 64, 2, 8), (128, 64, 2, 4), (64, 64, 2, 4), (16, 32, 1, 8)),
         "dk_dv": ((64, 128, 2, 8), (64, 64, 2, 8), (64, 128, 2, 4), (64, 64, 2, 4), (32, 16, 1, 8))}
#: (rows that stay, rows that stream by, panel_vectors, rows) that a search tries besides.
FURTHER = ((256, 64, 2, 8), (128, 128, 2, 8), (128, 32, 2, 8), (64, 128, 2, 8), (256, 32, 2, 8), (128, 64, 4, 4), (64, 64, 1, 16))


def decline(workload, arch):
    """Why this family does not take the workload, or None."""
    return None if arch.kind == "cpu" else f"{arch.name} is no CPU"


def default_plan(role, workload, arch):
    """The first of TILES that fits; PlanError where none does."""
    return first_of(_plans(role, TILES[role], workload, arch), NAME, workload, arch)


def tile_choices(role, workload, arch):
    """Plans of all tile shapes that fit; each is a search task of its own."""
    further = [(*(tile[:2] if role == "dq" else tile[1::-1]), *tile[2:]) for tile in FURTHER]
    return _plans(role, (*TILES[role], *further), workload, arch)


def _plans(role, tiles, workload, arch):
    """The plans of these tiles that fit."""
    lanes = max(arch.vector_bits // 32, 1)
    plans = (PLAN(q_tile, kv_tile, lanes, vectors, arch.cores, rows) for q_tile, kv_tile, vectors, rows in tiles)
    return fitting(plans, partial(budget, role), workload, arch)


def knobs(role, workload, arch, plan):
    """Candidates of the sampled fields for a plan's tile shape, as in cpu.py."""
    return cpu.knobs(workload, arch, plan, partial(budget, role))


def budget(role, workload, arch, plan):
    """Divisibility, registers and caches of a plan; PlanError with the whole budget where it does not fit."""
    stays, streams = (plan.q_tile, plan.kv_tile) if role == "dq" else (plan.kv_tile, plan.q_tile)
    D, DV = workload.head_dim, workload.value_dim
    require(stays % plan.panel == 0, f"the tile that stays must be a multiple of a panel of {plan.panel} rows", stays, "round it")
    require(streams % plan.rows == D % plan.rows == DV % plan.rows == 0, "the tile that streams by and both head dimensions must be "
            "multiples of rows", f"{streams}, {D} and {DV} by {plan.rows}", "change rows")
    accumulators = D if role == "dq" else D + DV
    return Budget((
        ("threads", plan.threads, arch.cores, "cores"),
        ("vector registers", plan.rows * plan.panel_vectors + plan.panel_vectors + 1, arch.vector_registers, ""),
        ("L1, a panel of what stays, or of scores", 4 * plan.panel * max(D, DV, streams), arch.l1_bytes, "bytes"),
        ("L2, all tiles", 4 * ((stays + streams) * (D + DV) + 2 * stays * accumulators + 5 * stays * streams), arch.l2_bytes, "bytes"),
    )).check(plan, arch)


def lane_first(sch, block, role):
    """The loops of a block [row, column, ...]: the one whose rows the lanes serve, the other one, those of a sum."""
    loops = loops_of(sch, block)
    lane = next(loop for loop in loops[:2] if sch.get(loop).loop_var.name == role.lane)
    return lane, *(loop for loop in loops if not loop.same_as(lane))


def give_rows_lanes(sch, plan, role):
    """Lay matrices with a row for each lane in panels: [panel, other axis, row of the panel].

    Loop nest::

        attn
          load_keys
            j in 128
              c in 64
                K_load  [4, 64, 32]
          ...
          e in ...
            t in ...
              rows
                ...
                qk
                  i in 64
                    j in 128
                      c in 64
                        S  [4, 64, 32]
    """
    scores = [block for leader, others in role.sweeps for block in (leader, *others)]
    accumulators = [block for block in role.states if block.endswith("_init")]
    for block in (*role.panels, *role.products, *scores, *accumulators):
        first = sch.get(loops_of(sch, block)[0]).loop_var.name == role.lane
        sch.transform_layout(block, ("write", 0), (lambda row, other: (row // plan.panel, other, row % plan.panel)) if first else (
            lambda other, row: (row // plan.panel, other, row % plan.panel)))


def widen_inputs(sch, plan, role):
    """Convert 16-bit inputs once, where they are loaded; P and dS stay wide.

    Loop nest::

        rows
          i in 64
            c in 64
              Q_load  [64, 64]
          ...
          softmax
            ...
            i in 64
              j in 128
                P_cast  [4, 64, 32]
    """
    casts = [block for _, others in role.sweeps for block in others if block.endswith("_cast")]
    for block in (*role.panels, *role.scalars, *casts):
        sch.unsafe_set_dtype(block, 0, "float32")


def tile_products(sch, plan, role):
    """Give each product a block of accumulators that fits the registers, and walk its whole sum before the next block.

    Loop nest::

        rows
          ...
          qk
            j_0 in 4
              i_0 in 8
                c_0 in 64
                  c_1 in 1  unrolled
                    i_1 in 8  unrolled
                      j_1 in 2  unrolled
                        j_2 in 16  vectorized
                          S  [4, 64, 32]
          ...
          pdo
            j_0 in 4
              c_0 in 8
                i_0 in 64
                  i_1 in 1  unrolled
                    c_1 in 8  unrolled
                      j_1 in 2  unrolled
                        j_2 in 16  vectorized
                          dV_acc_new  [4, 64, 32]
    """
    for product in role.products:
        row, other, step = lane_first(sch, product, role)
        panel, vector, lane = split_panel(sch, row, plan)
        others, other = sch.split(other, factors=[None, plan.rows])
        steps, step = sch.split(step, factors=[None, plan.unroll])
        sch.reorder(panel, others, steps, step, other, vector, lane)
        unroll_all(sch, (step, other))
        write_by_lanes(sch, vector, lane)


def sweep_scores(sch, plan, role):
    """Work on scores in two sweeps, P with its mask and dS, one row of vectors at a time.

    Loop nest::

        rows
          ...
          softmax
            j_0 in 4
              i in 64
                ...
                ax0_0 in 2  unrolled
                  ax0_1 in 16  vectorized
                    P_masked  [4, 64, 32]
          ...
          gradient
            j_0 in 4
              i in 64
                j_1 in 2  unrolled
                  j_2 in 16  vectorized
                    dS  [4, 64, 32]
    """
    for leader, others in role.sweeps:
        row, other = lane_first(sch, leader, role)
        panel, vector, lane = split_panel(sch, row, plan)
        sch.reorder(panel, other, vector, lane)
        write_by_lanes(sch, vector, lane)
        for block in others:
            sch.reverse_compute_at(block, other)
            extents = {loop: int(sch.get(loop).extent) for loop in loops_of(sch, block)[2:]}
            row = next(loop for loop, extent in extents.items() if extent == plan.panel)
            write_by_lanes(sch, *sch.split(row, factors=[plan.panel_vectors, plan.lanes]))


def vectorize_states(sch, plan, role):
    """Accumulators are set and copied by whole vectors.

    Loop nest::

        back
          j_0 in 4
            c in 64
              j_1 in 2  unrolled
                j_2 in 16  vectorized
                  dK_acc  [4, 64, 32]
    """
    for block in role.states:
        row, channel = lane_first(sch, block, role)
        panel, vector, lane = split_panel(sch, row, plan)
        sch.reorder(panel, channel, vector, lane)
        write_by_lanes(sch, vector, lane)


def copy_by_vectors(sch, plan, role):
    """Copy what gives scalars by whole vectors, or by the largest that divides its channels.

    Loop nest::

        rows
          i in 64
            c_0 in 4  unrolled
              c_1 in 16  vectorized
                Q_load  [64, 64]
    """
    for block in role.scalars:
        _, c = loops_of(sch, block)
        channels = int(sch.get(c).extent)
        write_by_lanes(sch, *sch.split(c, factors=[None, min(plan.lanes, channels & -channels)]))


def separate_init(sch, plan, role):
    """Start sums before their loops, so that accumulators stay in registers.

    Loop nest::

        dsq
          j_0 in 4
            c_0 in 8
              c_1_init in 8  unrolled
                j_1_init in 2  unrolled
                  j_2_init in 16  vectorized
                    dK_acc_new_init  [4, 64, 32]
              i_0 in 64
                i_1 in 1  unrolled
                  c_1 in 8  unrolled
                    j_1 in 2  unrolled
                      j_2 in 16  vectorized
                        dK_acc_new_update  [4, 64, 32]
    """
    for product in role.products:
        sch.decompose_reduction(product, loops_of(sch, product)[2])


def deal_tiles(sch, plan, role):
    """Deal tiles to the threads to and fro, as in cpu.py.

    Loop nest::

        b_g_r_fused_1 in 2  parallel
          b_g_r_fused_0 in ...
            attn
    """
    turn, thread = sch.split(sch.fuse(*loops_of(sch, "attn")), factors=[None, plan.threads])
    sch.reorder(thread, turn)
    sch.annotate(turn, cpu_pipeline.TO_AND_FRO, 1)
    sch.parallel(thread)


STAGES = (give_rows_lanes, widen_inputs, tile_products, sweep_scores, vectorize_states, copy_by_vectors, separate_init, deal_tiles)


def role_of(name, _plan):
    """The Role of a name."""
    return ROLES[name]


def declare(role, workload, plan):
    """The plain function at the plan's tile."""
    return ROLES[role].declare(workload, plan.q_tile, plan.kv_tile)


def schedule(role, workload, plan, stages=None, strided=False):
    """A fresh Schedule of a function after the stages; after the first `stages` of them where given."""
    return roles.staged(declare(role, workload, plan), STAGES[:stages], plan, role_of(role, plan), strided)
