"""The examples in Relax as users run them, PyTorch's attention, and `scripts.show graph`."""
import importlib
import json

import numpy as np
import pytest
import tvm
from tvm import relax

from schedules.lowering.cuda_compile import cuda_compiler
from schedules.relax import SCALED_DOT_PRODUCT_ATTENTION, FlashAttention
from scripts import cli
from scripts.examples import relax_block
from tests.commands import command, imported

TARGET = tvm.target.Target({"kind": "llvm", "opt-level": 0, "mcpu": tvm.target.codegen.llvm_get_system_cpu()})


def test_block_runs_with_the_runtime_alone(tmp_path, capfd):
    """Builds, exports, and has a process without TVM's compiler check all executables against NumPy and time them."""
    command("examples.relax_block", "--target", "cpu", "--length", 48, "--heads", 2, "--head-dim", 16, "--output", tmp_path, "--rounds", 1,
            code=cli.DONE)
    told = capfd.readouterr().out
    assert told.count("within the") == 3 and "attention inside takes" in told
    assert json.loads((tmp_path / "block.json").read_text())["executables"] == ["stock", "theirs", "ours"]


def test_records_must_be_there(tmp_path):
    refused = command("examples.relax_block", "--target", "cpu", "--records", tmp_path, code=cli.USAGE).stderr
    assert "--records must be a folder of MetaSchedule's records, found no database_workload.json in" in refused


@pytest.mark.gpu
def test_block_on_a_gpu(tmp_path, capfd, gpu_arch):
    command("examples.relax_block", "--target", gpu_arch.name, "--length", 256, "--heads", 4, "--head-dim", 64, "--output", tmp_path,
            "--rounds", 1, code=cli.DONE)
    assert "ours         largest error" in capfd.readouterr().out


def test_reference_of_the_block_sees_a_wrong_answer():
    """What relax_run allows is far below what a block without its positions, or its mask, is off by."""
    spec = {"batch": 1, "length": 48, "heads": 2, "dtype": "float32", "weights": relax_block.module_of(1, 48, 2, 16, "float32")[1]}
    relax_run = imported("examples.relax_run")
    tokens, weights = relax_run.make_inputs(spec)
    allowed, answer = relax_run.tolerance_and_answer(tokens, weights, 2, "float32")
    for name in ("attention.o.linear.weight", "down.linear.weight"):
        other = relax_run.tolerance_and_answer(tokens, {**weights, name: 0.999 * weights[name]}, 2, "float32")[1]
        assert np.abs(other - answer).max() > 10 * allowed


def test_graph_is_shown():
    told = command("show", "graph", "--workload", "d64_f32_full", "--target", "cpu", code=cli.DONE).stdout
    steps = {line[:40].strip(): tuple(map(int, line[40:56].split())) for line in told.splitlines() if line[40:56].split()[:1] and
             all(word.isdigit() for word in line[40:56].split())}
    assert list(steps)[:5] == ["no-op and zero-size elimination", "algebraic simplification", "transpose clean-up",
                               "common-subexpression elimination", "dead-code elimination"]
    assert all(before >= after for before, after in steps.values())
    assert all(steps[name][0] > steps[name][1] for name in ("no-op and zero-size elimination", "transpose clean-up", "constant folding",
                                                            "operator fusion", "dead-code elimination"))
    assert "flash_attention_forward_d64_dv64_f32_full" in told and "permute_dims" not in told.partition("@R.function")[2]
    assert command("show", "--graph", "--workload", "d64_f32_full", "--target", "cpu").stdout == told
    refused = command("show", "graph", "--workload", "d64_f32_window", "--target", "cpu", code=cli.USAGE).stderr
    assert "graph shows blocks whose attention is full or causal, found fwd_d64_dv64_f32_window" in refused


def test_cuda_executable_carries_kernels_of_both(tmp_path, toolkit):
    """Compiled for a GPU on whatever machine this is: device code of TVM's schedules and of the kernel in one file."""
    shapes = {**dict.fromkeys("qkv", (1, 64, 2, 16)), "bias": (1, 2, 64, 64)}  # with a bias there is one kernel for scales of both signs
    builder = relax.BlockBuilder()
    with builder.function("main", variables := [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.silu(builder.emit(relax.op.nn.attention(*variables))))
        builder.emit_func_output(out)
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host="llvm")
    with cuda_compiler(toolkit, ("sm_80",)):
        executable = relax_block.compiled(builder.get(), target, FlashAttention(None, target, toolkit))
    executable.export_library(str(tmp_path / "block.so"))
    library = (tmp_path / "block.so").read_bytes()
    assert b"attention_forward_kernel" in library and b"silu_kernel" in library and b"__tvm_ffi_flash_attention_forward_d16" in library
    assert b"flash_attention_manifest" not in library


@pytest.mark.examples
class TestTorch:
    """Needs PyTorch."""

    @pytest.fixture(scope="class")
    def torch(self):
        return pytest.importorskip("torch", reason="needs PyTorch")

    def test_options_are_kept(self, torch):
        """Scale, causal, grouped heads and masks of both kinds, all in one graph; a row that sees no key gives zeros."""
        attend = torch.nn.functional.scaled_dot_product_attention

        class Forms(torch.nn.Module):
            def forward(self, q, k, v, seen, added):
                few = q[:, :2]
                return (attend(few, k, v), attend(few, k, v, scale=-0.3), attend(q, k, v, is_causal=True, enable_gqa=True),
                        attend(few, k, v, seen), attend(q, k, v, attn_mask=added, scale=0.4, enable_gqa=True))
        torch.manual_seed(0)
        q, k, v, added = torch.randn(2, 4, 33, 16), torch.randn(2, 2, 47, 16), torch.randn(2, 2, 47, 16), torch.randn(2, 1, 33, 47)
        seen = torch.rand(33, 47) > 0.4
        seen[3] = False
        inputs = (q, k, v, seen, added)
        frontend = importlib.import_module("tvm.relax.frontend.torch")
        mod = frontend.from_exported_program(torch.export.export(Forms(), inputs), run_ep_decomposition=False,
                                             custom_convert_map=SCALED_DOT_PRODUCT_ATTENTION)
        mod = FlashAttention(None, TARGET)(mod)
        found = relax.VirtualMachine(tvm.compile(mod, TARGET), tvm.cpu())["main"](*[tvm.runtime.tensor(x.numpy()) for x in inputs])
        for answer, wanted in zip(found, Forms()(*inputs), strict=True):
            assert np.abs(answer.numpy() - wanted.numpy()).max() < 2e-6
        assert np.all(found[3].numpy()[:, :, 3] == 0)

    def test_what_has_no_counterpart_says_so(self, torch):
        frontend = importlib.import_module("tvm.relax.frontend.torch")

        def imported(inputs, **options):
            class Form(torch.nn.Module):
                def forward(self, q):
                    return torch.nn.functional.scaled_dot_product_attention(q, q, q, **options)
            frontend.from_exported_program(torch.export.export(Form(), inputs), run_ep_decomposition=False,
                                           custom_convert_map=SCALED_DOT_PRODUCT_ATTENTION)
        with pytest.raises(ValueError, match="must be without dropout, found dropout_p=0.5: export it after eval"):
            imported((torch.randn(1, 2, 5, 16),), dropout_p=0.5)
        with pytest.raises(ValueError, match="must have q, k and v of four axes, found .*: unsqueeze them before the call"):
            imported((torch.randn(2, 5, 16),))

    def test_llama_block(self, torch):
        told = command("examples.torch_export", "--length", 40, code=cli.DONE).stdout
        assert "largest error" in told
