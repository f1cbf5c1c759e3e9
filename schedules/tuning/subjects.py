"""What is tuned: the forward pass of a workload, or its gradients. A subject says how it is named, of which parts its plans are, how it is
called and when it is right.

A part is what one search draws plans for. The forward pass is one. Gradients in order are made by two or three functions, which share
nothing but their inputs: each is a part, tuned while the others have the family's default plans, and whole gradients, with delta and all
functions, are what is built, proved and timed at any time; the last round is among whole gradients. In any order one function has a plan.
"""
import functools
import re
from dataclasses import dataclass

import numpy as np
import tvm

from schedules import backward, registry
from schedules.backward_parts import Part, parts_of, plans_of
from schedules.build import KERNEL, NEGATIVE_SCALE_KERNEL, declaration_of, signs
from schedules.plan import plan_of
from schedules.space import spaces_of
from schedules.tuning.gate import Case, on_device
from te_defs import reference
from te_defs.workload import Shape, Workload, WorkloadError, flops, timed_arguments

#: How far beyond their bounds gradients may be on hard inputs: these are of the first order, and where dP and delta cancel at large scores,
#: kernels that add in another order than the yardstick reached 1.08 times the bounds in 600 random calls. Wrong ones are off by far more.
HARD_SLACK = 2

_NAME = re.compile(rf"(fwd|bwd)(.*?)(\+{backward.ANY_ORDER})?(@[1-9]\d*x[1-9]\d*)?")


@dataclass(frozen=True)
class ForwardPass:
    """Attention of a workload, by any family.

    order       of gradients, None here
    function    name of what is called; twin: of what is called for scales below zero
    same_bits   whether two runs must give the same bits
    many_tiles  what a would-be winner must pass besides the gate's cases: several tiles of work for every block of a persistent grid, so
                many that a causal mask's order of work deals in pairs too
    """

    workload: Workload
    order, function, twin, same_bits = None, KERNEL, NEGATIVE_SCALE_KERNEL, True
    many_tiles = ((Shape(batch=2, q_heads=200, kv_heads=20, q_len=200, kv_len=210), 1.0),)

    @property
    def name(self):
        """As the folder of its log is called."""
        return self.workload.name

    def operations(self, shape):
        """Floating-point operations of a call, as the field counts them."""
        return flops(self.workload, shape)

    def declines(self, arch):
        """Reason of each family by name; None for one that takes it."""
        return registry.declines(self.workload, arch)

    def takers(self, arch):
        """The families that take it, in order of preference; NoSchedule where there is none."""
        return registry.takers(self.workload, arch)

    def parts(self, families, arch):
        """{part: its spaces}."""
        return {None: spaces_of(families, self.workload, arch)}

    def families(self):
        """{name: family}."""
        return {family.NAME: family for family in registry.FAMILIES}

    def members(self):
        """{name: what has plans of that name}."""
        return self.families()

    def key_of(self, family, values):
        """(name of the family, plan) from what a record says; None where there is no such family or its plans have other fields."""
        family = self.families().get(family)
        plan = None if family is None else plan_of(family.PLAN, values)
        return None if plan is None else (family.NAME, plan)

    def split(self, key):
        """{part: key of the part's plan} of such a key."""
        return {None: key}

    def declaration_of(self, key, arch):
        """Structural hash of a plan's symbolic declaration, as text: what a record is of."""
        family, plan = key
        return declaration_of(self.families()[family], self.workload, plan)

    def offers(self, key, arch):
        """Whether today's spaces have room for the plan."""
        spaces = spaces_of([self.families()[key[0]]], self.workload, arch)
        return any(space.owns(*key) and space.fits(key[1]) for space in spaces)

    def is_asked(self, shape):
        """Whether an artefact calls a kernel at all. It does not where nothing is wanted, since TVM launches a block even of an empty grid,
        which reads what is not there."""
        return shape.batch * shape.q_len > 0

    def case(self, shape, scale, arguments, seed, device, inputs=None):
        """The gate's Case of a shape, on seeded inputs, or on hard ones (q, k, v)."""
        q, k, v = inputs or reference.make_inputs(self.workload, shape, seed)
        answers = reference.forward(self.workload, q, k, v, scale, arguments)
        judge = _judge(lambda found, bounds: reference.mismatch(*found, *answers, *bounds),
                       lambda yardstick: reference.tolerances(self.workload, q, k, v, scale, arguments, answers, yardstick=yardstick))
        *_, out, lse = shape.tensors(self.workload)
        return Case(shape, on_device((q, k, v), device), ((out, q.dtype), (lse, np.dtype("float32"))),
                    (scale, *on_device(arguments, device)), answers[:1], judge, negative=scale < 0 and True in signs(self.workload))

    def timed(self, shape, device):
        """Arguments of the call that is timed: seeded inputs, outputs, scale and what follows it."""
        *inputs, out, lse = _inputs(self.workload, shape, device)
        return *inputs, out, lse, *_behind(self.workload, shape, device)


@dataclass(frozen=True)
class BackwardPass:
    """Gradients of a workload, by one family.

    order  in which dQ is summed, a key of schedules.backward.FAMILIES
    """

    workload: Workload
    order: str = backward.IN_ORDER
    function, twin = "flash_attention_backward", None
    #: More tiles than a GPU has multiprocessors; no grid of a gradient is persistent.
    many_tiles = ((Shape(batch=2, q_heads=100, kv_heads=10, q_len=70, kv_len=80), 1.0),)

    @property
    def same_bits(self):
        return self.order == backward.IN_ORDER

    @property
    def name(self):
        """That of the workload with bwd in front, and behind it the order where it is any."""
        return f"bwd{self.workload.name.removeprefix('fwd')}" + ("" if self.order == backward.IN_ORDER else f"+{self.order}")

    def operations(self, shape):
        """Of five products over the scores, as the field counts them, however many a kernel computes; the forward pass has two."""
        return flops(self.workload, shape) * 5 / 2

    def declines(self, arch):
        return backward.declines(self.workload, arch, self.order)

    def takers(self, arch):
        return backward.takers(self.workload, arch, self.order)

    def parts(self, families, arch):
        """Those of the first of the families: all functions of a gradient are of one."""
        return {part.role: spaces_of((part,), self.workload, arch) for part in parts_of(families[0], self.workload)}

    def members(self):
        return {part.NAME: part for family in backward.FAMILIES[self.order] for part in parts_of(family, self.workload)}

    def key_of(self, family, values):
        family = self.families().get(family)
        plans = None if family is None else plans_of(family, self.workload, values)
        return None if plans is None else (family.NAME, plans)

    def families(self):
        return {family.NAME: family for family in backward.FAMILIES[self.order]}

    def split(self, key):
        family, plans = key
        parts = parts_of(self.families()[family], self.workload)
        return {part.role: (part.NAME, plans if part.role is None else plans.by_role()[part.role]) for part in parts}

    def declaration_of(self, key, arch):
        family, plans = key
        return Part(self.families()[family]).declaration(self.workload, arch, plans)

    def offers(self, key, arch):
        parts = self.parts((self.families()[key[0]],), arch)
        return all(any(space.owns(*own) and space.fits(own[1]) for space in parts[role]) for role, own in self.split(key).items())

    def is_asked(self, shape):
        """As of the forward pass. What is measured are the calls of an artefact, which know what to do where nothing is there."""
        return True

    def case(self, shape, scale, arguments, seed, device, inputs=None):
        q, k, v = inputs or reference.make_inputs(self.workload, shape, seed)
        dout = np.random.default_rng([seed, 1]).standard_normal((*q.shape[:3], v.shape[3]), np.float32).astype(q.dtype)
        given, answers, lse = reference.backward_case(self.workload, dout, q, k, v, scale, arguments)
        slack = HARD_SLACK if inputs else 1

        def bounds_of(yardstick):
            return [slack * bound for bound in reference.backward_tolerances(self.workload, dout, q, k, v, answers, scale, arguments,
                                                                             yardstick=yardstick)]
        judge = _judge(lambda found, bounds: reference.backward_mismatch(found, answers, bounds, lse), bounds_of)
        return Case(shape, on_device(given, device), tuple((x.shape, x.dtype) for x in (q, k, v)),
                    (scale, *on_device(arguments, device)), answers, judge)

    def timed(self, shape, device):
        """As of the forward pass, with an LSE of about the right size, so that probabilities are some: its kernel is not here."""
        q, k, v, out, lse = _inputs(self.workload, shape, device)
        dout, o = (_drawn(self.workload, out.shape, [1, number], device) for number in (1, 2))
        lse.copyfrom(np.full(lse.shape, np.log(max(shape.kv_len, 1)) + 0.5, np.float32))
        gradients = (tvm.runtime.empty(x.shape, x.dtype, device) for x in (q, k, v))
        return dout, q, k, v, o, lse, *gradients, *_behind(self.workload, shape, device)


def _judge(mismatch, tolerances):
    """A Case's judge from a function (outputs, bounds) and one that tells the bounds, without or with the yardstick, once each."""
    bounds = functools.cache(tolerances)
    return lambda found: reference.cheapest_first(lambda yardstick: mismatch(found, bounds(yardstick)))


def _inputs(workload, shape, device):
    """Seeded q, k and v, and room for out and lse."""
    *inputs, out, lse = shape.tensors(workload)
    inputs = (_drawn(workload, sizes, number, device) for number, sizes in enumerate(inputs))
    return *inputs, tvm.runtime.empty(out, reference.numpy_dtype(workload).name, device), tvm.runtime.empty(lse, "float32", device)


def _drawn(workload, sizes, seed, device):
    """A tensor of standard-normal numbers to time on. They are drawn in float32: of large shapes, float64 takes seconds more."""
    numbers = np.random.default_rng(seed).standard_normal(sizes, np.float32)
    return tvm.runtime.tensor(numbers.astype(reference.numpy_dtype(workload)), device)


def _behind(workload, shape, device):
    return workload.head_dim**-0.5, *on_device(timed_arguments(workload, shape), device)


def subject_of(workload, order=None):
    """The subject: gradients where an order is given."""
    return ForwardPass(workload) if order is None else BackwardPass(workload, order)


def subject_named(name):
    """The subject that the folder of a log is named for, whatever its bucket; WorkloadError where it is named for none."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise WorkloadError(f"a log is named like fwd_d128_dv128_f16_causal or bwd_..., found {name!r}: correct the name")
    which, rest, any_order, _ = found.groups()
    order = None if which == "fwd" else backward.ANY_ORDER if any_order else backward.IN_ORDER
    return subject_of(Workload.parse(f"fwd{rest}"), order)
