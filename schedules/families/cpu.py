"""cpu: vector units, lane by lane a query. Any CPU that LLVM knows.

The idea: each lane of a vector register serves one query row. A tile of queries is turned once, so that a panel of some rows (two
vectors full) lies side by side, and S, P and O are kept turned like it, key or channel first. Then

* both products are outer products: a few scalars of K or V, as they lie in memory, times the vectors of a panel;
* maxima, sums, exponentials and the rescale work on all lanes alike, and nothing is ever summed across a vector;
* K and V are copied as they are, without packing, and that copy is what a tile of queries shares.

The budget. A product keeps a block of `rows` x `panel_vectors` accumulators in registers for the length of its sum: 8 x 2 of the 32
registers of AVX-512 leaves enough for the panel's vectors and one scalar, takes 10 loads for 16 multiply-adds, and covers the latency of
two units (4 cycles x 2). The panel of Q, or of P, is read once for every block and has to stay in L1; a tile of K and V, S, P and the two
copies of O have to stay in L2.

The finished nest, one line a group of blocks::

    for thread in parallel, turn                     query tiles, dealt to and fro
      attn
        Q_load                                       [panel, channel, row]
        for t in key tiles, last one first
          K_load V_load                              [key, channel]
          for panel, keys: S                         for c: 8 keys x 2 vectors += K scalars * Q vectors, in registers
          for panel, j: S_masked tile_max            one sweep over S
          row_max_new rescale row_sum_new            vectors
          for panel, j: P tile_sum P_cast            one sweep over S_masked
          for panel, channels: O_acc_new             rescale, then for j: 8 channels x 2 vectors += V scalars * P vectors
        O LSE
"""
from dataclasses import dataclass

from schedules.lowering import cpu_pipeline
from schedules.plan import Budget, Plan, first_of, fitting, require
from schedules.stages import loops_of, unroll_all
from te_defs.flash_attention import flash_attention_forward

NAME = "cpu"
PIPELINE = "flashtir_cpu"
CONFIG = cpu_pipeline.CONFIG
#: No stage binds a thread of a GPU: all of them run on llvm.
BINDS_AT = ""

#: One kernel takes contiguous tensors and views: strides only enter into the copies of tiles.
STRIDED = (True,)

#: Blocks that write a matrix with a row for each query, whose layout has the queries last.
MATRICES = ("Q_load", "S", "S_masked", "P", "P_cast", "O_acc_new", "O_acc")
PRODUCTS = ("S", "O_acc_new")
#: A sweep over the scores: the block whose loops it has, the row reduction that joins it, and what else does.
SWEEPS = (("S_masked", "tile_max", ()), ("P", "tile_sum", ("P_cast",)))
#: Row statistics by the block that holds them; row_max_scaled is declared for 16-bit inputs only.
ROW_BLOCKS = {"init": ("row_max_init", "row_sum_init"), "softmax": ("row_max_new", "rescale", "row_max_scaled", "row_sum_new"),
              "back": ("row_max", "row_sum"), "finish": ("row_sum_total", "row_sum_inverse")}

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class CpuPlan(Plan):
    """Knobs of the cpu family.

    lanes          float32 numbers of a vector register
    panel_vectors  vectors of a panel: query rows that a product works on at once, over lanes
    threads        threads that the query tiles are dealt to: as many as TVM's pool has (TVM_NUM_THREADS; by default it takes half of what
                   an x86-64 machine has), with another number the answer is the same and the work uneven
    rows           keys of S, or channels of O, that a product works on at once
    unroll         steps of a product's sum that are written out
    """

    lanes: int
    panel_vectors: int
    threads: int
    rows: int = 8
    unroll: int = 1

    def on(self, arch):
        return self.but(threads=arch.cores)

    @property
    def panel(self):
        """Query rows of a panel."""
        return self.lanes * self.panel_vectors


PLAN = CpuPlan

#: (q_tile, kv_tile, panel_vectors, rows). Long tiles of queries share a copy of K and V; short ones waste less on the diagonal of a causal
#: mask, and on few queries. 4 x 4 blocks take fewer loads, 4 x 2 fit the 16 registers of AVX2.
TILES = ((128, 128, 2, 8), (256, 128, 2, 8), (64, 128, 2, 8), (128, 256, 2, 8), (256, 256, 4, 4), (128, 128, 2, 4), (64, 64, 2, 4),
         (32, 128, 2, 4), (16, 256, 1, 8), (16, 64, 1, 8))
#: The tile that comes first where nothing is skipped.
FULL_TILE = (256, 128, 2, 8)


def decline(workload, arch):
    """Why this family does not take the workload, or None."""
    return None if arch.kind == "cpu" else f"{arch.name} is no CPU"


def default_plan(workload, arch):
    """The seed: the first tile that fits; PlanError where none does."""
    return first_of(tile_choices(workload, arch), NAME, workload, arch)


def tile_choices(workload, arch):
    """Plans of all tile shapes that fit, the seed's first; each is a search task of its own."""
    lanes = max(arch.vector_bits // 32, 1)
    tiles = dict.fromkeys((FULL_TILE, *TILES) if workload.mask == "full" else TILES)
    plans = (CpuPlan(q_tile, kv_tile, lanes, vectors, arch.cores, rows) for q_tile, kv_tile, vectors, rows in tiles)
    return fitting(plans, budget, workload, arch)


def budget(workload, arch, plan):
    """Divisibility, registers and caches of a plan; PlanError with the whole budget where it does not fit."""
    require(plan.q_tile % plan.panel == 0, f"q_tile must be a multiple of a panel of {plan.panel} rows", plan.q_tile, "round it")
    require(plan.kv_tile % plan.rows == 0 and workload.value_dim % plan.rows == 0,
            "kv_tile and the value dimension must be multiples of rows", f"{plan.kv_tile} and {workload.value_dim} by {plan.rows}",
            "change rows")
    inputs = (plan.q_tile + plan.kv_tile) * workload.head_dim + plan.kv_tile * workload.value_dim
    scores, outputs = plan.q_tile * plan.kv_tile, plan.q_tile * workload.value_dim
    return Budget((
        ("threads", plan.threads, arch.cores, "cores"),
        ("vector registers", plan.rows * plan.panel_vectors + plan.panel_vectors + 1, arch.vector_registers, ""),
        ("L1, a panel of Q or P", FLOAT32_BYTES * plan.panel * max(workload.head_dim, plan.kv_tile), arch.l1_bytes, "bytes"),
        ("L2, all tiles", FLOAT32_BYTES * (inputs + 2 * scores + 2 * outputs), arch.l2_bytes, "bytes"),
    )).check(plan, arch)


def compiler_options(plan):
    """What the CUDA compiler is asked for: it has no part here."""
    return {}


def knobs(workload, arch, plan, budget=budget):
    """Candidates of the sampled fields within a budget for a plan's tile shape; the panel shapes the layouts, so the tile decides it."""
    plans = fitting((plan.but(rows=rows) for rows in (2, 4, 8, 16)), budget, workload, arch)
    return {"rows": tuple(fit.rows for fit in plans), "unroll": (1, 2, 4)}


def declare(workload, plan, negative_scale=False, strided=False):
    """The plain function at the plan's tile, with one copy of the row statistics."""
    return flash_attention_forward(workload, plan.q_tile, plan.kv_tile, negative_scale=negative_scale, strided=strided)


def split_panel(sch, i, plan):
    """Rows of a tile -> (panel, vector of the panel, lane)."""
    return sch.split(i, factors=[None, plan.panel_vectors, plan.lanes])


def write_by_lanes(sch, vector, lane):
    """One vector instruction for each vector of a panel."""
    sch.unroll(vector)
    sch.vectorize(lane)


def give_queries_lanes(sch, plan):
    """Turn Q, S, P and O, so that the rows of a panel are neighbours: a vector then holds one channel or key of several queries.

    Whole panels follow each other, since rows a power of two apart would fall on few sets of the L1 cache.

    Loop nest::

        load_queries
          i in 128
            c in 64
              Q_load  [4, 64, 32]
    """
    for block in MATRICES:
        sch.transform_layout(block, ("write", 0), lambda i, other: (i // plan.panel, other, i % plan.panel))


def widen_inputs(sch, plan):
    """Convert 16-bit inputs once, where they are loaded, and not in every product.

    Loop nest::

        kv
          j in 128
            c in 64
              K_load  [128, 64]
          j in 128
            c in 64
              V_load  [128, 64]
    """
    for block in ("Q_load", "K_load", "V_load", "P_cast"):
        sch.unsafe_set_dtype(block, 0, "float32")


def tile_products(sch, plan):
    """Give each product a block of accumulators that fits the registers, and walk its whole sum before the next block.

    A panel's vectors are loaded once for each step of the sum, and each of the `rows` scalars of K or V once for all its vectors.

    Loop nest::

        qk
          i_0 in 4
            j_0 in 16
              c_0 in 64
                c_1 in 1  unrolled
                  j_1 in 8  unrolled
                    i_1 in 2  unrolled
                      i_2 in 16  vectorized
                        S  [4, 128, 32]
    """
    for product in PRODUCTS:
        i, row, step = loops_of(sch, product)
        panel, vector, lane = split_panel(sch, i, plan)
        rows, row = sch.split(row, factors=[None, plan.rows])
        steps, step = sch.split(step, factors=[None, plan.unroll])
        sch.reorder(panel, rows, steps, step, row, vector, lane)
        unroll_all(sch, (step, row))
        write_by_lanes(sch, vector, lane)


def sweep_scores(sch, plan):
    """Work on the scores in two sweeps, mask with maximum and exponential with sum, one key of a panel at a time.

    What a sweep makes for itself stays in registers.

    Loop nest::

        softmax
          ...
          i_0 in 4
            j in 128
              i_1 in 2  unrolled
                i_2 in 16  vectorized
                  P  [4, 128, 32]
              ax0_0 in 2  unrolled
                ax0_1 in 16  vectorized
                  tile_sum  [128, 1]
              ax0_0 in 2  unrolled
                ax0_1 in 16  vectorized
                  P_cast  [4, 128, 32]
    """
    for leader, reduction, others in SWEEPS:
        i, j = loops_of(sch, leader)
        panel, vector, lane = split_panel(sch, i, plan)
        sch.reorder(panel, j, vector, lane)
        write_by_lanes(sch, vector, lane)
        for block in (reduction, *others):
            sch.reverse_compute_at(block, loops_of(sch, leader)[1])
            write_by_lanes(sch, *sch.split(loops_of(sch, block)[2], factors=[plan.panel_vectors, plan.lanes]))


def vectorize_rows(sch, plan):
    """Row statistics and the accumulator's copies follow: a lane for each row.

    Loop nest::

        softmax
          ...
          i_0 in 8
            l in 1
              i_1 in 16  vectorized
                row_max_new  [128, 1]
          i_0 in 8
            l in 1
              i_1 in 16  vectorized
                rescale  [128, 1]
          ...
          i_0 in 8
            l in 1
              i_1 in 16  vectorized
                row_sum_new  [128, 1]
    """
    for block in ("O_acc_init", "O_acc"):
        i, c = loops_of(sch, block)
        panel, vector, lane = split_panel(sch, i, plan)
        sch.reorder(panel, c, vector, lane)
        write_by_lanes(sch, vector, lane)
    for group, names in ROW_BLOCKS.items():
        for block in sch.get_child_blocks(sch.get_sblock(group)):
            if sch.get(block).name_hint in names:
                i, *units = loops_of(sch, block)
                vector, lane = sch.split(i, factors=[None, plan.lanes])
                sch.reorder(vector, *units, lane)
                sch.vectorize(lane)


def copy_by_vectors(sch, plan):
    """Copy K and V by whole vectors, or by the largest that divides their channels.

    Loop nest::

        kv
          j in 128
            c_0 in 4  unrolled
              c_1 in 16  vectorized
                K_load  [128, 64]
          j in 128
            c_0 in 4  unrolled
              c_1 in 16  vectorized
                V_load  [128, 64]
    """
    for block in ("K_load", "V_load"):
        j, c = loops_of(sch, block)
        channels = int(sch.get(c).extent)
        vector, lane = sch.split(c, factors=[None, min(plan.lanes, channels & -channels)])
        write_by_lanes(sch, vector, lane)


def separate_init(sch, plan):
    """Start sums and maxima before their loops; for O that is the rescale. Only now can the accumulators stay in registers.

    Loop nest::

        pv
          i_0 in 4
            c_0 in 8
              c_1_init in 8  unrolled
                i_1_init in 2  unrolled
                  i_2_init in 16  vectorized
                    O_acc_new_init  [4, 64, 32]
              j_0 in 128
                j_1 in 1  unrolled
                  c_1 in 8  unrolled
                    i_1 in 2  unrolled
                      i_2 in 16  vectorized
                        O_acc_new_update  [4, 64, 32]
    """
    for product in PRODUCTS:
        sch.decompose_reduction(product, loops_of(sch, product)[2])
    for _, reduction, _ in SWEEPS:
        sch.decompose_reduction(reduction, loops_of(sch, reduction)[1])


def deal_tiles(sch, plan):
    """Deal the query tiles of all heads to the threads, to and fro, since under a causal mask each is longer than the next.

    TVM would give each thread one run of neighbours, and with it the long tiles or the short ones.

    Loop nest::

        b_h_r_fused_1 in 2  parallel
          b_h_r_fused_0 in ...
            attn
    """
    turn, thread = sch.split(sch.fuse(*loops_of(sch, "attn")), factors=[None, plan.threads])
    sch.reorder(thread, turn)
    sch.annotate(turn, cpu_pipeline.TO_AND_FRO, 1)
    sch.parallel(thread)


STAGES = (give_queries_lanes, widen_inputs, tile_products, sweep_scores, vectorize_rows, copy_by_vectors, separate_init, deal_tiles)
