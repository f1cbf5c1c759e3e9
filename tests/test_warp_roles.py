"""What holds the loader and the consumers together: events that all have a meaning, and registers that a multiprocessor has."""
import inspect

import pytest
import tvm
import tvm_ffi
from tvm.tirx.compilation_pipeline import get_tir_pipeline

from schedules.arch import cuda_arch
from schedules.build import schedule
from schedules.families import wgmma, wgmma_backward, wgmma_fused_backward, wgmma_ordered_backward, wgmma_plan
from schedules.intrinsics import events
from schedules.lowering import products_in_flight, register_shares, warp_roles
from schedules.plan import plan_of
from te_defs.workload import Workload

ARCH = cuda_arch("sm_90a")
WORKLOAD, WIDE = Workload(64, 64, "float16", "causal"), Workload(256, 256, "float16", "full")
#: Functions of schedules.intrinsics.events that are no calls in a kernel, or stand for a loop index before the roles are split.
NOT_SPLIT = {"name_of", "key_tile"}
#: Events that lowering adds, and those of the backward pass alone.
ADDED, BACKWARD = {"bulk_load", "tell", "told", "release_before"}, {
    "hand_over", "meet", "reclaim", "add_up", "await_turn", "give_turn", "issued", "awaited"}
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
    assert used == known - ADDED - BACKWARD, "what the intrinsics say"
    assert [name for name in known - COUNTED if not callable(getattr(warp_roles._Roles, name, None))] == []
    assert events_in(lowered(mod)) == set()


@pytest.mark.parametrize("role, workload", [("dq", WORKLOAD), ("dk_dv", WORKLOAD), *((role, WIDE) for role in ("dq", "dk", "dv"))])
def test_none_is_left_of_the_backward_functions(role, workload):
    """And shared memory holds what the budget says, where a tile has a single copy, too."""
    plan = wgmma_backward.default_plan(role, workload, ARCH)
    mod = lowered(wgmma_backward.schedule(role, workload, plan).mod)
    assert events_in(mod) == set() and plan.single == (workload is WIDE)
    counted = next(used for name, used, *_ in wgmma_backward.budget(role, workload, ARCH, plan).rows if name == "shared memory")
    assert shared_bytes(mod) == counted


@pytest.mark.parametrize("across", [0, 1])
@pytest.mark.parametrize("family", [wgmma_fused_backward, wgmma_ordered_backward], ids=lambda it: it.NAME)
def test_none_is_left_of_the_functions_of_five_products(family, across):
    """And shared memory holds what the budget says, with one copy of what is added to dQ and with two."""
    plan = family.default_plan(WORKLOAD, ARCH).but(across=across)
    mod = family.schedule(WORKLOAD, plan).mod
    assert {"hand_over", "meet", "reclaim", "add_up"} <= events_in(mod)
    low = lowered(mod)
    assert events_in(low) == set() and ("flashtir_give_turn" in str(low)) == (family is wgmma_ordered_backward)
    counted = next(used for name, used, *_ in family.budget(WORKLOAD, ARCH, plan).rows if name == "shared memory")
    assert shared_bytes(low) == counted


def test_plans_of_other_fields_are_no_plans():
    plan = wgmma_plan.WgmmaPlan(128, 128, ping_pong=0)
    told = plan.values()
    assert plan_of(wgmma_plan.WgmmaPlan, told) == plan
    assert plan_of(wgmma_plan.WgmmaPlan, {**told, "skip_hidden": 0}) is None
    for name in told:
        assert plan_of(wgmma_plan.WgmmaPlan, {field: value for field, value in told.items() if field != name}) is None


def shared_bytes(mod):
    """Bytes of the shared memory that a kernel of a module asks for."""
    found = []
    for func in mod.functions.values():
        tvm_ffi.structural_walk(func.body, (tvm.tirx.AllocBuffer, lambda stmt: found.append(stmt.buffer)))
    return sum(2 * int(buffer.shape[0]) for buffer in found if buffer.scope() == "shared.dyn")


def lowered(mod):
    with ARCH.target(), tvm.transform.PassContext(config=wgmma.CONFIG):
        return get_tir_pipeline(wgmma.PIPELINE)[0](tvm.IRModule({"main": mod["main"].with_attr("target", ARCH.target())}))


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("loader", [24, 32, 40, 56])
def test_registers_of_a_block_are_those_of_a_multiprocessor(groups, loader):
    consumer = register_shares.consumer_registers(groups, loader)
    entry = register_shares.REGISTERS_PER_SM // (register_shares.GROUP * (groups + 1))
    assert register_shares.GROUP * (groups * consumer + loader) <= ARCH.registers_per_sm
    assert consumer <= 240 and consumer % 8 == 0, "as setmaxnreg wants it"
    assert consumer >= min(entry // 8 * 8, 240), "a consumer gives none of its registers away"


@pytest.mark.parametrize("groups, loader, consumer", [(1, 56, 240), (2, 24, 240), (3, 32, 160)])
def test_registers_are_those_of_the_paper_s_kernels(groups, loader, consumer):
    """FlashAttention-3, hopper/flash_fwd_kernel_sm90.h; a single consumer has 256 there, of which code can name 255."""
    assert wgmma_plan.LOADER_REGISTERS[groups] == loader
    assert register_shares.consumer_registers(groups, loader) == consumer
