"""Attention in Relax graphs: what is replaced, by which kernel, with which numbers; what stays and why; graphs in one executable."""
import logging
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from schedules.arch import ArchError, cpu_arch, cuda_arch
from schedules.lowering.cuda_compile import cuda_compiler
from schedules.relax import FlashAttention, cleanup, front_end
from schedules.relax.device import arch_of, plans_for
from schedules.relax.flash_attention import KernelCalls
from schedules.relax.modules import Workloads
from schedules.tuning.log import LogError
from te_defs import reference
from te_defs.workload import Workload

ROOT = Path(__file__).parent.parent
B, N, M, H, G, D, DV = 2, 37, 61, 4, 2, 16, 24
TARGET = tvm.target.Target({"kind": "llvm", "opt-level": 0, "mcpu": tvm.target.codegen.llvm_get_system_cpu()})
HERE = cpu_arch("x86-64-v4", 512, 2)
TURN = (0, 2, 1, 3)


def variable(name, shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def graph(variables, body, name="main", builder=None):
    """IRModule of a function (variables) of what `body`, a function of an emitter and the variables, gives."""
    builder = builder or relax.BlockBuilder()
    with builder.function(name, variables):
        with builder.dataflow():
            out = builder.emit_output(body(builder.emit, *variables))
        builder.emit_func_output(out)
    return builder.get()


def qkv(n=N, m=M, h=H, g=G, d=D, dv=DV, dtype="float32", batch=B):
    return [variable("q", (batch, n, h, d), dtype), variable("k", (batch, m, g, d), dtype), variable("v", (batch, m, g, dv), dtype)]


def randoms(variables, seed=0, **sizes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal([sizes.get(str(size)) or int(size) for size in it.ty.shape.values]).astype(str(it.ty.dtype))
            for it in variables]


def attention(emit, *tensors, **attributes):
    """A call of R.nn.attention whose result another operator takes, so that it is no output of the graph."""
    return relax.op.negative(emit(relax.op.nn.attention(*tensors, **attributes)))


def turned(emit, q, k, v):
    """Attention on heads-first tensors, as PyTorch has them."""
    q, k, v = (emit(relax.op.permute_dims(x, TURN)) for x in (q, k, v))
    return relax.op.negative(emit(relax.op.permute_dims(emit(relax.op.nn.attention(q, k, v, scale=-0.7, causal_mask="BottomRight")), TURN)))


def packed(emit, q, k, v, begins, most):
    return relax.op.negative(emit(relax.op.nn.attention_var_len(q, k, v, begins, most, causal_mask="BottomRight")))


@pytest.fixture(scope="module")
def machine():
    """A machine with functions for five workloads, compiled together."""
    builder, n = relax.BlockBuilder(), tvm.tirx.Var("n", "int64")
    graph(qkv(), attention, "full", builder)
    graph([variable(name, (B, heads, rows, D)) for name, heads, rows in (("q", H, N), ("k", G, M), ("v", G, M))], turned, "turned", builder)
    graph([*qkv(), variable("bias", (1, H, N, M))], lambda emit, *them: attention(emit, *them, causal_mask="TopLeft"), "bias", builder)
    graph(qkv(n, n, dv=D), lambda emit, *them: attention(emit, *them, causal_mask="TopLeft"), "symbolic", builder)
    mod = graph([*qkv(90, 90, dv=D, batch=1), variable("begins", (5,), "int32"), variable("most", (), "int32")], packed, "packed", builder)
    mod = FlashAttention(None, TARGET)(mod)
    text = mod.script()
    assert "R.nn.attention" not in text and "permute_dims" not in text
    return Compiled(tvm.compile(mod, TARGET))


class Compiled:
    """An executable and its virtual machine on the CPU."""

    def __init__(self, executable):
        self.executable, self.machine = executable, relax.VirtualMachine(executable, tvm.cpu())

    def __getitem__(self, name):
        return self.machine[name]


def call(machine, name, arrays):
    return -machine[name](*map(tvm.runtime.tensor, arrays)).numpy()


def check(out, workload, inputs, scale=None, arguments=(), lengths=()):
    """Whether an output of attention is within the rule of te_defs.reference."""
    answers = reference.forward(workload, *inputs, scale, arguments, lengths)
    allowed, _ = reference.tolerances(workload, *inputs, scale, arguments, answers, lengths)
    assert np.abs(out - answers[0]).max() <= allowed


def test_grouped_heads(machine):
    inputs = randoms(qkv())
    check(call(machine, "full", inputs), Workload(D, DV, "float32", "full"), inputs)


def test_heads_first_as_they_lie(machine):
    inputs = randoms([variable("x", (B, heads, rows, D)) for heads, rows in ((H, N), (G, M), (G, M))])
    check(call(machine, "turned", inputs).swapaxes(1, 2), Workload(D, D, "float32", "causal"), [x.swapaxes(1, 2) for x in inputs], -0.7)


def test_bias(machine):
    *inputs, bias = randoms([*qkv(), variable("bias", (1, H, N, M))])
    check(call(machine, "bias", [*inputs, bias]), Workload(D, DV, "float32", "causal_top_left", "bias"), inputs, None, (bias,))


@pytest.mark.parametrize("n", [1, 70])
def test_length_of_each_call(machine, n):
    inputs = randoms(qkv(n, n, dv=D))
    check(call(machine, "symbolic", inputs), Workload(D, D, "float32", "causal"), inputs)


def test_packed_sequences(machine):
    inputs, begins = randoms(qkv(90, 90, dv=D, batch=1)), np.array([0, 13, 13, 60, 90], np.int32)
    check(call(machine, "packed", [*inputs, begins, np.array(47, np.int32)]), Workload(D, D, "float32", "causal", lengths="packed"), inputs,
          None, (), (begins, begins, 47))
    with pytest.raises(ValueError, match="max_q is 40, wanted 47 or more, the queries of the longest sequence"):
        call(machine, "packed", [*inputs, begins, np.array(40, np.int32)])


def test_what_a_kernel_is_given_is_checked(machine):
    """As an artefact's calls are, whatever a graph hands over; and nothing is written before."""
    function = machine.executable["flash_attention_forward_d16_dv24_f32_full"]
    q, k, v = randoms(qkv())
    out, lse = np.full((B, N, H, DV), np.nan, np.float32), np.zeros((B, H, N), np.float32)

    def refused(q, k, v, *rest):
        with pytest.raises((TypeError, ValueError)) as error:
            function(*map(tvm.runtime.tensor, (q, k, v)), *rest, *(given := [tvm.runtime.tensor(x) for x in (out, lse)]))
        assert np.isnan(given[0].numpy()).all()
        return str(error.value)
    assert "k has dtype float64, wanted float32" in refused(q, k.astype("float64"), v, 1.0, 0)
    assert "q has 4 heads and k has 3, wanted a multiple" in refused(q, np.repeat(k, 2, 2)[:, :, :3], np.repeat(v, 2, 2)[:, :, :3], 1.0, 0)
    assert "scale is nan" in refused(q, k, v, float("nan"), 0)
    assert "q.shape[3] is 37, wanted 16" in refused(q.transpose(0, 2, 3, 1), k, v, 1.0, 0)
    assert "a graph's call has 6 arguments, wanted 7" in refused(q, k, v, 1.0)


def test_functions_of_other_libraries_stay():
    mod = graph(qkv(), attention)
    mod["main"] = mod["main"].with_attr("Codegen", "other")
    assert "R.nn.attention" in KernelCalls(HERE, Workloads())(mod).script()


def test_names_of_functions_are_their_own():
    workloads, causal = Workloads(), Workload(16, 16, "float32", "causal")
    names = [workloads.name_of(it) for it in (causal, Workload(16, 16, "float32", "causal", "bias"), causal)]
    assert names == ["flash_attention_forward_d16_dv16_f32_causal", "flash_attention_forward_d16_dv16_f32_causal_bias", names[0]]
    workloads.names[causal] = "flash_attention_forward_d16_dv16_f32_full"
    assert workloads.name_of(Workload(16, 16, "float32", "full")) == "flash_attention_forward_d16_dv16_f32_full_"


def test_a_result_that_is_returned_as_well_stays_as_it_is():
    """Only where all that use it exchange rows and heads does a kernel write it heads first."""
    def body(emit, q, k, v):
        out = emit(relax.op.nn.attention(q, k, v))
        return relax.Tuple([out, emit(relax.op.permute_dims(out, TURN))])
    assert "R.permute_dims" in KernelCalls(HERE, Workloads())(graph(qkv(), body)).script()


@pytest.mark.gpu
def test_heads_first_on_a_gpu(gpu_arch, toolkit):
    variables = [variable("x", (B, heads, rows, 64), "float16") for heads, rows in ((H, N), (G, M), (G, M))]
    target = tvm.target.Target({"kind": "cuda", "arch": gpu_arch.name.rstrip("a")}, host="llvm")
    with cuda_compiler(toolkit, (gpu_arch.name,)):
        executable = tvm.compile(FlashAttention(None, target, toolkit)(graph(variables, turned)), target)
    inputs = randoms(variables)
    out = relax.VirtualMachine(executable, tvm.cuda())["main"](*(tvm.runtime.tensor(x, tvm.cuda()) for x in inputs)).numpy()
    check(-out.swapaxes(1, 2), Workload(64, 64, "float16", "causal"), [x.swapaxes(1, 2) for x in inputs], -0.7)


REASONS = {
    "head_dim must be a multiple of 8 from 8 to 256, found 12": (qkv(d=12), {}),
    "dtype must be one of float16, bfloat16, float32, found 'float64'": (qkv(dtype="float64"), {}),
    "BottomRight with more queries than keys has another meaning": (qkv(M, N), {"causal_mask": "BottomRight"}),
    "causal_mask must be one of TopLeft, BottomRight, found Diagonal": (qkv(), {"causal_mask": "Diagonal"}),
    "Relax does not define which keys a window_size shows": (qkv(), {"window_size": 5}),
    "the channels of q must be a number, found c": (qkv(d=tvm.tirx.Var("c", "int64")), {}),
    "bias must be of q's type float32, found float16": ([*qkv(), variable("bias", (1, 1, N, M), "float16")], {}),
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_stays_says_why(reason, caplog):
    variables, attributes = REASONS[reason]
    mod = graph(variables, lambda emit, *them: attention(emit, *them, **attributes))
    after = KernelCalls(HERE, Workloads())(mod)
    assert "call_dps_packed" not in after.script() and "R.nn.attention" in after.script()
    assert f"stays TVM's own: {reason}" in caplog.text


def test_what_stays_has_its_key_heads_repeated():
    """TVM's own attention would read them wrongly."""
    inputs = randoms(variables := qkv(d=12, dv=16))
    mod = FlashAttention(None, TARGET)(graph(variables, attention))
    out = call(Compiled(tvm.compile(mod, TARGET)), "main", inputs)
    k, v = (np.repeat(x.astype(np.float64), H // G, axis=2) for x in inputs[1:])
    s = np.einsum("bihc,bjhc->bhij", inputs[0].astype(np.float64), k) * 12**-0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    assert np.abs(out - np.einsum("bhij,bjhc->bihc", p / p.sum(-1, keepdims=True), v)).max() < 1e-5


def test_a_graph_without_attention_says_so(caplog):
    x = variable("x", (3,))
    FlashAttention(None, TARGET)(graph([x], lambda emit, x: relax.op.negative(x)))
    assert "no attention was found" in caplog.text


def test_in_a_pipeline_of_ones_own(caplog):
    """Within the target of tvm.compile; where the plan is from is said."""
    pipeline = tvm.transform.Sequential([FlashAttention(), relax.get_default_pipeline(TARGET)])
    with caplog.at_level(logging.INFO):
        machine = Compiled(tvm.compile(graph(qkv(), attention), TARGET, relax_pipeline=pipeline))
    inputs = randoms(qkv())
    check(call(machine, "main", inputs), Workload(D, DV, "float32", "full"), inputs)
    assert "the plan of fwd_d16_dv24_f32_full is the default one of cpu" in caplog.text and "since no logs were named" in caplog.text


def test_logs_must_be_there(tmp_path):
    with pytest.raises(LogError, match="a folder of tuning logs was wanted, found none at .*nowhere: name one, or None for default plans"):
        plans_for(Workload(D, D, "float32", "full"), HERE, tmp_path / "nowhere")


def test_plan_of_the_log():
    """A GPU's graph gets the plans that were tuned on the nearest one."""
    workload = Workload(128, 128, "float16", "causal")
    plans, told = plans_for(workload, cuda_arch("sm_90a"), ROOT / "tuning_logs")
    assert told.startswith("the plan of fwd_d128_dv128_f16_causal was measured on nvidia-h200, 20") and plans[0].measured["seconds"] > 0
    _, told = plans_for(workload, cuda_arch("sm_80"), ROOT / "tuning_logs")
    assert told.startswith("the plan of fwd_d128_dv128_f16_causal is the default one of mma") and "no device like sm_80 lends one" in told


def test_targets():
    with pytest.raises(ArchError, match="a target was wanted, found none: name one"):
        arch_of(None)
    with pytest.raises(ArchError, match="a target is of kind llvm, or of kind cuda with an arch such as sm_80"):
        arch_of("c")
    assert [arch_of({"kind": "cuda", "arch": name}).name for name in ("sm_80", "sm_90", "sm_90a")] == ["sm_80", "sm_90a", "sm_90a"]
    with tvm.target.Target({"kind": "llvm", "num-cores": 3}):
        assert arch_of(None).cores == 3


def test_beside_records_of_metaschedule(tmp_path):
    """The kernel and what a folder of records schedules, in one executable."""
    variables = [*qkv(N, N, H, H, D, D), variable("w", (D, D))]
    mod = graph(variables, lambda emit, q, k, v, w: relax.op.matmul(emit(relax.op.nn.attention(q, k, v)), w))
    mod = relax.transform.LegalizeOps()(FlashAttention(None, TARGET)(mod))
    database = ms.database.JSONDatabase(work_dir=str(tmp_path))
    name = next(it for it in mod.get_global_vars() if it.name_hint == "matmul")
    task = tvm.IRModule({"main": mod[name].with_attr("global_symbol", "main")})
    sch = Schedule(task)
    sch.parallel(sch.get_loops("matmul")[0])
    database.commit_tuning_record(ms.database.TuningRecord(sch.trace, database.commit_workload(task), [1.0], TARGET))
    with TARGET:
        mod = relax.transform.MetaScheduleApplyDatabase(str(tmp_path))(mod)
    assert "T.parallel" in mod[name.name_hint].script()
    *inputs, w = randoms(variables)
    out = relax.VirtualMachine(tvm.compile(mod, TARGET), tvm.cpu())["main"](*map(tvm.runtime.tensor, [*inputs, w])).numpy()
    answer, _ = reference.forward(Workload(D, D, "float32", "full"), *inputs)
    assert np.abs(out - answer @ w).max() < 1e-5


def test_cleanup():
    """Each rule on a graph of its own, with the nodes that are left."""
    x, one, zero = variable("x", (2, 3, 4)), relax.const(1.0, "float32"), relax.const(0.0, "float32")

    def left(rewrite, body):
        mod = relax.transform.DeadCodeElimination()(relax.transform.CanonicalizeBindings()(rewrite(graph([x], body))))
        return dict(front_end.nodes(mod))
    op = relax.op
    assert left(cleanup.RemoveNoOps, lambda emit, x: op.negative(emit(op.reshape(emit(op.astype(x, "float32")), x.ty.shape)))) == {
        "negative": 1}
    assert left(cleanup.RemoveNoOps, lambda emit, x: op.negative(emit(op.concat([emit(op.zeros((2, 0, 4), "float32")), x], 1)))) == {
        "negative": 1}
    assert left(cleanup.RemoveNoOps, lambda emit, x: op.reshape(x, (6, 4))) == {"reshape": 1}
    assert left(cleanup.SimplifyArithmetic, lambda emit, x: op.negative(emit(op.divide(emit(op.add(zero, x)), one)))) == {"negative": 1}
    assert left(cleanup.SimplifyArithmetic, lambda emit, x: op.subtract(zero, x)) == {"subtract": 1}
    assert left(cleanup.SimplifyArithmetic, lambda emit, x: op.divide(one, x)) == {"divide": 1}
    assert left(cleanup.CancelTransposes, lambda emit, x: op.negative(emit(op.permute_dims(emit(op.permute_dims(x)))))) == {"negative": 1}
    assert left(cleanup.CancelTransposes, lambda emit, x: op.permute_dims(emit(op.permute_dims(x, (1, 2, 0))), (0, 2, 1))) == {
        "permute_dims": 1}
