"""Views with strides through the checked entry of an artefact: what is taken without a copy, and what is refused by name.

The kernel is the stand-in of tests/stand_in_kernel.py on a CPU; which of several kernels serves is tested on GPUs that are not there.
"""
import re
from collections import Counter
from functools import partial

import numpy as np
import pytest
import tvm_ffi
from numpy.lib.stride_tricks import as_strided as strided

from schedules.arch import cuda_arch
from schedules.artefact.export import export_artefact
from schedules.build import build, schedule, strided_of
from schedules.families import mma, simt, wgmma
from te_defs.workload import Workload
from tests.source_alone import source_alone
from tests.stand_in_kernel import on_cpu
from tests.test_artefact import B, G, H, M, N, SHAPES, WORKLOAD, call, ones, untouched  # noqa: F401, a fixture


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    """flash_attention_forward of an artefact that takes views."""
    path = tmp_path_factory.mktemp("views") / "views.so"
    export_artefact([on_cpu(WORKLOAD, strided=True)], WORKLOAD, path, {}, ())
    return tvm_ffi.load_module(str(path)).flash_attention_forward


def transposed(array):
    """The same values with heads outside rows in memory."""
    return np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)


def as_slice(array, axis, first=1, more=3):
    """The same values as a slice of a tensor that is longer along an axis."""
    size = list(array.shape)
    size[axis] += more
    whole = np.full(size, np.nan, array.dtype)
    part = whole[(slice(None),) * axis + (slice(first, first + array.shape[axis]),)]
    part[:] = array
    return part


class TestViews:
    def right(self, call):
        np.testing.assert_array_equal(call["out"], np.float32(0.5) * call["q"][..., :8])
        return (call["lse"] == M).all()

    @pytest.mark.parametrize("change", [transposed, *(partial(as_slice, axis=axis) for axis in range(4))],
                             ids=["transposed", "batch", "rows", "heads", "channels"])
    @pytest.mark.parametrize("which", [("q",), ("k", "v"), ("out",), ("q", "k", "v", "out")], ids="-".join)
    def test_are_taken(self, views, call, which, change):
        call.update({name: change(call[name]) for name in which})
        views(*call.values())
        assert self.right(call)
        if "out" in which and change is not transposed:
            assert np.isnan(call["out"].base).sum() == call["out"].base.size - call["out"].size, "written beside the view"

    def test_slices_of_one_projection_share_its_memory(self, views, call):
        fused = np.random.default_rng(1).standard_normal((B, N, H * 16 + G * 16 + G * 8)).astype("float32")
        q, k, v = np.split(fused, [H * 16, H * 16 + G * 16], axis=2)
        call.update(q=q.reshape(B, N, H, 16), k=k.reshape(B, N, G, 16), v=v.reshape(B, N, G, 8))
        assert all(np.shares_memory(call[name], fused) for name in "qkv")
        views(*call.values())
        np.testing.assert_array_equal(call["out"], np.float32(0.5) * call["q"][..., :8])

    def test_expanded_inputs(self, views, call):
        call.update({name: strided(call[name], SHAPES[name], (0, call[name].strides[1], 0, 4)) for name in "qkv"})
        views(*call.values())
        assert self.right(call)

    def test_axes_of_size_one_have_any_stride(self, views):
        q, out = (strided(np.ones(64, "float32"), (2, 1, 1, size), (64, stride, -4, 4)) for size, stride in ((16, 12), (8, 0)))
        lse = ones(2, 1, 1)
        views(q, ones(2, 3, 1, 16), ones(2, 3, 1, 8), out, lse, 3.0)
        assert (out == 3).all() and (lse == 3).all()

    def test_empty_tensors_have_any_stride(self, views, call):
        k, v = (strided(np.ones(1, "float32"), (B, 0, G, size), (4, -8, 12, 4)) for size in (16, 8))
        views(*{**call, "q": transposed(call["q"]), "k": k, "v": v}.values())
        assert (call["lse"] == 0).all()

    @pytest.mark.parametrize("change, message", [
        ({"q": ones(B, N, 16, H).swapaxes(2, 3)}, "q has stride 4 in dimension 3, wanted 1: pass a tensor whose channels are neighbours"),
        ({"v": ones(B, M, G, 16)[..., ::2]}, "v has stride 2 in dimension 3, wanted 1: pass a tensor whose channels are neighbours"),
        ({"k": ones(B, M, G, 16)[:, ::-1]}, "k has stride -32 in dimension 1, wanted none below zero: pass a copy"),
        ({"out": ones(B, N, H, 8)[:, :, ::-1]}, "out has stride -8 in dimension 2, wanted none below zero: pass a copy"),
        ({"out": strided(ones(1000), SHAPES["out"], (4 * 160, 0, 32, 4))},
         "out has stride 0 in dimension 1, wanted more than 0, so that no two elements share memory"),
        ({"out": strided(ones(1000), SHAPES["out"], (4 * 160, 4 * 31, 32, 4))},
         "out has stride 31 in dimension 1, wanted more than 31, so that no two elements share memory"),
        ({"lse": ones(B, N, H).swapaxes(1, 2)}, "lse has stride 4 in dimension 2, wanted 1: pass a contiguous tensor"),
        ({"q": strided(ones(1), SHAPES["q"], (4 * 2**30, 4 * 64, 64, 4))}, "q spans 2^31 elements or more, wanted fewer: split the batch"),
        ({"q": strided(ones(1), SHAPES["q"], (2**62, 4 * 64, 64, 4))}, "q spans 2^31 elements or more, wanted fewer: split the batch"),
    ], ids=["channels", "every_other_channel", "rows_backwards", "heads_backwards", "one_row", "rows_overlap", "lse", "span", "far_span"])
    def test_what_cannot_be_served_is_named(self, views, call, change, message):
        with pytest.raises(ValueError) as caught:
            views(*{**call, **change}.values())
        assert str(caught.value).startswith("flash_attention_forward: " + message)
        assert untouched(call)

    def test_an_output_between_the_rows_of_an_input_shares_its_memory(self, views, call):
        whole = np.ones((B, N, 2, H, 16), "float32")
        call.update(q=whole[:, :, 0], out=whole[:, :, 1, :, :8])
        with pytest.raises(ValueError, match="out shares memory with q, wanted outputs of their own"):
            views(*call.values())
        assert (whole == 1).all()


@pytest.fixture(scope="module")
def text_of(toolkit):
    """Function (family, name of a workload, architecture, strided) -> CUDA source of the kernel of its default plan, not compiled."""
    def make(family, workload, name, strided):
        arch, workload = cuda_arch(name), Workload.parse(workload)
        with source_alone(toolkit, name):
            mod = schedule(family, workload, family.default_plan(workload, arch), strided=strided).mod
            source = build(mod, family, arch).imports[0].inspect_source()
        return source[source.rindex('extern "C"'):]
    return make


class TestKernels:
    @pytest.mark.parametrize("family, workload", [(mma, "fwd_d64_dv64_f16_full"), (simt, "fwd_d64_dv64_f32_full")], ids=["mma", "simt"])
    def test_accesses_to_neighbouring_channels_stay_vectors(self, text_of, family, workload):
        assert strided_of(family) == (False, True)
        plain, views = (Counter(re.findall(r"\*\(\w+\*\)\([QKVO]_ptr|flashtir_\w+\(", text_of(family, workload, "sm_80", strided)))
                        for strided in (False, True))
        assert plain == views and plain

    def test_wgmma_reads_no_stride_of_an_input(self, text_of):
        """They are told to the TMA by the host; those of an output that lanes store only enter into the addresses of its stores."""
        assert re.findall(r"\w+_stride", text_of(wgmma, "fwd_d64_dv64_f16_full", "sm_90a", True)) == []
        text = text_of(wgmma, "fwd_d96_dv96_f16_full", "sm_90a", True)
        parameters, body = text.split("{", 1)
        assert set(re.findall(r"\w+_stride", parameters)) == {"O_batch_stride", "O_row_stride", "O_head_stride"}
        assert all("flashtir_store" in line for line in body.splitlines() if "_stride" in line)
