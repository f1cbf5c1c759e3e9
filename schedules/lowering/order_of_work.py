"""The order in which the blocks of a persistent grid take their tiles of work: a permutation in closed form, since nothing is shared at
run time that a block could ask for its next tile.

Tiles come numbered by head, then by query tile, the one with the most keys first. A wave is one tile for each block. `TO_AND_FRO` deals
the tiles of a wave from the first block to the last, those of the next wave back again. That keeps the blocks on few heads at a time,
whose keys and values stay in the L2 cache, but it is fair only where tiles are of one length. Under a causal mask they shrink one by
one, and `FAIR` deals in two steps:

* For most waves a block takes pairs: a head's longest tile and its shortest, or the second of both, and so on. Pairs cost the same.
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
    paired = _max(_div(waves - LAST_WAVES, 2), 0) * 2  # waves
    first_head, first_tile = _div(paired * blocks, tiles), _mod(paired * blocks, tiles)

    def inside_out(tile):
        """The tile-th of: the longest, the shortest, the second longest, ..."""
        return _select(_mod(tile, 2), tiles - 1 - _div(tile, 2), _div(tile, 2))

    rank = (_div(wave, 2) * blocks + block) * 2 + _mod(wave, 2)
    pair = rank - _mod(rank, tiles) + inside_out(_mod(rank, tiles))
    # What the pairs leave: the middle tiles of one head, and whole heads. Sorted, the tiles of one length stand side by side.
    place = (wave - paired) * blocks + turned
    left = heads - 1 - first_head  # whole heads
    middle, rest = _div(first_tile + 1, 2), tiles - first_tile
    long, inner = _min(place, left * middle), _min(_max(place - left * middle, 0), (left + 1) * rest)
    short = place - left * middle - (left + 1) * rest
    tile = _select(_less(place, left * middle), _div(long, _max(left, 1)),
                   _select(_less(short, 0), middle + _div(inner, left + 1), middle + rest + _div(short, _max(left, 1))))
    # The head whose middle is left counts as one more beside the whole ones, the first.
    aside = _select(_less(place, left * middle), first_head + 1 + _mod(long, _max(left, 1)),
                    _select(_less(short, 0), first_head + _mod(inner, left + 1), first_head + 1 + _mod(short, _max(left, 1))))
    last = _select(_less(place, total - paired * blocks), aside * tiles + tile, total)
    return _select(_less(wave, paired), pair, last)


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
