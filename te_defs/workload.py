"""The attention problem: what is fixed when a kernel is built (Workload) and what arrives with each call (Shape)."""
import re
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from te_defs.arguments import AXES, PER_HEAD, Argument, ModifierError, Operand
from te_defs.lengths import LENGTHS
from te_defs.masks import MASKS, find_mask
from te_defs.masks import prove as prove_mask
from te_defs.scores import find_score
from te_defs.scores import prove as prove_score

DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
_LONG_DTYPE = {short: dtype for dtype, short in DTYPES.items()}
_PATH = r"[A-Za-z_][\w.]*(?::[A-Za-z_]\w*)?"
_NAME = re.compile(rf"fwd_d(\d{{1,4}})_dv(\d{{1,4}})_(f16|bf16|f32)_({_PATH})((?:\+{_PATH})*)", re.ASCII)
#: The argument of a workload with sinks: a logit for each query head, which takes part in the softmax and has no value.
SINK = Argument("sink", PER_HEAD)


class WorkloadError(ValueError):
    """A workload that cannot be declared, or a name that does not describe one."""


@dataclass(frozen=True)
class Workload:
    """One kernel's problem: head dimensions, element type and mask. Batch, heads, lengths and scale are run-time values.

    head_dim   channels D of a query and a key, 8 to 256 in steps of 8
    value_dim  channels DV of a value and of the output, likewise
    dtype      element type of Q, K, V and O: float16, bfloat16 or float32; sums are float32 in every case
    mask       name of a class in te_defs.masks, such as "full" or "causal", or one of your own as "module:class"
    score      name of a class in te_defs.scores, such as "softcap", or a function or class of your own as "module:name"; "": none
    sink       whether each head has a sink: a logit that takes part in the softmax, with a value of zero
    lengths    name of a class in te_defs.lengths: whose lengths batch entries have

    The arguments of mask, score, sink and lengths arrive with each call.
    """

    head_dim: int
    value_dim: int
    dtype: str = "float16"
    mask: str = "full"
    score: str = ""
    sink: bool = False
    lengths: str = "uniform"

    def __post_init__(self):
        for name, size in (("head_dim", self.head_dim), ("value_dim", self.value_dim)):
            if not (isinstance(size, int) and 8 <= size <= 256 and size % 8 == 0):
                raise WorkloadError(f"{name} must be a multiple of 8 from 8 to 256, found {size!r}: choose such a dimension")
        if self.dtype not in DTYPES:
            raise WorkloadError(f"dtype must be one of {', '.join(DTYPES)}, found {self.dtype!r}: choose one of these")
        for name, text in (("mask", self.mask), ("score", self.score)):
            if not isinstance(text, str):
                raise WorkloadError(f"{name} must be a name, found {text!r}: write it as text")
        if self.lengths not in LENGTHS:
            raise WorkloadError(f"lengths must be one of {', '.join(LENGTHS)}, found {self.lengths!r}: choose one of these")
        try:
            if self.mask not in MASKS:
                prove_mask(self.mask_class, self.mask)
            if self.score:
                prove_score(self.score_class, self.score)
        except ModifierError as error:
            raise WorkloadError(str(error)) from error
        names = [argument.name for argument in self.arguments]
        if len(set(names)) < len(names):
            raise WorkloadError(f"the arguments of mask and score must have names of their own, found {', '.join(names)}: rename one")
        by_row = [argument.name for argument in self.arguments if set(argument.kind.axes) - {"H"}]
        if by_row and self.lengths != "uniform":
            raise WorkloadError(f"tensors behind the scale must be by head alone where lengths are {self.lengths}, found {by_row[0]} by "
                                "batch entry or row: use uniform lengths, or a function of rows")

    @property
    def name(self):
        """The name that `parse` reads back; it is also the folder of the workload's tuning log."""
        features = (self.score, "sink" if self.sink else "", "" if self.lengths == "uniform" else self.lengths)
        features = "".join(f"+{feature}" for feature in features if feature)
        return f"fwd_d{self.head_dim}_dv{self.value_dim}_{DTYPES[self.dtype]}_{self.mask}{features}"

    @property
    def mask_class(self):
        """Class of te_defs.masks."""
        return find_mask(self.mask)

    @property
    def score_class(self):
        """Class of te_defs.scores, None where scores stay as they are."""
        return find_score(self.score) if self.score else None

    @property
    def arguments(self):
        """Arguments that follow the scale in a call: those of the mask, those of the score modification, the sink."""
        return (*self.mask_class.arguments(), *(self.score_class.arguments() if self.score else ()), *([SINK] if self.sink else []))

    def modifiers(self, arguments):
        """(mask, score, sink) of the values of all arguments; score and sink None where there is none."""
        masks = len(self.mask_class.arguments())
        scores = masks + (len(self.score_class.arguments()) if self.score else 0)
        return (self.mask_class.of(arguments[:masks]), self.score_class.of(arguments[masks:scores]) if self.score else None,
                Operand(arguments[scores]) if self.sink else None)

    def with_feature(self, feature):
        """The workload with a feature more, as names have them behind a plus: "sink", lengths or a score modification."""
        if feature == "sink" and not self.sink:
            return replace(self, sink=True)
        if feature in LENGTHS and feature != "uniform" and self.lengths == "uniform":
            return replace(self, lengths=feature)
        if feature == "sink" or feature in LENGTHS:
            raise WorkloadError(f"a workload takes one sink and lengths of one kind, found {feature} behind {self.name}: leave it out")
        if self.score:
            raise WorkloadError(f"a workload takes one score modification, found {self.score} and {feature}: write one function of both")
        return replace(self, score=feature)

    @classmethod
    def parse(cls, name):
        """Workload of a name such as fwd_d128_dv128_f16_causal or fwd_d64_dv64_bf16_window+softcap+sink; WorkloadError where the name has
        another form."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise WorkloadError(f"a workload is named like fwd_d128_dv128_f16_causal, found {name!r}: correct the name")
        head_dim, value_dim, dtype, mask, features = found.groups()
        workload = cls(int(head_dim), int(value_dim), _LONG_DTYPE[dtype], mask)
        for feature in features.split("+")[1:]:
            workload = workload.with_feature(feature)
        return workload


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


def samples_of(workload):
    """The values that are timed of all arguments that are no tensors."""
    return (*workload.mask_class.samples[0], *(workload.score_class.samples[0] if workload.score else ()))


def make_arguments(workload, shape, seed=0, single=""):
    """Values of all arguments that follow the scale: those of `shape.mask`, a sample of the score's numbers, seeded random tensors.

    single  letters of te_defs.arguments.AXES: axes of tensors that shall have size one
    """
    rng, dtype = np.random.default_rng([seed, 7] if np.ndim(seed) == 0 else [*seed, 7]), element_type(workload)
    sizes = {"B": shape.batch, "H": shape.q_heads, "N": shape.q_len, "M": shape.kv_len}
    values = workload.mask_class.make(shape.mask, sizes, dtype, rng, single)
    if workload.score:
        samples = workload.score_class.samples
        values += workload.score_class.make(samples[rng.integers(len(samples)) if np.any(seed) else 0], sizes, dtype, rng, single)
    if workload.sink:
        values += (2 * rng.standard_normal(1 if "H" in single else shape.q_heads, np.float32),)
    return values


def timed_arguments(workload, shape):
    """The same for a kernel that is to be timed: tensors serve all batch entries and heads, or a bias would take too much memory."""
    return make_arguments(workload, shape, single="BH")


def element_type(workload):
    """NumPy's type for the workload's elements (bfloat16 comes from ml_dtypes)."""
    return np.dtype(ml_dtypes.bfloat16 if workload.dtype == "bfloat16" else workload.dtype)


def flops(workload, shape):
    """Floating-point operations of the two products over the scores that the mask keeps (of one that is not exact, those in the ranges of
    its rows), two per multiply-add."""
    small = workload.mask_class.make(shape.mask, dict.fromkeys(AXES, 1), "float32", np.random.default_rng())
    kept = workload.mask_class.of(small).kept(shape.q_len, shape.kv_len)
    return 2 * shape.batch * shape.q_heads * kept * (workload.head_dim + workload.value_dim)


def standard_shape(workload, q_len, tokens=16384, hidden=2048, kv_len=None):
    """The field's benchmark shape: `tokens` queries in all, or keys where these are more, `hidden` / D heads with keys of their own, the
    mask's first sample; as many keys as queries where their number is not given."""
    kv_len = q_len if kv_len is None else kv_len
    heads = max(hidden // workload.head_dim, 1)
    return Shape(max(tokens // max(q_len, kv_len), 1), heads, heads, q_len, kv_len, workload.mask_class.samples[0])


#: The workloads that the tuner knows by a short name.
PRESETS = {
    **{f"d{d}_{short}_{mask}": Workload(d, d, dtype, mask)
       for d in (64, 128) for dtype, short in DTYPES.items() for mask in MASKS},
    **{f"d{d}_{DTYPES[dtype]}_{mask}": Workload(d, dv, dtype, mask)
       for d, dv in ((96, 96), (192, 128), (256, 256)) for dtype in ("float16", "bfloat16") for mask in MASKS},
}
