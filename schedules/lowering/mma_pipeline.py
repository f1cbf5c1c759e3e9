"""Pipeline `flashtir_mma`: TVM's pass list for CUDA with the repairs that fragments in warp scope need.

Departures from the stock list: the software pipeline is annotated from the plan's integer; the key loop is split at the first
tile without mask before LoopPartition; the rescale is skipped where marked; no ThreadSync("warp"), which fails on loads under a
condition and which lock-step fragments do not need; no common-subexpression pass, which hides lane strides from LowerWarpMemory.
"""
import tvm
from tvm import s_tir, tirx
from tvm.tirx.compilation_pipeline import register_tir_pipeline

from schedules.lowering import rewrite
from schedules.lowering.software_pipeline import expand_order

#: Pass configuration that goes with the pipeline.
CONFIG = {"tirx.use_async_copy": True, "tirx.disable_cse_tir": True,
          "tirx.UnrollLoop": {"explicit_unroll": False, "auto_max_step": 0}}


def _schedule_to_loops():
    return [
        expand_order(),
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
        rewrite.async_copy(),
        tirx.transform.FlattenBuffer(),
        tirx.transform.BF16ComputeLegalize(),
        tirx.transform.NarrowDataType(32),
    ]


def _loops_to_statements():
    return [
        s_tir.transform.StmtSimplify(),
        rewrite.split_masked_tiles(),
        tirx.transform.ConvertSSA(),
        s_tir.transform.CanonicalizeLoop(),
        s_tir.transform.LoopPartition(),
        tirx.transform.VectorizeLoop(True),
        s_tir.transform.InjectVirtualThread(),
        s_tir.transform.InjectDoubleBuffer(),
        tirx.transform.StorageRewrite(),
        s_tir.transform.LowerAsyncDMA(),
        tirx.transform.UnrollLoop(),
        s_tir.transform.RenormalizeSplitPattern(),
        tirx.transform.StmtSimplify(),
        tirx.transform.RemoveNoOp(),
        s_tir.transform.RewriteUnsafeSelect(),
    ]


def _statements_to_kernel():
    return [
        tirx.transform.VerifyMemory(),
        tirx.transform.AnnotateEntryFunc(),
        s_tir.transform.ThreadSync("shared"),
        s_tir.transform.ThreadSync("shared.dyn"),
        s_tir.transform.InferFragment(),
        s_tir.transform.LowerThreadAllreduce(),
        s_tir.transform.InjectPTXAsyncCopy(),
        s_tir.transform.MergeSharedMemoryAllocations(),
        tirx.transform.SplitHostDevice(),
        tirx.transform.MakePackedAPI(),
        tirx.transform.BF16StorageLegalize(),
    ]


def _host():
    return tvm.transform.Sequential([tirx.transform.LowerTVMBuiltin(), tirx.transform.LowerIntrin()])


def _device():
    return tvm.transform.Sequential([
        rewrite.lower_all_warp_memory(), rewrite.full_warp_mask(), rewrite.skip_rescale(), tirx.transform.ConvertSSA(),
        tirx.transform.StmtSimplify(), rewrite.truncated_division(), tirx.transform.LowerIntrin()])


def mma_pipeline():
    """(module pass, maker of the host passes, maker of the device passes), as tvm.tirx.build expects them."""
    return tvm.transform.Sequential([*_schedule_to_loops(), *_loops_to_statements(), *_statements_to_kernel()]), _host, _device


register_tir_pipeline("flashtir_mma", mma_pipeline)
