"""What holds the loader and the consumers together: events that all have a meaning, and registers that a multiprocessor has."""
import inspect

import pytest
import tvm
import tvm_ffi
from tvm.tirx.compilation_pipeline import get_tir_pipeline

from schedules.arch import cuda_arch
from schedules.build import schedule
from schedules.families import wgmma, wgmma_backward, wgmma_fused_backward, wgmma_plan
from schedules.intrinsics import events
from schedules.lowering import products_in_flight, warp_roles
from te_defs.workload import Workload

ARCH = cuda_arch("sm_90a")
WORKLOAD = Workload(64, 64, "float16", "causal")
#: Functions of schedules.intrinsics.events that are no calls in a kernel, or stand for a loop index before the roles are split.
NOT_SPLIT = {"name_of", "key_tile"}
#: Events that lowering makes of annotated blocks, and those of the backward pass alone.
FROM_BLOCKS, BACKWARD = {"bulk_load", "tell", "told"}, {"meet", "reclaim", "add_up", "issued", "awaited"}
#: Those of which lowering.products_in_flight makes numbers before roles are split.
COUNTED = {products_in_flight.ISSUED, products_in_flight.AWAITED}


def events_in(mod):
    names = set()
    for func in mod.functions.values():
        tvm_ffi.structural_walk(func.body, (tvm.ir.Call, lambda call: names.add(events.name_of(call))))
    return names - {None}


def test_every_event_has_a_meaning_and_none_is_left():
    mod = schedule(wgmma, WORKLOAD, wgmma.default_plan(WORKLOAD, ARCH)).mod
    known = {name for name, value in vars(events).items() if inspect.isfunction(value)} - NOT_SPLIT
    used = events_in(mod) - NOT_SPLIT
    assert used == known - FROM_BLOCKS - BACKWARD, "what the intrinsics say"
    assert [name for name in known - COUNTED if not callable(getattr(warp_roles._Roles, name, None))] == []
    assert events_in(lowered(mod)) == set()


@pytest.mark.parametrize("role", ["dq", "dk_dv"])
def test_none_is_left_of_the_backward_functions(role):
    mod = wgmma_backward.schedule(role, WORKLOAD, wgmma_backward.default_plan(role, WORKLOAD, ARCH)).mod
    assert events_in(lowered(mod)) == set()


def test_none_is_left_of_the_fused_backward_function():
    mod = wgmma_fused_backward.schedule(WORKLOAD, wgmma_fused_backward.default_plan(WORKLOAD, ARCH)).mod
    assert {"meet", "reclaim", "add_up"} <= events_in(mod) and events_in(lowered(mod)) == set()


def lowered(mod):
    with ARCH.target():
        return get_tir_pipeline(wgmma.PIPELINE)[0](tvm.IRModule({"main": mod["main"].with_attr("target", ARCH.target())}))


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("loader", [24, 32, 40, 56])
def test_registers_of_a_block_are_those_of_a_multiprocessor(groups, loader):
    consumer = warp_roles.consumer_registers(groups, loader)
    entry = warp_roles.REGISTERS_PER_SM // (warp_roles.GROUP * (groups + 1))
    assert warp_roles.GROUP * (groups * consumer + loader) <= ARCH.registers_per_sm
    assert consumer <= 240 and consumer % 8 == 0, "as setmaxnreg wants it"
    assert consumer >= min(entry // 8 * 8, 240), "a consumer gives none of its registers away"


@pytest.mark.parametrize("groups, loader, consumer", [(1, 56, 240), (2, 24, 240), (3, 32, 160)])
def test_registers_are_those_of_the_paper_s_kernels(groups, loader, consumer):
    """FlashAttention-3, hopper/flash_fwd_kernel_sm90.h; a single consumer has 256 there, of which code can name 255."""
    assert wgmma_plan.LOADER_REGISTERS[groups] == loader
    assert warp_roles.consumer_registers(groups, loader) == consumer
