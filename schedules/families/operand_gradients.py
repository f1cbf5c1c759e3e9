"""The functions of te_defs/operand_gradients.py on CUDA cores of any GPU, beside any family of the backward pass.

The idea is that of simt_backward.py: a thread owns a patch of S, of dP and of the sums, which stay in its registers over all tiles that its
block walks over. What an axis of size one still asks for is summed once at the end, through shared memory: the keys and the queries of the
tile, each by a thread of its own.

The finished nest, one line a group of blocks; rows are @threadIdx.y, columns @threadIdx.x::

    attn  @blockIdx.x                             a part of an owner's places
      sum_init                                    registers
      for x in rows of tiles
        Q_load dO_load LSE_load delta_load        shared, [channel, query]
        for t in key tiles
          K_load V_load                           shared, [key, channel]
          S P P_masked dP dS                      for c: outer product of a thread's queries and keys
          sum_new sum                             registers
      tile by_key by_query total                  shared, then a key or a query a thread
      dX                                          neighbouring threads store neighbours

Offsets into dO, Q, K and V have 64 bits, as in the families beside it; operands have fewer than 2^31 elements.
"""
import tvm
from tvm import s_tir

from schedules import roles
from schedules.families import simt_backward
from schedules.families.simt import CONFIG, PIPELINE, compiler_options, own_patch  # noqa: F401, the same here
from schedules.lowering.aligned_strides import ALIGNED_VIEWS
from schedules.lowering.wide_offsets import WIDE_OFFSETS
from schedules.stages import loops_of, unroll_all
from te_defs.operand_gradients import attention_d_operand, attention_d_sink, attention_fold_parts

NAME = "operand_gradients"
ROLE = simt_backward.Role(attention_d_operand, "i", ("Q_load", "dO_load"), ("K_load", "V_load"), (), (),
                          elements=("sum_init", "P", "P_masked", "dS", "sum_new", "sum"))
#: Threads of a block that adds up parts.
THREADS = 128
#: Blocks that keep a GPU busy to its end: where operands have fewer tiles than this, their sums are made in parts.
BLOCKS = 1024


def decline(workload, arch):
    """Why this does not take a workload, or None."""
    return simt_backward.decline(workload, arch)


def default_plan(workload, arch):
    """That of dQ, which has the same tiles and more to sum."""
    return simt_backward.default_plan("dq", workload, arch)


def budget(workload, arch, plan):
    """What a plan takes, likewise at most; PlanError where it does not fit."""
    return simt_backward.budget("dq", workload, arch, plan)


def share_sums(sch, plan, role):
    """Put what is summed across threads into shared memory; the sums themselves run in registers."""
    for block in ("tile", "by_key", "by_query"):
        sch.set_scope(block, 0, "shared.dyn")
    for block in ("row", "total"):
        sch.set_scope(block, 0, "local")


def split_sums(sch, rows, columns):
    """Deal keys, queries and what is stored to so many rows and columns of threads."""
    for block in ("by_key", "by_query"):
        copy = sch.cache_write(block, 0, "local")
        *_, thread = sch.split(loops_of(sch, block)[0], factors=[None, rows, columns])
        sch.reverse_compute_at(copy, thread)
    sch.split(sch.fuse(*loops_of(sch, "dX")), factors=[None, rows, columns])


def tile_sums(sch, plan, role):
    """A thread copies its patch, sums a key or a query, and stores every so manieth element."""
    unroll_all(sch, own_patch(sch, "tile", plan)[1:])
    split_sums(sch, plan.thread_rows, plan.thread_columns)


def bind_sums(sch, plan, role):
    """Bind what `split_sums` has dealt."""
    for block in ("by_key", "by_query", "dX"):
        _, row, column = loops_of(sch, block)[:3]
        sch.bind(row, "threadIdx.y")
        sch.bind(column, "threadIdx.x")


def bind_copy(sch, plan, role):
    """Bind the patches of the copy of the sums."""
    row, column = loops_of(sch, "tile")[:2]
    sch.bind(row, "threadIdx.y")
    sch.bind(column, "threadIdx.x")


#: As many as have no thread yet, then the others.
UNBOUND = (simt_backward.widen_inputs, simt_backward.share_tiles, simt_backward.keep_in_registers, share_sums, simt_backward.tile_products,
           simt_backward.tile_elements, simt_backward.tile_copies, tile_sums)
STAGES = (*UNBOUND, simt_backward.bind_grid, simt_backward.bind_threads, bind_copy, bind_sums, simt_backward.separate_init)


def declare(workload, name, plan, dtype):
    """The plain function at the plan's tile, for tensors of any size."""
    func = attention_d_operand(workload, name, plan.q_tile, plan.kv_tile, dtype).with_attr(WIDE_OFFSETS, ["dO", "Q", "K", "V"])
    return func.with_attr(ALIGNED_VIEWS, True)


def schedule(workload, name, plan, dtype, stages=STAGES, strided=False):
    """A fresh Schedule of the function that sums the gradient of a score's operand, as `dtype`."""
    return roles.staged(declare(workload, name, plan, dtype), stages, plan, ROLE, strided)


def fold(workload, name):
    """A fresh Schedule of the function that adds up parts: a thread has an element."""
    sch = s_tir.Schedule(tvm.IRModule({"main": attention_fold_parts(workload, name)}), debug_mask=0)
    block, thread = sch.split(loops_of(sch, "dX")[0], factors=[None, THREADS])
    sch.set_scope("total", 0, "local")
    sch.compute_at("total", thread)
    sch.bind(block, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    return sch


def sink(workload):
    """A fresh Schedule of the function that makes the gradient of the sink: a block of threads has a head."""
    sch = s_tir.Schedule(tvm.IRModule({"main": attention_d_sink(workload).with_attr(WIDE_OFFSETS, True)}), debug_mask=0)
    copy = sch.cache_write("part", 0, "local")
    sch.set_scope(copy, 0, "shared")
    sch.set_scope("total", 0, "local")
    lane = loops_of(sch, "part")[0]
    sch.reverse_compute_at(copy, lane)
    sch.bind(loops_of(sch, "head")[0], "blockIdx.x")
    sch.bind(lane, "threadIdx.x")
    return sch
