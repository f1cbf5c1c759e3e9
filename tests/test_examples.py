"""The examples for PyTorch, JAX and C++: right numbers, what torch.compile keeps, one sentence for what is wrong, and nothing of ours."""
import importlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from schedules.lowering.toolkit import driver_version
from scripts.examples import artefact
from scripts.examples.artefact import ArtefactError, load
from te_defs.workload import Workload
from tests.commands import command
from tests.examples import build_program, by_jax, by_pytorch, complaint, jax_example

pytestmark = [pytest.mark.slow, pytest.mark.examples]

ROOT = Path(__file__).parent.parent
WORKLOAD = Workload(32, 16, "float32", "causal")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Function (workload, options of the export) -> path of an artefact for the CPU."""
    def make(workload, *options):
        path = tmp_path_factory.mktemp("examples") / "attention.so"
        command("export", "--target", "cpu", "--plan", "default", "--workload", workload.name, "--output", path, *options, code=0)
        return path
    return make


@pytest.fixture(scope="module")
def with_gradients(exported):
    return exported(WORKLOAD, "--backward")


@pytest.fixture(scope="module")
def without(exported):
    """One of another workload and without gradients."""
    return exported(Workload(32, 32, "float32", "full"))


@pytest.fixture
def told(monkeypatch, tmp_path):
    """Function (change) -> path of an artefact whose manifest, right before, went through `change`; there is no code behind it."""
    manifest = {"schema": artefact.SCHEMA, "signature": artefact.FORWARD, "versions": {"tvm": importlib.metadata.version("apache-tvm")}}

    def make(change):
        change(manifest)
        module = SimpleNamespace(implements_function=lambda name: True, flash_attention_manifest=lambda: json.dumps(manifest))
        monkeypatch.setattr(artefact.tvm_ffi, "load_module", lambda path: module)
        path = tmp_path / "attention.so"
        path.touch()
        return path
    return make


class TestLoading:
    @pytest.mark.parametrize("change, sentence", [
        (lambda it: it.update(schema=2), "a manifest of schema 3 is wanted, found 2 in .*: export again$"),
        (lambda it: it["versions"].update(tvm="0.21.0"), r"an artefact for TVM 0\.27\..* is wanted, found .* by TVM 0\.21\.0: export "),
        (lambda it: it.update(signature="f(q, k, v, out, lse, scale, left, right)"), "is wanted, found f.*left, right.* in .*: hand its"),
    ], ids=["schema", "version", "signature"])
    def test_a_manifest_that_does_not_match(self, told, change, sentence):
        with pytest.raises(ArtefactError, match=sentence):
            load(told(change))

    def test_a_manifest_that_does(self, told):
        assert load(told(dict))[1]["signature"] == artefact.FORWARD

    def test_no_file(self, tmp_path):
        with pytest.raises(ArtefactError, match="found no file .*no.so: export one first$"):
            load(tmp_path / "no.so")

    def test_another_library(self):
        with pytest.raises(ArtefactError, match="found no manifest in .*: name another file$"):
            load(artefact.tvm_ffi.libinfo.find_libtvm_ffi())

    def test_no_library(self, tmp_path):
        path = tmp_path / "text.so"
        path.write_text("text")
        with pytest.raises(ArtefactError, match="text.so does not load: "):
            load(path)

    def test_no_runtime(self, monkeypatch, with_gradients):
        def missing(*_):
            raise RuntimeError("Cannot find library libtvm_runtime.so; searched directories:\n  here")
        monkeypatch.setattr(artefact.tvm_ffi.libinfo, "load_lib_ctypes", missing)
        with pytest.raises(ArtefactError, match="TVM's library tvm_runtime is wanted, found that it does not load .*: pip install "):
            load(with_gradients)

    @pytest.mark.skipif(driver_version() is not None, reason="there is a driver")
    def test_no_driver(self, monkeypatch, with_gradients):
        def foreign(path):
            raise RuntimeError("Library binary was created using {cuda} but a loader of that name is not registered.")
        monkeypatch.setattr(artefact.tvm_ffi, "load_module", foreign)
        monkeypatch.setattr(artefact.tvm_ffi.libinfo, "load_lib_ctypes", self.without_driver)
        with pytest.raises(ArtefactError, match=r"tvm_runtime_cuda is wanted, found .*libcuda.so.1.*: .*for a GPU, install its driver"):
            load(with_gradients)

    @staticmethod
    def without_driver(package, name, mode):
        if name == "tvm_runtime_cuda":
            raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")


@pytest.fixture(scope="module")
def pytorch():
    """The example for PyTorch."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    return importlib.import_module("scripts.examples.pytorch")


@pytest.fixture(scope="module")
def attention(pytorch, with_gradients):
    return pytorch.load_attention(with_gradients)


class TestPyTorch:
    @pytest.fixture
    def inputs(self, pytorch):
        """Function (channels of q, k, v, options of torch.randn) -> q, k, v."""
        return lambda channels=(32, 32, 16), **options: [pytorch.torch.randn(2, 9, 4, width, **options) for width in channels]

    def test_numbers_and_gradients(self, attention):
        assert complaint(by_pytorch(attention), WORKLOAD) is None

    def test_numbers_and_gradients_under_compile(self, pytorch, attention):
        assert complaint(by_pytorch(pytorch.torch.compile(attention, fullgraph=True)), WORKLOAD) is None

    def test_the_operator_is_what_pytorch_wants_of_one(self, pytorch, attention, inputs):
        operator = pytorch.torch.ops.flashtir.fwd_d32_dv16_f32_causal.default
        outputs = pytorch.torch.empty(2, 9, 4, 16), pytorch.torch.empty(2, 4, 9)
        pytorch.torch.library.opcheck(operator, (*inputs(), *outputs, 0.5))

    def test_compile_keeps_the_operator(self, pytorch, attention, inputs):
        graphs = []

        def backend(module, example):
            graphs.append(module)
            return module.forward
        pytorch.torch.compile(lambda q, k, v: attention(2 * q, k, v).relu(), backend=backend, fullgraph=True)(*inputs())
        targets = [str(node.target) for module in graphs[0].modules() for node in module.graph.nodes]
        assert len(graphs) == 1 and targets.count("flashtir.fwd_d32_dv16_f32_causal.default") == 1

    def test_views_are_taken_as_they_are(self, pytorch, without):
        attention = pytorch.load_attention(without)
        views = pytorch.torch.randn(2, 9, 3, 4, 32).unbind(2)
        assert not views[0].is_contiguous()
        assert pytorch.torch.equal(attention(*views), attention(*(view.contiguous() for view in views)))

    def test_what_is_wrong_is_told_in_a_sentence(self, pytorch, attention, without, inputs):
        for call in attention, pytorch.torch.compile(attention):
            with pytest.raises(TypeError, match="^flash_attention_forward: q has dtype float64, wanted float32$"):
                call(*inputs(dtype=pytorch.torch.float64))
        with pytest.raises(ValueError, match="^flash_attention_forward: q has 2 dimensions, wanted 4: "):
            attention(*(tensor[0, 0] for tensor in inputs()))
        with pytest.raises(ArtefactError, match="found flashtir::fwd_d32_dv16_f32_causal there already: give .* another name$"):
            pytorch.load_attention(without, "fwd_d32_dv16_f32_causal")
        plain = pytorch.load_attention(without, "plain")(*inputs((32, 32, 32), requires_grad=True))
        with pytest.raises(ArtefactError, match="gradients are wanted, found none in .*: export it with --backward$"):
            plain.sum().backward()


@pytest.fixture(scope="module")
def jax_ffi():
    """The example for JAX."""
    return jax_example("cpu", "JAX computes on a GPU here: that is for tests/test_gpu_examples.py")


@pytest.fixture(scope="module")
def attention_of_jax(jax_ffi, with_gradients):
    return jax_ffi.load_attention(with_gradients)


class TestJax:
    def inputs(self, channels, dtype="float32"):
        numpy = importlib.import_module("jax.numpy")
        return [numpy.ones((2, 9, 4, width), dtype) for width in channels]

    def test_numbers_and_gradients(self, attention_of_jax):
        assert complaint(by_jax(attention_of_jax), WORKLOAD) is None

    def test_what_is_wrong_is_told_in_a_sentence(self, jax_ffi, attention_of_jax, without, monkeypatch):
        with pytest.raises(jax_ffi.jax.errors.JaxRuntimeError, match="flash_attention_forward: q has dtype float16, wanted float32\n"):
            attention_of_jax(*self.inputs((32, 32, 16), "float16")).block_until_ready()
        with pytest.raises(jax_ffi.jax.errors.JaxRuntimeError, match="flash_attention_forward: q has 2 dimensions, wanted 4: "):
            attention_of_jax(*(array[0, 0] for array in self.inputs((32, 32, 16)))).block_until_ready()
        with pytest.raises(ArtefactError, match="found flashtir_fwd_d32_dv16_f32_causal there already: give .* another name$"):
            jax_ffi.load_attention(without, "fwd_d32_dv16_f32_causal")
        plain = jax_ffi.load_attention(without)
        with pytest.raises(ArtefactError, match="gradients are wanted, found none in .*: export it with --backward\n"):
            jax_ffi.jax.grad(lambda q, k, v: plain(q, k, v).sum())(*self.inputs((32, 32, 32)))
        monkeypatch.setattr(jax_ffi.jax, "default_backend", lambda: "gpu")
        with pytest.raises(ArtefactError, match="an artefact for JAX's gpu is wanted, found .* for cpu: export for that, or "):
            jax_ffi.load_attention(without, "another")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build_program(tmp_path_factory.mktemp("cpp"))


class TestCpp:
    @pytest.mark.parametrize("which", ["with_gradients", "without"])
    def test_numbers(self, program, which, request):
        done = program(request.getfixturevalue(which))
        name, error = done.stdout.split(": largest error ")
        assert done.returncode == 0 and name.startswith("fwd_d32_dv") and 0 < float(error) < 2e-6, done.stderr

    def test_what_is_wrong_is_told_in_a_sentence(self, program):
        assert program().stderr == "error: one argument is wanted, found 0: name an artefact of scripts.export\n"
        assert "found no manifest in" in program(artefact.tvm_ffi.libinfo.find_libtvm_ffi()).stderr


def test_copies_need_nothing_of_ours(with_gradients, tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    shutil.copytree(ROOT / "scripts" / "examples", tmp_path / "scripts" / "examples")
    code = ("import sys; from scripts.examples import overhead; code = overhead.main([sys.argv[1], '--rounds', '1']); "
            "assert not {'tvm', 'te_defs', 'schedules', 'tests'} & {name.split('.')[0] for name in sys.modules}; sys.exit(code)")
    done = subprocess.run([sys.executable, "-c", code, with_gradients], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    heading, *rows = done.stdout.splitlines()
    assert "median" in heading and len(rows) == 6
    assert all(float(row.split()[-3]) > 0 for row in rows)
