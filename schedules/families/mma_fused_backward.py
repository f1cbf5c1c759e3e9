"""mma, backward, with five products: te_defs/fused_backward.py on tensor cores of sm_80 and later, in no fixed order (FlashAttention-2).

To what mma_backward does for dK and dV, by its stages, a turn adds dQ of its queries. No warp has their rows: dS is handed over through
shared memory, as [key][query], the warps meet, and each multiplies a part of it, read transposed, with the keys, which stay. The result
goes to memory by additions straight from registers (lowering.reduce_adds), and `dq_cast` reads the sums.

Where dK and dV of 128 channels would fill the registers of warps that keep 32 keys, two warps share the scores of these keys, one half of
the queries each, and the sums, one half of the channels each (`parts`): P and dS are then handed over both, and are read back as first
operands. Tiles of 16 keys a warp would do without that, and read each tile that comes by twice as often.

The budget, as mma_backward's. A turn is bound by shared memory: a product of r x c warps reads its first operand c times, its second r
times, at 128 bytes a clock. d 128, 64 queries and 128 keys: 128 KiB for S and for dP, 96 for dV and for dK, 128 for dQ, 64 to hand over and
to load, 5,100 clocks; mma.sync takes 2,600 at the nominal rate of sm_90. d 64, 32 queries: 160 KiB, 1,300 clocks; 640.
A turn has two barriers (lowering.few_barriers), one behind the wait for its tiles and one behind what is handed over; at 128 channels three
in two parts each, with a product between.

Pictures are those of d 64, float16, causal.
"""
from dataclasses import dataclass

from schedules import roles
from schedules.families import mma_backward, mma_turns, wgmma_fused_backward
from schedules.families.backward_roles import MMA_FUSED, MMA_FUSED_HANDED
from schedules.families.mma_backward import BINDS_AT, CONFIG, PIPELINE, STRIDED  # noqa: F401, the same here
from schedules.families.mma_backward_plan import OTHER_REGISTERS, MmaBackwardPlan, compiler_options  # noqa: F401, the same here
from schedules.intrinsics import mma as intrinsics
from schedules.lowering import meetings, reduce_adds
from schedules.plan import Budget, first_of, fitting, require
from schedules.stages import loops_of, own_fragment, own_rows, read_index

NAME = "mma_fused_backward"
ROLE = "fused"


@dataclass(frozen=True)
class MmaFusedBackwardPlan(MmaBackwardPlan):
    """Knobs of the function.

    parts       warps that share the scores of the same keys, 1 or 2
    query_rows  parts of a tile's queries among which warps divide what is added to dQ
    """

    parts: int = 1
    query_rows: int = 1

    def shares(self, block):
        """As in MmaBackwardPlan."""
        rows = self.query_rows if block.startswith("dQ") else self.warps // self.parts
        return rows, self.warps // rows


PLAN = MmaFusedBackwardPlan

#: By most channels, in order of preference; the last is for chips with less shared memory. Speed on an H200 (float16, mask full, 16,384
#: tokens, n 4096 and 16,384) as a multiple of FlashAttention-2's in the same run. 64 channels, 128 keys: 32 queries 1.084 and 1.077, 64
#: 1.039 and 1.026, 48 0.900 and 1.087, 128 (8 warps, parts=2) 0.988 and 0.965; causal 1.059 and 1.007, 1.018 and 0.981, 0.602 and 0.976.
#: 128 channels, causal, n 16,384: 64 x 128 0.964, 64 x 64 0.750.
TILES = {64: (MmaFusedBackwardPlan(32, 128, 4, query_rows=2),),
         128: (MmaFusedBackwardPlan(64, 128, 8, parts=2, query_rows=2), MmaFusedBackwardPlan(32, 64, 4, parts=2, query_rows=2))}


def decline(workload, arch):
    """Why this family does not take the workload, or None."""
    return mma_backward.decline(workload, arch)


def default_plan(workload, arch):
    """The tile for so many channels."""
    channels = max(workload.head_dim, workload.value_dim)
    plans = (plan for most, plans in sorted(TILES.items()) if most >= channels for plan in plans)
    return first_of(fitting(plans, budget, workload, arch), NAME, workload, arch)


def tile_choices(workload, arch):
    """Plans of all structures that fit; each is a search task of its own."""
    plans = (PLAN(q_tile, kv_tile, warps, parts=parts, query_rows=query_rows) for kv_tile in (128, 64) for warps in (4, 8)
             for q_tile in (32, 64, 48, 96, 128) for parts in (1, 2) for query_rows in (1, 2, 4) if parts * query_rows <= warps)
    return fitting(plans, budget, workload, arch)


def knobs(workload, arch, plan):
    """Candidates of the sampled fields for a plan's structure."""
    return {"register_level": (5, 10)}


def role_of(_name, plan):
    """The Role at a plan."""
    return MMA_FUSED if plan.parts == 1 else MMA_FUSED_HANDED


def handed(plan):
    """Blocks that copy a cast matrix to shared memory, as cache_read names that for one reader, and cache_write for all."""
    return ("dS_cast_shared.dyn",) if plan.parts == 1 else ("P_cast_warp", "dS_cast_warp")


def gap(plan):
    """Elements behind each row of a matrix that is handed over."""
    return 0 if intrinsics.swizzled(plan.q_tile) else intrinsics.ROW_GAP


def budget(workload, arch, plan):
    """Divisibility, shared memory and registers of a plan; PlanError with the whole budget where it does not fit."""
    d, dv, threads = workload.head_dim, workload.value_dim, 32 * plan.warps
    for name, size, blocks in (("kv_tile", plan.kv_tile, plan.warps // plan.parts), ("q_tile", plan.q_tile, plan.parts),
                               ("q_tile", plan.q_tile, plan.query_rows), ("head_dim", d, plan.warps // plan.query_rows)):
        require(blocks and size % (16 * blocks) == 0, f"{name} must be whole blocks of 16 for each of {blocks} parts", size,
                "change either")
    exchange = 2 * len(handed(plan)) * plan.kv_tile * (plan.q_tile + gap(plan)) + meetings.BYTES
    return Budget((
        ("threads", threads, arch.threads_per_block, "of a block"),
        ("shared memory", 2 * (plan.kv_tile + 2 * plan.q_tile) * (d + dv) + exchange + 8 * plan.q_tile, arch.smem_bytes, "bytes"),
        ("registers, about", plan.kv_tile * (d + dv + 2 * plan.q_tile) // threads + OTHER_REGISTERS, arch.registers_per_thread,
         "per thread"),
    )).check(plan, arch)


def declare(workload, plan):
    """The plain function at the plan's tile; makes the intrinsics known that it will need."""
    intrinsics.register(workload.dtype, {operand: (plan.kv_tile, plan.q_tile) for operand in "AT"})
    return mma_backward.declared(role_of(ROLE, plan), workload, plan)


def place_exchange(sch, plan, role):
    """What is handed over goes to shared memory beside the registers.

    Loop nest::

        dsk
          ax0 in 32
            ax1 in 128
              dS_cast_shared.dyn  [32, 128] shared.dyn
    """
    if plan.parts == 1:
        product = sch.get_sblock("dQ_part")
        sch.cache_read(product, read_index(sch, product, "dS_cast"), "shared.dyn")
        return
    for block in handed(plan):
        sch.cache_write(block.removesuffix("_warp"), 0, "warp")
        sch.set_scope(block, 0, "shared.dyn")


def lay_out_exchange(sch, plan, role):
    """Lay out what is handed over as it lies in registers, [key][query], and keep eight rows of it in different banks.

    Loop nest::

        dsk
          ax0 in 32
            ax1 in 128
              dS_cast_shared.dyn  [128, 32] shared.dyn
    """
    for block in handed(plan):
        sch.transform_layout(block, ("write", 0), lambda i, j: (j, i))
        if gap(plan):
            sch.storage_align(block, 0, axis=0, factor=plan.q_tile, offset=gap(plan))
        else:
            sch.annotate(sch.get_sblock(block), "permuted_layout", 1)


def bind_exchange(sch, plan, role):
    """Every lane stores what it holds of dS by pairs, and adds what it holds of dQ by four neighbours.

    Loop nest::

        rows
          ...
          dsk
            ax1_0 in 4  @threadIdx.y
              ax1_3_ax0_2_fused in 32  @threadIdx.x
                ax1_1 in 2  unrolled
                  ax0_0 in 2  unrolled
                    ax0_1 in 2  unrolled
                      ax1_2 in 2  unrolled
                        ax0_3_0 in 1  unrolled
                          ax0_3_1 in 2  vectorized
                            dS_cast_shared.dyn  [128, 32] shared.dyn
          ...
          sum
            i_0_c_0_fused in 4  @threadIdx.y
              i_3_c_1_2_fused in 32  @threadIdx.x
                i_1 in 1  unrolled
                  i_2 in 2  unrolled
                    c_1_0 in 2  unrolled
                      c_1_1 in 2  unrolled
                        c_1_3 in 2  unrolled
                          dQ_sum
    """
    for block in handed(plan):
        sch.reorder(*reversed(loops_of(sch, block, 2)))
        own_fragment(sch, block, *plan.shares(block), vectorize=2)
    own_rows(sch, "dQ_sum", *plan.shares("dQ_sum"), reduce_adds.BLOCKS, reduce_adds.REDUCE_ADD)


def order_turn(sch, plan, role):
    """Ask for tiles a turn ahead. Where all is handed over, a product stands between each arrival of the threads and their meeting: dP
    while P is handed over, dV while dS is, and dK while warps come to the end of their turn.

    Loop nest::

        rows
          ...
          qk
            j_0_0 in 4  @threadIdx.y
              ...
              c_0 in 4  unrolled
                ...
                i_0 in 2  unrolled
                  ...
                  j_0_1 in 2  unrolled
                    S_o_update
          ...
          sum
            i_0_c_0_fused in 4  @threadIdx.y
              i_3_c_1_2_fused in 32  @threadIdx.x
                i_1 in 1  unrolled
                  i_2 in 2  unrolled
                    c_1_0 in 2  unrolled
                      c_1_1 in 2  unrolled
                        c_1_3 in 2  unrolled
                          dQ_sum
    """
    executed, places = role.statements, {"last": "dQ_sum"}
    if plan.parts > 1:
        places = {"last": "dQ_part", "asked": "dS_cast_warp"}
        for names, behind in ((("dV_init", "dV_acc_new"), "dS_cast_warp"), (("dK_init", "dK_acc_new"), "dQ_sum")):
            executed = mma_turns.moved(executed, names, behind)
        mma_turns.arrive_behind(sch, *handed(plan), mma_turns.STORE.format(mma_turns.STATISTICS[-1]))
    mma_turns.order(sch, loops_of(sch, role.turn)[-1], role.statements, executed, **places)


STAGES = (place_exchange, mma_backward.place_buffers, mma_backward.lay_out_fragments, lay_out_exchange, wgmma_fused_backward.lay_out_memory,
          mma_backward.tile_products, mma_backward.stage_fragments, wgmma_fused_backward.hide_sums, mma_backward.bind_grid,
          mma_backward.copy_tiles, mma_backward.bind_fragments, mma_backward.bind_products, bind_exchange, mma_backward.use_tensor_cores,
          order_turn)


def schedule(workload, plan, stages=None, strided=False):
    """A fresh Schedule of the function after the stages; after the first `stages` of them where given."""
    return roles.staged(declare(workload, plan), STAGES[:stages], plan, role_of(ROLE, plan), strided)
