"""simt, backward: the two functions of te_defs/flash_attention_backward.py on CUDA cores of any GPU, by the primitives of simt.py.

The idea is that of simt.py, with more products. A thread block keeps a tile of rows and walks over the tiles of the other side; each of its
threads owns a patch of S and of dP, and the same rows of what is summed, in registers. For dQ the rows are those of queries, for dK and
dV those of keys: there the loops over scores are turned.

Every tile is in shared memory once, in float32, whatever the inputs are: one conversion an element, not one a use. A tile that stays is
summed over its channels alone and lies turned, as Q does in the forward pass. One that streams by is summed over its channels and, as an
operand of the product that follows, over its rows; it lies by rows, each four elements longer than whole lines, and so both read four
neighbours at once: four channels of the first sum, four columns of the second. Probabilities and dS lie turned, as P does.

The budget. Registers decide: of each of its rows a thread holds its channels of all that is summed, and its columns of P and dP; with 8
rows, 4 columns and 16 channels that is 192, some 250 with operands and addresses. Shared memory holds the tiles, the statistics of q_tile
queries, and one matrix of scores: dS takes the place of P, or, where there is no P to share, that of V.

The finished nest of dK and dV, one line a group of blocks; rows are @threadIdx.y, columns @threadIdx.x::

    attn  @blockIdx.x
      K_load V_load                               shared, [channel, key]
      dK_acc_init dV_acc_init                     registers
      for e in query heads, for t in query tiles  split where the mask begins and ends
        Q_load dO_load LSE_load delta_load        shared, [query, channel]
        S P P_masked                              for c: outer product of a thread's keys and queries
        P_cast                                    shared, [query, key]
        dV_acc_new                                for i: outer product of a thread's keys and channels
        dP dS
        dS_cast                                   shared, in the place of P
        dK_acc_new
      dK dV

Pictures below are those of dK and dV, d 64, float16, causal.
"""
from dataclasses import dataclass

from schedules import roles
from schedules.families.simt import (  # noqa: F401, compiler_options is the same here
    CONFIG, PIPELINE, VECTOR, columns_of, compiler_options, copy_together, own_patch, own_product, unroll_vectors)
from schedules.families.simt_backward_plan import (  # noqa: F401, the family's other half
    LINE, NAME, PAD, PLAN, budget, decline, default_plan, knobs, tile_choices)
from schedules.stages import loops_of, unroll_all
from te_defs.flash_attention_backward import attention_dk_dv, attention_dq

#: The first stage that binds threads: what stands before it runs on llvm.
BINDS_AT = "bind_grid"
#: Views have kernels of their own, as in the forward pass.
STRIDED = (False, True)


@dataclass(frozen=True)
class Role:
    """What one of the two functions is made of.

    rows     "i" or "j": whose rows stay, and are the rows of the threads
    stays    loads of the tiles that stay; streams: of those that come by
    scores   products of scores; sums: those that add to what is summed
    shared   blocks of the scores that `sums` read; elements: of all others that work element by element
    outputs  what is summed; its blocks are named by it
    """

    declare: object
    rows: str
    stays: tuple
    streams: tuple
    shared: tuple
    outputs: tuple
    scores: tuple = ("S", "dP")
    elements: tuple = ("P", "P_masked", "dS")

    @property
    def sums(self):
        return tuple(f"{output}_acc_new" for output in self.outputs)

    @property
    def states(self):
        """Blocks that set what is summed or copy it back."""
        return tuple(f"{output}_acc{part}" for output in self.outputs for part in ("_init", ""))

    @property
    def patches(self):
        """Blocks of matrices of which each thread owns a patch."""
        return *self.scores, *self.sums, *self.elements, *self.states, *self.shared, *self.outputs


DQ = Role(attention_dq, "i", ("Q_load", "dO_load"), ("K_load", "V_load"), ("dS_cast",), ("dQ",))
DK_DV = Role(attention_dk_dv, "j", ("K_load", "V_load"), ("Q_load", "dO_load"), ("P_cast", "dS_cast"), ("dK", "dV"))
ROLES = {"dq": DQ, "dk_dv": DK_DV}
STATISTICS = ("LSE_load", "delta_load")


def role_of(name, _plan):
    """The Role of a name."""
    return ROLES[name]


def declare(role, workload, plan):
    """The plain function at the plan's tile."""
    return ROLES[role].declare(workload, plan.q_tile, plan.kv_tile)


def score_columns(sch, plan):
    """Columns of its patch of scores that a thread has."""
    return columns_of(sch, "S", plan, reductions=1)[0]


def put_rows_first(sch, plan, role):
    """Where keys are the rows of the threads, work on scores with the loop over keys outside.

    Loop nest::

        rows
          ...
          qk
            j in 64
              i in 32
                c in 64
                  S  [32, 64]
          softmax
            ...
            j in 64
              i in 32
                P_masked  [32, 64]
    """
    if role.rows == "j":
        for block in (*role.scores, *role.elements, *role.shared):
            i, j = loops_of(sch, block)[:2]
            sch.reorder(j, i)


def widen_inputs(sch, plan, role):
    """Convert 16-bit inputs where they are loaded, once; P and dS stay wide.

    Loop nest::

        rows
          i in 32
            c in 64
              Q_load  [32, 64]
    """
    for block in (*role.stays, *role.streams, *role.shared):
        sch.unsafe_set_dtype(block, 0, "float32")


def share_tiles(sch, plan, role):
    """Put tiles and statistics into shared memory. Rows that a thread owns as columns of its patch are apart, those of its neighbours
    side by side; of its channels each group of four lies with that of the neighbours, as in simt.py.

    Loop nest::

        attn
          load_keys
            j in 64
              c in 64
                K_load  [64, 64] shared.dyn
          ...
          e in ...
            t in ...
              rows
                i in 32
                  c in 64
                    Q_load  [4, 8, 2, 8, 4] shared.dyn
    """
    for block in (*role.stays, *role.streams, *STATISTICS):
        sch.set_scope(block, 0, "shared.dyn")
    for block in role.stays:
        sch.transform_layout(block, ("write", 0), lambda row, c: (c, row))
    rows = score_columns(sch, plan)
    for block in role.streams:
        channels, vector = columns_of(sch, block, plan)
        sch.transform_layout(block, ("write", 0), lambda row, c: (
            row % rows, row // rows, c % channels // vector, c // channels, c % vector))
        sch.storage_align(block, 0, axis=1, factor=LINE, offset=PAD)


def share_scores(sch, plan, role):
    """Put the scores that a product sums over into shared memory, turned: it takes all columns of a row, and a thread has some.

    Loop nest::

        rows
          ...
          softmax
            ...
            j in 64
              i in 32
                P_cast  [4, 8, 64] shared.dyn
          ...
          gradient
            ...
            j in 64
              i in 32
                dS_cast  [4, 8, 64] shared.dyn
    """
    columns = score_columns(sch, plan)
    for block in role.shared:
        sch.set_scope(block, 0, "shared.dyn")
        sch.transform_layout(block, ("write", 0), (
            lambda row, column: (column % columns, column // columns, row)) if role.rows == "i" else (
                lambda column, row: (column % columns, column // columns, row)))
        sch.storage_align(block, 0, axis=1, factor=LINE, offset=PAD)


def keep_in_registers(sch, plan, role):
    """Everything else lives in registers.

    Loop nest::

        qk
          j in 64
            i in 32
              c in 64
                S  [32, 64] local
    """
    for block in (*role.scores, *role.sums, *role.elements, *(f"{output}_acc_init" for output in role.outputs)):
        sch.set_scope(block, 0, "local")


def tile_products(sch, plan, role):
    """Give each thread a patch of the products, and write out a few steps of their sums: outer products of rows and columns.

    Loop nest::

        dsq
          j_0 in 8
            c_0 in 8
              i_0 in 4
                i_1 in 8  unrolled
                  j_1 in 8  unrolled
                    c_1_0 in 2  unrolled
                      c_1_1 in 4  vectorized
                        dK_acc_new  [64, 64] local
    """
    for product in (*role.scores, *role.sums):
        own_product(sch, product, plan)


def tile_elements(sch, plan, role):
    """Elementwise work follows the patches. Scores go to shared memory by rows, outputs to global memory by channels, four at a time.

    Loop nest::

        gradient
          j_0 in 8
            i_0 in 8
              j_1 in 8  unrolled
                i_1 in 4  unrolled
                  dS  [32, 64] local
          j_0 in 8
            i_0 in 8
              i_1 in 4  unrolled
                j_1_0 in 2  unrolled
                  j_1_1 in 4  vectorized
                    dS_cast  [4, 8, 64] shared.dyn
    """
    for block in (*role.elements, *role.states):
        unroll_all(sch, own_patch(sch, block, plan)[1:])
    for block in role.shared:
        _, row, column = own_patch(sch, block, plan)
        rows = int(sch.get(row).extent)
        sch.reorder(column, row)
        sch.unroll(column)
        unroll_vectors(sch, row, min(VECTOR, rows & -rows))
    for block in role.outputs:
        _, vector = columns_of(sch, block, plan)
        _, row, c = own_patch(sch, block, plan)
        sch.unroll(row)
        unroll_vectors(sch, c, vector)


def tile_copies(sch, plan, role):
    """Let all threads load a tile together, four neighbours each, and statistics one by one.

    Loop nest::

        rows
          i_c_0_fused_0 in 8  unrolled
            i_c_0_fused_1 in 8
              i_c_0_fused_2 in 8
                c_1 in 4  vectorized
                  Q_load  [4, 8, 2, 8, 4] shared.dyn
          ...
          statistics
            i_0 in 1  unrolled
              i_1 in 8
                i_2 in 8
                  LSE_load  [32] shared.dyn
    """
    for block in (*role.stays, *role.streams):
        copy_together(sch, block, plan, turned=block in role.stays)
    for block in STATISTICS:
        sch.unroll(sch.split(loops_of(sch, block)[-1], factors=[None, plan.thread_rows, plan.thread_columns])[0])


def bind_grid(sch, plan, role):
    """One thread block per tile that stays, head and batch entry, all on blockIdx.x: the other grid axes end at 65,535.

    Loop nest::

        b_g_r_fused in ...  @blockIdx.x
          attn
    """
    sch.bind(sch.fuse(*loops_of(sch, "attn")), "blockIdx.x")


def bind_threads(sch, plan, role):
    """Bind rows to threadIdx.y and columns to threadIdx.x, everywhere with the same two extents: TVM does not check that.

    Loop nest::

        rows
          i_c_0_fused_0 in 8  unrolled
            i_c_0_fused_1 in 8  @threadIdx.y
              i_c_0_fused_2 in 8  @threadIdx.x
                c_1 in 4  vectorized
                  Q_load  [4, 8, 2, 8, 4] shared.dyn
          ...
          softmax
            j_0 in 8  @threadIdx.y
              i_0 in 8  @threadIdx.x
                j_1 in 8  unrolled
                  i_1 in 4  unrolled
                    P  [32, 64] local
    """
    places = {block: (0, 1) for block in role.patches} | {block: (1, 2) for block in (*role.stays, *role.streams, *STATISTICS)}
    for block, (row, column) in places.items():
        loops = loops_of(sch, block)
        sch.bind(loops[row], "threadIdx.y")
        sch.bind(loops[column], "threadIdx.x")


def separate_init(sch, plan, role):
    """Start the sums before their loops. Last, since a sum without its init can no longer be bound.

    Loop nest::

        pdo
          j_0 in 8  @threadIdx.y
            c_0 in 8  @threadIdx.x
              j_1_init in 8  unrolled
                c_1_0_init in 2  unrolled
                  c_1_1_init in 4  vectorized
                    dV_acc_new_init  [64, 64] local
              i_0 in 4
                i_1 in 8  unrolled
                  j_1 in 8  unrolled
                    c_1_0 in 2  unrolled
                      c_1_1 in 4  vectorized
                        dV_acc_new_update  [64, 64] local
    """
    for product in (*role.scores, *role.sums):
        sch.decompose_reduction(product, loops_of(sch, product)[2])


STAGES = (put_rows_first, widen_inputs, share_tiles, share_scores, keep_in_registers, tile_products, tile_elements, tile_copies, bind_grid,
          bind_threads, separate_init)


def schedule(role, workload, plan, stages=None, strided=False):
    """A fresh Schedule of a function after the stages; after the first `stages` of them where given."""
    return roles.staged(declare(role, workload, plan), STAGES[:stages], plan, role_of(role, plan), strided)
