"""The examples on a GPU: PyTorch's streams and CUDA graphs, JAX's, a program in C++, and tensors of other devices.

Artefacts are exported for the GPU that is there, with default plans. What is not installed for CUDA is skipped.
"""
import importlib
import os
from pathlib import Path

import numpy as np
import pytest

from schedules.lowering.toolkit import find_toolkit
from te_defs.workload import Workload
from tests.commands import command
from tests.examples import build_program, by_jax, by_pytorch, complaint, jax_example

pytestmark = pytest.mark.gpu
HALVES, FLOATS = Workload(64, 64, "float16", "causal"), Workload(64, 64, "float32", "causal")
#: Clock cycles that a stream sleeps, some milliseconds: far longer than the host takes to issue what follows.
A_WHILE = 20_000_000


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """{workload: path of its artefact for this GPU, with gradients}"""
    folder = tmp_path_factory.mktemp("examples")
    paths = {workload: folder / f"{workload.name}.so" for workload in (HALVES, FLOATS)}
    for workload, path in paths.items():
        command("export", "--plan", "default", "--workload", workload.name, "--backward", "--output", path, code=0)
    return paths


@pytest.fixture(scope="module")
def torch():
    found = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not found.cuda.is_available():
        pytest.skip("PyTorch is not installed for CUDA")
    return found


@pytest.fixture(scope="module")
def attention(torch, exported):
    return importlib.import_module("scripts.examples.pytorch").load_attention(exported[HALVES])


def tensors(torch, count, device="cuda", length=300):
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(2, length, 4, 64, generator=generator).half().to(device) for _ in range(count)]


class TestPyTorch:
    @pytest.mark.parametrize("mode", ["eager", "default", "reduce-overhead"])
    def test_numbers_and_gradients(self, torch, attention, mode):
        call = attention if mode == "eager" else torch.compile(attention, fullgraph=True, mode=mode)
        for seed in range(3):  # of CUDA graphs the first calls only record
            assert complaint(by_pytorch(call, "cuda"), HALVES, seed) is None

    def test_a_call_is_on_the_current_stream(self, torch, attention):
        late = tensors(torch, 3)
        wanted = attention(*late)
        now = [torch.full_like(tensor, torch.nan) for tensor in late]
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(A_WHILE)
            for tensor, value in zip(now, late):
                tensor.copy_(value)
            out = attention(*now)  # on another stream it would not wait for the values
        assert not stream.query(), "the stream was to be busy while calls were issued"
        stream.synchronize()
        assert torch.equal(out, wanted)

    def test_a_call_leaves_other_streams_alone(self, torch, attention):
        q, k, v = tensors(torch, 3)
        attention(q, k, v)
        torch.cuda.synchronize()
        busy, stream = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(busy):
            torch.cuda._sleep(10 * A_WHILE)
        with torch.cuda.stream(stream):
            attention(q, k, v)
        stream.synchronize()
        assert not busy.query(), "the call waited for a stream that it has nothing to do with"
        torch.cuda.synchronize()

    def test_a_cuda_graph_of_both_passes(self, torch, attention):
        inputs = [tensor.requires_grad_() for tensor in tensors(torch, 3)]
        dout = tensors(torch, 4)[3]

        def both():
            out = attention(*inputs)
            return out, *torch.autograd.grad(out, inputs, dout)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            both()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = both()
        with torch.no_grad():
            for tensor, value in zip(inputs, tensors(torch, 7)[4:]):
                tensor.copy_(value)
        graph.replay()
        found = [tensor.clone() for tensor in captured]
        assert all(torch.equal(a, b) for a, b in zip(found, both()))

    def test_tensors_are_not_copied(self, torch, exported):
        module, _ = importlib.import_module("scripts.examples.artefact").load(exported[HALVES])
        q, k, v = tensors(torch, 3)
        both, lse = q.new_full((2, *q.shape), torch.nan), q.new_empty(2, 4, 300, dtype=torch.float32)
        before = torch.cuda.memory_allocated()
        module.flash_attention_forward(q, k, v, both[1], lse, 0.125)
        assert torch.cuda.memory_allocated() == before
        assert both[0].isnan().all() and not both[1].isnan().any()

    def test_other_devices_are_told_in_a_sentence(self, torch, attention):
        q, k, v = tensors(torch, 3)
        for call in attention, torch.compile(attention):
            with pytest.raises(ValueError, match="^flash_attention_forward: q is on cpu, wanted a tensor on a cuda device$"):
                call(q.cpu(), k.cpu(), v.cpu())
        with pytest.raises(ValueError, match="^flash_attention_forward: k is on cpu, wanted a tensor on a cuda device$"):
            attention(q, k.cpu(), v)

    def test_two_gpus(self, torch, attention):
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        here, there = tensors(torch, 3), tensors(torch, 3, "cuda:1")
        assert torch.cuda.current_device() == 0
        assert torch.equal(attention(*there).cpu(), attention(*here).cpu())
        assert torch.cuda.current_device() == 0
        with pytest.raises(ValueError, match="k is on cuda:1, wanted cuda:0, where q is$"):
            attention(here[0], there[1], here[2])

    def test_the_overhead_is_told(self, torch, exported, capsys):
        assert importlib.import_module("scripts.examples.overhead").main([str(exported[FLOATS]), "--rounds", "3"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 8


@pytest.fixture(scope="module")
def jax_ffi():
    """The example for JAX; PyTorch's tests in this process need memory too."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return jax_example("gpu", "JAX is not installed for CUDA")


@pytest.fixture(scope="module")
def attentions(jax_ffi, exported):
    return {workload: jax_ffi.load_attention(path) for workload, path in exported.items()}


class TestJax:
    @pytest.mark.parametrize("workload", [HALVES, FLOATS], ids=lambda it: it.name)
    def test_numbers_and_gradients(self, attentions, workload):
        for seed in range(3):  # XLA makes graphs of what it has run before
            assert complaint(by_jax(attentions[workload]), workload, seed) is None

    def test_inside_a_larger_program(self, jax_ffi, attentions):
        jnp, random = jax_ffi.jax.numpy, np.random.default_rng(0)
        q, k, v = (jnp.asarray(random.standard_normal((2, 300, 4, 64)), "float16") for _ in range(3))

        @jax_ffi.jax.jit
        def program(q, k, v):
            for _ in range(8):
                q = attentions[HALVES](q / 2 + q / 2, k, v)
            return q
        wanted = q
        for _ in range(8):
            wanted = attentions[HALVES](wanted / 2 + wanted / 2, k, v)
        assert jnp.array_equal(program(q, k, v), wanted)


def test_cpp(exported, tmp_path):
    cudart = find_toolkit(os.environ).cudart
    folders = {"LD_LIBRARY_PATH": str(Path(cudart).parent)} if cudart else {}
    done = build_program(tmp_path)(exported[FLOATS], **folders)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{FLOATS.name}: largest error ")
