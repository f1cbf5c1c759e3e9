"""The FlashAttention backward pass as three plain TensorIR functions, in the form of te_defs/flash_attention.py.

Scores are computed again from Q and K, and probabilities from these and the LSE of the forward pass (FlashAttention-2, algorithm 2):
nothing of size N x M exists. With S the scores as they enter the softmax, all of one row i::

    delta = rowsum(dO * O)        P = exp(S - LSE)          dP = dO V^T          dS = P * (dP - delta) * (slope of the modification)
    dV = P^T dO                   dK = scale * dS^T Q       dQ = scale * dS K

`attention_delta` makes delta. Two functions follow, so that every sum has one owner and one order, and two runs give the same bits; they
need seven products where one function with additions to dQ in memory, in any order, needs five. Their blocks, in the order they run::

    attention_dk_dv: a tile of keys
        attn{ K_load V_load | dK_acc_init dV_acc_init
              for e, the query heads of the group; for t, from the first query tile that sees a key up to the last that does:
                  rows{ Q_load dO_load LSE_load delta_load | S | P P_masked P_cast | dV_acc_new | dP | dS dS_cast | dK_acc_new
                        | dK_acc dV_acc }
              dK dV }

    attention_dq: a tile of queries
        attn{ Q_load dO_load LSE_load delta_load | dQ_acc_init
              for t, from the last key tile that is needed down to the first that is:
                  kv{ K_load V_load | S | P P_masked | dP | dS dS_cast | dQ_acc_new | dQ_acc }
              dQ }

Where dK and dV take a function each, both come from the first by what they need, and S and P are computed once more.

Rows that do not count are made so by their loads: of a query row past the end, or one that saw no key, LSE_tile is infinite and delta 0,
and so P, dS and all that it adds are zero, whatever O and dLSE hold there; only its dO and Q must be finite. A key past the end spoils
rows of dK and dV that are not stored; from dQ the mask keeps it out.
"""
from tvm import tirx
from tvm.script import tirx as T

from te_defs import script
from te_defs.backward_parameters import Parameters
from te_defs.blocks import block, each, load, product
from te_defs.flash_attention import LOG2_E
from te_defs.integers import round_up, tiles_of


def attention_delta(workload, through_lse=False):
    """PrimFunc (dO [B, N, H, DV], O [B, N, H, DV], LSE [B, H, N] float32, delta [B, H, N] float32) -> None: delta = rowsum(dO * O), and 0
    for a row that sees no key, whose LSE is -inf, whatever the other inputs hold there: 0 * (dP - NaN) would spoil dQ and all of dK.

    through_lse  whether a parameter dLSE [B, H, N] float32 stands before delta, the gradient of the LSE. As P is the slope of the LSE,
                 delta = rowsum(dO * O) - dLSE then makes dS = P * (dP - delta) the gradient through both.

    Packed sequences are one batch entry here; rows that belong to none are as good as any.
    """
    dtype, DV = workload.dtype, workload.value_dim

    @script.prim_func(s_tir=True)
    def delta_of(d_o: T.handle, o: T.handle, lse: T.handle, d_lse: T.handle, d: T.handle):
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        B, N, H = T.int32(), T.int32(), T.int32()
        dO = T.match_buffer(d_o, (B, N, H, DV), dtype, align=4)
        O = T.match_buffer(o, (B, N, H, DV), dtype, align=4)
        LSE = T.match_buffer(lse, (B, H, N), "float32", align=4)
        dLSE = T.match_buffer(d_lse, (B, H, N), "float32", align=4)
        delta = T.match_buffer(d, (B, H, N), "float32", align=4)
        row_sum = T.sblock_alloc_buffer((B, H, N), "float32")
        for b, h, i, c in T.grid(B, H, N, DV):
            with T.sblock("row_sum"):
                vb, vh, vi, vc = T.axis.remap("SSSR", [b, h, i, c])
                with T.init():
                    row_sum[vb, vh, vi] = T.float32(0)
                row_sum[vb, vh, vi] += T.cast(dO[vb, vi, vh, vc], "float32") * T.cast(O[vb, vi, vh, vc], "float32")
        for b, h, i in T.grid(B, H, N):
            with T.sblock("delta"):
                vb, vh, vi = T.axis.remap("SSS", [b, h, i])
                of_row = T.meta_var(row_sum[vb, vh, vi] - dLSE[vb, vh, vi] if through_lse else row_sum[vb, vh, vi])
                delta[vb, vh, vi] = T.Select(LSE[vb, vh, vi] == -T.infinity("float32"), T.float32(0), of_row)

    if through_lse:
        return delta_of
    return tirx.PrimFunc([param for param in delta_of.params if param.name != "dLSE"], delta_of.body, delta_of.ret_type, delta_of.attrs)


def load_statistics(LSE_tile, delta_tile, exists, lse, delta):
    """Statistics of a tile's rows: LSE in base 2, infinite for rows that do not exist or see no key, and delta."""
    infinite = T.infinity("float32")
    with T.sblock("statistics"):
        each(LSE_tile, "LSE_load", "i", lambda i: T.if_then_else(
            exists(i), T.if_then_else(lse(i) > -infinite, lse(i) * T.float32(LOG2_E), infinite), infinite))
        each(delta_tile, "delta_load", "i", lambda i: T.if_then_else(exists(i), delta(i), T.float32(0)))


def probabilities(P, P_masked, S, LSE_tile, scale, given, whole, place):
    """P = exp(S - LSE), and 0 where the mask hides the key. P itself is masked and not S, which a scale of zero or below would spoil."""
    each(P, "P", "ij", lambda i, j: given.probability(S[i, j], LSE_tile[i], scale, *place(i, j)))
    with block("P_masked", "ij", P.shape) as (i, j):
        seen = T.if_then_else(given.sees(*place(i, j)), P[i, j], T.float32(0))
        if not given.mask.exact:
            T.buffer_store(P_masked, seen, [i, j])
        else:
            with T.If(T.likely(whole)):
                with T.Then():
                    T.buffer_store(P_masked, P[i, j], [i, j])
                with T.Else():
                    T.buffer_store(P_masked, seen, [i, j])


def score_gradients(dS, dS_cast, S, P_masked, dP, delta_tile, scale, given, place):
    """dS = P * (dP - delta), through the score modification, and its copy for the products that follow."""
    with T.sblock("gradient"):
        each(dS, "dS", "ij", lambda i, j: given.through_score(
            P_masked[i, j] * (dP[i, j] - delta_tile[i]), P_masked[i, j], S[i, j], scale, *place(i, j)))
        each(dS_cast, "dS_cast", "ij", lambda i, j: T.cast(dS[i, j], dS_cast.dtype))


def attention_dk_dv(workload, q_tile, kv_tile, query_sum=None, channel_steps=(1, 1)):
    """PrimFunc (dO [B, N, H, DV], Q [B, N, H, D], K [B, M, G, D], V [B, M, G, DV], LSE [B, H, N], delta [B, H, N], dK [B, M, G, D],
    dV [B, M, G, DV], scale, ...) -> None.

    B, N, M, H and G are symbolic; H must be a multiple of G, and the query heads of a group are summed one after the other. LSE, in natural
    logarithm, delta and scale are float32; what follows are `workload.arguments` and those of the lengths (te_defs.lengths). Scale may be
    of either sign or zero. Rows that see no key add nothing; keys that no row sees get zeros.

    q_tile         query rows of a tile (Br in the paper)
    kv_tile        key rows of a tile (Bc)
    query_sum      a te_defs.fused_backward.QuerySum, which adds dQ up as well; None: nothing does
    channel_steps  what the channels of products and of tiles are rounded up to: there zeros stand, in sums and gradients none
    """
    dtype, D, DV, given = workload.dtype, workload.head_dim, workload.value_dim, Parameters(workload)
    (PRODUCT_D, PRODUCT_DV), (TILE_D, TILE_DV) = ([round_up(size, step) for size in (D, DV)] for step in channel_steps)
    PACKED, ADDS = workload.lengths == "packed", query_sum is not None
    BOUND = bool(given.tables) or ADDS and query_sum.in_order  # whether a block's place is not plain from its loops

    def stored(value, j, m):
        """What key row j gets: past the length of its batch entry zero."""
        return T.if_then_else(j < m, value, T.float32(0)) if workload.lengths == "keys" else value

    @script.prim_func(s_tir=True, check_well_formed=False)
    def dk_dv(d_o: T.handle, q: T.handle, k: T.handle, v: T.handle, lse: T.handle, d: T.handle, d_k: T.handle, d_v: T.handle,
              scale: T.float32):
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        B, N, M, H, G = T.int32(), T.int32(), T.int32(), T.int32(), T.int32()
        dO = T.match_buffer(d_o, (B, N, H, DV), dtype, align=4)
        Q = T.match_buffer(q, (B, N, H, D), dtype, align=4)
        K = T.match_buffer(k, (B, M, G, D), dtype, align=4)
        V = T.match_buffer(v, (B, M, G, DV), dtype, align=4)
        LSE = T.match_buffer(lse, (B, H, N), "float32", align=4)
        delta = T.match_buffer(d, (B, H, N), "float32", align=4)
        dK = T.match_buffer(d_k, (B, M, G, D), dtype, align=4)
        dV = T.match_buffer(d_v, (B, M, G, DV), dtype, align=4)
        sums = T.meta_var(query_sum.declare(B, H, q_tile, D) if ADDS else [])
        sequences, longest = T.meta_var(given.sizes(B, N, M)[::2])
        key_tiles = T.meta_var(tiles_of(longest, kv_tile))
        # The first key tile first: under a causal mask the most queries see it, and a grid ends best on its short tiles.
        for b, g, r in T.grid(sequences, G, key_tiles):
            with T.sblock("attn"):
                ab, ag, ar = T.axis.remap("SSS", [b, g, r])
                vb, vg, vr = T.meta_var(query_sum.dealt(ab, ag, ar, sequences, G, key_tiles) if ADDS else (ab, ag, ar))
                if BOUND:
                    T.reads(given.touched(dO, Q, K, V, LSE, delta, *sums, *given.tables, *given.operands.values()))
                    T.writes(given.touched(dK, dV, *sums))
                part = T.meta_var(given.part(vb, N, M))
                n, m = T.meta_var((part.queries, part.keys))
                k0 = T.meta_var((query_sum.key_tile(vr, key_tiles) if ADDS else vr) * kv_tile)
                first, turns, whole = T.meta_var(given.query_tiles(k0, q_tile, kv_tile, n, m, hides_end=ADDS))
                K_tile = T.sblock_alloc_buffer((kv_tile, TILE_D), dtype)
                V_tile = T.sblock_alloc_buffer((kv_tile, TILE_DV), dtype)
                dK_acc = T.sblock_alloc_buffer((kv_tile, PRODUCT_D), "float32")
                dV_acc = T.sblock_alloc_buffer((kv_tile, PRODUCT_DV), "float32")
                with T.sblock("load_keys"):
                    load(K_tile, "K_load", "jc", lambda j: k0 + j < m, lambda j, c: K[part.entry, part.first_key + k0 + j, vg, c], D)
                    load(V_tile, "V_load", "jc", lambda j: k0 + j < m, lambda j, c: V[part.entry, part.first_key + k0 + j, vg, c], DV)
                with T.sblock("init"):
                    each(dK_acc, "dK_acc_init", "jc", lambda *_: T.float32(0))
                    each(dV_acc, "dV_acc_init", "jc", lambda *_: T.float32(0))
                for e, t in T.grid(H // G, turns):
                    with T.sblock("rows"):
                        ve = T.axis.opaque(H // G, e)
                        vt = T.axis.opaque(T.max(tiles_of(N, q_tile), 1), t)
                        tile = T.meta_var(first + (query_sum.turned(given, vt, turns, vr * max(kv_tile // q_tile, 1)) if ADDS else vt))
                        h, q0 = T.meta_var((vg * (H // G) + ve, tile * q_tile))
                        Q_tile = T.sblock_alloc_buffer((q_tile, TILE_D), dtype)
                        dO_tile = T.sblock_alloc_buffer((q_tile, TILE_DV), dtype)
                        LSE_tile = T.sblock_alloc_buffer((q_tile,), "float32")
                        delta_tile = T.sblock_alloc_buffer((q_tile,), "float32")
                        S = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                        P = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                        P_masked = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                        P_cast = T.sblock_alloc_buffer((q_tile, kv_tile), dtype)
                        dP = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                        dS = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                        dS_cast = T.sblock_alloc_buffer((q_tile, kv_tile), dtype)
                        dK_acc_new = T.sblock_alloc_buffer((kv_tile, PRODUCT_D), "float32")
                        dV_acc_new = T.sblock_alloc_buffer((kv_tile, PRODUCT_DV), "float32")
                        load(Q_tile, "Q_load", "ic", lambda i: q0 + i < n, lambda i, c: Q[part.entry, part.first_query + q0 + i, h, c], D)
                        load(dO_tile, "dO_load", "ic", lambda i: q0 + i < n,
                             lambda i, c: dO[part.entry, part.first_query + q0 + i, h, c], DV)
                        load_statistics(LSE_tile, delta_tile, lambda i: q0 + i < n,
                                        lambda i: LSE[part.entry, h, part.first_query + q0 + i],
                                        lambda i: delta[part.entry, h, part.first_query + q0 + i])
                        with T.sblock("qk"):
                            product(S, "S", "ijc", PRODUCT_D, lambda i, c: Q_tile[i, c], lambda j, c: K_tile[j, c])
                        with T.sblock("softmax"):
                            probabilities(P, P_masked, S, LSE_tile, scale, given, whole(vt), lambda i, j: (vb, h, q0 + i, k0 + j, n, m))
                            each(P_cast, "P_cast", "ij", lambda i, j: T.cast(P_masked[i, j], dtype))
                        with T.sblock("pdo"):
                            product(dV_acc_new, "dV_acc_new", "jci", q_tile,
                                    lambda j, i: P_cast[i, j], lambda c, i: dO_tile[i, c], first=dV_acc)
                        with T.sblock("dov"):
                            product(dP, "dP", "ijc", PRODUCT_DV, lambda i, c: dO_tile[i, c], lambda j, c: V_tile[j, c])
                        score_gradients(dS, dS_cast, S, P_masked, dP, delta_tile, scale, given,
                                        lambda i, j: (vb, h, q0 + i, k0 + j, n, m))
                        with T.sblock("dsq"):
                            product(dK_acc_new, "dK_acc_new", "jci", q_tile,
                                    lambda j, i: dS_cast[i, j], lambda c, i: Q_tile[i, c], first=dK_acc)
                        if ADDS:
                            query_sum.add(dS_cast, K_tile, vb, part, h, tile, vr,
                                          given.query_tiles(k0 + kv_tile, q_tile, kv_tile, n, m, hides_end=True)[:2])
                        with T.sblock("back"):
                            each(dK_acc, "dK_acc", "jc", lambda j, c: dK_acc_new[j, c])
                            each(dV_acc, "dV_acc", "jc", lambda j, c: dV_acc_new[j, c])
                with T.sblock("finish"):
                    for j, c in T.grid(kv_tile, D):
                        with T.sblock("dK"):
                            vj, vc = T.axis.remap("SS", [j, c])
                            T.where(k0 + j < (m if PACKED else M))
                            dK[part.entry, part.first_key + k0 + vj, vg, vc] = T.cast(stored(dK_acc[vj, vc] * scale, k0 + vj, m), dtype)
                    for j, c in T.grid(kv_tile, DV):
                        with T.sblock("dV"):
                            vj, vc = T.axis.remap("SS", [j, c])
                            T.where(k0 + j < (m if PACKED else M))
                            dV[part.entry, part.first_key + k0 + vj, vg, vc] = T.cast(stored(dV_acc[vj, vc], k0 + vj, m), dtype)

    return given.of(dk_dv)


def attention_dq(workload, q_tile, kv_tile, channel_steps=(1, 1)):
    """PrimFunc (dO [B, N, H, DV], Q [B, N, H, D], K [B, M, G, D], V [B, M, G, DV], LSE [B, H, N], delta [B, H, N], dQ [B, N, H, D], scale,
    ...) -> None. As `attention_dk_dv`; rows that see no key get zeros."""
    dtype, D, DV, given = workload.dtype, workload.head_dim, workload.value_dim, Parameters(workload)
    (PRODUCT_D, PRODUCT_DV), (TILE_D, TILE_DV) = ([round_up(size, step) for size in (D, DV)] for step in channel_steps)
    BOUND = bool(given.tables)

    @script.prim_func(s_tir=True, check_well_formed=False)
    def dq(d_o: T.handle, q: T.handle, k: T.handle, v: T.handle, lse: T.handle, d: T.handle, d_q: T.handle, scale: T.float32):
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        B, N, M, H, G = T.int32(), T.int32(), T.int32(), T.int32(), T.int32()
        dO = T.match_buffer(d_o, (B, N, H, DV), dtype, align=4)
        Q = T.match_buffer(q, (B, N, H, D), dtype, align=4)
        K = T.match_buffer(k, (B, M, G, D), dtype, align=4)
        V = T.match_buffer(v, (B, M, G, DV), dtype, align=4)
        LSE = T.match_buffer(lse, (B, H, N), "float32", align=4)
        delta = T.match_buffer(d, (B, H, N), "float32", align=4)
        dQ = T.match_buffer(d_q, (B, N, H, D), dtype, align=4)
        sequences, longest, _ = T.meta_var(given.sizes(B, N, M))
        for b, h, r in T.grid(sequences, H, tiles_of(longest, q_tile)):
            with T.sblock("attn"):
                vb, vh, vr = T.axis.remap("SSS", [b, h, r])
                # The last query tile first: under a causal mask it has the most keys, and a grid ends best on its short tiles.
                if BOUND:
                    T.reads(given.touched(dO, Q, K, V, LSE, delta, *given.tables, *given.operands.values()))
                    T.writes(given.touched(dQ))
                part = T.meta_var(given.part(vb, N, M))
                n, m = T.meta_var((part.queries, part.keys))
                q0 = T.meta_var((tiles_of(longest, q_tile) - 1 - vr) * q_tile)
                tiles, turns, whole = T.meta_var(given.key_tiles(q0, q_tile, kv_tile, n, m))
                g = T.meta_var(vh // (H // G))
                Q_tile = T.sblock_alloc_buffer((q_tile, TILE_D), dtype)
                dO_tile = T.sblock_alloc_buffer((q_tile, TILE_DV), dtype)
                LSE_tile = T.sblock_alloc_buffer((q_tile,), "float32")
                delta_tile = T.sblock_alloc_buffer((q_tile,), "float32")
                dQ_acc = T.sblock_alloc_buffer((q_tile, PRODUCT_D), "float32")
                with T.sblock("load_queries"):
                    load(Q_tile, "Q_load", "ic", lambda i: q0 + i < n, lambda i, c: Q[part.entry, part.first_query + q0 + i, vh, c], D)
                    load(dO_tile, "dO_load", "ic", lambda i: q0 + i < n, lambda i, c: dO[part.entry, part.first_query + q0 + i, vh, c], DV)
                    load_statistics(LSE_tile, delta_tile, lambda i: q0 + i < n,
                                    lambda i: LSE[part.entry, vh, part.first_query + q0 + i],
                                    lambda i: delta[part.entry, vh, part.first_query + q0 + i])
                with T.sblock("init"):
                    each(dQ_acc, "dQ_acc_init", "ic", lambda *_: T.float32(0))
                for t in T.serial(turns):
                    with T.sblock("kv"):
                        vt = T.axis.opaque(T.max(tiles_of(M, kv_tile), 1), t)
                        k0 = T.meta_var((tiles - 1 - vt) * kv_tile)
                        K_tile = T.sblock_alloc_buffer((kv_tile, TILE_D), dtype)
                        V_tile = T.sblock_alloc_buffer((kv_tile, TILE_DV), dtype)
                        S = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                        P = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                        P_masked = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                        dP = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                        dS = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                        dS_cast = T.sblock_alloc_buffer((q_tile, kv_tile), dtype)
                        dQ_acc_new = T.sblock_alloc_buffer((q_tile, PRODUCT_D), "float32")
                        # Only the last tile can reach past the end, and it comes first.
                        load(K_tile, "K_load", "jc", lambda j: T.Or(vt >= 1, k0 + j < m),
                             lambda j, c: K[part.entry, part.first_key + k0 + j, g, c], D)
                        load(V_tile, "V_load", "jc", lambda j: T.Or(vt >= 1, k0 + j < m),
                             lambda j, c: V[part.entry, part.first_key + k0 + j, g, c], DV)
                        with T.sblock("qk"):
                            product(S, "S", "ijc", PRODUCT_D, lambda i, c: Q_tile[i, c], lambda j, c: K_tile[j, c])
                        with T.sblock("softmax"):
                            probabilities(P, P_masked, S, LSE_tile, scale, given, whole(vt), lambda i, j: (vb, vh, q0 + i, k0 + j, n, m))
                        with T.sblock("dov"):
                            product(dP, "dP", "ijc", PRODUCT_DV, lambda i, c: dO_tile[i, c], lambda j, c: V_tile[j, c])
                        score_gradients(dS, dS_cast, S, P_masked, dP, delta_tile, scale, given,
                                        lambda i, j: (vb, vh, q0 + i, k0 + j, n, m))
                        with T.sblock("dsk"):
                            product(dQ_acc_new, "dQ_acc_new", "icj", kv_tile,
                                    lambda i, j: dS_cast[i, j], lambda c, j: K_tile[j, c], first=dQ_acc)
                        with T.sblock("back"):
                            each(dQ_acc, "dQ_acc", "ic", lambda i, c: dQ_acc_new[i, c])
                with T.sblock("finish"):
                    for i, c in T.grid(q_tile, D):
                        with T.sblock("dQ"):
                            vi, vc = T.axis.remap("SS", [i, c])
                            T.where(q0 + i < n)
                            dQ[part.entry, part.first_query + q0 + vi, vh, vc] = T.cast(dQ_acc[vi, vc] * scale, dtype)

    return given.of(dq)
