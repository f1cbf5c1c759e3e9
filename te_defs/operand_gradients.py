"""Gradients of the tensors behind the scale: those that the score modification reads, such as a bias, and the sink.

With dS = P * (dP - delta) as in te_defs/flash_attention_backward.py, and x the element of an operand that S', the modified score of a place
(b, h, i, j), reads::

    dX = the sum of dS * (dS' / dx) over all places that read x         dSink = - the sum of exp(sink - LSE) * delta over a head's rows

An operand may have axes of size one, and then serves all indices: how much is summed is known with a call. Every element belongs to one
block, which takes its terms in one order, so two runs give the same bits. Where there are few elements the places are dealt out in
`parts`, each with sums of its own, and `attention_fold_parts` adds these up in their order. The blocks, in the order they run::

    attention_d_operand: a part of what a tile of the operand, [queries, keys], sums; an axis of size one is a tile
        attn{ sum_init
              for x, rows of tiles: each a head of a batch entry and a tile of its queries
                  rows{ Q_load dO_load LSE_load delta_load
                        for t, tiles of keys
                            kv{ K_load V_load | S | P P_masked | dP | dS sum_new | sum } }
              tile | by_key by_query total
              dX }
"""
from tvm import tirx
from tvm.script import tirx as T

from te_defs import script
from te_defs.arguments import ModifierError
from te_defs.backward_parameters import Parameters
from te_defs.blocks import block, each, load, product
from te_defs.evaluate import UnknownExpression
from te_defs.flash_attention import LOG2_E
from te_defs.flash_attention_backward import load_statistics, probabilities
from te_defs.integers import tiles_of
from te_defs.workload import SINK, WorkloadError

#: Lanes that share the rows of a sink.
LANES = 256


def require_gradient(workload, name):
    """WorkloadError, a sentence, where there is no gradient of an argument behind the scale, or no argument of this name."""
    def refuse(found):
        raise WorkloadError(f"a gradient of {name} was wanted, found {found}: leave it out")

    argument = next((argument for argument in workload.arguments if argument.name == name), None)
    if argument is None:
        refuse(f"that {workload.name} has {', '.join(it.name for it in workload.arguments) or 'nothing'} behind the scale")
    if not argument.kind.axes:
        refuse("a number, and only tensors have gradients")
    if "float" not in (argument.kind.dtype or workload.dtype):
        refuse("whole numbers, which have no slopes")
    if argument in workload.mask_class.arguments():
        refuse("an argument of the mask, which has no slopes")
    if argument == SINK:
        return
    try:
        Parameters(workload).score.slope_of(name, tirx.Var("s", "float32"), *(tirx.Var(letter, "int32") for letter in "bhijnm"))
    except (ModifierError, UnknownExpression) as error:
        raise WorkloadError(f"a gradient of {name} was wanted: {error}") from error


def dtype_of(workload, name):
    """Element type of an argument, and of its gradient."""
    return next(it.kind.dtype for it in workload.arguments if it.name == name) or workload.dtype


def parts_of(turns, parts, part):
    """(first, number) of the turns that a part has, as even as may be."""
    each_part = tiles_of(turns, parts)
    return part * each_part, T.max(T.min(each_part, turns - part * each_part), 0)


def attention_d_operand(workload, name, q_tile, kv_tile, dtype="float32"):
    """PrimFunc (dO [B, N, H, DV], Q [B, N, H, D], K [B, M, G, D], V [B, M, G, DV], LSE [B, H, N], delta [B, H, N], dX [parts, ...] of
    `dtype`, scale, ...) -> None: the gradient of the score's operand `name`, of its shape behind the first axis, in parts to be added up.

    Everything else as in te_defs.flash_attention_backward.attention_dq. Elements that no place reads get zeros.
    """
    D, DV, given = workload.head_dim, workload.value_dim, Parameters(workload)
    X = given.operands[name]
    axes = next(argument.kind.axes for argument in workload.arguments if argument.name == name)
    sizes = {axis: X.shape[axes.index(axis)] if axis in axes else 1 for axis in "BHNM"}
    ELEMENTS = workload.dtype

    def whole(axis):
        """Whether an axis of the operand serves all indices."""
        return tirx.const(True, "bool") if axis not in axes else sizes[axis] == 1

    def over(axis, size):
        """How many indices an owner sums over."""
        return size if axis not in axes else tirx.Select(whole(axis), size, 1)

    def store(dX, part, at, value):
        with T.If(T.And(at["N"] < sizes["N"], at["M"] < sizes["M"])), T.Then():
            T.buffer_store(dX, T.cast(value, dtype), [part, *(at[axis] for axis in axes)])

    @script.prim_func(s_tir=True, check_well_formed=False)
    def d_operand(d_o: T.handle, q: T.handle, k: T.handle, v: T.handle, lse: T.handle, d: T.handle, d_x: T.handle, scale: T.float32):
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        B, N, M, H, G, parts = T.int32(), T.int32(), T.int32(), T.int32(), T.int32(), T.int32()
        dO = T.match_buffer(d_o, (B, N, H, DV), ELEMENTS, align=4)
        Q = T.match_buffer(q, (B, N, H, D), ELEMENTS, align=4)
        K = T.match_buffer(k, (B, M, G, D), ELEMENTS, align=4)
        V = T.match_buffer(v, (B, M, G, DV), ELEMENTS, align=4)
        LSE = T.match_buffer(lse, (B, H, N), "float32", align=4)
        delta = T.match_buffer(d, (B, H, N), "float32", align=4)
        dX = T.match_buffer(d_x, (parts, *X.shape), dtype, align=2)
        sequences, longest, _ = T.meta_var(given.sizes(B, N, M))
        # Rows of tiles that an owner takes: (head of a batch entry, tile of queries), neighbours with the same keys.
        of_batch, of_heads = T.meta_var((over("B", sequences), over("H", H)))
        of_queries = T.meta_var(over("N", tiles_of(longest, q_tile)))
        inputs = T.meta_var((dO, Q, K, V, LSE, delta, *given.tables, *given.operands.values()))
        for p, b, h, r, s in T.grid(parts, sizes["B"], sizes["H"], tiles_of(sizes["N"], q_tile), tiles_of(sizes["M"], kv_tile)):
            with T.sblock("attn"):
                vp, vb, vh, vr, vs = T.axis.remap("SSSSS", [p, b, h, r, s])
                # A tile of queries and keys that no query sees has no turns; only uniform lengths have such owners.
                last, seen, _ = T.meta_var(given.key_tiles(vr * q_tile, q_tile, kv_tile, N, M))
                summed = T.meta_var(tirx.Or(whole("N"), whole("M")))
                all_turns = T.meta_var(of_batch * of_heads * of_queries)
                first, turns = T.meta_var(parts_of(tirx.Select(
                    tirx.Or(summed, tirx.And(vs < last, vs >= last - seen)), all_turns, 0), parts, vp))
                sums = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                tile = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                by_key = T.sblock_alloc_buffer((kv_tile,), "float32")
                by_query = T.sblock_alloc_buffer((q_tile,), "float32")
                total = T.sblock_alloc_buffer((1,), "float32")
                with T.sblock("init"):
                    each(sums, "sum_init", "ij", lambda *_: T.float32(0))
                for x in T.serial(turns):
                    with T.sblock("rows"):
                        vx = T.axis.opaque(T.max(turns, 1), x)
                        T.reads(given.touched(*inputs, sums))
                        T.writes(given.touched(sums))
                        # Divisors are kept from zero: a compiler may divide before it knows that there is no turn.
                        per_head, per_entry, row = T.meta_var((T.max(of_queries, 1), T.max(of_heads, 1), first + vx))
                        # Kept in memory, or a compiler would write their divisions out wherever they are used.
                        found = T.sblock_alloc_buffer((4,), "int32")
                        with T.sblock("row"):
                            found[0] = vb + row // per_head // per_entry
                            found[1] = vh + row // per_head % per_entry
                            found[2] = (vr + row % per_head) * q_tile
                        e = T.bind(found[0])
                        head = T.bind(found[1])
                        q0 = T.bind(found[2])
                        part = T.meta_var(given.part(e, N, M))
                        n, m, g = T.meta_var((part.queries, part.keys, head // (H // G)))
                        key_tiles, key_turns, _ = T.meta_var(given.key_tiles(q0, q_tile, kv_tile, n, m))
                        with T.sblock("key_tiles"):
                            found[3] = key_tiles
                        tiles = T.bind(found[3])
                        Q_tile = T.sblock_alloc_buffer((q_tile, D), ELEMENTS)
                        dO_tile = T.sblock_alloc_buffer((q_tile, DV), ELEMENTS)
                        LSE_tile = T.sblock_alloc_buffer((q_tile,), "float32")
                        delta_tile = T.sblock_alloc_buffer((q_tile,), "float32")
                        load(Q_tile, "Q_load", "ic", lambda i: q0 + i < n, lambda i, c: Q[part.entry, part.first_query + q0 + i, head, c])
                        load(dO_tile, "dO_load", "ic", lambda i: q0 + i < n,
                             lambda i, c: dO[part.entry, part.first_query + q0 + i, head, c])
                        load_statistics(LSE_tile, delta_tile, lambda i: q0 + i < n,
                                        lambda i: LSE[part.entry, head, part.first_query + q0 + i],
                                        lambda i: delta[part.entry, head, part.first_query + q0 + i])
                        for t in T.serial(over("M", key_turns)):
                            with T.sblock("kv"):
                                w = T.axis.opaque(T.max(tiles_of(M, kv_tile), 1), tirx.Select(whole("M"), tiles - 1 - t, vs))
                                k0 = T.meta_var(w * kv_tile)
                                K_tile = T.sblock_alloc_buffer((kv_tile, D), ELEMENTS)
                                V_tile = T.sblock_alloc_buffer((kv_tile, DV), ELEMENTS)
                                S = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                                P = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                                P_masked = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                                dP = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                                dS = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                                sums_new = T.sblock_alloc_buffer((q_tile, kv_tile), "float32")
                                load(K_tile, "K_load", "jc", lambda j: k0 + j < m,
                                     lambda j, c: K[part.entry, part.first_key + k0 + j, g, c])
                                load(V_tile, "V_load", "jc", lambda j: k0 + j < m,
                                     lambda j, c: V[part.entry, part.first_key + k0 + j, g, c])
                                place = T.meta_var(lambda i, j: (e, head, q0 + i, k0 + j, n, m))
                                with T.sblock("qk"):
                                    product(S, "S", "ijc", D, lambda i, c: Q_tile[i, c], lambda j, c: K_tile[j, c])
                                with T.sblock("softmax"):
                                    probabilities(P, P_masked, S, LSE_tile, scale, given, tirx.const(False, "bool"), place)
                                with T.sblock("dov"):
                                    product(dP, "dP", "ijc", DV, lambda i, c: dO_tile[i, c], lambda j, c: V_tile[j, c])
                                with T.sblock("gradient"):
                                    each(dS, "dS", "ij", lambda i, j: given.through_operand(
                                        name, P_masked[i, j] * (dP[i, j] - delta_tile[i]), P_masked[i, j], S[i, j], scale, *place(i, j)))
                                    each(sums_new, "sum_new", "ij", lambda i, j: sums[i, j] + dS[i, j])
                                with T.sblock("back"):
                                    each(sums, "sum", "ij", lambda i, j: sums_new[i, j])
                with T.sblock("fold"):
                    each(tile, "tile", "ij", lambda i, j: sums[i, j])
                    sum_of(by_key, "by_key", "ji", q_tile, lambda j, i: tile[i, j])
                    sum_of(by_query, "by_query", "ij", kv_tile, lambda i, j: tile[i, j])
                    sum_of(total, "total", "oj", kv_tile, lambda _, j: by_key[j])
                with T.sblock("finish"), block("dX", "ij", (q_tile if "N" in axes else 1, kv_tile if "M" in axes else 1)) as (i, j):
                    store(dX, vp, {"B": vb, "H": vh, "N": vr * q_tile + i, "M": vs * kv_tile + j}, tirx.Select(
                        whole("N"), tirx.Select(whole("M"), total[0], by_key[j]), tirx.Select(whole("M"), by_query[i], tile[i, j])))

    return given.of(d_operand)


def sum_of(out, name, axes, terms, value):
    """Sums: out[place] = the sum over terms of value(place, term)."""
    with block(name, axes, (*out.shape, terms), "SR") as (place, term):
        with T.init():
            T.buffer_store(out, T.float32(0), [place])
        T.buffer_store(out, out[place] + value(place, term), [place])


def attention_fold_parts(workload, name):
    """PrimFunc (sums [parts, X] float32, dX [X]) -> None: dX = the sum over the parts, in their order, of all X elements of an operand, in
    its element type."""
    dtype = dtype_of(workload, name)

    @script.prim_func(s_tir=True)
    def fold_parts(s: T.handle, d_x: T.handle):
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        parts, X = T.int32(), T.int32()
        sums = T.match_buffer(s, (parts, X), "float32", align=4)
        dX = T.match_buffer(d_x, (X,), dtype, align=2)
        total = T.sblock_alloc_buffer((X,), "float32")
        for x, p in T.grid(X, parts):
            with T.sblock("total"):
                vx, vp = T.axis.remap("SR", [x, p])
                with T.init():
                    total[vx] = T.float32(0)
                total[vx] += sums[vp, vx]
        for x in T.serial(X):
            with T.sblock("dX"):
                vx = T.axis.spatial(X, x)
                dX[vx] = T.cast(total[vx], dtype)

    return fold_parts


def attention_d_sink(workload):
    """PrimFunc (LSE [B, H, N], delta [B, H, N], dSink [1, H or 1] float32, scale, ...) -> None: the gradient of the sink.

    Each of LANES sums every LANES-th row of a head, and these are added up. Of packed sequences, rows behind the last add nothing.
    """
    given = Parameters(workload)
    sink = given.operands[SINK.name]

    @script.prim_func(s_tir=True, check_well_formed=False)
    def d_sink(lse: T.handle, d: T.handle, d_s: T.handle, scale: T.float32):
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        B, N, H = T.int32(), T.int32(), T.int32()
        LSE = T.match_buffer(lse, (B, H, N), "float32", align=4)
        delta = T.match_buffer(d, (B, H, N), "float32", align=4)
        dSink = T.match_buffer(d_s, (1, sink.shape[0]), "float32", align=4)
        rows = T.meta_var(given.tables[0][given.tables[0].shape[0] - 1] if workload.lengths == "packed" else N)
        for s in T.serial(sink.shape[0]):
            with T.sblock("head"):
                vs = T.axis.spatial(sink.shape[0], s)
                part = T.sblock_alloc_buffer((LANES,), "float32")
                total = T.sblock_alloc_buffer((1,), "float32")
                heads = T.meta_var(T.Select(sink.shape[0] == 1, H, 1))
                # At least one turn of each loop: TVM never initialises a sum over an empty axis.
                for lane, e, b, i in T.grid(LANES, T.max(heads, 1), T.max(B, 1), T.max(tiles_of(N, LANES), 1)):
                    with T.sblock("part"):
                        vl, ve, vb, vi = T.axis.remap("SRRR", [lane, e, b, i])
                        row, head = T.meta_var((vi * LANES + vl, vs + ve))
                        with T.init():
                            part[vl] = T.float32(0)
                        part[vl] += T.if_then_else(T.And(T.And(vb < B, head < H), row < rows), of_row(
                            sink[vs], LSE[vb, head, row], delta[vb, head, row]), T.float32(0))
                sum_of(total, "total", "ol", LANES, lambda _, lane: part[lane])
                with T.sblock("dSink"):
                    dSink[0, vs] = total[0]

    return given.of(d_sink)


def of_row(sink, lse, delta):
    """What a row adds to the gradient of its head's sink; nothing where neither sink nor keys have a share."""
    share = T.exp2((sink - lse) * T.float32(LOG2_E))
    return T.if_then_else(lse > -T.infinity("float32"), T.float32(0) - share * delta, T.float32(0))
