"""Pipeline `flashtir_mma`: the shared pass list with the repairs that fragments in warp scope need.

The software pipeline is annotated from the plan's integer, and Q's copy made asynchronous like the others; the key loop is split at the
first tile without mask. There is no common-subexpression pass, which would hide lane strides from LowerWarpMemory. The rescale is made
conditional once fragments are plain registers, where its factors have constant indices.
"""
from tvm import tirx

from schedules.lowering import masked_tiles, pass_lists, rewrite
from schedules.lowering.aligned_strides import aligned_strides
from schedules.lowering.empty_tiles import mark_empty_tiles, skip_empty_tiles
from schedules.lowering.few_barriers import few_barriers
from schedules.lowering.mask_bits import mask_bits
from schedules.lowering.reduce_adds import reduce_adds
from schedules.lowering.software_pipeline import expand_order
from schedules.lowering.wide_stores import wide_stores
from schedules.lowering.zero_fill import zero_fill

#: Pass configuration that goes with the pipeline.
CONFIG = {"tirx.use_async_copy": True, **pass_lists.UNROLLED_BY_NVCC}

pass_lists.register("flashtir_mma", [
    expand_order(),
    mark_empty_tiles(),
    *pass_lists.blocks_to_loops(),
    rewrite.async_copy(),
    *pass_lists.flatten(),
    aligned_strides("O"),  # cp.async takes 16 bytes at any address
    *pass_lists.split_key_loop([masked_tiles.split_masked_tiles(), rewrite.release_held()]),  # held, they would take more instructions
    *pass_lists.loops_to_statements(),
    *pass_lists.statements_to_function(behind_barriers=[few_barriers()]),
], device=[
    rewrite.lower_all_warp_memory(),
    rewrite.full_warp_mask(),
    mask_bits(),
    rewrite.skip_rescale(),
    wide_stores(),
    reduce_adds(),
    zero_fill(),
    tirx.transform.ConvertSSA(),
    skip_empty_tiles(),
    tirx.transform.StmtSimplify(),
    rewrite.put_back(),
    rewrite.truncated_division(),
])
