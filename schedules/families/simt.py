"""simt: CUDA cores, the textbook schedule: tile, transpose into shared memory, bind, unroll, nothing else. Any CUDA GPU from sm_75.

The idea is that of a matrix product on CUDA cores, twice. A thread block takes one tile of query rows and walks over the key tiles. Its
threads form a grid; each owns a patch of some rows and columns of S, and of the same rows of O, in registers. The operands of both
products lie in shared memory, turned so that a thread's rows, and its columns, are neighbours there.

The budget. Registers decide how large a patch may be: with 8 rows, 8 keys and 8 channels a thread holds 64 elements of S, 64 of O, 16
operands and 48 statistics, some 230 with addresses. The larger the patch, the fewer shared-memory reads: 4 of 16 bytes for 64
multiply-adds. Shared memory holds Q, V and, one after the other, K and P.

The finished nest, one line a group of blocks; rows are @threadIdx.y, columns @threadIdx.x::

    attn  @blockIdx.x
      Q_load                                      shared, [channel, row]
      for t in key tiles, last one first          split in two where the mask ends
        K_load V_load                             shared, [channel, key] and [key, channel]
        S                                         for c: outer product of a thread's rows and keys
        S_masked .. P_cast                        registers; tile_max and tile_sum by warp shuffles along a row
        P_cast_shared.dyn                         shared, [key, row]: every thread of a row needs the whole row
        O_acc_new                                 rescale, then for j: outer product of a thread's rows and channels
      O LSE
"""
from dataclasses import dataclass

from schedules.lowering import simt_pipeline
from schedules.plan import Budget, Plan, first_of, fitting, require
from schedules.stages import loops_of, read_index, unroll_all
from te_defs.flash_attention import flash_attention_forward

NAME = "simt"
PIPELINE = "flashtir_simt"
CONFIG = simt_pipeline.CONFIG
#: The first stage that binds threads: what stands before it runs on llvm.
BINDS_AT = "bind_grid"

#: Views have a kernel of their own: addresses by strides cost the key loop up to 1 % more instructions.
STRIDED = (False, True)

LOADS = ("Q_load", "K_load", "V_load")
PRODUCTS = ("S", "O_acc_new")
ELEMENTS = ("S_masked", "P", "P_cast", "O_acc_init", "O_acc")
ROW_REDUCTIONS = ("tile_max", "tile_sum")
ROW_STATE = ("row_max_init", "row_sum_init", "row_max_new", "rescale", "row_max_scaled", "row_sum_new", "row_sum_total", "row_sum_inverse")
#: Row blocks that write a buffer which another block made, or the output.
ROW_COPIES = ("row_max", "row_sum", "LSE")
#: The copy of P in shared memory, as cache_read names it.
P_SHARED = "P_cast_shared.dyn"

#: Neighbours that one shared-memory access takes: 16 bytes of float32.
VECTOR = 4
#: Elements by which a row of P in shared memory is longer than q_tile, so that the threads of a row store to different banks.
P_PAD = 4
#: Row statistics that a thread keeps for each of its rows, and registers for addresses and the like (read off compiled kernels).
STATISTICS, OTHER_REGISTERS = 5, 24


@dataclass(frozen=True)
class SimtPlan(Plan):
    """Knobs of the simt family.

    thread_rows     threads along the query rows (threadIdx.y); each owns q_tile / thread_rows rows, a multiple of 4
    thread_columns  threads along keys and channels (threadIdx.x), which share a row: 8, 16 or 32 lanes of a warp
    unroll          steps of a product's sum that are written out
    """

    thread_rows: int
    thread_columns: int
    unroll: int = 8


PLAN = SimtPlan

#: Tiles and threads that are worth a try, the seed first: patches of 8 rows by 8 or 4 columns, then smaller tiles for large head
#: dimensions and small shared memories.
TILES = (SimtPlan(128, 64, 16, 8), SimtPlan(64, 64, 8, 16), SimtPlan(128, 64, 16, 16), SimtPlan(64, 64, 8, 8, 4),
         SimtPlan(64, 32, 8, 16), SimtPlan(64, 32, 8, 8), SimtPlan(32, 32, 8, 16, 4), SimtPlan(32, 32, 8, 8, 4), SimtPlan(32, 16, 8, 16, 4),
         SimtPlan(32, 16, 8, 8, 4))


def decline(workload, arch):
    """Why this family does not take the workload, or None."""
    if arch.kind != "cuda":
        return f"{arch.name} is no CUDA GPU"
    if workload.dtype == "bfloat16":
        return "CUDA cores are scheduled for float32 and float16 inputs, not bfloat16"
    return None


def default_plan(workload, arch):
    """The seed: the first of TILES that fits; PlanError where none does."""
    return first_of(tile_choices(workload, arch), NAME, workload, arch)


def tile_choices(workload, arch):
    """Plans of all tile shapes that fit, the seed's first; each is a search task of its own."""
    return fitting(TILES, budget, workload, arch)


def budget(workload, arch, plan):
    """Divisibility, threads, registers and shared memory of a plan; PlanError with the whole budget where it does not fit."""
    check_divisibility(workload, plan)
    rows, keys, channels = patch(workload, plan)
    registers = rows * (keys + channels + STATISTICS + 1) + max(keys, channels) + OTHER_REGISTERS
    element = 4 if workload.dtype == "float32" else 2
    q, k, v, p = (element * size for size in (plan.q_tile * workload.head_dim, plan.kv_tile * workload.head_dim,
                                              plan.kv_tile * workload.value_dim, plan.kv_tile * (plan.q_tile + P_PAD)))
    # P takes the place of K. Where K fits V's place, the second of the two key loops puts it there, and V's place must grow for P.
    smem = q + max(k, p) + (p if k <= v < p else v)
    return resources(plan, registers, smem, arch).check(plan, arch)


def knobs(workload, arch, plan, budget=budget):
    """Candidates of the sampled fields within a member's budget; thread_columns shapes the layouts, so the tile decides it."""
    plans = fitting([plan.but(thread_rows=rows) for rows in (4, 8, 16, 32)], budget, workload, arch)
    steps = tuple(steps for steps in (4, 8, 16) if workload.head_dim % steps == plan.kv_tile % steps == 0)
    return {"thread_rows": tuple(plan.thread_rows for plan in plans), "unroll": steps}


def check_divisibility(workload, plan):
    """PlanError where the patches of the threads would not tile S and O."""
    require(plan.q_tile % (plan.thread_rows * VECTOR) == 0, f"q_tile must be a multiple of {VECTOR} rows for each thread row",
            f"q_tile {plan.q_tile} and {plan.thread_rows} thread rows", "change either")
    require(plan.kv_tile % plan.thread_columns == 0 and workload.value_dim % plan.thread_columns == 0,
            "kv_tile and the value dimension must be multiples of thread_columns",
            f"{plan.kv_tile} and {workload.value_dim} on {plan.thread_columns}", "change thread_columns")


def patch(workload, plan):
    """Rows, keys and channels that a thread owns."""
    return plan.q_tile // plan.thread_rows, plan.kv_tile // plan.thread_columns, workload.value_dim // plan.thread_columns


def resources(plan, registers, smem, arch):
    """The budget of a thread block whose threads take about `registers` each, and `smem` bytes together."""
    threads = plan.thread_rows * plan.thread_columns
    return Budget((
        ("threads", threads, arch.threads_per_block, "of a block"),
        ("registers (estimate)", registers, arch.registers_per_thread, "per thread"),
        ("registers (estimate)", registers * threads, arch.registers_per_sm, "per block"),
        ("shared memory", smem, arch.smem_bytes, "bytes"),
    ))


def compiler_options(plan):
    """What ptxas is asked for: nothing that the plan decides."""
    return {}


def declare(workload, plan, negative_scale=False, strided=False):
    """The plain function at the plan's tile, with one copy of the row statistics."""
    return flash_attention_forward(workload, plan.q_tile, plan.kv_tile, negative_scale=negative_scale, strided=strided)


def own_patch(sch, block, plan, reductions=0):
    """Split the rows and columns of a matrix block among the threads; return its loops (reductions, row, column) inside a thread."""
    i, j, *reductions = loops_of(sch, block, 2 + reductions)
    i_thread, i = sch.split(i, factors=[plan.thread_rows, None])
    j_thread, j = sch.split(j, factors=[plan.thread_columns, None])
    sch.reorder(i_thread, j_thread, *reductions, i, j)
    return reductions, i, j


def own_product(sch, product, plan):
    """Split a product among the threads and write out the plan's steps of its sum, each an outer product of rows and columns."""
    _, vector = columns_of(sch, product, plan, reductions=1)
    (step,), i, j = own_patch(sch, product, plan, reductions=1)
    unroll_all(sch, (sch.split(step, factors=[None, plan.unroll])[1], i))
    unroll_vectors(sch, j, vector)


def unroll_vectors(sch, loop, elements):
    """Write a loop out as accesses of `elements` neighbours."""
    outer, vector = sch.split(loop, factors=[None, elements])
    sch.unroll(outer)
    sch.vectorize(vector)


def copy_together(sch, block, plan, turned):
    """Deal a tile [row, channel], four neighbours each, to all threads; the rows first where the tile is stored turned."""
    row, c = loops_of(sch, block, 2)
    c, vector = sch.split(c, factors=[None, VECTOR])
    if turned:
        sch.reorder(c, row, vector)
    turn, *_ = sch.split(sch.fuse(*loops_of(sch, block, 3)[:2]), factors=[None, plan.thread_rows, plan.thread_columns])
    sch.unroll(turn)
    sch.vectorize(vector)


def columns_of(sch, block, plan, reductions=0):
    """Columns of a block's matrix that one thread owns, and how many of them one access takes."""
    columns = int(sch.get(loops_of(sch, block, 2 + reductions)[1]).extent) // plan.thread_columns
    return columns, min(VECTOR, columns & -columns)


def share_tiles(sch, plan):
    """Put Q, K and V tiles into shared memory, Q and K transposed: a step of the first product takes one channel of a thread's rows.

    Of the columns that a thread owns, each group of four lies with the same group of the neighbouring threads: [.., group, thread, 4].
    So the threads of a warp read neighbouring addresses, and no bank twice.

    Loop nest::

        kv
          j in 64
            c in 64
              K_load  [64, 2, 8, 4] shared.dyn
    """
    keys, key_vector = columns_of(sch, "S", plan, reductions=1)
    channels, vector = columns_of(sch, "O_acc_new", plan, reductions=1)
    for block in LOADS:
        sch.set_scope(block, 0, "shared.dyn")
    sch.transform_layout("Q_load", ("write", 0), lambda i, c: (c, i))
    sch.transform_layout("K_load", ("write", 0), lambda j, c: (c, j % keys // key_vector, j // keys, j % key_vector))
    sch.transform_layout("V_load", ("write", 0), lambda j, c: (j, c % channels // vector, c // channels, c % vector))


def share_probabilities(sch, plan):
    """Copy P to shared memory, transposed: the second product sums over all keys of a row, and a thread has only some of them.

    Keys that the threads of a row store together become neighbours, one padded row of q_tile apart, so that they use different banks.

    Loop nest::

        pv
          ax0 in 128
            ax1 in 64
              P_cast_shared.dyn  [8, 8, 128] shared.dyn
    """
    keys, _ = columns_of(sch, "S", plan, reductions=1)
    product = sch.get_sblock("O_acc_new")
    sch.cache_read(product, read_index(sch, product, "P_cast"), "shared.dyn")
    sch.transform_layout(P_SHARED, ("write", 0), lambda i, j: (j % keys, j // keys, i))
    sch.storage_align(P_SHARED, 0, axis=1, factor=32, offset=P_PAD)


def keep_in_registers(sch, plan):
    """Everything else lives in registers. What concerns a whole row, every thread of the row keeps for itself.

    Loop nest::

        qk
          i in 128
            j in 64
              c in 64
                S  [128, 64] local
    """
    for block in (*PRODUCTS, *ELEMENTS[:-1], *ROW_REDUCTIONS, *ROW_STATE):
        sch.set_scope(block, 0, "local")


def tile_products(sch, plan):
    """Give each thread a patch of S and of O, and write out a few steps of the sums: outer products of rows and columns.

    Loop nest::

        qk
          i_0 in 16
            j_0 in 8
              c_0 in 8
                c_1 in 8  unrolled
                  i_1 in 8  unrolled
                    j_1_0 in 2  unrolled
                      j_1_1 in 4  vectorized
                        S  [128, 64] local
    """
    for product in PRODUCTS:
        own_product(sch, product, plan)


def tile_elements(sch, plan):
    """Elementwise work follows the patches. P goes to shared memory by rows, four at a time, O to global memory by columns.

    Loop nest::

        pv
          ax0_0 in 16
            ax1_0 in 8
              ax1_1 in 8  unrolled
                ax0_1_0 in 2  unrolled
                  ax0_1_1 in 4  vectorized
                    P_cast_shared.dyn  [8, 8, 128] shared.dyn
    """
    for block in ELEMENTS:
        unroll_all(sch, own_patch(sch, block, plan)[1:])
    _, i, j = own_patch(sch, P_SHARED, plan)
    sch.reorder(j, i)
    sch.unroll(j)
    unroll_vectors(sch, i, VECTOR)
    _, vector = columns_of(sch, "O", plan)
    _, i, j = own_patch(sch, "O", plan)
    sch.unroll(i)
    unroll_vectors(sch, j, vector)


def tile_rows(sch, plan):
    """Split a row's maximum and sum among its threads; what follows from them each thread does for itself.

    Loop nest::

        softmax
          ...
          i_0 in 16
            i_1 in 8
              l in 1
                s_0 in 8
                  s_1 in 8  unrolled
                    p in 1
                      tile_max  [128, 1] local
    """
    for block in ROW_REDUCTIONS:
        i, _, j, _ = loops_of(sch, block)
        sch.split(i, factors=[plan.thread_rows, None])  # stays a loop: TVM cannot lower a written-out reduction across threads
        sch.unroll(sch.split(j, factors=[plan.thread_columns, None])[1])
    for block in (*ROW_STATE, *ROW_COPIES):
        sch.unroll(sch.split(loops_of(sch, block)[0], factors=[plan.thread_rows, None])[1])


def tile_copies(sch, plan):
    """Let all threads load a tile together, four neighbours each.

    Where the tile is transposed, neighbouring threads take neighbouring rows, so that their stores go to different banks.

    Loop nest::

        kv
          c_0_j_fused_0 in 8  unrolled
            c_0_j_fused_1 in 16
              c_0_j_fused_2 in 8
                c_1 in 4  vectorized
                  K_load  [64, 2, 8, 4] shared.dyn
    """
    for block in LOADS:
        copy_together(sch, block, plan, turned=block != "V_load")


def bind_grid(sch, plan):
    """One thread block for each query tile of each head, all on blockIdx.x: the other grid axes end at 65,535.

    Loop nest::

        b_h_r_fused in ...  @blockIdx.x
          attn
    """
    sch.bind(sch.fuse(*loops_of(sch, "attn")), "blockIdx.x")


def bind_threads(sch, plan):
    """Bind rows to threadIdx.y and columns to threadIdx.x, everywhere with the same two extents: TVM does not check that.

    Row blocks are bound to threadIdx.y alone, so that all threads of a row compute them.

    Loop nest::

        softmax
          ...
          i_0 in 16  @threadIdx.y
            j_0 in 8  @threadIdx.x
              i_1 in 8  unrolled
                j_1 in 8  unrolled
                  P  [128, 64] local
    """
    places = {block: (0, 1) for block in (*PRODUCTS, *ELEMENTS, P_SHARED, "O")}
    places |= {block: (0, 3) for block in ROW_REDUCTIONS} | {block: (1, 2) for block in LOADS}
    for block, (row, column) in places.items():
        loops = loops_of(sch, block)
        sch.bind(loops[row], "threadIdx.y")
        sch.bind(loops[column], "threadIdx.x")
    for block in (*ROW_STATE, *ROW_COPIES):
        sch.bind(loops_of(sch, block)[0], "threadIdx.y")


def separate_init(sch, plan):
    """Start the sums before their loops; for O that is the rescale. Last, since a sum without its init can no longer be bound.

    Loop nest::

        pv
          ...
          i_0 in 16  @threadIdx.y
            c_0 in 8  @threadIdx.x
              i_1_init in 8  unrolled
                c_1_0_init in 2  unrolled
                  c_1_1_init in 4  vectorized
                    O_acc_new_init  [128, 64] local
              j_0 in 8
                j_1 in 8  unrolled
                  i_1 in 8  unrolled
                    c_1_0 in 2  unrolled
                      c_1_1 in 4  vectorized
                        O_acc_new_update  [128, 64] local
    """
    for product in PRODUCTS:
        sch.decompose_reduction(product, loops_of(sch, product)[2])


STAGES = (share_tiles, share_probabilities, keep_in_registers, tile_products, tile_elements, tile_rows, tile_copies, bind_grid,
          bind_threads, separate_init)
