"""The order in which the blocks of a persistent grid take their tiles: each tile once, and as much work for each block under a mask."""
import itertools

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from schedules.lowering import order_of_work
from schedules.lowering.order_of_work import FAIR, TO_AND_FRO
from tests.numbers import on_llvm

#: One tile or head, fewer tiles than blocks, odd numbers, primes; then the H200's 132 multiprocessors and the lengths of the field.
SMALL = [*itertools.product(range(1, 10), range(1, 10), (1, 2, 3, 5, 8, 13))]
LARGE = [(1, 1, 132), (1, 1000, 132), (1000, 1, 132), (3, 401, 132), (16, 128, 132), (32, 86, 132), (512, 4, 132), (7, 11, 114),
         (37, 43, 78)]
#: What a tile costs beside its key tiles, in key tiles: loads of its queries, the first scores, the last product, the output.
OVERHEAD = 1.3


@pytest.fixture(params=[TO_AND_FRO, FAIR], ids=["to_and_fro", "fair"])
def order(request):
    return request.param


def dealt(order, heads, tiles, blocks):
    """Tile numbers [wave, block]."""
    waves, block = np.ogrid[:-(-heads * tiles // blocks), :blocks]
    return order_of_work.deal(order, waves, block, blocks, heads, tiles)


def test_each_tile_is_dealt_once(order):
    for heads, tiles, blocks in SMALL + LARGE:
        numbers = np.sort(dealt(order, heads, tiles, blocks).ravel())
        total = heads * tiles
        assert numbers[:total].tolist() == list(range(total)), f"{heads} heads of {tiles} tiles for {blocks} blocks"
        assert (numbers[total:] >= total).all(), "the blocks that take none in the last wave"


def compiled(order, blocks):
    """`deal` as a kernel has it, all in TIR but the number of blocks: a function (numbers [wave, block], heads, tiles)."""
    @T.prim_func
    def deal(out: T.handle, heads: T.int32, tiles: T.int32):
        waves = T.int32()
        Out = T.match_buffer(out, (waves, blocks), "int32")
        for wave in range(waves):
            for block in range(blocks):
                Out[wave, block] = order_of_work.deal(order, wave, block, blocks, heads, tiles)
    return on_llvm(deal)


@pytest.mark.parametrize("blocks", [1, 5, 132])
def test_tir_deals_like_python(order, blocks):
    function = compiled(order, blocks)
    for heads, tiles in [*itertools.product((1, 2, 5), (1, 4, 7)), *((heads, tiles) for heads, tiles, of in LARGE if of == blocks)]:
        expected = dealt(order, heads, tiles, blocks)
        numbers = tvm.runtime.tensor(np.full_like(expected, -1, dtype="int32"))
        function(numbers, heads, tiles)
        np.testing.assert_array_equal(numbers.numpy(), expected)


def fairness(order, length, tokens=16384, heads=16, tile=128, blocks=132):
    """Mean load of the blocks over the largest, under a causal mask, with query and key tiles of one size."""
    tiles, all_heads = -(-length // tile), heads * tokens // length
    total = all_heads * tiles
    numbers = dealt(order, all_heads, tiles, blocks)
    loads = np.where(numbers < total, tiles - numbers % tiles + OVERHEAD, 0).sum(axis=0)
    return loads.mean() / loads.max()


@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("heads, tile", [(16, 128), (32, 192), (21, 192), (8, 128)])
def test_fair_is_fair(length, heads, tile):
    fair, to_and_fro = (fairness(order, length, heads=heads, tile=tile) for order in (FAIR, TO_AND_FRO))
    assert fair >= 0.95 and fair >= to_and_fro


def test_to_and_fro_is_not_where_tiles_are_few_and_differ_most():
    assert fairness(TO_AND_FRO, 16384) < 0.7
