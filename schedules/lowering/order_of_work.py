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
import tvm
from tvm import tirx

TO_AND_FRO, FAIR = 0, 1
#: Waves that are dealt longest first at the end.
LAST_WAVES = 3


def deal(order, wave, block, blocks, heads, tiles):
    """Number of the tile that a block takes in a wave; heads * tiles or more where it takes none.

    order   TO_AND_FRO or FAIR
    blocks  blocks of the grid
    heads   heads times batch entries
    tiles   query tiles of a head
    All are integers, of Python or of TIR; the result is a permutation of the heads * tiles tiles over waves and blocks.
    """
    total, turned = heads * tiles, _select(_mod(wave, 2), blocks - 1 - block, block)
    if order == TO_AND_FRO:
        return wave * blocks + turned
    waves = _div(total + blocks - 1, blocks)
    pairs = _min(_max(_div(waves - LAST_WAVES, 2), 0), _div(_div(heads, 2) * tiles, blocks))  # of a block
    number = _div(wave, 2) * blocks + block
    head, shorter = _div(number, tiles) * 2, _mod(number, tiles)
    pair = _select(_mod(wave, 2), (head + 2) * tiles - 1 - shorter, head * tiles + shorter)

    # What the pairs leave: whole heads, and of the two before them the tiles that are not in pairs yet, `begun` of either are. Sorted, the
    # tiles of one length stand side by side: first and last that of one of the two and of each whole head, in between of both or none.
    first, begun = _div(pairs * blocks, tiles) * 2, _mod(pairs * blocks, tiles)
    near, far = _min(begun, tiles - begun), _max(begun, tiles - begun)
    whole = heads - first - _select(_less(0, begun), 2, 0)
    outer, inner = whole + 1, _select(_less(begun, far), heads - first, whole)
    place = (wave - pairs * 2) * blocks + turned
    middle = place - near * outer
    end = middle - (far - near) * inner
    outside = _select(_less(middle, 0), place, _max(end, 0))
    inside, beside = _max(middle, 0), _mod(outside, outer)
    long = (first + 1 + beside) * tiles + _div(outside, outer)
    short = (first + beside + _min(beside, 1)) * tiles + far + _div(outside, outer)
    between = (heads - inner + _mod(inside, _max(inner, 1))) * tiles + near + _div(inside, _max(inner, 1))
    last = _select(_less(middle, 0), long, _select(_less(end, 0), between, short))
    return _select(_less(wave, pairs * 2), pair, _select(_less(place, total - pairs * 2 * blocks), last, total))


def _symbolic(*values):
    return any(isinstance(value, tvm.ir.Expr) for value in values)


def _div(a, b):
    return tirx.truncdiv(a, b) if _symbolic(a, b) else a // b


def _mod(a, b):
    return tirx.truncmod(a, b) if _symbolic(a, b) else a % b


def _max(a, b):
    return tirx.max(a, b) if _symbolic(a, b) else max(a, b)


def _min(a, b):
    return tirx.min(a, b) if _symbolic(a, b) else min(a, b)


def _less(a, b):
    return tirx.LT(a, b) if _symbolic(a, b) else int(a < b)


def _select(condition, then, other):
    if not _symbolic(condition, then, other):
        return then if condition else other
    return tirx.Select(condition if str(condition.ty) == "bool" else condition > 0, then, other)
