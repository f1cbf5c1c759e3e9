"""Hardware facts as rows of data. A stage chooses by capacity, never by a chip's name."""
from dataclasses import dataclass, field

from tvm.target import Target


class ArchError(ValueError):
    """A target that is not known or not supported."""


@dataclass(frozen=True)
class Peak:
    """What a chip's units can do at most.

    tensor_tflops   dense float16 or bfloat16 matrix products with float32 sums, all multiprocessors at boost_ghz
    boost_ghz       the clock that this figure is for
    sms             multiprocessors of the chip
    exp2_per_clock  base-2 exponentials a clock and multiprocessor
    fma_per_clock   float32 multiply-adds a clock and multiprocessor, without tensor cores
    memory_tbytes   10^12 bytes a second between the chip and its memory
    """

    tensor_tflops: float
    boost_ghz: float
    sms: int
    exp2_per_clock: int
    fma_per_clock: int
    memory_tbytes: float

    def exp_bound_tflops(self, head_dim, value_dim):
        """Speed of attention that spends the exponentials (one a score) and the matrix products one after the other, both at peak."""
        operations = 2 * (head_dim + value_dim)
        exp2_per_picosecond = self.exp2_per_clock * self.sms * self.boost_ghz / 1e3
        return operations / (operations / self.tensor_tflops + 1 / exp2_per_picosecond)


@dataclass(frozen=True)
class CudaArch:
    """One CUDA compute capability.

    name                  as nvcc spells it: sm_80; sm_90a and its like add instructions that only this chip has
    smem_bytes            most shared memory that one block can opt in to; TVM's target tags and the driver's default say 48 KiB
    smem_per_sm_bytes     shared memory of a multiprocessor, which its resident blocks share (each block also pays 1 KiB)
    mma                   whether it has mma.sync m16n8k16 for 16-bit inputs, ldmatrix and cp.async
    mma_tile              {most channels: (q_tile, kv_tile, warps) of the seed plan}, for mma
    wgmma_seed            {(head dimension, mask): fields of the seed plan}, for wgmma with TMA and setmaxnreg; empty where it has none
    wgmma_lengths         likewise {...: ((fewest queries, fields that differ), ...)}, longest first: plans by length of the sequence, where
                          the seed is not the best for all
    peak                  what the fastest chip of this capability can do; None where it is not written down
    """

    name: str
    smem_bytes: int
    smem_per_sm_bytes: int
    mma: bool
    mma_tile: dict = field(default_factory=dict, hash=False)
    wgmma_seed: dict = field(default_factory=dict, hash=False)
    wgmma_lengths: dict = field(default_factory=dict, hash=False)
    kind: str = "cuda"
    threads_per_block: int = 1024
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    warp_lanes: int = 32
    peak: Peak | None = None

    def __post_init__(self):
        if self.mma and not self.mma_tile:
            raise ArchError(f"{self.name} has mma and must name the tiles of its seed plans in mma_tile, found none: copy a nearby row's")

    @property
    def capability(self):
        """Compute capability (major, minor) that it is named for."""
        number = self.name.removeprefix("sm_").removesuffix("a")
        return int(number[:-1]), int(number[-1])

    @property
    def exact(self):
        """Whether its device code runs on that compute capability alone: instructions that only one chip has."""
        return self.name.endswith("a")

    def serves(self, capability):
        """Whether its device code runs on a GPU of a compute capability (major, minor): on its own and, unless exact, on later minors."""
        major, minor = self.capability
        return capability == (major, minor) if self.exact else capability[0] == major and capability[1] >= minor

    def target(self):
        """TVM target with the true limits; TVM itself would refuse blocks above the 48 KiB of its tags."""
        return Target({"kind": "cuda", "arch": self.name, "max_threads_per_block": self.threads_per_block,
                       "max_shared_memory_per_block": self.smem_bytes, "thread_warp_size": self.warp_lanes}, host="llvm")


@dataclass(frozen=True)
class Gpu:
    """What sets GPUs of one compute capability apart.

    arch           name of their row in CUDA_ARCHS
    sms            multiprocessors
    memory_gbytes  10^9 bytes a second between the chip and its memory; None where it is not known
    """

    arch: str
    sms: int
    memory_gbytes: int | None = None


@dataclass(frozen=True)
class CpuArch:
    """An x86-64 or other llvm machine: name is LLVM's CPU name, vector_bits the widest registers, cache sizes are per core, machine is the
    instruction set as the system calls it."""

    name: str
    vector_bits: int
    vector_registers: int
    l1_bytes: int
    l2_bytes: int
    cores: int
    kind: str = "cpu"
    machine: str = "x86_64"

    def target(self):
        return Target({"kind": "llvm", "mcpu": self.name, "num-cores": self.cores})


_KIB = 1024
#: Seed tiles from the peers' published choices (FlashAttention-2 and -3, tile-size tables): d -> (q_tile, kv_tile, warps).
_AMPERE_TILES = {32: (128, 128, 4), 64: (128, 112, 4), 128: (128, 64, 4), 192: (128, 64, 8), 256: (128, 32, 8)}
_ADA_TILES = {32: (128, 128, 4), 64: (128, 96, 4), 128: (128, 32, 4), 192: (64, 32, 4), 256: (64, 32, 4)}
_HOPPER_TILES = {32: (128, 128, 4), 64: (128, 96, 4), 128: (128, 64, 4), 192: (128, 64, 8), 256: (128, 64, 8)}

#: Fields of wgmma's seed plans by head dimension and mask: tiles after FlashAttention-3's table, the rest by measurement on an H200.
_WGMMA_SEEDS = {
    (64, "full"): dict(q_tile=192, kv_tile=128, query_stages=2, ping_pong=0, loader_registers=32),
    (64, "causal"): dict(q_tile=192, kv_tile=128, shared_decode=1, stages=3, query_stages=2, late_wait=0, loader_registers=32),
    (64, "window"): dict(q_tile=128, kv_tile=128, shared_decode=1, stages=3, query_stages=2, ping_pong=0),
    (96, "full"): dict(q_tile=192, kv_tile=96, shared_decode=1, stages=3, query_stages=2, loader_registers=32),
    (96, "causal"): dict(q_tile=192, kv_tile=96, shared_decode=1, stages=3, query_stages=2, late_wait=0, loader_registers=32),
    (128, "full"): dict(q_tile=128, kv_tile=128, query_stages=2),
    (128, "causal"): dict(q_tile=128, kv_tile=128, shared_decode=1, query_stages=2),
    (128, "window"): dict(q_tile=128, kv_tile=128, shared_decode=1, query_stages=2, ping_pong=0),
    (192, "full"): dict(q_tile=128, kv_tile=128, shared_decode=1),
    (192, "causal"): dict(q_tile=128, kv_tile=128, ping_pong=0),
    (192, "window"): dict(q_tile=128, kv_tile=128, ping_pong=0),
    (256, "full"): dict(q_tile=128, kv_tile=80, shared_decode=1, ping_pong=0, late_wait=0),
    (256, "causal"): dict(q_tile=128, kv_tile=64),
}
#: Rows of 192 are an eighth more than there are at n 512 and 1024, where tiles of 128 are up to 20 % faster; from 1536 on they are slower.
#: Very long sequences have so few prologues that it pays to hand tiles out by the hardware, to whichever multiprocessor is free.
_BY_HARDWARE = dict(blocks=0, shared_decode=0, query_stages=1)
_WGMMA_LENGTHS = {
    (64, "full"): ((1025, {}), (0, dict(shared_decode=1, stages=4, ping_pong=1))),
    (64, "causal"): ((1025, {}), (0, dict(q_tile=128, ping_pong=0, late_wait=1, loader_registers=24))),
    (96, "full"): ((1025, {}), (0, dict(q_tile=128, kv_tile=128, loader_registers=24))),
    (96, "causal"): ((1025, {}), (0, dict(q_tile=128, kv_tile=128, late_wait=1, loader_registers=24))),
    (128, "full"): ((12289, {**_BY_HARDWARE, "kv_tile": 160}), (1025, {}), (0, dict(shared_decode=1, ping_pong=0))),
    (128, "causal"): ((12289, {**_BY_HARDWARE, "ping_pong": 0}), (1025, {}), (0, {})),
    (192, "full"): ((6145, _BY_HARDWARE), (1025, {}), (0, {})),
    (192, "causal"): ((12289, _BY_HARDWARE), (1025, {}), (0, {})),
}

#: NVIDIA's data sheets of the H100 and H200 (SXM), memory that of the H200; exponentials and multiply-adds from the CUDA programming
#: guide, table of arithmetic throughput.
_HOPPER_PEAK = Peak(tensor_tflops=989, boost_ghz=1.83, sms=132, exp2_per_clock=16, fma_per_clock=128, memory_tbytes=4.8)

#: Shared memory from the CUDA programming guide, table "technical specifications per compute capability".
CUDA_ARCHS = {arch.name: arch for arch in (
    CudaArch("sm_75", 64 * _KIB, 64 * _KIB, mma=False),
    CudaArch("sm_80", 163 * _KIB, 164 * _KIB, mma=True, mma_tile=_AMPERE_TILES),
    CudaArch("sm_86", 99 * _KIB, 100 * _KIB, mma=True, mma_tile=_ADA_TILES),
    CudaArch("sm_87", 163 * _KIB, 164 * _KIB, mma=True, mma_tile=_AMPERE_TILES),
    CudaArch("sm_89", 99 * _KIB, 100 * _KIB, mma=True, mma_tile=_ADA_TILES),
    CudaArch("sm_90", 227 * _KIB, 228 * _KIB, mma=True, mma_tile=_HOPPER_TILES),
    CudaArch("sm_90a", 227 * _KIB, 228 * _KIB, mma=True, mma_tile=_HOPPER_TILES, wgmma_seed=_WGMMA_SEEDS, wgmma_lengths=_WGMMA_LENGTHS,
             peak=_HOPPER_PEAK),
    CudaArch("sm_100a", 227 * _KIB, 228 * _KIB, mma=True, mma_tile=_HOPPER_TILES),
    CudaArch("sm_120", 99 * _KIB, 100 * _KIB, mma=True, mma_tile=_ADA_TILES),
)}

#: Compute capability (major, minor) that the driver reports -> row. Chips with instructions of their own take the `a` spelling.
_BY_CAPABILITY = {(7, 5): "sm_75", (8, 0): "sm_80", (8, 6): "sm_86", (8, 7): "sm_87", (8, 9): "sm_89", (9, 0): "sm_90a",
                  (10, 0): "sm_100a", (12, 0): "sm_120"}

#: GPUs as their folders of tuning logs are called, after the driver's name; from NVIDIA's data sheets and architecture white papers.
GPUS = {
    "tesla-t4": Gpu("sm_75", 40, 320),
    "nvidia-a100-sxm4-40gb": Gpu("sm_80", 108, 1555),
    "nvidia-a100-sxm4-80gb": Gpu("sm_80", 108, 2039),
    "nvidia-a100-80gb-pcie": Gpu("sm_80", 108, 1935),
    "nvidia-a30": Gpu("sm_80", 56, 933),
    "nvidia-a10": Gpu("sm_86", 72, 600),
    "nvidia-a40": Gpu("sm_86", 84, 696),
    "nvidia-rtx-a6000": Gpu("sm_86", 84, 768),
    "nvidia-geforce-rtx-3090": Gpu("sm_86", 82, 936),
    "nvidia-l4": Gpu("sm_89", 58, 300),
    "nvidia-l40": Gpu("sm_89", 142, 864),
    "nvidia-l40s": Gpu("sm_89", 142, 864),
    "nvidia-rtx-6000-ada-generation": Gpu("sm_89", 142, 960),
    "nvidia-geforce-rtx-4090": Gpu("sm_89", 128, 1008),
    "nvidia-h100-80gb-hbm3": Gpu("sm_90a", 132, 3350),
    "nvidia-h100-pcie": Gpu("sm_90a", 114, 2000),
    "nvidia-h200": Gpu("sm_90a", 132, 4800),
    "nvidia-geforce-rtx-5090": Gpu("sm_120", 170, 1792),
}


def gpu_named(slug, arch, sms=None):
    """Row of the GPU whose folder of tuning logs is called so, or one of what its driver tells, its row in CUDA_ARCHS and multiprocessors;
    None where neither is known."""
    return GPUS.get(slug) or (None if sms is None else Gpu(arch, sms))


def cuda_arch(name):
    """Row of a CUDA architecture such as sm_80; ArchError where none is known."""
    if name not in CUDA_ARCHS:
        raise ArchError(f"a CUDA target is one of {', '.join(CUDA_ARCHS)}, found {name!r}: choose one of these")
    return CUDA_ARCHS[name]


def arch_of_capability(major, minor):
    """Row of a GPU by the compute capability that its driver reports; ArchError where it is too old or unknown."""
    if (major, minor) < (7, 5):
        raise ArchError(f"compute capability 7.5 or later is needed, found {major}.{minor}: use a newer GPU or --target cpu")
    if (major, minor) not in _BY_CAPABILITY:
        raise ArchError(f"compute capability {major}.{minor} has no row in schedules/arch.py: add one or name a --target")
    return CUDA_ARCHS[_BY_CAPABILITY[major, minor]]


def cpu_arch(name, vector_bits, cores, l1_bytes=32 * _KIB, l2_bytes=1024 * _KIB, machine="x86_64"):
    """Row of the CPU that the caller found: LLVM's name for it, vector width in bits, cores to use, cache sizes per core, what the system
    calls its instruction set."""
    return CpuArch(name, vector_bits, 32 if vector_bits >= 512 else 16, l1_bytes, l2_bytes, cores, machine=machine)
