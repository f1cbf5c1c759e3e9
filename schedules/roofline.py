"""What a call must take at least, by each of a chip's limits: the roofline of attention, which has exponentials beside its products."""
import math
from dataclasses import dataclass

from te_defs.workload import element_type, flops


@dataclass(frozen=True)
class Work:
    """What a call has to do, however it is scheduled.

    operations    floating-point operations of the products, as the field counts them
    exponentials  one a score that the mask keeps
    bytes         of all tensors, each read or written once
    tensor_cores  whether these take the element type
    """

    operations: float
    exponentials: float
    bytes: int
    tensor_cores: bool

    @property
    def intensity(self):
        """Operations a byte."""
        return self.operations / max(self.bytes, 1)


@dataclass(frozen=True)
class Limit:
    """Least seconds of a call by one of the chip's units."""

    name: str
    seconds: float


def work_of(subject, shape):
    """The Work of a call of what is tuned (schedules.tuning.subjects) at a te_defs.workload.Shape."""
    workload, element = subject.workload, element_type(subject.workload).itemsize
    *rows, statistics = map(math.prod, shape.tensors(workload))  # elements of Q, K, V and O, and of the LSE
    q, k, v, out = rows
    elements = q + k + v + out if subject.order is None else 2 * (q + k + v + out)  # gradients and dO are as large as what they are of
    sizes = {"B": 1, "H": 1, "N": shape.q_len, "M": shape.kv_len}  # as `timed_arguments` makes them
    behind = sum(math.prod(sizes[axis] for axis in argument.kind.axes) * (4 if argument.kind.dtype else element)
                 for argument in workload.arguments if argument.kind.axes)
    scores = flops(workload, shape) / (2 * (workload.head_dim + workload.value_dim))
    return Work(subject.operations(shape), scores, element * elements + 4 * statistics + behind, workload.dtype != "float32")


def limits_of(peak, work):
    """The Limits of a Work on a chip of this schedules.arch.Peak: its products, its exponentials, these one after the other, its
    memory."""
    clocks = peak.sms * peak.boost_ghz * 1e9
    products = work.operations / (1e12 * peak.tensor_tflops if work.tensor_cores else 2 * peak.fma_per_clock * clocks)
    exponentials = work.exponentials / (peak.exp2_per_clock * clocks)
    return (Limit("tensor cores" if work.tensor_cores else "CUDA cores", products), Limit("exponentials", exponentials),
            Limit("one after the other", products + exponentials), Limit("memory", work.bytes / (1e12 * peak.memory_tbytes)))
