"""TVM's pass list for scheduled functions in three parts, which the families' pipelines share; each adds its own passes between.

The parts are those of TVM 0.27's own pipeline `s_tir`, in its order, less passes for other hardware and RemoveNoOp, which behind
StmtSimplify takes as long and changes no kernel of ours. A pass that finds nothing to do changes nothing, so one list serves the CPU
and CUDA, with or without a software pipeline.
"""
import tvm
from tvm import s_tir, tirx
from tvm.tirx.compilation_pipeline import register_tir_pipeline

from schedules.lowering.aligned_strides import aligned_views
from schedules.lowering.wide_offsets import wide_offsets

#: Pass configuration that leaves loops to nvcc to unroll: written out by TVM, some lane indices could not be proved.
UNROLLED_BY_NVCC = {"tirx.UnrollLoop": {"explicit_unroll": False, "auto_max_step": 0}}


def blocks_to_loops():
    """From blocks to plain loops over buffers in memory; ends before buffers are flat."""
    return [
        s_tir.transform.CanonicalizeLoop(),
        s_tir.transform.LowerCrossThreadReduction(),
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.LiftThreadBinding(),
        s_tir.transform.ManifestSharedMemoryLocalStage(),
        s_tir.transform.CompactBufferAllocation(),
        s_tir.transform.LowerAutoCopy(),
        s_tir.transform.UnifyThreadBinding(),
        s_tir.transform.LowerMatchBuffer(),
        s_tir.transform.StmtSimplify(),
        s_tir.transform.InjectPermutedLayout(),
        s_tir.transform.AnnotateIrregularLoop(),
        s_tir.transform.InjectSoftwarePipeline(),
        s_tir.transform.TransformMmaBufferLayout(),
        s_tir.transform.LowerOpaqueBlock(),
    ]


def flatten():
    """Buffers become flat, indices 32 bits wide unless the function wants 64, and bfloat16 arithmetic float32."""
    return [tirx.transform.FlattenBuffer(), tirx.transform.BF16ComputeLegalize(), tirx.transform.NarrowDataType(32), wide_offsets(),
            aligned_views()]


def split_key_loop(split):
    """Run `split`, passes that cut the key loop, where they see one simple mask, and make loops canonical again."""
    return [s_tir.transform.StmtSimplify(), *split, tirx.transform.ConvertSSA(), s_tir.transform.CanonicalizeLoop(),
            s_tir.transform.LoopPartition()]


def loops_to_statements(hoist=()):
    """Vectors, storage, unrolled loops; `hoist` are passes that move conditions out of loops, right before these are unrolled."""
    return [
        tirx.transform.VectorizeLoop(True),
        s_tir.transform.InjectVirtualThread(),
        s_tir.transform.InjectDoubleBuffer(),
        tirx.transform.StorageRewrite(),
        *hoist,
        tirx.transform.UnrollLoop(),
        s_tir.transform.RenormalizeSplitPattern(),
        tirx.transform.StmtSimplify(),
        s_tir.transform.RewriteUnsafeSelect(),
    ]


def statements_to_function(behind_barriers=()):
    """Barriers, asynchronous copies, one shared-memory block, and the split into host function and kernel; `behind_barriers` are passes
    that run once barriers stand.

    ThreadSync("warp") of TVM's list is left out: it fails on loads under a condition, and lanes that exchange values run in step.
    """
    return [
        tirx.transform.VerifyMemory(),
        tirx.transform.AnnotateEntryFunc(),
        s_tir.transform.ThreadSync("shared"),
        s_tir.transform.ThreadSync("shared.dyn"),
        *behind_barriers,
        s_tir.transform.InferFragment(),
        s_tir.transform.LowerThreadAllreduce(),
        s_tir.transform.InjectPTXAsyncCopy(),
        s_tir.transform.MergeSharedMemoryAllocations(),
        tirx.transform.SplitHostDevice(),
        tirx.transform.MakePackedAPI(),
        tirx.transform.BF16StorageLegalize(),
    ]


def register(name, passes, device=()):
    """Register a TIR pipeline: `passes` over the module, then TVM's for the host and `device` for the kernels."""
    def host():
        return tvm.transform.Sequential([tirx.transform.LowerTVMBuiltin(), tirx.transform.LowerIntrin()])

    def kernels():
        return tvm.transform.Sequential([*device, tirx.transform.LowerIntrin()])

    register_tir_pipeline(name, lambda: (tvm.transform.Sequential(list(passes)), host, kernels))
