"""The benchmark's parts, with stand-ins for PyTorch, NVML and other people's kernels. No GPU is needed."""
import contextlib
import ctypes
import re
import sys
from dataclasses import astuple, replace
from types import SimpleNamespace

import numpy as np
import pytest

from schedules.arch import Peak, cpu_arch, cuda_arch
from scripts import bench, contest, peers
from scripts.cli import Device
from te_defs import reference
from te_defs.masks import MASKS
from te_defs.workload import Shape, Workload

HALF = Workload(64, 64, "float16", "causal")
SHAPE = Shape(1, 2, 2, 48, 48)
OK, ERROR = 0, 1


class TestContest:
    def test_everyone_takes_a_turn_in_every_round(self, monkeypatch):
        calls = []
        monkeypatch.setattr(contest.time, "sleep", lambda seconds: calls.append("rest"))

        class Data:
            def measure(self, call, repeats):
                calls.append("timed")
                for _ in range(repeats):
                    call()
                return contest.Turn(1e-3)
        contestants = [contest.Contestant(name, lambda name=name: calls.append(name)) for name in "abc"]
        turns = contest.contest(contestants, Data(), rounds=5, milliseconds=2, rest=0.1, seed=0)
        assert {name: len(found) for name, found in turns.items()} == {"a": 5, "b": 5, "c": 5}
        text = "".join("|" if call == "rest" else "t" if call == "timed" else call for call in calls)
        turns = text.split("|")[1:]
        assert all(re.fullmatch(r"([abc])\1t\1\1", turn) for turn in turns)
        orders = ["".join(turn[0] for turn in turns[round:round + 3]) for round in range(0, 15, 3)]
        assert all(sorted(order) == ["a", "b", "c"] for order in orders) and len(set(orders)) > 1

    def test_summary(self):
        turns = [contest.Turn(0.002, ((1800, 400.0), (1700, None))), contest.Turn(0.001, ((1600, 600.0),)), contest.Turn(0.004)]
        assert contest.summary({"a": turns}, 4e9)["a"] == {"ms": 2.0, "ms_least": 1.0, "ms_most": 4.0, "tflops": 2.0, "mhz": 1700,
                                                           "watts": 500.0}

    def test_summary_without_readings(self):
        figures = contest.summary({"a": [contest.Turn(0.001, ((None, None),)), contest.Turn(0.001)]}, 1e9)["a"]
        assert figures["mhz"] is None and figures["watts"] is None

    def test_tvm_tensors_are_timed_without_a_gauge_on_a_cpu(self):
        data, calls = contest.TvmData(HALF, SHAPE, "cpu", seed=0), []
        turn = data.measure(lambda: calls.append(1), 3)
        assert len(calls) == 3 and turn.seconds > 0 and turn.readings == ()


class Nvml:
    """Stand-in for libnvidia-ml.so.1: a GPU at 1755 MHz, whose power is told by the field of new chips or by the call of old ones."""

    def __init__(self, has_field=True, error=OK):
        self.has_field, self.error = has_field, error

    def nvmlInit_v2(self):
        return self.error

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus, handle):
        handle._obj.value = 7 if bus.value == b"0000:1b:00.0" else 0
        return OK

    def nvmlDeviceGetClockInfo(self, handle, kind, clock):
        clock._obj.value = 1755 * (handle.value == 7 and kind == 1)
        return self.error

    def nvmlDeviceGetFieldValues(self, handle, count, values):
        # As nvml.h lays out nvmlFieldValue_t: two unsigned ints, two long longs, two enums, a union of 8 bytes.
        assert count == 1 and ctypes.sizeof(values._obj) == 40
        field = ctypes.c_uint.from_buffer(values._obj, 0)
        ctypes.c_int.from_buffer(values._obj, 28).value = OK if self.has_field and field.value == 186 else ERROR
        ctypes.c_uint.from_buffer(values._obj, 32).value = 512_250
        return self.error

    def nvmlDeviceGetPowerUsage(self, handle, milliwatts):
        milliwatts._obj.value = 300_000
        return self.error


class Driver:
    """Stand-in for libcuda.so.1, which alone knows which GPU CUDA_VISIBLE_DEVICES puts first."""

    @staticmethod
    def cuInit(flags):
        return OK

    @staticmethod
    def cuDeviceGetPCIBusId(bus, length, device):
        bus.value = b"0000:1b:00.0"
        return OK


class TestGauge:
    @pytest.mark.parametrize("nvml, reading", [(Nvml(), (1755, 512.25)), (Nvml(has_field=False), (1755, 300.0))])
    def test_of_the_gpu_that_cuda_puts_first(self, monkeypatch, nvml, reading):
        libraries = {"libcuda.so.1": Driver, "libnvidia-ml.so.1": nvml}
        monkeypatch.setattr(contest.ctypes, "CDLL", libraries.__getitem__)
        assert contest.find_gauge().read() == reading

    def test_what_nvml_cannot_tell(self):
        assert contest.Gauge(Nvml(error=ERROR), ctypes.c_void_p(7)).read() == (None, None)

    def test_no_nvml(self, monkeypatch):
        def load(name):
            raise OSError(f"{name}: cannot open shared object file")
        monkeypatch.setattr(contest.ctypes, "CDLL", load)
        assert contest.find_gauge() is None

    def test_nvml_that_fails(self, monkeypatch):
        libraries = {"libcuda.so.1": Driver, "libnvidia-ml.so.1": Nvml(error=ERROR)}
        monkeypatch.setattr(contest.ctypes, "CDLL", libraries.__getitem__)
        assert contest.find_gauge() is None

    def test_watches_until_the_work_is_done(self, monkeypatch):
        monkeypatch.setattr(contest.time, "sleep", lambda seconds: None)
        left = [False, False, True]
        assert contest.Gauge(Nvml(), ctypes.c_void_p(7)).watch(lambda: left.pop(0)) == ((1755, 512.25), (1755, 512.25))


    @pytest.mark.parametrize("gauge, readings", [
        (contest.Gauge(Nvml(), ctypes.c_void_p(7)), ((1755, 512.25), (1755, 512.25))), (None, ())], ids=["gauge", "no_gauge"])
    def test_is_read_while_a_gpu_works_on_what_was_launched(self, monkeypatch, gauge, readings):
        monkeypatch.setattr(contest.time, "sleep", lambda seconds: None)
        told = []

        class Event:
            """Stand-in for torch.cuda.Event: done at the third asking, 6 ms after the one before it."""
            def __init__(self, enable_timing):
                self.asked = 0

            def record(self):
                told.append("event")

            def query(self):
                self.asked += 1
                return self.asked > 2

            def synchronize(self):
                told.append("wait")

            def elapsed_time(self, other):
                return 6.0
        data = object.__new__(contest.TorchData)
        data.torch, data.kind, data.gauge = SimpleNamespace(cuda=SimpleNamespace(Event=Event)), "cuda", gauge
        assert data.measure(lambda: told.append("call"), 2) == contest.Turn(0.003, readings)
        assert told == ["event", "call", "call", "event", "wait"]

    @pytest.mark.gpu
    def test_of_a_real_gpu(self):
        megahertz, watts = contest.find_gauge().read()
        assert 100 < megahertz < 5000 and 1 < watts < 3000


class Tensor(np.ndarray):
    """The few methods of a torch.Tensor that the comparison uses."""

    def float(self):
        return self.astype(np.float32)

    def contiguous(self):
        return self

    def norm(self):
        return np.linalg.norm(np.asarray(self))


def data_with_our_result(workload, kind="cuda"):
    """Stand-in for TorchData after our kernel's turn: O is the reference's answer."""
    inputs = reference.make_inputs(workload, SHAPE)
    out, lse = reference.forward(workload, *inputs)
    return SimpleNamespace(kind=kind, shape=SHAPE, arguments=(), tensors=[array.view(Tensor) for array in (*inputs, out, lse)])


def right(q, k, v, mask):
    return lambda: reference.plain(replace(HALF, mask=mask.name), q, k, v, arguments=astuple(mask)).view(Tensor)


def off_by(factor):
    return lambda *arguments: lambda: right(*arguments)() * np.float16(factor)


def failing(error):
    """A peer that raises when it is called."""
    def prepare(q, k, v, mask):
        def call():
            raise error
        return call
    return prepare


def not_installed(q, k, v, mask):
    raise ModuleNotFoundError("No module named 'elsewhere'")


class TestPeers:
    def test_who_is_right_takes_part(self):
        contestants, sentences = peers.admit([peers.Peer("right", right), peers.Peer("rounder", off_by(1.01))], HALF,
                                             data_with_our_result(HALF))
        assert [contestant.name for contestant in contestants] == ["right", "rounder"] and sentences == []
        assert contestants[0].call().shape == (1, 48, 2, 64)

    @pytest.mark.parametrize("peer, sentence", [
        (peers.Peer("A", not_installed), r"A is left out: it is not installed \(No module named 'elsewhere'\)"),
        (peers.Peer("A", right, kinds=("cpu",)), f"A is left out of {HALF.name}: it is for cpu, found cuda"),
        (peers.Peer("A", right, dtypes=("float32", "bfloat16")),
         f"A is left out of {HALF.name}: it takes float32 and bfloat16, found float16"),
        (peers.Peer("A", failing(AssertionError("head_dim\n  must be 96"))),
         f"A is left out of {HALF.name} at length 48: AssertionError: head_dim must be 96"),
        (peers.Peer("A", off_by(1.03)),
         f"A is left out of {HALF.name}: at length 48 its output is off from ours by 0.03, more than 0.02"),
        (peers.Peer("A", off_by(np.nan)), f"A is left out of {HALF.name}: at length 48 its output is off from ours by nan, more than 0.02"),
    ], ids=["absent", "device", "type", "exception", "wrong", "nan"])
    def test_who_is_left_out_is_told_with_the_reason(self, peer, sentence):
        contestants, sentences = peers.admit([peer, peers.Peer("B", right)], HALF, data_with_our_result(HALF))
        assert [contestant.name for contestant in contestants] == ["B"]
        assert len(sentences) == 1 and re.fullmatch(sentence, sentences[0])

    def test_a_mask_that_is_missed_is_seen(self):
        """The commonest mistake: a causal workload computed without its mask."""
        peer = peers.Peer("A", lambda q, k, v, mask: right(q, k, v, MASKS["full"]()))
        assert peers.admit([peer], HALF, data_with_our_result(HALF))[0] == []

    @pytest.mark.parametrize("mask", ["causal_top_left", "window", "prefix"])
    def test_a_mask_that_a_peer_does_not_have_is_told(self, monkeypatch, mask):
        for name in ("torch", "torch.nn", "torch.nn.attention", "torch.nn.functional"):
            stand_in = SimpleNamespace(SDPBackend=None, sdpa_kernel=None, scaled_dot_product_attention=None)
            monkeypatch.setitem(sys.modules, name, stand_in)
        data = SimpleNamespace(kind="cuda", shape=replace(SHAPE, mask=MASKS[mask].samples[0]), tensors=[None] * 5)
        contestants, sentences = peers.admit([peers.CUDNN], replace(HALF, mask=mask), data)
        assert contestants == [] and sentences == [f"cuDNN is left out of {HALF.name.replace('causal', mask)}: it has no mask {mask}"]

    def test_who_is_invited(self):
        assert [peer.name for peer in peers.FASTEST] == ["FlashAttention-2", "cuDNN", "FlashAttention-4", "FlexAttention"]
        names = {kind: [peer.name for peer in default] for kind, default in peers.BY_DEFAULT.items()}
        assert names == {"cuda": ["FlashAttention-2", "cuDNN", "efficient"], "cpu": ["PyTorch"]}

    def test_versions(self, monkeypatch):
        monkeypatch.setattr(peers.metadata, "version", lambda name: f"that of {name}")
        assert peers.versions({"default", "cuDNN", "FlashAttention-4"}) == {"flash-attn-4": "that of flash-attn-4"}

    def test_version_of_what_pip_does_not_know(self, monkeypatch):
        def version(name):
            raise peers.metadata.PackageNotFoundError(name)
        monkeypatch.setattr(peers.metadata, "version", version)
        assert peers.versions({"FlashAttention-4"}) == {"flash-attn-4": "of a source tree"}


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="needs PyTorch to compare with")


@pytest.mark.examples
class TestPyTorch:
    """Peers as they are, on a CPU."""

    @pytest.mark.parametrize("name, mask, sizes", [
        *((name, mask, ()) for name in ("PyTorch", "FlexAttention") for mask in ("full", "causal")),
        ("FlexAttention", "causal_top_left", ()), ("FlexAttention", "window", (9, 4)), ("FlexAttention", "prefix", (20,))])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_peer_is_called_rightly(self, torch, name, mask, sizes, dtype):
        workload = Workload(64, 64, dtype, mask)
        data = contest.TorchData(workload, replace(SHAPE, mask=sizes), "cpu", seed=0)
        q, k, v = (tensor.float().numpy() for tensor in data.tensors[:3])
        data.tensors[3][:] = torch.from_numpy(reference.forward(workload, q, k, v, arguments=sizes)[0])
        peer = next(peer for peer in (*peers.BY_DEFAULT["cpu"], *peers.FASTEST) if peer.name == name)
        (contestant,), sentences = peers.admit([peer], workload, data)
        assert sentences == []
        found = contestant.call()
        assert not found.requires_grad
        assert peers.relative_error(found, data.tensors[3]) < peers.LARGEST_ERROR / 4
        assert data.measure(contestant.call, 2).seconds > 0

    def test_every_shape_is_compiled_for_itself(self, torch):
        """PyTorch compiles one function for a few shapes, and then runs it uncompiled."""
        with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
            for length in (16, 32, 48):
                data = contest.TorchData(HALF, Shape(1, 1, 1, length, length), "cpu", seed=0)
                assert peers.flex_attention(*data.tensors[:3], MASKS["causal"]())().shape == (1, length, 1, 64)


@pytest.mark.parametrize("answer", [lambda out: out, lambda out: (out, "lse")], ids=["out", "out_and_lse"])
def test_call_of_flash_attention_4(monkeypatch, answer):
    """With stand-ins for both packages: it gets [B, N, H, D], and with or without an LSE the output comes back."""
    calls = []

    def flash_attn_func(q, k, v, causal):
        calls.append((q.shape, causal))
        return answer(right(q, k, v, MASKS["causal" if causal else "full"]())())
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(no_grad=contextlib.nullcontext))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=flash_attn_func))
    peer = next(peer for peer in peers.FASTEST if peer.name == "FlashAttention-4")
    contestants, sentences = peers.admit([peer], HALF, data_with_our_result(HALF))
    assert [contestant.name for contestant in contestants] == ["FlashAttention-4"] and sentences == []
    assert calls == [((1, 48, 2, 64), True)]


def test_comparison_on_a_gpu(monkeypatch):
    """A whole comparison with stand-ins: the peer that agrees with our kernel is timed beside it, the other one is named."""
    def data(workload, shape, kind, seed, backward):
        assert not backward
        made = data_with_our_result(workload, kind)
        made.tensors[3] = np.zeros_like(made.tensors[3])
        made.measure = lambda call, repeats: contest.Turn(1e-3, ((1755, 690.0),))
        return made

    def kernel(q, k, v, out, lse, scale):
        out[:] = reference.forward(HALF, q, k, v, scale)[0]
    for name in ("TorchData", "TvmData"):
        monkeypatch.setattr(bench, name, data)
    monkeypatch.setattr(peers, "FASTEST", (peers.Peer("right", right), peers.Peer("wrong", off_by(2))))
    args = bench.make_parser().parse_args(["--peers", "--tokens", "48", "--hidden", "128", "--milliseconds", "1", "--rest", "0"])
    device = Device("cuda", cuda_arch("sm_90a"), "nvidia-h200", "NVIDIA H200")
    rows, sentences = bench.compare(args, device, dict.fromkeys(("default", "tuned"), {"flash_attention_forward": kernel}), HALF, 48)
    assert [row["contestant"] for row in rows] == ["default", "tuned", "right"]
    assert all(row["mhz"] == 1755 and row["watts"] == 690 and row["ours_over_this"] == 1 and row["of_peak"] > 0 for row in rows)
    assert sentences == [f"wrong is left out of {HALF.name}: at length 48 its output is off from ours by 1, more than 0.02"]


class TestLimits:
    @pytest.mark.parametrize("head_dim, tflops", [(64, 495), (128, 660), (256, 792)])
    def test_exp_bound_of_hopper(self, head_dim, tflops):
        assert cuda_arch("sm_90a").peak.exp_bound_tflops(head_dim, head_dim) == pytest.approx(tflops, rel=0.01)

    def test_exp_bound_is_half_where_both_take_as_long(self):
        # 2 * (d + dv) = 256 operations a score: 64 TFLOP/s make 0.25e12 scores a second, as 1 exponential, 250 multiprocessors, 1 GHz do.
        assert Peak(64, 1.0, 250, 1, 1, 1.0).exp_bound_tflops(64, 64) == pytest.approx(32)

    @pytest.mark.parametrize("arch, workload", [
        (cuda_arch("sm_80"), HALF), (cuda_arch("sm_90a"), Workload(64, 64, "float32")), (cpu_arch("x86-64-v4", 512, 2), HALF)],
        ids=["no_figures", "no_tensor_cores", "cpu"])
    def test_no_peak(self, arch, workload):
        device = Device(arch.kind, arch, "device", "device")
        assert bench.peak_for(device, workload) is None and bench.limits_told(device, [workload]) == []

    def test_told_once_a_head_dimension(self):
        device = Device("cuda", cuda_arch("sm_90a"), "nvidia-h200", "NVIDIA H200")
        told = bench.limits_told(device, [HALF, Workload(64, 64), Workload(128, 128), Workload(128, 128, "float32")])
        assert told == [f"d {d}, dv {d}: the peak is 989 TFLOP/s on 132 multiprocessors at 1.83 GHz, the exp bound {bound} TFLOP/s"
                        for d, bound in ((64, 495), (128, 659))]


class TestTables:
    ROW = {"workload": "w", "length": 8, "batch": 1, "heads": 2, "tflops": 1.0}

    def test_those_who_did_not_take_part_are_left_out(self):
        rows = [{**self.ROW, "contestant": "default", "ms": 2.0}, {**self.ROW, "contestant": "tuned", "ms": 1.0},
                {**self.ROW, "contestant": "cuDNN", "ms": 0.5}, {**self.ROW, "length": 16, "contestant": "default", "ms": 4.0},
                {**self.ROW, "length": 16, "contestant": "tuned", "ms": 3.0}]
        lines = bench.table(rows).splitlines()
        assert "tuned TFLOP/s" in lines[0]
        assert lines[1].split()[-2:] == ["2.00x", "0.50x"] and lines[2].split()[-2:] == ["1.33x", "-"]

    def test_a_workload_without_a_tuned_plan_beside_one_that_has_it(self):
        rows = [{**self.ROW, "contestant": "default", "ms": 2.0}, {**self.ROW, "contestant": "tuned", "ms": 1.0},
                {**self.ROW, "workload": "untuned", "contestant": "default", "ms": 2.0}]
        assert bench.table(rows).splitlines()[2].split() == ["untuned", "1", "x", "2", "x", "8", "2.000", "-", "1", "-", "-"]

    FIGURES = {"default": {"ms": 4.0, "tflops": 300.0, "mhz": 1700, "watts": 650.5}, "FlashAttention-4": {
        "ms": 2.0, "tflops": 600.0, "mhz": 1650, "watts": 690.0}}

    def test_speeds_are_judged_beside_the_tuned_plan_where_there_is_one(self):
        peak = cuda_arch("sm_90a").peak
        judged = bench.judged({**self.FIGURES, "tuned": {"ms": 3.0, "tflops": 400.0}}, Workload(128, 128), peak)
        assert {name: row["ours_over_this"] for name, row in judged.items()} == pytest.approx(
            {"default": 4 / 3, "FlashAttention-4": 2 / 3, "tuned": 1})
        assert judged["tuned"]["of_peak"] == pytest.approx(400 / 989)
        assert judged["tuned"]["of_exp_bound"] == pytest.approx(400 / 660, rel=0.01)
        assert bench.judged(self.FIGURES, Workload(128, 128), peak)["FlashAttention-4"]["ours_over_this"] == 0.5

    def test_peers(self):
        rows = [{**self.ROW, "contestant": name, **figures} for name, figures in
                bench.judged(self.FIGURES, Workload(128, 128), cuda_arch("sm_90a").peak).items()]
        rows.append({**rows[0], "of_peak": None, "of_exp_bound": None, "mhz": None, "watts": None})
        lines = bench.peer_table(rows, markdown=True).splitlines()
        assert re.split(r" +\| +", lines[0].strip("| ")) == ["workload", "batch x heads x length", "contestant", "TFLOP/s", "ours / this",
                                                             "of peak", "of exp bound", "MHz", "W"]
        assert [re.split(r" +\| +", line.strip("| ")) for line in lines[2:]] == [
            ["w", "1 x 2 x 8", "default", "300", "1.00x", "30.3%", "45.5%", "1700", "650"],
            ["w", "1 x 2 x 8", "FlashAttention-4", "600", "0.50x", "60.7%", "91.0%", "1650", "690"],
            ["w", "1 x 2 x 8", "default", "300", "1.00x", "-", "-", "-", "-"]]


def test_peers_by_name():
    """Without a name all of the fastest, in their order; an unknown name is refused by the parser."""
    assert peers.named([]) == peers.FASTEST
    assert [peer.name for peer in peers.named(["FlashAttention-4", "cuDNN"])] == ["cuDNN", "FlashAttention-4"]
    with pytest.raises(SystemExit):
        bench.make_parser().parse_args(["--peers", "nobody"])
