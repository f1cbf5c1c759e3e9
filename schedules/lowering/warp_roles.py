"""Warps with roles: one warpgroup loads tiles, the others compute with them (FlashAttention-3, section 3.1).

Until here a kernel is one program for the warps that compute, with bulk loads and other events (schedules.intrinsics.events) in the places
where their tiles are needed. `split_roles` cuts this program in two: the loader keeps the loads and the loops around them, the consumers
keep the rest. What holds them together are rings: K and V have `stages` copies in shared memory, each with a barrier that says "full" and
one that says "empty"; Q has `query_stages`. A tile's number modulo the copies is its copy, its number divided by them the turn, whose last
bit is the phase to wait for.
"""
from dataclasses import fields
from functools import partial

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.stmt import SBlock
from tvm.script import tirx as T

from schedules.intrinsics import events
from schedules.intrinsics.mma import LANES
from schedules.intrinsics.wgmma import GROUP_WARPS
from schedules.lowering import bulk_loads, bulk_stores, order_of_work, register_shares, rewrite, row_statistics, work_tiles
from schedules.lowering.rewrite import FULL_WARP, constant, function_pass, once, substitute
from schedules.lowering.rings import Rings
from schedules.lowering.warp_exchange import Exchange
from schedules.lowering.warp_turns import Turns
from te_defs.lengths import FIRST_ROW, Part

#: Fields of the plan that stand as annotations on block `attn`, and as attributes of the function later, behind PREFIX.
KNOBS = ("stages", "query_stages", "ping_pong", "order_of_work", "shared_decode", "loader_registers")
PREFIX = "flashtir."
#: The same where a kernel has it: the number of the ring of which there is one copy.
SINGLE = "single"
#: The same: whether what is to be added to memory is handed over in the next turn, where one fence will do for both; it has two copies
#: then.
DEFERS = "defers"
#: Mark of the loop over the work tiles of a block, where the grid is persistent.
WAVES = "pragma_flashtir_waves"

#: Variables that hold what tensors of lengths say of a batch entry.
ROWS = (FIRST_ROW, *(field.name for field in fields(Part)))


@function_pass("flashtir.ReadRoles")
def read_roles(func):
    """Move the plan's annotations from block `attn`, which lowering dissolves, to the function; one without stays as it is."""
    blocks = []
    tvm_ffi.structural_walk(func.body, (SBlock, lambda block: blocks.append(block.name_hint)))
    if "attn" not in blocks:
        return func
    sch = s_tir.Schedule(tvm.IRModule({"main": func}), debug_mask=0)
    attn = sch.get_sblock("attn")
    marks = sch.get(attn).annotations
    found = {PREFIX + knob: int(marks[PREFIX + knob]) for knob in (*KNOBS, SINGLE, DEFERS) if PREFIX + knob in marks}
    for key in found:
        sch.unannotate(attn, key)
    return sch.mod["main"].with_attrs(found) if found else func


@function_pass("flashtir.SplitRoles")
def split_roles(func):
    """Cut a kernel with events in two, for a loader warpgroup behind the consumer warpgroups, and turn its events into barriers.

    The warps of the kernel, threadIdx.y, become four more. Inside a loop over work tiles (a persistent grid) the rings run on from tile to
    tile: the loader is at the next tile while the consumers finish this one.
    """
    if PREFIX + KNOBS[0] not in func.attrs:
        return func

    def launch(mark):
        if _thread_tag(mark) != "blockIdx.x":
            return mark
        roles, kernel = _launch(func, mark)
        stays = bulk_loads.tensor_of(roles.loads[min(roles.stays)])  # a tensor that is not empty, or there is no grid
        maps = (bulk_loads.encode_tensor_map(roles.maps[ring], call, stand_in=stays) for ring, call in roles.loads.items())
        entries = (tirx.Bind(roles.entry_rows[ring], bulk_loads.rows_of_entry(call)) for ring, call in roles.loads.items()
                   if bulk_loads.in_sequence(call))
        output = roles.output and [bulk_loads.encode_tensor_map(roles.output.map, roles.output.described(), stand_in=stays, apart=True)]
        return _sequence([*maps, *entries, *(output or []), kernel])

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.AttrStmt, launch)))


def _thread_tag(mark):
    return str(mark.node.thread_tag) if mark.attr_key == "thread_extent" else None


def _launch(func, grid):
    """The roles of a kernel, and its AttrStmt of blockIdx.x with them inside."""
    program = grid.body
    threads = {}

    def strip(mark):
        if _thread_tag(mark) in ("threadIdx.x", "threadIdx.y"):
            threads[_thread_tag(mark)] = mark
            return mark.body
        return mark

    program = work_tiles.flat(tvm_ffi.structural_map(program, (tirx.AttrStmt, strip)))
    allocations = [stmt for stmt in program if isinstance(stmt, tirx.AllocBuffer)]
    program = [stmt for stmt in program if not isinstance(stmt, tirx.AllocBuffer)]
    roles = _Roles(func, grid, program, threads)
    body, queries = roles.block(), roles.loads[events.Q]
    if events.Q in roles.stays and bulk_loads.in_sequence(queries):  # blocks whose tile lies past the end of its sequence have no work
        reads = [stmt for stmt in program if isinstance(stmt, tirx.Bind) and stmt.var.name in ROWS]
        body = _sequence([*reads, tirx.IfThenElse(bulk_loads.tile_exists(queries), body, None)])
    for tag, extent in (("threadIdx.y", roles.warps + GROUP_WARPS), ("threadIdx.x", LANES)):
        old = threads[tag].node
        axis = tirx.IterVar(tvm.ir.Range(0, extent), old.var, old.iter_type, old.thread_tag)
        body = tirx.AttrStmt(axis, "thread_extent", constant(extent), body)
    # One block on a multiprocessor: the register count at entry then leaves room for setmaxnreg.
    body = tirx.AttrStmt(constant(0), "tirx.launch_bounds_min_blocks_per_sm", constant(1), body)
    body, allocations = roles.rings.place_tiles(body, allocations)
    body = tirx.SeqStmt([*allocations, body])
    return roles, tirx.AttrStmt(grid.node, grid.attr_key, grid.value, body)


def _sequence(stmts):
    stmts = [inner for stmt in stmts for inner in work_tiles.flat(stmt)]
    return stmts[0] if len(stmts) == 1 else tirx.SeqStmt(stmts)


LOADER, TELLER, ADDER, CONSUMER = "loader", "teller", "adder", "consumer"
#: Whose events are whose; the others are the consumers'.
OF_ONE_ROLE = {"bulk_load": LOADER, "tell": TELLER, "await_turn": ADDER, "give_turn": ADDER}


class _Roles(Turns, Exchange):
    """The roles of one kernel."""

    def __init__(self, func, grid, program, threads):
        self.grid, self.program, self.waves = grid, program, None
        if len(program) == 1 and isinstance(program[0], tirx.AttrStmt) and program[0].attr_key == WAVES:
            self.waves = program[0].body
        for knob in KNOBS:
            setattr(self, knob, int(func.attrs[PREFIX + knob]))
        self.shared_decode = self.shared_decode and self.waves is not None
        self.lane, self.thread_warp = (threads[tag].node.var for tag in ("threadIdx.x", "threadIdx.y"))
        self.warps = int(threads["threadIdx.y"].value)
        self.groups = self.warps // GROUP_WARPS
        self.warp = tirx.Var("warp", "int32")
        single, self.defers = func.attrs.get(PREFIX + SINGLE), PREFIX + DEFERS in func.attrs
        self.rings = Rings(program, self.stages, self.query_stages, None if single is None else int(single), 1 + self.defers)
        self.loads, self.stays = self.rings.loads, self.rings.stays
        self.peeled = any(isinstance(call.args[-1], tirx.IntImm) for call in work_tiles.events_in(program, "wait_full"))
        self.work = work_tiles.flat(self.waves.body.then_case) if self.waves is not None else program
        tensors = [param for param in func.params if hasattr(param, "data")]
        # Where the queries have one place only, the next ones would wait for it; where they come by, they are not those that are written.
        takes_place = events.Q in self.stays and (self.waves is None or self.query_stages > 1)
        self.output = bulk_stores.output_of(self.work, self.loads[events.Q], tensors) if takes_place else None
        self.maps = {ring: tirx.Var(f"{events.RINGS[ring]}_map", bulk_loads.tensor_map_type()) for ring in self.loads}
        self.entry_rows = {ring: tirx.Var(f"{events.RINGS[ring]}_entry_rows", "int32") for ring in self.loads}

    def block(self):
        """What all threads of a block do."""
        consumer = register_shares.consumer_registers(self.groups, self.loader_registers)
        lead, third = (tirx.And(tirx.EQ(self.thread_warp, constant(self.warps + warp)), tirx.EQ(self.lane, constant(0))) for warp in (0, 2))
        load = [_evaluate(T.ptx["setmaxnreg.dec.sync.aligned.u32"](self.loader_registers)),
                tirx.IfThenElse(lead, self.program_of(LOADER), None)]
        if self.rings.added:
            load.append(tirx.IfThenElse(third, _sequence([*self.first_set_down(), self.program_of(ADDER)]), None))
        if self.rings.numbers:
            load.append(tirx.IfThenElse(tirx.EQ(self.warp, constant(self.warps + 1)), self.program_of(TELLER), None))
        compute = _sequence([_evaluate(T.ptx["setmaxnreg.inc.sync.aligned.u32"](consumer)), *self.first_turn(),
                             self.program_of(CONSUMER), *self.last_turn(), *self.last_set_down()])
        shuffled = T.cuda._shfl_sync(constant(FULL_WARP, "uint32"), self.thread_warp, 0, LANES)
        return _sequence([
            self.initialise(), _evaluate(T.cuda.cta_sync()),
            tirx.Bind(self.warp, shuffled),  # the same in all lanes, which the compiler cannot know of threadIdx.y
            tirx.IfThenElse(tirx.GE(self.warp, constant(self.warps)), tirx.SeqStmt(load), compute)])

    def initialise(self):
        """One thread sets up the barriers: a full one waits for the loader's thread and for each warp's worth of numbers that go with the
        tile, an empty one for each consumer warpgroup, whose warps finish a product together. What the loader tells beside the queries,
        each warp reads by itself. What is added to memory each warp has a part of, and one thread reads."""
        inits = [_evaluate(T.ptx.mbarrier.init.shared.b64(self.rings.barrier(ring, constant(copy), empty), constant(threads, "uint32")))
                 for ring in self.rings.added for copy in range(self.rings.sums) for empty, threads in enumerate((self.warps, 1))]
        for ring in self.loads:
            readers = self.groups + (self.warps if ring == events.Q and self.shared_decode else 0)
            writers = 1 + self.rings.numbers_of(ring) // LANES
            for copy in range(self.rings.copies(ring)):
                for empty in (0, 1):
                    address = self.rings.barrier(ring, constant(copy), empty)
                    inits.append(_evaluate(T.ptx.mbarrier.init.shared.b64(address, constant(readers if empty else writers, "uint32"))))
        first = tirx.And(tirx.EQ(self.thread_warp, constant(0)), tirx.EQ(self.lane, constant(0)))
        return tirx.IfThenElse(first, tirx.SeqStmt([*inits, _evaluate(T.ptx.fence.proxy.async_.shared__cta())]), None)

    def program_of(self, role):
        """One role's program over all work tiles of the block."""
        loads = role == LOADER
        if self.waves is None:
            return _sequence([self.cut(_sequence(self.program), role, constant(0), constant(0)), *self.written(role)])
        # Rings run on from one work tile to the next: the queries' by waves, those of keys and values by the key tiles before this one.
        counts = tirx.decl_buffer((1,), "int32", "counts", scope="local")
        keys, loop, guard = tirx.BufferLoad(counts, [constant(0)]), self.waves, self.waves.body
        wave, blocks = loop.loop_var, int(self.grid.value)
        last_key_tile = work_tiles.events_in(self.work, "wait_full")[-1].args[-1]
        work = work_tiles.release_queries(work_tiles.keys_first(self.work), early=self.output is None)
        body = _sequence([self.cut(_sequence(work), role, keys, wave), tirx.BufferStore(counts, keys + last_key_tile + 1, [constant(0)])])
        body = tirx.IfThenElse(guard.condition, body, _sequence(self.no_work(wave)) if loads and self.shared_decode else None)
        if self.shared_decode and not loads:
            body = _sequence([*self.take_work(wave), body])
        rows, heads, batch, box_rows = self.loads[events.Q].args[4:8]
        query_tiles = tirx.truncdiv(rows + (box_rows - 1), box_rows)
        number, binds = tirx.Var("tile", "int32"), []
        named = partial(rewrite.set_aside, binds)  # simplified wherever they are used, its parts took a third of lowering
        dealt = order_of_work.deal(self.order_of_work, wave, self.grid.node.var, blocks, batch * heads, query_tiles, named)
        body = _sequence([*binds, tirx.Bind(number, once(dealt)),
                          substitute(body, {self.grid.node.var: number - wave * blocks})])
        return _sequence([tirx.AllocBuffer(counts), tirx.BufferStore(counts, constant(0), [constant(0)]),
                          tirx.For(wave, loop.min, loop.extent, loop.kind, body, None, {"disable_unroll": True}, loop.step),
                          *self.written(role)])

    def written(self, role):
        """Statements at the end of a role's program: shared memory must be there until O has been read."""
        return [tirx.IfThenElse(self.speaks(), bulk_stores.wait(), None)] if self.output and role == CONSUMER else []

    def speaks(self):
        """Whether this is the thread that speaks for its consumer warpgroup."""
        return tirx.And(tirx.EQ(self.warp % GROUP_WARPS, constant(0)), tirx.EQ(self.lane, constant(0)))

    def take_work(self, wave):
        """Statements by which a consumer learns what its work tile is: the divisions that tell are the loader's, which has the time."""
        copy, phase = self.rings.turn(events.Q, constant(0), wave, constant(0))
        calls = (T.cuda.mbarrier_wait(self.rings.barrier(events.Q, copy, 0), phase),
                 tirx.call_extern("int32", rewrite.TAKE_FACTS, self.rings.facts(wave)), T.cuda.warp_sync())
        return [*map(_evaluate, calls), self.arrive(events.Q, copy, tirx.EQ(self.lane, constant(0)))]

    def publish(self, wave):
        """Call by which the loader tells what the work tile is, once everybody has read what was told before."""
        return tirx.call_extern("int32", rewrite.PUBLISH_FACTS, self.rings.facts(wave), wave)

    def no_work(self, wave):
        """Statements of the loader where a wave has no tile for this block."""
        copy, phase = self.rings.turn(events.Q, constant(0), wave, constant(0))
        arrive = T.ptx.mbarrier.arrive.shared.b64(self.rings.barrier(events.Q, copy, 0), constant(1, "uint32"))
        return map(_evaluate, (T.cuda.mbarrier_wait(self.rings.barrier(events.Q, copy, 1), 1 - phase), self.publish(wave), arrive))

    def cut(self, stmt, role, done, tiles):
        """What a role does of a statement, with events expanded; None where nothing is left.

        done   key tiles of the work tiles before
        tiles  work tiles before, or the wave
        """
        if self.output and stmt.same_as(self.output.stmt):
            return self.write_output(tiles) if role == CONSUMER else None
        if isinstance(stmt, tirx.SeqStmt):
            parts = [part for part in (self.cut(part, role, done, tiles) for part in stmt.seq) if part is not None]
            return _sequence(parts) if parts else None
        if isinstance(stmt, tirx.For):
            body = self.cut(stmt.body, role, done, tiles)
            # Unrolled, the loader's loop would need more registers than it keeps.
            annotations = {"disable_unroll": True} if role != CONSUMER else stmt.annotations
            return body and tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, None, annotations, stmt.step)
        if isinstance(stmt, tirx.IfThenElse):
            then, other = (case and self.cut(case, role, done, tiles) for case in (stmt.then_case, stmt.else_case))
            return tirx.IfThenElse(stmt.condition, then or _evaluate(0), other) if then or other else None
        if isinstance(stmt, tirx.AttrStmt):
            body = self.cut(stmt.body, role, done, tiles)
            return body and tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, body)
        if isinstance(stmt, tirx.Bind) and role != CONSUMER:
            # The loader reads the lengths of a batch entry, and counts tiles, for itself.
            return stmt if stmt.var.name in ROWS or rewrite.is_extern(stmt.value, rewrite.HELD) else None
        name = events.name_of(stmt.value) if isinstance(stmt, tirx.Evaluate) else None
        if name == "bulk_load" and role == CONSUMER:
            ring = int(stmt.value.args[1])
            # A peeled first turn waits for what stays by itself.
            waits = [] if self.peeled or ring not in self.stays else self.wait_full(done, tiles, ring, constant(0))
            return _sequence(map(_evaluate, waits)) if waits else None
        if role == ADDER and name == "add_up":
            return _sequence(self.added_up(done, tiles, *substitute(stmt.value, {self.thread_warp: constant(0)}).args[1:]))
        if role != OF_ONE_ROLE.get(name, CONSUMER):
            return None
        return self.expand(stmt, name, done, tiles)

    def write_output(self, tiles):
        """Statement by which a consumer writes O, in the place of its queries."""
        first = tirx.address_of(tirx.BufferLoad(self.rings.shared, [constant(self.rings.offset(events.Q))]))
        copy, _phase = self.rings.turn(events.Q, constant(0), tiles, constant(0))
        slot = tirx.Cast("int32", T.cuda.cvta_generic_to_shared(first)) + copy * self.rings.tile_bytes[events.Q]
        return _sequence(self.output.statements(slot, self.warp, self.lane, self.speaks(), self.groups + 2))

    def expand(self, stmt, name, done, tiles):
        """A statement with events as barriers."""
        stmt = substitute(stmt, {self.thread_warp: self.warp})
        if name is not None:
            arguments = stmt.value.args[1:]
            parts = getattr(self, name)(done, tiles, *arguments)
            return _sequence([part if isinstance(part, tirx.Stmt) else _evaluate(part) for part in parts] or [_evaluate(0)])

        def inner(call):
            called = events.name_of(call)
            return call if called is None else getattr(self, called)(done, tiles, *call.args[1:])
        return tvm_ffi.structural_map(stmt, (tvm.ir.Call, inner))

    def bulk_load(self, done, tiles, ring, pointer, *rest):
        ring, (*coordinates, key_tile) = int(ring), rest[-6:]
        copy, phase = self.rings.turn(ring, done, tiles, key_tile)
        full, bytes_ = self.rings.barrier(ring, copy, 0), self.rings.tile_bytes[ring]
        address = T.cuda.cvta_generic_to_shared(pointer) + tirx.Cast("uint32", copy * bytes_)
        return [T.cuda.mbarrier_wait(self.rings.barrier(ring, copy, 1), 1 - phase),
                *([self.publish(tiles)] if ring == events.Q and self.shared_decode else []),
                T.ptx.mbarrier.arrive.expect_tx.shared.b64(full, constant(bytes_, "uint32")),
                *bulk_loads.load_instructions(self.loads[ring], self.maps[ring], coordinates, self.entry_rows[ring], address, full,
                                              reused=ring not in self.stays)]

    def tell(self, done, tiles, pointer, ring, key_tile, value):
        ring = int(ring)
        copy, phase = self.rings.turn(ring, done, tiles, key_tile)
        number = tirx.Var("number", "float32")  # on its way while the place is not free yet
        arrive = T.ptx.mbarrier.arrive.shared.b64(self.rings.barrier(ring, copy, 0), constant(1, "uint32"))
        return [tirx.Bind(number, value), T.cuda.mbarrier_wait(self.rings.barrier(ring, copy, 1), 1 - phase),
                row_statistics.write(self.rings.place_of(pointer, copy), number), T.cuda.warp_sync(),
                tirx.IfThenElse(tirx.EQ(self.lane, constant(0)), _evaluate(arrive), None)]

    def told(self, done, tiles, pointer, ring, key_tile):
        return row_statistics.read(self.rings.place_of(pointer, self.rings.turn(int(ring), done, tiles, key_tile)[0]))

    def wait_full(self, done, tiles, ring, key_tile):
        ring = int(ring)
        copy, phase = self.rings.turn(ring, done, tiles, key_tile)
        first = isinstance(key_tile, tirx.IntImm) and ring == events.K and ring not in self.stays and not self.shared_decode
        return [*(call for stay in sorted(self.stays) if first for call in self.wait_full(done, tiles, stay, constant(0))),
                T.cuda.mbarrier_wait(self.rings.barrier(ring, copy, 0), phase)]

    def release(self, done, tiles, ring, key_tile):
        copy, _phase = self.rings.turn(int(ring), done, tiles, key_tile)
        return [self.arrive(ring, copy, self.speaks())]

    def release_before(self, done, tiles):
        """The queries of the work tile before this one, in whose place O was written, are released."""
        copy, _phase = self.rings.turn(events.Q, done, tiles - 1, constant(0))
        freed = _sequence([bulk_stores.wait(), self.arrive(events.Q, copy, None)])
        return [tirx.IfThenElse(tirx.And(self.speaks(), tiles > 0), freed, None)]

    def arrive(self, ring, copy, condition, empty=1):
        """Statement by which the thread that a condition chooses, if any, says that a copy may be overwritten as far as it is concerned, or
        where not `empty`, that its part is there."""
        arrive = _evaluate(T.ptx.mbarrier.arrive.shared.b64(self.rings.barrier(int(ring), copy, empty), constant(1, "uint32")))
        return arrive if condition is None else tirx.IfThenElse(condition, arrive, None)

    def slot_bytes(self, done, tiles, ring, key_tile):
        return self.rings.turn(int(ring), done, tiles, key_tile)[0] * self.rings.tile_bytes[int(ring)]

    def group_bytes(self, done, tiles, rows_bytes):
        return self.warp % GROUP_WARPS * rows_bytes

    def wait_scores(self, done, tiles, key_tile):
        # The peeled first tile has no product in front of it.
        return [T.ptx.wgmma.wait_group.sync.aligned(0 if isinstance(key_tile, tirx.IntImm) else 1)]


def _evaluate(value):
    return tirx.Evaluate(tirx.const(value, "int32") if isinstance(value, int) else value)
