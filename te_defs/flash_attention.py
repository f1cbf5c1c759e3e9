"""The FlashAttention forward pass as one plain TensorIR function: what every family schedules.

It is written at tile level (FlashAttention-2, algorithm 1) with the tile sizes as parameters, and without thread, memory scope or
layout: unscheduled it runs on llvm. Nothing of size N x M exists. Structure, with the blocks in the order they run::

    attn{ Q_load | O_acc_init row_max_init row_sum_init
          for t, from the last key tile that is needed down to the first that is:
              kv{ K_load V_load | S | S_masked tile_max .. row_max_new rescale row_max_scaled P tile_sum row_sum_new P_cast
                  | O_acc_new | O_acc row_max row_sum }
          row_sum_total row_sum_inverse O LSE }

Three choices make it schedulable for every family:

* No block reads and writes one buffer. State goes X -> X_new -> X, and the rescale of the accumulator is the init of its reduction.
* Key tiles run from the last one down, so that those which need a mask come first; the mask block asks for a mask by a comparison
  of the loop index, which a lowering pass uses to split the loop.
* Row statistics have `row_lanes` columns. With 1 they are plain vectors. With 4 each column belongs to one lane of a quad, as in
  the m16n8k16 accumulator fragment: every lane keeps the statistics of its own columns and holds the combined value.
"""
from dataclasses import replace

from tvm import tirx
from tvm.script import tirx as T

from te_defs import script
from te_defs.arguments import parameter
from te_defs.integers import maximum, round_up
from te_defs.lengths import FIRST_ROW, LENGTHS
from te_defs.parsed_once import parsed_once

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
#: Below every score that can occur, and finite, so that exp2(x - x) of a row that has seen no key is 1 and not NaN.
SCORE_MIN = -(2.0**100)
#: Stands for a scale of zero: products with it vanish, while -inf times it is still -inf and not NaN.
SCALE_MIN = 2.0**-100


@parsed_once
def flash_attention_forward(workload, q_tile, kv_tile, row_lanes=1, negative_scale=False, max_slack=0, strided=False, packed=False,
                            channel_steps=(1, 1)):
    """PrimFunc (Q [B, N, H, D], K [B, M, G, D], V [B, M, G, DV], O [B, N, H, DV], LSE [B, H, N], scale, ...) -> None.

    B, N, M, H and G are symbolic; H must be a multiple of G. LSE and scale are float32, LSE in natural logarithm; what follows are
    `workload.arguments` and those of the lengths (te_defs.lengths). Rows that see no key get O = 0 and LSE = -inf, or that of their sink.

    q_tile          query rows of a tile (Br in the paper)
    kv_tile         key rows of a tile (Bc)
    row_lanes       1 or 4, see above; 4 needs kv_tile and DV to be multiples of 8
    negative_scale  the function for scales below zero instead of the one for all others: the row maximum is taken before the scale
                    is applied, which saves a multiplication of every score, so the sign must be known. Where scores are modified they are
                    scaled first, and one function serves all scales
    max_slack       powers of two by which a row's scores may exceed the value that stands for their maximum before it moves, and O and the
                    row sum with it; 0: it is the maximum. With 8 it rarely moves (FlashAttention-4, conditional rescaling); P is then at
                    most 2^8 and not 1, far from the end of float16
    strided         Q, K, V and O are views with strides of their own, which come with the tensors. Channels are neighbours; strides of rows
                    and heads have 32 bits, and those of batch entries 64
    packed          query heads of a group share row tiles: K and V are then read once for all of them. The last arguments, int32, say how
                    many: `heads`, at most q_tile, of each of q_tile // heads `queries`, and how many `parts` of so many heads, the last
                    perhaps not whole, make a group
    channel_steps   (of products, of tiles): multiples to which channels are rounded up, the second one of the first. Tiles have zeros past
                    the tensors' own channels, which O leaves out again
    """
    if row_lanes not in (1, 4):
        raise ValueError(f"row_lanes must be 1 or 4, found {row_lanes}: choose one of these")
    arguments, dtype = [parameter(argument, workload.dtype) for argument in workload.arguments], workload.dtype
    mask, score, sink = workload.modifiers(arguments)
    lengths, SEQUENCES = LENGTHS[workload.lengths], workload.lengths == "packed"
    tables = [tirx.decl_buffer((tirx.Var("numbers", "int32"),), "int32", name=name) for name in lengths.tensors]
    operands = [value for value, argument in zip(arguments, workload.arguments) if argument.kind.axes]
    arguments += [*tables, *(tirx.Var(name, "int32") for name in lengths.integers)]
    D, DV, LANES = workload.head_dim, workload.value_dim, row_lanes
    (PRODUCT_D, PRODUCT_DV), (TILE_D, TILE_DV) = ([round_up(size, step) for size in (D, DV)] for step in channel_steps)
    QUAD, SLACK, SCALED, READ = row_lanes == 4, max_slack > 0, score is not None, bool(tables)
    SEEN = "row_max_seen" if SLACK else "row_max_new"
    PAIR = 2 if QUAD else 1  # columns of a lane that stand side by side
    STEPS = kv_tile // (LANES * PAIR)

    def lane(j):
        """The statistics column that serves score or output column j."""
        return j // PAIR % LANES

    def turns(tiles, i0, M):
        """Key tiles from the last one down to the first that a row of the query tile sees; at least one, as pipelines can tell."""
        return tiles if mask.from_start else maximum(tiles - mask.key_begin(i0, M) // kv_tile, 1)

    def whole(t, tiles, i0, last, M):
        """Whether the rows from i0 to `last` all see the key tile of turn t whole; a lowering pass reads its two comparisons with t."""
        below = t >= tiles - mask.key_end(i0, M) // kv_tile
        return below if mask.from_start else tirx.And(below, t < tiles - (mask.key_begin(last, M) + (kv_tile - 1)) // kv_tile)

    # Of a tile: heads that share it, its queries, and the tiles that a query takes in a group.
    sizes = [tirx.Var(name, "int32") for name in ("heads", "queries", "parts")] if packed else []
    heads, queries, parts = sizes or (1, q_tile, None)

    def place(i):
        """(query, head) of a tile's row, counted from the tile's first: heads run faster."""
        return (i // heads, i % heads) if packed else (i, 0)

    def stands(i, q0, first, N, group):
        """Whether a tile's row stands for a query and a head that there are; `first` is the tile's first head in its group."""
        query, head = place(i)
        return tirx.And(tirx.And(query < queries, q0 + query < N), first + head < group) if packed else q0 + query < N

    def exists(row, c, channels, tile_channels):
        """Whether channel c of a tile is one of the tensor, where its row is; asked of 8 at a time, so that wide copies stay whole."""
        return row if tile_channels == channels else tirx.And(row, c // 8 < channels // 8)

    def modified(s, scale, *place):
        """What is masked and summed of a score: with the scale's sign, or scaled and modified."""
        if score is None:
            return -s if negative_scale else s
        return score.modify(s * scale, *place)

    def with_sink(total, row_max_scaled, h):
        """(row maximum, row sum, factor of O), base 2, once the sink of head h has joined a row."""
        if sink is None:
            return row_max_scaled, total, tirx.const(1, "float32")
        logit = sink[h] * tirx.const(LOG2_E, "float32")
        row_max = tirx.max(row_max_scaled, logit)
        kept = tirx.exp2(row_max_scaled - row_max)
        return row_max, total * kept + tirx.exp2(logit - row_max), kept

    def whole_of(*buffers):
        return [buffer[tuple(slice(0, size) for size in buffer.shape)] for buffer in buffers]

    def part_of(b, N, M):
        """Rows of batch entry b; what a table says of them is read once."""
        part = lengths.part(b, N, M, *tables)
        read = {name: value for name, value in vars(part).items() if not any(value is known for known in (b, 0, N, M))}
        return replace(part, **{name: T.bind(value, var=tirx.Var(name, "int32")) for name, value in read.items()})

    def first_row_of(row):
        """The first row of a tile, under a name where it may lie past the end of its sequence."""
        return T.bind(row, var=tirx.Var(FIRST_ROW, "int32")) if SEQUENCES else row

    def strides_of(name):
        """Strides of a view, in elements; None for a contiguous tensor."""
        axes = (("batch", "int64"), ("row", "int32"), ("head", "int32"))
        return [*(tirx.Var(f"{name}_{axis}_stride", dtype) for axis, dtype in axes), 1] if strided else None

    @script.prim_func(s_tir=True, check_well_formed=False)
    def flash_attention(q: T.handle, k: T.handle, v: T.handle, o: T.handle, lse: T.handle, scale: T.float32):
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        B, N, M, H, G = T.int32(), T.int32(), T.int32(), T.int32(), T.int32()
        entries = T.meta_var(T.Cast("int64", B) if strided else B)  # TVM reads a stride in the type of its axis
        Q = T.match_buffer(q, (entries, N, H, D), dtype, strides=strides_of("Q"), align=4)
        K = T.match_buffer(k, (entries, M, G, D), dtype, strides=strides_of("K"), align=4)
        V = T.match_buffer(v, (entries, M, G, DV), dtype, strides=strides_of("V"), align=4)
        O = T.match_buffer(o, (entries, N, H, DV), dtype, strides=strides_of("O"), align=4)
        LSE = T.match_buffer(lse, (B, H, N), "float32", align=4)
        sequences, longest = T.meta_var((tables[0].shape[0] - 1, arguments[-1]) if SEQUENCES else (B, N))
        for b, h, r in T.grid(sequences, G * parts if packed else H, (longest + (queries - 1)) // queries):
            with T.sblock("attn"):
                vb, vh, vr = T.axis.remap("SSS", [b, h, r])
                # The last query tile first: under a causal mask it has the most keys, and a grid ends best on its short tiles.
                if READ:  # TVM would name the rows that are touched by variables that are bound inside
                    T.reads(whole_of(Q, K, V, *tables, *operands))
                    T.writes(whole_of(O, LSE))
                part = T.meta_var(part_of(vb, N, M))
                n, m = T.meta_var((part.queries, part.keys))
                q0 = T.meta_var(first_row_of(((longest + (queries - 1)) // queries - 1 - vr) * queries))
                g = T.meta_var(vh // parts if packed else vh // (H // G))  # the key head of these query heads
                first = T.meta_var(vh % parts * heads if packed else 0)
                h0 = T.meta_var(g * (H // G) + first if packed else vh)
                i0 = T.meta_var(mask.position(q0, n, m))
                tiles = T.meta_var(T.max((mask.key_end(i0 + (queries - 1), m) + (kv_tile - 1)) // kv_tile, 1))
                scale_log2 = T.meta_var(
                    T.float32(LOG2_E) if SCALED else T.max(T.fabs(scale), T.float32(SCALE_MIN)) * T.float32(LOG2_E))
                Q_tile = T.sblock_alloc_buffer((q_tile, TILE_D), dtype)
                O_acc = T.sblock_alloc_buffer((q_tile, PRODUCT_DV), "float32")
                row_max = T.sblock_alloc_buffer((q_tile, LANES), "float32")
                row_sum = T.sblock_alloc_buffer((q_tile, LANES), "float32")
                with T.sblock("load_queries"):
                    for i, c in T.grid(q_tile, TILE_D):
                        with T.sblock("Q_load"):
                            vi, vc = T.axis.remap("SS", [i, c])
                            at = T.meta_var(place(vi))
                            Q_tile[vi, vc] = T.if_then_else(
                                exists(stands(vi, q0, first, n, H // G), vc, D, TILE_D),
                                Q[part.entry, part.first_query + q0 + at[0], h0 + at[1], vc], T.cast(0.0, dtype))
                with T.sblock("init"):
                    for i, c in T.grid(q_tile, PRODUCT_DV):
                        with T.sblock("O_acc_init"):
                            vi, vc = T.axis.remap("SS", [i, c])
                            O_acc[vi, vc] = T.float32(0)
                    for i, l in T.grid(q_tile, LANES):
                        with T.sblock("row_max_init"):
                            vi, vl = T.axis.remap("SS", [i, l])
                            row_max[vi, vl] = T.float32(SCORE_MIN)
                    for i, l in T.grid(q_tile, LANES):
                        with T.sblock("row_sum_init"):
                            vi, vl = T.axis.remap("SS", [i, l])
                            row_sum[vi, vl] = T.float32(0)
                for t in T.serial(turns(tiles, i0, m)):
                    with T.sblock("kv"):
                        vt = T.axis.opaque(T.max((M + (kv_tile - 1)) // kv_tile, 1), t)
                        k0 = T.meta_var((tiles - 1 - vt) * kv_tile)
                        K_tile = T.sblock_alloc_buffer((kv_tile, TILE_D), dtype)
                        V_tile = T.sblock_alloc_buffer((kv_tile, TILE_DV), dtype)
                        S = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                        S_masked = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                        tile_max = T.sblock_alloc_buffer((q_tile, LANES), "float32")
                        row_max_new = T.sblock_alloc_buffer((q_tile, LANES), "float32")
                        rescale = T.sblock_alloc_buffer((q_tile, LANES), "float32")
                        row_max_scaled = T.sblock_alloc_buffer((q_tile, LANES), "float32")
                        P = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                        tile_sum = T.sblock_alloc_buffer((q_tile, LANES), "float32")
                        row_sum_new = T.sblock_alloc_buffer((q_tile, LANES), "float32")
                        P_cast = T.sblock_alloc_buffer((q_tile, kv_tile), dtype)
                        O_acc_new = T.sblock_alloc_buffer((q_tile, PRODUCT_DV), "float32")
                        for j, c in T.grid(kv_tile, TILE_D):
                            with T.sblock("K_load"):
                                vj, vc = T.axis.remap("SS", [j, c])
                                # Only the last tile can reach past the end, and it comes first.
                                K_tile[vj, vc] = T.if_then_else(
                                    exists(T.Or(vt >= 1, k0 + vj < m), vc, D, TILE_D),
                                    K[part.entry, part.first_key + k0 + vj, g, vc], T.cast(0.0, dtype))
                        for j, c in T.grid(kv_tile, TILE_DV):
                            with T.sblock("V_load"):
                                vj, vc = T.axis.remap("SS", [j, c])
                                V_tile[vj, vc] = T.if_then_else(
                                    exists(T.Or(vt >= 1, k0 + vj < m), vc, DV, TILE_DV),
                                    V[part.entry, part.first_key + k0 + vj, g, vc], T.cast(0.0, dtype))
                        with T.sblock("qk"):
                            for i, j, c in T.grid(q_tile, kv_tile, PRODUCT_D):
                                with T.sblock("S"):
                                    vi, vj, vc = T.axis.remap("SSR", [i, j, c])
                                    with T.init():
                                        S[vi, vj] = T.float32(0)
                                    S[vi, vj] += T.cast(Q_tile[vi, vc], "float32") * T.cast(K_tile[vj, vc], "float32")
                        with T.sblock("softmax"):
                            for i, j in T.grid(q_tile, kv_tile):
                                with T.sblock("S_masked"):
                                    vi, vj = T.axis.remap("SS", [i, j])
                                    at = T.meta_var(place(vi))
                                    s = T.meta_var(modified(S[vi, vj], scale, vb, h0 + at[1], q0 + at[0], k0 + vj, n, m))
                                    if mask.exact:
                                        if T.likely(whole(vt, tiles, i0, i0 + (queries - 1), m)):
                                            S_masked[vi, vj] = s
                                        else:
                                            S_masked[vi, vj] = T.if_then_else(
                                                mask.keep(i0 + at[0], k0 + vj, m), s, -T.infinity("float32"))
                                    else:
                                        S_masked[vi, vj] = T.if_then_else(
                                            mask.at(vb).keep(i0 + at[0], k0 + vj, m), s, -T.infinity("float32"))
                            for i, l, s, p in T.grid(q_tile, LANES, STEPS, PAIR):
                                with T.sblock("tile_max"):
                                    vi, vl, vs, vp = T.axis.remap("SSRR", [i, l, s, p])
                                    with T.init():
                                        tile_max[vi, vl] = T.min_value("float32")
                                    tile_max[vi, vl] = T.max(tile_max[vi, vl], S_masked[vi, (vs * LANES + vl) * PAIR + vp])
                            row_max_seen = T.sblock_alloc_buffer((q_tile, LANES), "float32") if SLACK else row_max_new
                            if QUAD:  # all-reduce over the quad in two steps
                                quad_max = T.sblock_alloc_buffer((q_tile, LANES), "float32")
                                for i, l in T.grid(q_tile, LANES):
                                    with T.sblock("pair_max"):
                                        vi, vl = T.axis.remap("SS", [i, l])
                                        quad_max[vi, vl] = T.max(tile_max[vi, vl], tile_max[vi, (vl + 1) % 4])
                                for i, l in T.grid(q_tile, LANES):
                                    with T.sblock(SEEN):
                                        vi, vl = T.axis.remap("SS", [i, l])
                                        row_max_seen[vi, vl] = T.max(row_max[vi, vl], T.max(quad_max[vi, vl], quad_max[vi, (vl + 2) % 4]))
                            else:
                                for i, l in T.grid(q_tile, LANES):
                                    with T.sblock(SEEN):
                                        vi, vl = T.axis.remap("SS", [i, l])
                                        row_max_seen[vi, vl] = T.max(row_max[vi, vl], tile_max[vi, vl])
                            if SLACK:  # any value near the maximum will do: one that stays saves the rescale
                                for i, l in T.grid(q_tile, LANES):
                                    with T.sblock("row_max_new"):
                                        vi, vl = T.axis.remap("SS", [i, l])
                                        row_max_new[vi, vl] = T.if_then_else(
                                            (row_max_seen[vi, vl] - row_max[vi, vl]) * scale_log2 > T.float32(max_slack),
                                            row_max_seen[vi, vl], row_max[vi, vl])
                            for i, l in T.grid(q_tile, LANES):
                                with T.sblock("rescale"):
                                    vi, vl = T.axis.remap("SS", [i, l])
                                    rescale[vi, vl] = T.exp2((row_max[vi, vl] - row_max_new[vi, vl]) * scale_log2)
                            for i, l in T.grid(q_tile, LANES):
                                with T.sblock("row_max_scaled"):
                                    vi, vl = T.axis.remap("SS", [i, l])
                                    row_max_scaled[vi, vl] = row_max_new[vi, vl] * scale_log2
                            for i, j in T.grid(q_tile, kv_tile):
                                with T.sblock("P"):
                                    vi, vj = T.axis.remap("SS", [i, j])
                                    P[vi, vj] = T.exp2(S_masked[vi, vj] * scale_log2 - row_max_scaled[vi, lane(vj)])
                            for i, l, s, p in T.grid(q_tile, LANES, STEPS, PAIR):
                                with T.sblock("tile_sum"):
                                    vi, vl, vs, vp = T.axis.remap("SSRR", [i, l, s, p])
                                    with T.init():
                                        tile_sum[vi, vl] = T.float32(0)
                                    tile_sum[vi, vl] = tile_sum[vi, vl] + P[vi, (vs * LANES + vl) * PAIR + vp]
                            for i, l in T.grid(q_tile, LANES):
                                with T.sblock("row_sum_new"):
                                    vi, vl = T.axis.remap("SS", [i, l])
                                    row_sum_new[vi, vl] = row_sum[vi, vl] * rescale[vi, vl] + tile_sum[vi, vl]
                            for i, j in T.grid(q_tile, kv_tile):
                                with T.sblock("P_cast"):
                                    vi, vj = T.axis.remap("SS", [i, j])
                                    P_cast[vi, vj] = T.cast(P[vi, vj], dtype)
                        with T.sblock("pv"):
                            for i, c, j in T.grid(q_tile, PRODUCT_DV, kv_tile):
                                with T.sblock("O_acc_new"):
                                    vi, vc, vj = T.axis.remap("SSR", [i, c, j])
                                    with T.init():
                                        O_acc_new[vi, vc] = rescale[vi, lane(vc)] * O_acc[vi, vc]
                                    O_acc_new[vi, vc] += T.cast(P_cast[vi, vj], "float32") * T.cast(V_tile[vj, vc], "float32")
                        with T.sblock("back"):
                            for i, c in T.grid(q_tile, PRODUCT_DV):
                                with T.sblock("O_acc"):
                                    vi, vc = T.axis.remap("SS", [i, c])
                                    O_acc[vi, vc] = O_acc_new[vi, vc]
                            for i, l in T.grid(q_tile, LANES):
                                with T.sblock("row_max"):
                                    vi, vl = T.axis.remap("SS", [i, l])
                                    row_max[vi, vl] = row_max_new[vi, vl]
                            for i, l in T.grid(q_tile, LANES):
                                with T.sblock("row_sum"):
                                    vi, vl = T.axis.remap("SS", [i, l])
                                    row_sum[vi, vl] = row_sum_new[vi, vl]
                with T.sblock("finish"):
                    row_sum_total = T.sblock_alloc_buffer((q_tile, LANES), "float32")
                    row_sum_inverse = T.sblock_alloc_buffer((q_tile, LANES), "float32")
                    for i, l, e in T.grid(q_tile, LANES, LANES):
                        with T.sblock("row_sum_total"):
                            vi, vl, ve = T.axis.remap("SSR", [i, l, e])
                            with T.init():
                                row_sum_total[vi, vl] = T.float32(0)
                            row_sum_total[vi, vl] = row_sum_total[vi, vl] + row_sum[vi, ve]
                    for i, l in T.grid(q_tile, LANES):
                        with T.sblock("row_sum_inverse"):
                            vi, vl = T.axis.remap("SS", [i, l])
                            state = T.meta_var(with_sink(row_sum_total[vi, vl], row_max[vi, vl] * scale_log2, h0 + place(vi)[1]))
                            row_sum_inverse[vi, vl] = T.if_then_else(state[1] > T.float32(0), state[2] / state[1], T.float32(0))
                    for i, c in T.grid(q_tile, DV):
                        with T.sblock("O"):
                            vi, vc = T.axis.remap("SS", [i, c])
                            T.where(stands(i, q0, first, n, H // G))
                            at = T.meta_var(place(vi))
                            O[part.entry, part.first_query + q0 + at[0], h0 + at[1], vc] = T.cast(
                                O_acc[vi, vc] * row_sum_inverse[vi, lane(vc)], dtype)
                    for i, l in T.grid(q_tile, LANES):
                        with T.sblock("LSE"):
                            vi, vl = T.axis.remap("SS", [i, l])
                            T.where(stands(i, q0, first, n, H // G))  # the lanes of a row store one value
                            at = T.meta_var(place(vi))
                            state = T.meta_var(with_sink(row_sum_total[vi, vl], row_max[vi, vl] * scale_log2, h0 + at[1]))
                            LSE[part.entry, h0 + at[1], part.first_query + q0 + at[0]] = state[0] * T.float32(LN_2) + T.log(state[1])

    return flash_attention if not arguments + sizes else tirx.PrimFunc(
        [*flash_attention.params, *arguments, *sizes], flash_attention.body, flash_attention.ret_type, flash_attention.attrs)
