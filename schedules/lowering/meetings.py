"""Barriers in two parts: the threads of a block say that they have come so far, go on, and wait for each other later.

A warp that is ahead then computes while another one catches up, where at a barrier of one part both start again from nothing. One mbarrier
serves a kernel whose arrivals and waits alternate (PTX ISA, "mbarrier"; sm_80 and later); its phases are counted by a variable.
"""
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

#: Bytes of the mbarrier, in static shared memory.
BYTES = 8
_PLACE = """\
__device__ __forceinline__ unsigned flashtir_meeting() {
  __shared__ unsigned long long barrier;
  return (unsigned)__cvta_generic_to_shared(&barrier);
}
"""
_SOURCES = {
    "flashtir_open_meetings": """\
__device__ __forceinline__ void flashtir_open_meetings(unsigned barrier, int warps) {
  if (threadIdx.x + threadIdx.y == 0) asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(warps) : "memory");
  __syncthreads();
}
""",
    "flashtir_arrive": """\
__device__ __forceinline__ void flashtir_arrive(unsigned barrier) {
  __syncwarp();
  asm volatile("{.reg .pred p; .reg .b64 s; setp.eq.s32 p, %1, 0; @p mbarrier.arrive.shared.b64 s, [%0];}"
               :: "r"(barrier), "r"(threadIdx.x) : "memory");
}
""",
    "flashtir_meet": """\
__device__ __forceinline__ void flashtir_meet(unsigned barrier, int phase) {
  unsigned met;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
#else
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
#endif
                 : "=r"(met) : "r"(barrier), "r"(phase) : "memory");
  } while (!met);
}
""",
}
_ZERO, _ONE = tirx.IntImm("int32", 0), tirx.IntImm("int32", 1)


def _call(name, *arguments):
    place = T.cuda.func_call("flashtir_meeting", source_code=_PLACE, return_type="uint32")
    return tirx.Evaluate(T.cuda.func_call(name, place, *arguments, source_code=_SOURCES[name]))


class Meetings:
    """The meetings of one kernel."""

    def __init__(self):
        self.phase, self.used = tirx.decl_buffer((1,), "int32", "phase", scope="local"), False

    def arrive(self):
        """Statement by which a thread says that it has come so far."""
        self.used = True
        return _call("flashtir_arrive")

    def meet(self):
        """Statement behind which all threads have arrived."""
        phase = tirx.BufferLoad(self.phase, [_ZERO])
        return tirx.SeqStmt([_call("flashtir_meet", phase), tirx.BufferStore(self.phase, tirx.bitwise_xor(phase, _ONE), [_ZERO])])

    def opened(self, body):
        """The body of a function, with the barrier in order before anything else."""
        launches = []
        tvm_ffi.structural_walk(
            body, (tirx.AttrStmt, lambda it: launches.append(it) if it.attr_key == "thread_extent" else None), order="pre")
        warps = next(it.value for it in launches if str(it.node.thread_tag) == "threadIdx.y")

        def within(mark):
            if not (mark.attr_key == "thread_extent" and mark.node.same_as(launches[-1].node)):
                return mark
            first = [tirx.AllocBuffer(self.phase), tirx.BufferStore(self.phase, _ZERO, [_ZERO]), _call("flashtir_open_meetings", warps)]
            return tirx.AttrStmt(mark.node, mark.attr_key, mark.value, tirx.SeqStmt([*first, mark.body]))
        return tvm_ffi.structural_map(body, (tirx.AttrStmt, within))
