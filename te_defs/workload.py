"""The attention problem: what is fixed when a kernel is built (Workload) and what arrives with each call (Shape)."""
import re
from dataclasses import dataclass

from te_defs.lengths import LENGTHS
from te_defs.masks import MASKS

DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
_LONG_DTYPE = {short: dtype for dtype, short in DTYPES.items()}
_NAME = re.compile(r"fwd_d(\d{1,4})_dv(\d{1,4})_(f16|bf16|f32)_([a-z_]+?)(_keys|_packed)?")


class WorkloadError(ValueError):
    """A workload that cannot be declared, or a name that does not describe one."""


@dataclass(frozen=True)
class Workload:
    """One kernel's problem: head dimensions, element type and mask. Batch, heads, lengths and scale are run-time values.

    head_dim   channels D of a query and a key, 8 to 256 in steps of 8
    value_dim  channels DV of a value and of the output, likewise
    dtype      element type of Q, K, V and O: float16, bfloat16 or float32; sums are float32 in every case
    mask       name of a class in te_defs.masks, such as "full" or "causal"; its arguments arrive with each call
    lengths    name of a class in te_defs.lengths: whose lengths batch entries have
    """

    head_dim: int
    value_dim: int
    dtype: str = "float16"
    mask: str = "full"
    lengths: str = "uniform"

    def __post_init__(self):
        for name, size in (("head_dim", self.head_dim), ("value_dim", self.value_dim)):
            if not (isinstance(size, int) and 8 <= size <= 256 and size % 8 == 0):
                raise WorkloadError(f"{name} must be a multiple of 8 from 8 to 256, found {size!r}: choose such a dimension")
        if self.dtype not in DTYPES:
            raise WorkloadError(f"dtype must be one of {', '.join(DTYPES)}, found {self.dtype!r}: choose one of these")
        if self.mask not in MASKS:
            raise WorkloadError(f"mask must be one of {', '.join(MASKS)}, found {self.mask!r}: choose one of these")
        if self.lengths not in LENGTHS:
            raise WorkloadError(f"lengths must be one of {', '.join(LENGTHS)}, found {self.lengths!r}: choose one of these")

    @property
    def name(self):
        """The name that `parse` reads back; it is also the folder of the workload's tuning log."""
        suffix = "" if self.lengths == "uniform" else f"_{self.lengths}"
        return f"fwd_d{self.head_dim}_dv{self.value_dim}_{DTYPES[self.dtype]}_{self.mask}{suffix}"

    @classmethod
    def parse(cls, name):
        """Workload of a name such as fwd_d128_dv128_f16_causal; WorkloadError where the name has another form."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise WorkloadError(f"a workload is named like fwd_d128_dv128_f16_causal, found {name!r}: correct the name")
        head_dim, value_dim, dtype, mask, suffix = found.groups()
        return cls(int(head_dim), int(value_dim), _LONG_DTYPE[dtype], mask, suffix[1:] if suffix else "uniform")


@dataclass(frozen=True)
class Shape:
    """The run-time numbers of one call: Q [batch, q_len, q_heads, D], K and V [batch, kv_len, kv_heads, D or DV], the mask's arguments."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    mask: tuple = ()

    def __post_init__(self):
        if min(self.batch, self.q_heads, self.kv_heads, self.q_len, self.kv_len, *self.mask) < 0:
            raise WorkloadError(f"sizes must not be negative, found {self}: correct the shape")
        if self.q_heads and (self.kv_heads == 0 or self.q_heads % self.kv_heads):
            raise WorkloadError(f"query heads must be a multiple of key heads, found {self.q_heads} and {self.kv_heads}: correct the shape")

    def tensors(self, workload):
        """Shapes of Q, K, V, O and LSE, in the order of the exported call."""
        b, h, g, n, m = self.batch, self.q_heads, self.kv_heads, self.q_len, self.kv_len
        d, dv = workload.head_dim, workload.value_dim
        return (b, n, h, d), (b, m, g, d), (b, m, g, dv), (b, n, h, dv), (b, h, n)


def flops(workload, shape):
    """Floating-point operations of the two products over the scores that the mask keeps, two per multiply-add."""
    kept = MASKS[workload.mask](*shape.mask).kept(shape.q_len, shape.kv_len)
    return 2 * shape.batch * shape.q_heads * kept * (workload.head_dim + workload.value_dim)


def standard_shape(workload, length, tokens=16384, hidden=2048):
    """The field's benchmark shape: `tokens` tokens in all, `hidden` / D heads with keys of their own, the mask's first sample."""
    heads = max(hidden // workload.head_dim, 1)
    return Shape(max(tokens // length, 1), heads, heads, length, length, MASKS[workload.mask].samples[0])


#: The workloads that the tuner knows by a short name.
PRESETS = {
    **{f"d{d}_{short}_{mask}": Workload(d, d, dtype, mask)
       for d in (64, 128) for dtype, short in DTYPES.items() for mask in MASKS},
    **{f"d{d}_{DTYPES[dtype]}_{mask}": Workload(d, dv, dtype, mask)
       for d, dv in ((96, 96), (192, 128), (256, 256)) for dtype in ("float16", "bfloat16") for mask in MASKS},
}
