"""What the functions of the backward pass take behind the scale, and what they read from it: masks, scores, lengths."""
from dataclasses import replace

from tvm import tirx
from tvm.script import tirx as T

from te_defs.arguments import parameter
from te_defs.flash_attention import LOG2_E
from te_defs.integers import minimum, tiles_of
from te_defs.lengths import LENGTHS


class Parameters:
    """What functions of the backward pass take behind the scale, and what they read from it."""

    def __init__(self, workload):
        arguments = [parameter(argument, workload.dtype) for argument in workload.arguments]
        self.mask, self.score, _ = workload.modifiers(arguments)
        self.lengths = LENGTHS[workload.lengths]
        self.tables = [tirx.decl_buffer((tirx.Var("numbers", "int32"),), "int32", name=name) for name in self.lengths.tensors]
        self.longest = [tirx.Var(name, "int32") for name in self.lengths.backward_integers]
        self.all = [*arguments, *self.tables, *self.longest]
        self.operands = {argument.name: value for argument, value in zip(workload.arguments, arguments) if argument.kind.axes}

    def of(self, func):
        """The function with these parameters behind its own."""
        return tirx.PrimFunc([*func.params, *self.all], func.body, func.ret_type, func.attrs)

    def touched(self, *tensors):
        """Regions of whole tensors: TVM would name what is touched by variables that are bound inside the block."""
        return [tensor[tuple(slice(0, size) for size in tensor.shape)] for tensor in tensors]

    def sizes(self, B, N, M):
        """(batch entries, most queries of one, most keys of one)."""
        return (self.tables[0].shape[0] - 1, *self.longest) if self.longest else (B, N, M)

    def part(self, b, N, M):
        """Rows of batch entry b; what a table says of them is read once."""
        part = self.lengths.part(b, N, M, *self.tables)
        return replace(part, **{name: value if any(value is known for known in (b, 0, N, M))
                                else T.bind(value, var=tirx.Var(name, "int32")) for name, value in vars(part).items()})

    def query_tiles(self, k0, q_tile, kv_tile, n, m, hides_end=False):
        """(first, number, whole) of the query tiles that see a key of the tile from k0 on, at least one, as pipelines can tell;
        whole(t) says whether all rows of the tile in turn t see all keys. Rows and keys past the end may see anything; such keys are hidden
        from all rows where `hides_end`, and the first tile then holds rows where there are any."""
        mask, last = self.mask, minimum(k0 + kv_tile, m) - 1
        first = mask.query_begin(k0, n, m) // q_tile
        if hides_end and self.tables:  # keys past the end visit the last tile alone: those that visit one are neighbours then
            first = first + tirx.Cast("int32", k0 >= m) * tiles_of(n, q_tile)
        if hides_end and not isinstance(first, int):  # who adds to a tile wants one that exists, though nothing may be seen there
            first = T.min(first, T.max(tiles_of(n, q_tile) - 1, 0))
        turns = tiles_of(mask.query_end(last, n, m), q_tile) - first
        turns = T.max(tirx.Select(k0 < m, turns, 0) if self.tables and not hides_end else turns, 1)

        def whole(t):
            if not mask.knows_queries:
                begin, end = (mask.position((first + t) * q_tile + row, n, m) for row in (0, q_tile - 1))
                return tirx.And(mask.key_begin(end, m) <= k0, (k0 + kv_tile - 1 if hides_end else last) < mask.key_end(begin, m))
            below = t >= tiles_of(mask.query_begin(last, n, m), q_tile) - first
            if hides_end:  # not as a choice, for which a compiler would branch
                below = tirx.And(below, t >= T.min(T.max(k0 + kv_tile - m, 0), 1) * turns)
            if mask.from_start:  # then every key is seen up to the last query
                return below
            end = mask.query_end(k0, n, m)
            return tirx.And(below, t < tirx.Select(end < n, end // q_tile, tiles_of(n, q_tile)) - first)
        return first, turns, whole

    def key_tiles(self, q0, q_tile, kv_tile, n, m):
        """(tiles, number, whole) of the key tiles that a row of the tile from q0 on sees: they run down from `tiles` - 1. As above, but
        that keys past the end are seen by no row."""
        i0 = self.mask.position(q0, n, m)
        tiles = T.max(tiles_of(self.mask.key_end(i0 + (q_tile - 1), m), kv_tile), 1)
        turns = tiles if self.mask.from_start else T.max(tiles - self.mask.key_begin(i0, m) // kv_tile, 1)

        def whole(t):
            below = t >= tiles - self.mask.key_end(i0, m) // kv_tile
            if self.mask.from_start:
                return below
            return tirx.And(below, t < tiles - tiles_of(self.mask.key_begin(i0 + (q_tile - 1), m), kv_tile))
        return tiles, turns, whole

    def sees(self, b, h, i, j, n, m):
        """Whether the mask shows key j to query row i of n, where m keys are."""
        return self.mask.at(b).keep(self.mask.position(i, n, m), j, m)

    def probability(self, s, lse, scale, *place):
        """exp(S - LSE) of a product s and the LSE in base 2. Of rows that do not count it is 0 whatever their modified score may be: where
        there are no queries at all it may come from an operand that is empty."""
        if self.score is None:
            return T.exp2(s * (scale * T.float32(LOG2_E)) - lse)
        p = T.exp2(self.score.modify(s * scale, *place) * T.float32(LOG2_E) - lse)
        return T.if_then_else(lse < T.infinity("float32"), p, T.float32(0))

    def through_score(self, ds, p, s, scale, *place):
        """The gradient of a scaled product, from that of the modified score; where P is 0, slopes may be anything."""
        if self.score is None:
            return ds
        return T.if_then_else(p > T.float32(0), ds * self.score.derivative(s * scale, *place), T.float32(0))

    def through_operand(self, name, ds, p, s, scale, *place):
        """Likewise the gradient of the element that the modification reads of an operand."""
        return T.if_then_else(p > T.float32(0), ds * self.score.slope_of(name, s * scale, *place), T.float32(0))
