"""The backward pass with five products instead of seven: dK, dV and dQ by one function.

Where te_defs/flash_attention_backward.py computes S and dP twice, once for keys and once for queries, here every tile of keys adds what it
knows of dQ to a float32 tensor in memory. Blocks that run side by side add in no fixed order, so two runs may differ in their last bits;
run one after the other, as on a CPU, they add in the order of the keys. Inside the loop over tiles of queries stand, behind those of
`attention_dk_dv`::

    dQ_part       what these keys add to dQ, without the scale
    dQ_sum        its addition to the sum in memory

The sums are workspace, and lie as it suits those who add: in tiles, [B, H, tile, row of the tile, channel], so that the rows of a tile are
all there, and what is added past the end of a sequence, zeros, stands where nobody reads. Sequence b of packed ones has its tiles from
first_query // q_tile + b on: tiles of sequences do not meet, as the rows of those before fill at most so many.

A key past the end must add nothing here, while it may spoil its own rows of dK and dV: the tile that it is in is always masked.

Tiles of keys can be told to add one after the other, from the last to the first, which gives the same bits whatever runs side by side.
Beside the sums then stands for each tile whose turn it is, by how many tiles of keys come before, and around the addition::

    dQ_ahead      how far that is from these keys' turn: where keys are visited in that order, not at all
    dQ_turn       the turn of the next tile of keys
"""
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from te_defs import script
from te_defs.blocks import block, product
from te_defs.backward_parameters import Parameters
from te_defs.flash_attention_backward import attention_dk_dv
from te_defs.integers import divide, maximum, minimum, remainder

#: Tiles of keys times channels, of which whole heads stand side by side where they add in order: as many as run at a time, or twice that.
#: More, of whose sums fewer are in the L2 cache, keep each other waiting (H200).
BESIDE = 16_384
#: Names of what the place in such a grid comes to.
DEALT = ("entry", "group", "before")
#: Parameters of attention_dk_dv before its outputs, and all of its own; the one for the sums of dQ is declared behind them.
OPERANDS, OWN = 6, 9


def first_tile(b, part, q_tile):
    """Number of the first tile of sequence b among those of its tensor."""
    return 0 if isinstance(part.first_query, int) else part.first_query // q_tile + b


def visits_all(mask):
    """Whether a mask says that every key may be seen by all queries: then all tiles of keys visit the same tiles of queries."""
    j, n, m = (tirx.Var(name, "int32") for name in "jnm")
    return mask.knows_queries and isinstance(mask.query_begin(j, n, m), int) and n.same_as(mask.query_end(j, n, m))


def rotated(turn, turns, first):
    """What turn it is for those who begin with turn `first`, counted round, and go round."""
    turned = turn + tirx.floormod(first, turns)
    return turned - turns * tirx.Cast("int32", turned >= turns)  # not as a choice, which TVM would take for a range of tiles


class QuerySum:
    """What `attention_dk_dv` does besides: it builds the blocks that add up dQ; where `in_order`, tile of keys by tile of keys."""

    def __init__(self, in_order=False):
        self.in_order, self.tensor, self.turns = in_order, None, None

    def declare(self, B, H, q_tile, D):
        """The tensors that take the sums, in as many tiles as the call brings, and whose turn it is at each."""
        tiles = tirx.Var("tiles", "int32")
        self.tensor = T.match_buffer(T.arg("d_s", T.handle()), (B, H, tiles, q_tile, D), "float32", align=4)
        IRBuilder.name("dQ_sum", self.tensor)
        self.turns = _declare_turns(B, H, tiles) if self.in_order else None
        return [self.tensor, self.turns][:1 + self.in_order]

    def dealt(self, b, g, r, entries, groups, tiles):
        """(batch entry, group, tiles of keys before) of a place in the grid. In order, tiles of several heads stand side by side: of one
        head a single one can begin in the time that an addition takes, and those that run side by side should begin together."""
        if not self.in_order:
            return b, g, r
        heads, number = entries * groups, (b * groups + g) * tiles + r
        beside = maximum(divide(BESIDE // int(self.tensor.shape[-1]), maximum(tiles, 1)), 1)
        first = divide(number, tiles * beside) * beside
        width, inside = minimum(heads - first, beside), number - first * tiles
        head = first + remainder(inside, width)
        return [T.bind(value, var=tirx.Var(name, "int32")) for name, value in zip(
            DEALT, (divide(head, groups), remainder(head, groups), divide(inside, width)))]

    def key_tile(self, r, tiles):
        """The tile of keys that comes r-th. In order it is the last one first: under a causal mask a tile then begins with queries that no
        other has to see before, and goes on to each next one a turn after the tile of keys behind it."""
        return tiles - 1 - r if self.in_order else r

    def turned(self, given, turn, turns, first):
        """The turn whose tile of queries is visited in a turn. Where all tiles of keys visit the same ones, each begins with another, its
        `first`, so that not all that run side by side read and add to the same rows; who asks whether a tile is whole may ask with either.
        Lengths that arrive with a call are bound in a block, and TVM could not tell which tile a turn writes: there turns are as they are.
        """
        return rotated(turn, turns, first) if visits_all(given.mask) and not given.tables and not self.in_order else turn

    def add(self, dS_cast, K_tile, b, rows, h, t, r, tiles_before):
        """Add dS K to a head's tile t of the sums of batch entry b, whose rows are a te_defs.lengths.Part.

        r             how many tiles of keys come before
        tiles_before  (first, number) of the tiles that the one before visits, of the keys behind: those that visit a tile are neighbours
                      (te_defs/masks.py)
        """
        part = T.sblock_alloc_buffer((dS_cast.shape[0], K_tile.shape[1]), "float32")
        IRBuilder.name("dQ_part", part)
        tile = rows.entry, h, first_tile(b, rows, dS_cast.shape[0]) + t
        with T.sblock("dsk"):
            product(part, "dQ_part", "icj", dS_cast.shape[1], lambda i, j: dS_cast[i, j], lambda c, j: K_tile[j, c])
        if self.in_order:
            first, number = tiles_before
            follows = tirx.And(tirx.And(r > 0, first <= t), t < first + number)
            ahead = T.sblock_alloc_buffer((1,), "int32")
            IRBuilder.name("ahead", ahead)
            with T.sblock("dQ_ahead"):
                T.buffer_store(ahead, self.turns[tile] - r * tirx.Cast("int32", follows), [0])
        with T.sblock("sum"), block("dQ_sum", "ic", part.shape) as (i, c):
            T.buffer_store(self.tensor, self.tensor[(*tile, i, c)] + part[i, c], [*tile, i, c])
        if self.in_order:
            with T.sblock("dQ_turn"):
                T.buffer_store(self.turns, ahead[0] + (r + 1), list(tile))


def attention_dk_dv_dq(workload, q_tile, kv_tile, channel_steps=(1, 1), in_order=False):
    """PrimFunc (dO [B, N, H, DV], Q [B, N, H, D], K [B, M, G, D], V [B, M, G, DV], LSE [B, H, N], delta [B, H, N], dQ_sum [B, H, tiles,
    q_tile, D] float32, dK [B, M, G, D], dV [B, M, G, DV], scale, ...) -> None. As `attention_dk_dv`; besides, dQ / scale is added to
    dQ_sum, which holds zeros before the call and has `sum_tiles` tiles. Where `in_order`, dQ_turns [B, H, tiles] int32, zeros as well,
    stands behind dQ_sum, and additions to a tile are made from the last keys to the first."""
    func = attention_dk_dv(workload, q_tile, kv_tile, QuerySum(in_order), channel_steps)
    params = list(func.params)
    for place in range(1 + in_order):
        params.insert(OPERANDS + place, params.pop(OWN + place))
    return tirx.PrimFunc(params, func.body, func.ret_type, func.attrs)


def sum_tiles(rows, q_tile, sequences=0):
    """Tiles of the sums of an entry of so many rows, at least one; of one that so many packed sequences share, where there are any."""
    return rows // q_tile + sequences if sequences else max(-(-rows // q_tile), 1)


def attention_dq_cast(workload, q_tile):
    """PrimFunc (dQ_sum [B, H, tiles, q_tile, D] float32, dQ [B, N, H, D], scale, ...) -> None: dQ = scale * dQ_sum, in the element type.
    What follows the scale is as in `attention_dk_dv`."""
    dtype, D, given = workload.dtype, workload.head_dim, Parameters(workload)

    @script.prim_func(s_tir=True, check_well_formed=False)
    def dq_cast(d_s: T.handle, d_q: T.handle, scale: T.float32):
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        B, N, H, tiles = T.int32(), T.int32(), T.int32(), T.int32()
        dQ_sum = T.match_buffer(d_s, (B, H, tiles, q_tile, D), "float32", align=4)
        dQ = T.match_buffer(d_q, (B, N, H, D), dtype, align=4)
        sequences, longest, _ = T.meta_var(given.sizes(B, N, N))
        scaled = T.sblock_alloc_buffer((sequences, longest, H, D), dtype)
        for b, i, h, c in T.grid(sequences, longest, H, D):
            with T.sblock("scaled"):
                vb, vi, vh, vc = T.axis.remap("SSSS", [b, i, h, c])
                part = T.meta_var(given.lengths.part(vb, N, N, *given.tables))
                scaled[vb, vi, vh, vc] = T.cast(
                    dQ_sum[part.entry, vh, first_tile(vb, part, q_tile) + vi // q_tile, vi % q_tile, vc] * scale, dtype)
        for b, i, h, c in T.grid(sequences, longest, H, D):
            with T.sblock("dQ"):
                vb, vi, vh, vc = T.axis.remap("SSSS", [b, i, h, c])
                part = T.meta_var(given.lengths.part(vb, N, N, *given.tables))
                T.where(i < given.lengths.part(b, N, N, *given.tables).queries)
                dQ[part.entry, part.first_query + vi, vh, vc] = scaled[vb, vi, vh, vc]

    return given.of(dq_cast)


def attention_dq_zeros(workload, q_tile, in_order=False):
    """PrimFunc (dQ_sum [B, H, tiles, q_tile, D] float32) -> None: dQ_sum = 0; where `in_order`, (dQ_sum, dQ_turns [B, H, tiles] int32), and
    dQ_turns = 0."""
    D = workload.head_dim

    @script.prim_func(s_tir=True)
    def dq_zeros(d_s: T.handle):
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        B, H, tiles = T.int32(), T.int32(), T.int32()
        dQ_sum = T.match_buffer(d_s, (B, H, tiles, q_tile, D), "float32", align=4)
        turns = T.meta_var([_declare_turns(B, H, tiles)] if in_order else [])
        for b, h, t, i, c in T.grid(B, H, tiles, q_tile, D):
            with T.sblock("dQ_sum"):
                vb, vh, vt, vi, vc = T.axis.remap("SSSSS", [b, h, t, i, c])
                dQ_sum[vb, vh, vt, vi, vc] = T.float32(0)
        if in_order:
            for b, h, t in T.grid(B, H, tiles):
                with T.sblock("dQ_turns"):
                    vb, vh, vt = T.axis.remap("SSS", [b, h, t])
                    T.buffer_store(turns[0], 0, [vb, vh, vt])

    return dq_zeros


def _declare_turns(B, H, tiles):
    """Parameter of a function: whose turn it is at each tile of the sums."""
    turns = T.match_buffer(T.arg("d_t", T.handle()), (B, H, tiles), "int32", align=4)
    IRBuilder.name("dQ_turns", turns)
    return turns
