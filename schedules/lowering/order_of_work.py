"""The order in which the blocks of a persistent grid take their tiles of work: a permutation in closed form, since nothing is shared at
run time that a block could ask for its next tile.

Tiles come numbered by head, then by query tile, the one with the most keys first. A wave is one tile for each block. `TO_AND_FRO` deals
the tiles of a wave from the first block to the last, those of the next wave back again. That keeps the blocks on few heads at a time,
whose keys and values stay in the L2 cache, but it is fair only where tiles are of one length. Under a causal mask they shrink one by
one, and `FAIR` deals in two steps:

* For most waves a block takes pairs: the longest tile of a head and the shortest of the next head, or the second longest and the second
  shortest, and so on. Pairs cost the same, whatever the number of tiles.
* The tiles of the last heads, three waves or so, are dealt longest first, to and fro. The last waves are then short, and so is the wait
  for the slowest block.
"""
from te_defs.integers import divide, less, maximum, minimum, remainder, select

TO_AND_FRO, FAIR = 0, 1
#: Waves that are dealt longest first at the end.
LAST_WAVES = 3


def deal(order, wave, block, blocks, heads, tiles):
    """Number of the tile that a block takes in a wave; heads * tiles or more where it takes none.

    order   TO_AND_FRO or FAIR
    blocks  blocks of the grid
    heads   heads times batch entries
    tiles   query tiles of a head
    All are integers, of Python or of TIR, or arrays of them; the result is a permutation of the heads * tiles tiles over waves and blocks.
    """
    total, turned = heads * tiles, select(remainder(wave, 2), blocks - 1 - block, block)
    if order == TO_AND_FRO:
        return wave * blocks + turned
    waves = divide(total + blocks - 1, blocks)
    pairs = minimum(maximum(divide(waves - LAST_WAVES, 2), 0), divide(divide(heads, 2) * tiles, blocks))  # of a block
    number = divide(wave, 2) * blocks + block
    head, shorter = divide(number, tiles) * 2, remainder(number, tiles)
    pair = select(remainder(wave, 2), (head + 2) * tiles - 1 - shorter, head * tiles + shorter)

    # What the pairs leave: whole heads, and of the two before them the tiles that are not in pairs yet, `begun` of either are. Sorted, the
    # tiles of one length stand side by side: first and last that of one of the two and of each whole head, in between of both or none.
    first, begun = divide(pairs * blocks, tiles) * 2, remainder(pairs * blocks, tiles)
    near, far = minimum(begun, tiles - begun), maximum(begun, tiles - begun)
    whole = heads - first - select(less(0, begun), 2, 0)
    outer, inner = whole + 1, select(less(begun, far), heads - first, whole)
    place = (wave - pairs * 2) * blocks + turned
    middle = place - near * outer
    end = middle - (far - near) * inner
    outside = select(less(middle, 0), place, maximum(end, 0))
    inside, beside = maximum(middle, 0), remainder(outside, outer)
    long = (first + 1 + beside) * tiles + divide(outside, outer)
    short = (first + beside + minimum(beside, 1)) * tiles + far + divide(outside, outer)
    between = (heads - inner + remainder(inside, maximum(inner, 1))) * tiles + near + divide(inside, maximum(inner, 1))
    last = select(less(middle, 0), long, select(less(end, 0), between, short))
    return select(less(wave, pairs * 2), pair, select(less(place, total - pairs * 2 * blocks), last, total))
