"""The benchmark of gradients: what is compared, with stand-ins for kernels and, where it is installed, PyTorch on a CPU."""
import numpy as np
import pytest

from schedules.arch import cpu_arch
from scripts import bench, contest, peers
from scripts.cli import Device
from te_defs import reference
from te_defs.workload import Shape, Workload

FLOAT = Workload(32, 32, "float32", "causal")
SHAPE = Shape(1, 2, 2, 48, 48)


def data_with_our_gradients(workload):
    """TorchData after our kernels' turns."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    data = contest.TorchData(workload, SHAPE, "cpu", 0, backward=True)
    q, k, v = (tensor.numpy() for tensor in data.tensors[:3])
    dout = data.gradients[0].numpy()
    out, lse = reference.forward(workload, q, k, v)
    data.tensors[3:] = torch.from_numpy(out).float(), torch.from_numpy(lse).float()
    data.gradients[1:] = (torch.from_numpy(x).float() for x in reference.backward(workload, dout, q, k, v, out, lse))
    return data


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("peer", peers.BY_DEFAULT["cpu"], ids=lambda peer: peer.name)
def test_peers_compute_our_gradients(peer, mask):
    workload = Workload(32, 32, "float32", mask)
    (contestant,), sentences = peers.admit([peer], workload, data_with_our_gradients(workload), backward=True)
    assert sentences == [] and len(contestant.call()) == 3


def test_a_peer_whose_gradients_differ_is_left_out():
    data = data_with_our_gradients(FLOAT)
    data.gradients[2] *= 1.1
    contestants, sentences = peers.admit(peers.BY_DEFAULT["cpu"], FLOAT, data, backward=True)
    assert contestants == []
    assert sentences[0].startswith(f"PyTorch is left out of {FLOAT.name}: at length 48 its dk is off from ours by 0.091, more than 0.02")


def test_what_is_timed_and_how_operations_are_counted(monkeypatch):
    """Our call gets all tensors of its signature, after the forward pass made O and LSE; five products count 2.5 times as much as two."""
    calls = []
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(contest.TvmData, "measure", lambda data, call, repeats: call() or contest.Turn(1e-3))
    args = bench.make_parser().parse_args(["--backward", "--tokens", "48", "--hidden", "64", "--milliseconds", "1", "--rest", "0",
                                           "--rounds", "2"])
    module = {"flash_attention_forward": lambda *given: calls.append(("forward", [getattr(x, "shape", x) for x in given])),
              "flash_attention_backward": lambda *given: calls.append(("backward", [getattr(x, "shape", x) for x in given]))}
    device = Device("cpu", cpu_arch("x86-64-v4", 512, 2), "device", "device")
    (row,), left_out = bench.compare(args, device, {"default": module}, FLOAT, 48)
    assert [name for name, _ in calls[:2]] == ["forward", "backward"] and {name for name, _ in calls[2:]} == {"backward"}
    rows, lse = (1, 48, 2, 32), (1, 2, 48)
    assert [tuple(it) for it in calls[1][1][:9]] == [rows, rows, rows, rows, rows, lse, rows, rows, rows] and calls[1][1][9] == 32**-0.5
    assert row["tflops"] == pytest.approx(2.5 * 4 * 2 * 32 * np.arange(1, 49).sum() / 1e-3 / 1e12) and left_out == []


def test_flags():
    parse = bench.make_parser().parse_args
    assert [parse(given).backward for given in ([], ["--backward"], ["--backward", "any-order"])] == [None, "in-order", "any-order"]
