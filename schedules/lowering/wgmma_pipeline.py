"""Pipeline `flashtir_wgmma`: the shared pass list with bulk loads in front, and the split of the warps' roles behind.

As in flashtir_mma there is no common-subexpression pass and no unrolling by TVM. The first tile, which the software pipeline peels, is
always masked: that is right for every tile, and a branch in it would make the compiler serialise the products.
"""
from tvm import tirx

from schedules.lowering import masked_tiles, pass_lists, rewrite
from schedules.lowering.bulk_loads import lower_bulk_loads
from schedules.lowering.mask_bits import mask_bits
from schedules.lowering.ordered_sums import take_turns_at_sums
from schedules.lowering.polynomial_exp2 import share_exponentials
from schedules.lowering.products_in_flight import count_products, hold_probabilities
from schedules.lowering.row_statistics import tell_statistics
from schedules.lowering.software_pipeline import expand_overlap
from schedules.lowering.warp_roles import read_roles, split_roles
from schedules.lowering.wide_stores import wide_stores

#: Pass configuration that goes with the pipeline.
CONFIG = pass_lists.UNROLLED_BY_NVCC

pass_lists.register("flashtir_wgmma", [
    expand_overlap(),
    read_roles(),
    tell_statistics(),
    take_turns_at_sums(),
    lower_bulk_loads(),
    *pass_lists.blocks_to_loops(),
    *pass_lists.flatten(),
    *pass_lists.split_key_loop([masked_tiles.split_masked_tiles(), masked_tiles.mask_peeled_tile()]),
    *pass_lists.loops_to_statements(),
    count_products(),
    split_roles(),
    tirx.transform.ConvertSSA(),
    *pass_lists.statements_to_function(),
], device=[
    rewrite.lower_all_warp_memory(),
    rewrite.full_warp_mask(),
    mask_bits(),
    rewrite.skip_rescale(),
    rewrite.hold_back(),
    hold_probabilities(),
    share_exponentials(),
    wide_stores(),
    tirx.transform.ConvertSSA(),
    tirx.transform.StmtSimplify(),
    rewrite.put_back(),
    rewrite.release_held(),
    rewrite.hoist_divisions(),  # last: StmtSimplify puts the value of a binding back where it is used
    rewrite.wide_indices(),
    rewrite.truncated_division(),
])
