"""split-KV, or flash-decoding: the keys of one query tile shared among workers, from the same Tensor Expression as simt_te.

With one query row there is one query tile, and a schedule that gives each tile to one worker leaves the machine idle. But the operator
that merges partial softmax results is associative, so the keys can be cut into chunks that are worked on side by side, and the chunks'
results merged at the end. In the schedule that is one primitive, `rfactor`, on the reduction over key tiles.

The finished nest::

    b h r chunk  parallel                          as many chunks as the keys fill
      Q_load
      for t in the chunk's key tiles
        K_load V_load S S_masked tile_max P tile_sum O_tile
        state_rf                                   merge the tile into the chunk's (row_max, row_sum, O)
    state                                          merge the chunks
    O LSE

Runs on llvm; no thread is bound here.
"""
import ctypes
import functools
from dataclasses import dataclass

import tvm
import tvm_ffi

from schedules.plan import Plan
from schedules.stages import loops_of
from te_defs.online import empty, merge, online_attention

TILE_BLOCKS = ("O_tile", "tile_sum", "P", "tile_max", "S_masked", "S", "V_load", "K_load")


@dataclass(frozen=True)
class SplitKvPlan(Plan):
    """Knobs of split-KV.

    chunk_tiles  key tiles that one worker passes over
    """

    chunk_tiles: int


#: For decoding: few query rows, chunks of 512 keys.
DEFAULT = SplitKvPlan(8, 64, 8)


@functools.cache
def register_merge():
    """Tell TVM that `merge` is a reduction operator with identity `empty`: rfactor takes only those that it knows.

    TVM's registry outlives the Python interpreter, and would release the two functions when there is none left to ask; so each gets a
    reference that is never given back.
    """
    ffi = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
    ffi.TVMFFIObjectIncRef.argtypes = [ctypes.c_void_p]
    functions = tvm_ffi.convert(lambda a, b: list(merge(a, b))), tvm_ffi.convert(lambda values: list(empty(len(values) - 2)))
    for function in functions:
        ffi.TVMFFIObjectIncRef(function.__chandle__())
    tvm.get_global_func("s_tir.schedule.RegisterReducer")(3, *functions)


def declare(workload, plan, negative_scale=False):
    """The Tensor Expression at the plan's tiles; it takes scales of either sign."""
    return online_attention(workload, plan.q_tile, plan.kv_tile)


def split_keys(sch, plan):
    """Cut the reduction over key tiles into chunks, each with a partial result of its own, and a reduction over the chunks.

    Loop nest::

        b in ...
          h in ...
            i in ...
              e in 64
                t_0 in ...
                  t_1 in 8
                    state_rf  [..., ..., ..., 64, ...]
        b in ...
          h in ...
            i in ...
              e in 64
                t_0 in ...
                  state  [..., ..., ..., 64]
    """
    register_merge()
    chunk, _ = sch.split(loops_of(sch, "state")[-1], factors=[None, plan.chunk_tiles])
    sch.rfactor(chunk, 4)


def stream_chunk(sch, plan):
    """Bring the key tiles of a chunk above the rows of a query tile and compute everything of a key tile there, as in simt_te.

    Loop nest::

        b in ...
          h in ...
            i_0 in ...
              t_0 in ...
                ax0 in 8
                  ax1 in 64
                    Q_load  [..., ..., ..., 64]
                t_1 in 8
                  ...
                  ax0 in 8
                    ax1 in 64
                      ax2 in 64
                        S  [..., ..., ..., ..., 64]
                  ...
                  i_1 in 8
                    e in 64
                      state_rf  [..., ..., ..., 64, ...]
    """
    b, h, i, e, chunk, t = loops_of(sch, "state_rf")
    r, i = sch.split(i, factors=[None, plan.q_tile])
    sch.reorder(b, h, r, chunk, t, i, e)
    for block in TILE_BLOCKS:
        sch.compute_at(block, t)
    sch.compute_at("Q_load", chunk)


def share_chunks(sch, plan):
    """Hand out query tiles and chunks together: a single query row now has as many workers as it has chunks.

    Loop nest::

        b_h_i_0_t_0_fused in ...  parallel
          ax0 in 8
            ax1 in 64
              Q_load  [..., ..., ..., 64]
          t_1 in 8
            ...
            i_1 in 8
              e in 64
                state_rf  [..., ..., ..., 64, ...]
        b in ...
          h in ...
            i in ...
              e in 64
                t_0 in ...
                  state  [..., ..., ..., 64]
    """
    sch.parallel(sch.fuse(*loops_of(sch, "state_rf")[:4]))


STAGES = (split_keys, stream_chunk, share_chunks)
