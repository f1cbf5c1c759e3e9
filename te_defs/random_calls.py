"""Random calls, each drawn from its number alone, so that one which fails can be made again by whoever has the number."""
from dataclasses import dataclass, replace

import numpy as np

from te_defs import reference
from te_defs.masks import MASKS
from te_defs.arguments import AXES
from te_defs.lengths import slices
from te_defs.storage import STORAGES
from te_defs.workload import Shape, Workload, make_arguments

#: Head dimensions, and types of elements.
DIMS, DTYPES = ((64, 64), (128, 128)), ("float32", "float16", "bfloat16")
#: (mask, score, sink) beside the plain masks, dealt to the head dimensions and types in turn.
FEATURES = (("causal", "softcap", False), ("window", "alibi", False), ("full", "bias", True), ("causal", "", True),
            ("prefix", "bias", False), ("full", "softcap", True), ("causal_top_left", "alibi", True), ("window", "softcap", False),
            ("full", "", True))
#: Lengths around which tiles end, beside whatever is drawn up to MOST.
LENGTHS, MOST = (0, 1, 2, 17, 63, 64, 65, 127, 128, 129), 300
#: Scores of a call at most: the reference computes them all, in float64.
SCORES = 120_000
#: (head dimension, that of values, type) of calls for gradients by kind of device, and the rest of their workloads, (mask, score, sink,
#: lengths), dealt to these in turn.
PAIRS_OF_GRADIENTS = {"cpu": ((64, 64, "float32"), (32, 16, "float16"), (24, 40, "bfloat16")), "cuda": (
    (128, 128, "float16"), (64, 64, "bfloat16"), (256, 192, "float16"), (40, 72, "bfloat16"), (64, 64, "float32"))}
FEATURES_OF_GRADIENTS = (("causal", "softcap", False, "keys"), ("full", "bias", True, "uniform"), ("window", "alibi", False, "packed"),
                         ("prefix", "", False, "uniform"), ("causal_top_left", "", True, "keys"), ("causal", "", False, "uniform"))


@dataclass(frozen=True)
class Call:
    """One call.

    scale    as a multiple of 1 / sqrt(D)
    data     "normal", "large" (scores of thousands), "equal" (all keys of a head are one) or "tiny" (denormal in float16)
    storage  where the tensors lie, one of te_defs.storage.STORAGES
    lengths  the arguments of the workload's lengths: tuples of integers for the tensors, then the integers
    single   axes, as letters, that tensors behind the scale have with size one
    """

    number: int
    workload: Workload
    shape: Shape
    scale: float
    data: str
    storage: str
    lengths: tuple = ()
    single: str = ""

    @property
    def rounded_scale(self):
        """The scale as it is handed over, a float32 number."""
        return float(np.float32(self.scale * self.workload.head_dim**-0.5))

    def __str__(self):
        lengths = f", lengths {self.lengths}" if self.lengths else ""
        single = f", single {self.single}" if self.single else ""
        return (f"call {self.number}: {self.workload.name}, {self.shape}, scale {self.scale} / sqrt(D), {self.data} data, {self.storage}"
                f"{lengths}{single}")

    @property
    def arguments(self):
        """What follows the scale, but for the lengths."""
        return make_arguments(self.workload, self.shape, self.number, self.single)

    def given_lengths(self):
        """The lengths as a call takes them, tensors as int32 arrays."""
        return tuple(np.array(numbers, np.int32) if isinstance(numbers, tuple) else numbers for numbers in self.lengths)

    @property
    def through_lse(self):
        """Whether a call for gradients comes with one of the LSE: every other one does."""
        return self.number % 2 == 1

    def rows_without_keys(self):
        """Whether there are queries that the mask shows no key of their batch entry."""
        mask, *_ = self.workload.modifiers(self.arguments)

        def some(n, m):
            i = mask.position(np.arange(n), n, m)
            return bool(np.any(mask.key_end(i, m) <= mask.key_begin(i, m))) and n > 0
        sizes = self.shape.q_len, self.shape.kv_len
        return any(some(*(len(range(total)[part]) for total, part in zip(sizes, parts)))
                   for _, *parts in slices(self.workload.lengths, *sizes, self.given_lengths(), self.shape.batch))

    def inputs(self):
        """(q, k, v) in the workload's type; keys past the length of their batch entry are NaN."""
        q, k, v = self._values()
        for b, length in enumerate(self.lengths[0] if self.workload.lengths == "keys" else ()):
            k[b, length:], v[b, length:] = np.nan, np.nan
        return q, k, v

    def _values(self):
        q, k, v = reference.make_inputs(self.workload, self.shape, self.number)
        if self.data == "large":
            return q * q.dtype.type(30), k * k.dtype.type(30), v
        if self.data == "tiny":
            return q * q.dtype.type(2**-12), k * k.dtype.type(2**-12), v * v.dtype.type(2**-16)
        if self.data == "equal":
            k[:] = k[:, :1]
        return q, k, v


def random_call(number, workloads):
    """The Call of a number; its workload is one of these."""
    rng = np.random.default_rng([number, 2026])

    def pick(choices):
        return choices[rng.integers(len(choices))]

    workload = pick(workloads)
    group, kv_heads, batch = (int(pick(choices)) for choices in ((1, 1, 2, 3, 5, 7, 8), (1, 1, 2, 3), (1, 1, 1, 2, 3, 0)))
    lengths = [int(pick(LENGTHS)) if rng.random() < 0.4 else int(rng.integers(1, MOST)) for _ in range(2)]
    q_len, kv_len = (lengths[0], lengths[0]) if rng.random() < 0.25 else lengths
    while batch * group * kv_heads * q_len * kv_len > SCORES:
        group, kv_heads, batch = (group - 1, kv_heads, batch) if group > 1 else (1, max(kv_heads - 1, 1), 1)
    sizes = tuple(int(rng.integers(0, MOST)) if rng.random() < 0.7 else int(pick((0, 1, 64, 128, 10_000)))
                  for argument in workload.mask_class.arguments() if not argument.kind.axes)
    shape = Shape(batch, group * kv_heads, kv_heads, q_len, kv_len, sizes)
    scale, data = float(pick((1.0, 1.0, 1.0, 0.3, -1.0, -2.5, 0.0, 4.0))), pick(("normal",) * 5 + ("large", "equal", "tiny"))
    call = Call(number, workload, shape, scale, data, pick(("contiguous", *STORAGES)),
                single="".join(axis for axis in AXES if rng.random() < 0.3))
    if workload.lengths == "keys":
        return replace(call, lengths=(tuple(int(pick((0, kv_len, rng.integers(kv_len + 1)))) for _ in range(batch)),))
    if workload.lengths == "packed":
        cuts = rng.integers(1, 5)
        tables = tuple((0, *sorted(map(int, rng.integers(total + 1, size=cuts))), total) for total in (q_len, kv_len))
        longest = int(np.diff(tables[0]).max()) + int(pick((0, 0, 1, 200)))
        return replace(call, shape=replace(shape, batch=1), lengths=(*tables, longest))
    return call


def workloads_with_lengths(kind):
    """What calls with lengths of their own are drawn from: every mask, one pair of head dimensions and one type; some with scores and
    sinks."""
    dtype = "float32" if kind == "cpu" else "float16"
    return [Workload(*DIMS[0], dtype, mask, *features, lengths=lengths) for mask in MASKS for lengths, features in (
        ("keys", ("softcap", True) if mask == "causal" else ()), ("packed", ("alibi", False) if mask == "prefix" else ()))]


def workloads_of(kind, dims=DIMS):
    """What the calls are drawn from on a device of a kind: every mask and type; on a CPU one pair of head dimensions. And, in one type,
    a pair that neither vectors nor tensor cores divide."""
    pairs = [(pair, dtype) for pair in (dims[:1] if kind == "cpu" else dims) for dtype in DTYPES]
    pairs.append(((40, 72), "float32" if kind == "cpu" else "bfloat16"))
    plain = [Workload(*pair, dtype, mask) for pair, dtype in pairs for mask in MASKS]
    return plain + [Workload(*pairs[n % len(pairs)][0], pairs[n % len(pairs)][1], *features) for n, features in enumerate(FEATURES)]


def workloads_of_gradients(kind, takes, dealt=True):
    """What calls for gradients are drawn from on a device of a kind, by families that take a workload or not, which `takes` tells.

    dealt  whether each of FEATURES_OF_GRADIENTS comes with one of the pairs only, not with all
    """
    pairs = [pair for pair in PAIRS_OF_GRADIENTS[kind] if takes(Workload(*pair))]
    made = (Workload(*pair, *features) for n, features in enumerate(FEATURES_OF_GRADIENTS if pairs else ())
            for pair in ([pairs[n % len(pairs)]] if dealt else pairs))
    return list(filter(takes, made))


def gradient_problem(call):
    """((what a backward function is handed before the scale, the gradient of the LSE or None), what is wanted, as `wanted` has it, with
    (dQ, dK, dV) in the place of (O, LSE)) of a call."""
    rng, (q, k, v) = np.random.default_rng([call.number, 2027]), call.inputs()
    dout = rng.standard_normal((*q.shape[:3], v.shape[3])).astype(q.dtype)
    dlse = rng.standard_normal((q.shape[0], q.shape[2], q.shape[1]), np.float32) if call.through_lse else None
    rest = call.rounded_scale, call.arguments, call.given_lengths(), dlse
    given, answers, lse = reference.backward_case(call.workload, dout, q, k, v, *rest)

    def complaint(*found):
        return reference.backward_complaint(found, call.workload, *given[:4], call.rounded_scale, call.arguments, answers, lse,
                                            call.given_lengths(), dlse)
    return (given, dlse), (answers, complaint)


def forward_problem(call):
    """(Q, K and V, what is wanted) of a call."""
    inputs = call.inputs()
    return inputs, wanted(call, inputs)


def wanted(call, inputs):
    """((O, LSE), function of an answer like that which gives None where it is right, else one sentence) of a call on its inputs."""
    arguments, lengths = (call.workload, *inputs, call.rounded_scale, call.arguments), call.given_lengths()
    answers = reference.forward(*arguments, lengths)
    return answers, lambda *found: reference.complaint(found, *arguments, answers, lengths)


def judged(runs, wanted):
    """None where what is `wanted`, (out, lse) or the gradients, was found and is the same in all runs, of which there are some, else one
    sentence."""
    if any(first.tobytes() != again.tobytes() for run in runs[1:] for first, again in zip(runs[0], run)):
        return "two runs differ"
    _, complaint = wanted
    return complaint(*runs[0])
