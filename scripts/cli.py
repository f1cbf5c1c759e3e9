"""What the commands share: devices, workloads and folders by their names on the command line, exit codes, and errors as one sentence."""
import contextlib
import functools
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm.target import Target, codegen

from schedules.arch import CUDA_ARCHS, GPUS, ArchError, arch_of_capability, cpu_arch, cuda_arch, gpu_named
from schedules.artefact.export import ExportError
from schedules.lowering.cuda_compile import CompileError
from schedules.lowering.toolkit import ToolkitError, driver_version, find_toolkit, preload, require_driver
from schedules.plan import PlanError
from schedules.registry import NoSchedule
from schedules.tuning.log import LogError
from schedules.tuning.search import TuneError
from te_defs.workload import PRESETS, Workload, WorkloadError

DONE, FAILED, USAGE = 0, 1, 2
ROOT = Path(__file__).parent.parent


class UsageError(ValueError):
    """An argument that cannot be meant; the message is one sentence."""


class Interrupted(RuntimeError):
    """Ctrl-C, after what there was is kept; the message says where."""


USAGE_ERRORS = (UsageError, WorkloadError, ArchError)
#: What ends a command, or one workload of several, in a sentence.
FAILURES = (Interrupted, NoSchedule, PlanError, LogError, TuneError, ToolkitError, CompileError, ExportError, OSError)


@dataclass(frozen=True)
class Device:
    """Where kernels are to run.

    kind         "cuda" or "cpu"
    arch         row of schedules.arch to lower for
    slug         name of the device's folder of tuning logs; None where no such device is in this machine
    description  for people
    gpu          schedules.arch.Gpu where more is known of one than its architecture
    is_here      whether it is in this machine
    """

    kind: str
    arch: object
    slug: str | None
    description: str
    gpu: object = None
    is_here: bool = True


def main(run, arguments=None):
    """Exit code of `run(arguments)`, which returns one or None. Our errors become one sentence on stderr."""
    try:
        with _told_interrupts():
            return run(arguments) or DONE
    except USAGE_ERRORS as error:
        return _complain(error, USAGE)
    except FAILURES as error:
        return _complain(error, FAILED)
    except MemoryError:
        return _complain("more memory than there is was wanted: choose smaller sizes", FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted", FAILED)


@contextlib.contextmanager
def _told_interrupts():
    """Ctrl-C stays one where TVM makes a RuntimeError without a word of it, as it does in functions of ours that it calls."""
    struck = []

    def strike(number, frame):
        struck.append(number)
        signal.default_int_handler(number, frame)
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, as by a shell's jobs in the background
        yield
        return
    signal.signal(signal.SIGINT, strike)
    try:
        yield
    except RuntimeError as error:
        if not struck:
            raise
        raise KeyboardInterrupt from error
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _complain(error, code):
    print(f"error: {error}", file=sys.stderr)
    return code


def echo(**resolved):
    """Print what the arguments came to, as one line of JSON."""
    print(json.dumps(resolved, default=str), flush=True)


def parse_workload(text):
    """Workload of a preset, with or without features behind a plus, or of a name such as fwd_d128_dv128_f16_causal; UsageError with the
    presets where it is neither."""
    preset, *features = text.split("+")
    try:
        return functools.reduce(Workload.with_feature, features, PRESETS[preset]) if preset in PRESETS else Workload.parse(text)
    except WorkloadError as error:
        if preset.startswith("fwd_") or preset in PRESETS:
            raise UsageError(str(error)) from error
        raise UsageError(f"{error}, or name a preset ({', '.join(PRESETS)})") from error


def log_folder(text):
    """Path of the folder of tuning logs: the project's own by default; UsageError where nothing can be there."""
    if text is None:
        return ROOT / "tuning_logs"
    path = Path(text)
    if not path.parent.is_dir() or (path.exists() and not path.is_dir()):
        raise UsageError(f"--logs must be a folder, or a new one inside a folder that exists, found {text!r}: correct the path")
    return path


def require_room_for(option, path):
    """UsageError where no file can be made in the folder of `path`, which that option names, or in the one that it would be made in: said
    before anything is built."""
    try:
        folder = next(it for it in path.absolute().parents if it.exists())
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(f"{option} must be where a file can be written, found {str(path)!r} ({error.strerror}): name another") from error


def find_device(target):
    """Device of a --target: auto (the GPU of this machine, else its CPU), cpu, or an architecture such as sm_80.

    UsageError for an architecture that is not known, ArchError for a GPU without a row in schedules/arch.py, ToolkitError for a driver
    that is too old for the GPU to be meant by auto.
    """
    if target == "cpu":
        return _cpu()
    if target == "auto" and driver_version() is not None:
        require_driver()
    gpu = _gpu()
    if target == "auto":
        return _cpu() if gpu is None else _found(arch_of_capability(*gpu[1]), *gpu)
    try:
        arch = cuda_arch(target)
    except ArchError as error:
        raise UsageError(f"--target is auto, cpu or an architecture; {error}") from error
    if gpu is not None and "".join(map(str, gpu[1])) == re.sub(r"\D", "", arch.name):
        return _found(arch, *gpu)
    return Device("cuda", arch, None, f"{arch.name}, of which this machine has none", is_here=False)


def _found(arch, name, _, sms):
    """Device of what `_gpu` found."""
    slug = slug_of(name)
    return Device("cuda", arch, slug, name, gpu_named(slug, arch.name, sms))


def device_named(slug, arch):
    """Device of that folder of tuning logs, wherever it may be, for which kernels are lowered for a row of schedules.arch."""
    gpu = GPUS.get(slug)
    same = gpu is not None and arch.kind == "cuda" and CUDA_ARCHS[gpu.arch].capability == arch.capability
    return Device(arch.kind, arch, slug, slug, gpu if same else None, is_here=False)


def slug_of(name):
    """Name of a device as a folder: NVIDIA H200 -> nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def nvidia_driver(device):
    """Version of the NVIDIA driver as text; None on a CPU, or where nvidia-smi is not there to tell it."""
    if device.kind == "cpu" or not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip() or None


def _gpu():
    """(name, (major, minor), multiprocessors) of the first GPU; None where this machine has none, or no driver."""
    if driver_version() is None:
        return None
    try:
        toolkit = find_toolkit(os.environ)
    except ToolkitError:
        toolkit = None  # then cudart has to come from elsewhere, and preload says where it looked
    preload(toolkit)
    device = tvm.cuda(0)
    if not device.exist:
        return None
    return device.device_name, tuple(map(int, device.compute_version.split("."))), device.multi_processor_count


def _cpu():
    """This machine's CPU. TVM's thread pool would take half of its cores, so the number is said to it here, before the pool starts."""
    name, cores = codegen.llvm_get_system_cpu(), len(os.sched_getaffinity(0))
    os.environ.setdefault("TVM_NUM_THREADS", str(cores))
    bits = codegen.llvm_get_vector_width(Target({"kind": "llvm", "mcpu": name}))
    caches = {f"l{level}_bytes": size for level in (1, 2) if (size := _cache_bytes(level)) is not None}
    arch = cpu_arch(name, bits, cores, machine=platform.machine(), **caches)
    return Device("cpu", arch, f"{slug_of(platform.machine())}-{slug_of(name)}-{cores}c", f"{name}, {cores} cores")


def _cache_bytes(level):
    """Bytes of a core's data cache as Linux tells them, None where it does not."""
    for entry in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            facts = {name: (entry / name).read_text().strip() for name in ("level", "type", "size")}
        except OSError:
            continue
        if facts["level"] == str(level) and facts["type"] != "Instruction" and facts["size"].endswith("K"):
            return int(facts["size"][:-1]) * 1024
    return None
