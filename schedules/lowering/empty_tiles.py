"""Tiles of queries that lie past the end of their sequence: a grid over packed sequences has as many for each as for the longest."""
import itertools

import tvm_ffi
from tvm import tirx
from tvm.s_tir import stmt as s_stmt

from schedules.lowering.rewrite import function_pass, is_extern
from te_defs.lengths import FIRST_ROW

EXISTS = "flashtir_tile_exists"


@function_pass("flashtir.MarkEmptyTiles")
def mark_empty_tiles(func):
    """Put a mark in front of what block `attn` does for a tile of packed sequences: a call with the condition that the tile has rows."""
    def mark(block):
        if block.name_hint != "attn" or not isinstance(block.body, tirx.SeqStmt):
            return block
        binds = list(itertools.takewhile(lambda stmt: isinstance(stmt, tirx.Bind), block.body.seq))
        bound = {stmt.var.name: stmt.var for stmt in binds}
        if FIRST_ROW not in bound:
            return block
        call = tirx.Evaluate(tirx.call_extern("int32", EXISTS, bound[FIRST_ROW] < bound["queries"]))
        body = tirx.SeqStmt([*binds, call, *block.body.seq[len(binds):]])
        return s_stmt.SBlock(block.iter_vars, block.reads, block.writes, block.name_hint, body, block.init, block.alloc_buffers,
                             block.match_buffers, block.annotations)

    return func.with_body(tvm_ffi.structural_map(func.body, (s_stmt.SBlock, mark)))


@function_pass("flashtir.SkipEmptyTiles")
def skip_empty_tiles(func):
    """Do what stands behind the mark only where its condition holds. All threads of a block agree, so barriers may stand there; TVM's pass
    that places them refuses any condition, so this comes behind it."""
    def skip(seq):
        at = next((n for n, stmt in enumerate(seq.seq) if isinstance(stmt, tirx.Evaluate) and is_extern(stmt.value, EXISTS)), None)
        if at is None:
            return seq
        rest = tirx.IfThenElse(seq.seq[at].value.args[1], tirx.SeqStmt(seq.seq[at + 1:]), None)
        return tirx.SeqStmt([*seq.seq[:at], rest]) if at else rest

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.SeqStmt, skip)))
