"""Check and time an exported artefact, the way its user has it: with TVM's runtime and NumPy, without this project and without a compiler.

    python -m scripts.run build/attention.so

Checks are those that `scripts.export` wrote beside the artefact: seeded inputs, float64 answers and the errors that are allowed; of
several workloads all take part. This file imports nothing else of the project; it may be copied to wherever the artefact goes.
"""
import argparse
import ctypes
import functools
import importlib.util
import json
import os
import statistics
import sys
import zipfile
from pathlib import Path

import numpy as np

os.environ["TVM_USE_RUNTIME_LIB"] = "1"  # read by `import tvm`: load libtvm_runtime.so and not the compiler
os.environ.setdefault("TVM_NUM_THREADS", str(len(os.sched_getaffinity(0))))  # TVM itself would take half of the cores
import tvm  # noqa: E402
import tvm_ffi  # noqa: E402

DONE, FAILED = 0, 1
FORWARD, BACKWARD, MANIFEST = "flash_attention_forward", "flash_attention_backward", "flash_attention_manifest"
#: Behind the name of a call, the same by a variant of one's own choice: (its number in the manifest, then as that call).
BY_VARIANT = "_variant"
#: Likewise, where an artefact has plans of several lengths: (query rows, key rows) -> number of the bucket in the manifest that they take.
BUCKET = "_bucket"
#: Of the manifests that this file reads: that of one workload, and a list of several.
SCHEMA, SCHEMA_OF_SEVERAL = 3, 4


class RunError(Exception):
    """Why the artefact cannot be run here, in one sentence."""


def load(path):
    """The artefact as a TVM module; its CUDA kernels bring in TVM's CUDA runtime."""
    if not path.is_file():
        raise RunError(f"an artefact of scripts.export is wanted, found no file {path}: export one first")
    if not _is_whole(path):
        raise RunError(f"an artefact is a shared library, found {path} to be something else or cut off: name what scripts.export wrote")
    try:
        return tvm.runtime.load_module(str(path))
    except RuntimeError as error:
        if "created using {cuda}" not in str(error):
            raise RunError(f"{path} does not load ({str(error).strip().splitlines()[-1]}): export again with this TVM") from error
    load_cuda_runtime()
    return tvm.runtime.load_module(str(path))


def text_of(plan):
    """A plan of the manifest, or a dictionary of several, as text."""
    return " ".join(f"{name}: {text_of(value)};" if isinstance(value, dict) else f"{name}={value}" for name, value in plan.items())


def _is_whole(path):
    """Whether a file is an ELF library that reaches to its end, the section headers; the loader would crash on one that does not."""
    head = path.read_bytes()[:64]
    first, size, count = (int.from_bytes(head[start:end], "little") for start, end in ((40, 48), (58, 60), (60, 62)))
    return path.suffix == ".so" and head[:4] == b"\x7fELF" and first + size * count <= path.stat().st_size


def load_cuda_runtime():
    """Load what runs CUDA kernels, which TVM without its compiler does not look for: driver, libcudart and TVM's own part."""
    wheels = importlib.util.find_spec("nvidia")
    cudarts = ["libcudart.so.13"]
    cudarts += [str(Path(folder, "cu13/lib/libcudart.so.13")) for folder in (wheels.submodule_search_locations if wheels else ())]
    cudarts += [str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "lib64/libcudart.so.13"))]
    own = str(Path(tvm.libinfo.find_libtvm_runtime()).with_name("libtvm_runtime_cuda.so"))
    for wanted, places in (("an NVIDIA driver", ["libcuda.so.1"]), ("CUDA 13's libcudart.so.13", cudarts), ("TVM's CUDA runtime", [own])):
        if not any(_opens(place) for place in places):
            raise RunError(f"a CUDA artefact needs {wanted}, found none: install it, or export for --target cpu")


def _opens(library):
    try:
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def manifests_of(module, path, wanted):
    """Manifests of the workloads that an artefact holds, or of those that are wanted by name; one of several has "front", what its names
    begin with in the check file, and each has "functions"."""
    if not module.implements_function(MANIFEST):
        raise RunError(f"an artefact has a function {MANIFEST}, found none in {path}: name what scripts.export wrote")
    schema = (manifest := json.loads(module[MANIFEST]())).get("schema")
    if schema not in (SCHEMA, SCHEMA_OF_SEVERAL):
        raise RunError(f"a manifest of schema {SCHEMA} or {SCHEMA_OF_SEVERAL} is wanted, found {schema} in {path}: export again")
    if schema == SCHEMA:
        functions = {"forward": FORWARD, "backward": manifest.get("backward") and BACKWARD}
        found = {manifest["workload"]["name"]: {"backward": None, **manifest, "functions": functions, "front": ""}}
    else:
        found = {name: {**it, "front": f"{name}/"} for name, it in manifest["workloads"].items()}
    for name in {*wanted} - {*found}:
        raise RunError(f"--workload must name what {path} holds, which is {', '.join(found)}, found {name}: correct it")
    wanted = [found[name] for name in dict.fromkeys(wanted or found)]
    for it in wanted:
        require_match(module, path, it)
    return wanted


def require_match(module, path, manifest):
    """RunError where an artefact has not what its manifest tells, or is of another TVM: calls of a minor version may differ."""
    for name, here in (("tvm", tvm.__version__), ("tvm_ffi", tvm_ffi.__version__)):
        built = manifest["versions"][name]
        if built.split(".")[:2] != here.split(".")[:2]:
            raise RunError(f"{path} was built with {name} {built}, found {name} {here} here: install the former, or export again")
    for name in filter(None, manifest["functions"].values()):
        if not module.implements_function(name):
            raise RunError(f"the manifest of {path} tells of a function {name}, found none: export again")


def read_cases(path, name_of_workload, front=""):
    """(index, arrays) of a workload in a check file, where its names begin with `front`; schedules/artefact/cases.py describes the form."""
    if not path.is_file():
        raise RunError(f"the check cases of the artefact are wanted, found no file {path}: export again, or name it with --check")
    try:
        with np.load(path) as file:
            arrays = {name.removeprefix(front): file[name] for name in file.files if name.startswith(front)}
        index = json.loads(str(arrays["index"]))
        complete = all(f"{case['name']}.{name}" in arrays for case in index["cases"] for name in (
            "q", "k", "v", "out", "lse", *(value for value in case["arguments"] if isinstance(value, str)),
            *(("dout", "dq", "dk", "dv", *case.get("operand_tolerances", ())) if "gradient_tolerances" in case else ())))
        schema, workload = index["schema"], index["workload"]
    except (OSError, EOFError, ValueError, LookupError, TypeError, zipfile.BadZipFile) as error:
        raise RunError(f"{path} must hold check cases, found something else ({error}): export again") from error
    if not complete or not index["cases"] or (schema, workload) != (2, name_of_workload):
        raise RunError(f"complete check cases of {name_of_workload}, schema 2, are wanted in {path}, found {len(index['cases'])} of "
                       f"{workload}, schema {schema}: export again")
    return index, arrays


def call_arguments(q, k, v, device):
    """q, k, v on the device and outputs full of NaN, so that what is not written shows."""
    out = np.full((*q.shape[:-1], v.shape[-1]), np.nan, np.float32).astype(q.dtype)
    lse = np.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), np.nan, np.float32)
    return [tvm.runtime.tensor(array, device) for array in (q, k, v, out, lse)]


def length_arguments(lengths, device):
    """What follows the other arguments, of batch entries with lengths of their own: lists as int32 tensors, and integers."""
    return [tvm.runtime.tensor(np.array(numbers, np.int32), device) if isinstance(numbers, list) else numbers for numbers in lengths]


def with_most_keys(lengths):
    """The same of a call for gradients, which of packed sequences wants the most keys of one, too."""
    return [*lengths, int(np.diff(lengths[1]).max(initial=0))] if len(lengths) == 3 else lengths


def full_lengths(kind, batch, q_len, kv_len):
    """The same for entries that are all as long as they can be."""
    begins = [[b * size for b in range(batch + 1)] for size in (q_len, kv_len)]
    return {"keys": [[kv_len] * batch], "packed": [*begins, q_len]}.get(kind, [])


def array_of(case, arrays, name):
    """An array of a case."""
    array = arrays[f"{case['name']}.{name}"]
    return array.view("bfloat16") if array.dtype == np.uint16 else array  # kept as bits; tvm makes NumPy know the type


def arguments_behind_scale(case, arrays, device, backward=False):
    """What follows the scale in a call of a case."""
    extras = [tvm.runtime.tensor(array_of(case, arrays, value), device) if isinstance(value, str) else value for value in case["arguments"]]
    return [*extras, *length_arguments(with_most_keys(case["lengths"]) if backward else case["lengths"], device)]


def check(forward, case, arrays, device):
    """(largest error of out, None or what is wrong) of one case."""
    q, k, v = (array_of(case, arrays, name) for name in "qkv")
    answer, lse_answer = arrays[f"{case['name']}.out"], arrays[f"{case['name']}.lse"]
    arguments = call_arguments(q, k, v, device)
    forward(*arguments, case["scale"], *arguments_behind_scale(case, arrays, device))
    out, lse = (tensor.numpy().astype(np.float64) for tensor in arguments[3:])
    error = np.nan_to_num(np.abs(out - answer), nan=np.inf).max(initial=0)
    unseen = np.isneginf(lse_answer)
    if not error <= case["out_tolerance"]:
        return error, f"out is off by {error:.2e}, allowed are {case['out_tolerance']:.2e}"
    if not np.isneginf(lse[unseen]).all() or out.swapaxes(-3, -2)[unseen].any():
        return error, "a row that sees no key is not out = 0 and lse = -inf"
    lse, lse_answer = lse[~unseen], lse_answer[~unseen]
    if not (np.abs(lse - lse_answer) <= case["lse_tolerance"] * np.maximum(np.abs(lse_answer), 1)).all():
        return error, "lse is off by more than allowed"
    return error, None


def check_gradients(backward, case, arrays, device):
    """(largest error of the gradients as a share of what is allowed, None or what is wrong) of one case."""
    dout, q, k, v, out, lse = (array_of(case, arrays, name) for name in ("dout", "q", "k", "v", "out", "lse"))
    inputs = [tvm.runtime.tensor(array, device) for array in (dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32))]
    of_operands = case.get("operand_tolerances", {})  # of tensors behind the scale
    outputs = q, k, v, *(array_of(case, arrays, name.removeprefix("d")) for name in of_operands)
    gradients = [tvm.runtime.tensor(np.full(array.shape, np.nan, np.float32).astype(array.dtype), device) for array in outputs]
    behind = arguments_behind_scale(case, arrays, device, backward=True)
    backward(*inputs, *gradients[:3], case["scale"], *behind, *((None, *gradients[3:]) if of_operands else ()))
    worst = 0.0
    for name, gradient, allowed in zip(("dq", "dk", "dv", *of_operands), gradients, (*case["gradient_tolerances"], *of_operands.values())):
        found, answer = gradient.numpy().astype(np.float64), arrays[f"{case['name']}.{name}"]
        error = np.where(np.isnan(answer), 0, np.nan_to_num(np.abs(found - answer), nan=np.inf)).max(initial=0)  # NaN: may be anything
        worst = max(worst, error / allowed if allowed else 0.0)  # nothing is allowed of an empty gradient
        if not error <= allowed:
            return worst, f"{name} is off by {error:.2e}, allowed are {allowed:.2e}"
    if gradients[0].numpy().swapaxes(-3, -2)[np.isneginf(lse)].any():
        return worst, "a row that sees no key has not dq = 0"
    return worst, None


def check_all(call, index, arrays, device, label="", checked=check):
    """Number of wrong cases, with a line about each; None where the artefact's code is for other GPUs. checked is `check` for the forward
    pass, `check_gradients` for the other."""
    wrong = 0
    for case in index["cases"]:
        try:
            error, complaint = checked(call, case, arrays, device)
        except ValueError as refusal:
            if "variant" in label and "of compute capability" in str(refusal):
                print(f"  {label}is for other GPUs")
                return None
            raise RunError(f"the artefact refuses check case {case['name']}: {refusal}") from refusal
        wrong += complaint is not None
        allowed = 1.0 if checked is check_gradients else case["out_tolerance"]
        print(f"  {label}{case['name']:<16} error {error:.2e} of {allowed:.2e}  {complaint or 'ok'}")
    return wrong


def extra_arguments(known, numbers, shape, rng, device):
    """What follows the scale in a timed call: these numbers, and random tensors that serve all batch entries and heads."""
    _, _, _, q_len, kv_len = shape
    sizes, numbers = {"B": 1, "H": 1, "N": q_len, "M": kv_len}, iter(numbers)

    def tensor_for(argument):
        size = [sizes[axis] for axis in argument["axes"]]
        whole = argument["dtype"].startswith("int")
        return (rng.integers(0, 2, size) if whole else rng.standard_normal(size, np.float32)).astype(argument["dtype"])
    return [tvm.runtime.tensor(tensor_for(argument), device) if argument["axes"] else next(numbers) for argument in known]


def told_bucket(module, manifest, name, length):
    """Where an artefact has plans of several lengths: which of them calls of a length take, as text."""
    buckets = (manifest if name == manifest["functions"]["forward"] else manifest["backward"]).get("buckets")
    taken = buckets[module[name + BUCKET](length, length)] if buckets else None
    return f", plan of {taken['q_len']}x{taken['kv_len']}" if taken else ""


def measure(module, manifest, shape, numbers, seed, repeat, device):
    """[(what a call is, its median and spread in milliseconds)] on random data of one shape (batch, heads, key heads, queries, keys) with
    these numbers behind the scale: the forward pass, gradients, and these with those of tensors behind the scale."""
    workload = manifest["workload"]
    batch, heads, kv_heads, q_len, kv_len = shape
    rng = np.random.default_rng(seed)
    sizes = ((batch, q_len, heads, workload["head_dim"]), (batch, kv_len, kv_heads, workload["head_dim"]),
             (batch, kv_len, kv_heads, workload["value_dim"]))
    q, k, v = (rng.standard_normal(size, np.float32).astype(workload["dtype"]) for size in sizes)
    kind = workload.get("lengths", "uniform")
    lengths = full_lengths(kind, batch, q_len, kv_len)
    if kind == "packed":
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    behind = workload["head_dim"] ** -0.5, *extra_arguments(manifest["arguments"], numbers, shape, rng, device)
    tensors = call_arguments(q, k, v, device)
    calls = [("", manifest["functions"]["forward"], (*tensors, *behind, *length_arguments(lengths, device)))]
    if manifest["backward"]:
        dout = rng.standard_normal(tensors[3].shape, np.float32).astype(workload["dtype"])
        gradients = [tvm.runtime.tensor(np.empty_like(array), device) for array in (q, k, v)]
        backward = (tvm.runtime.tensor(dout, device), *tensors, *gradients, *behind, *length_arguments(with_most_keys(lengths), device))
        calls.append((", backward", manifest["functions"]["backward"], backward))
        names, made = [argument["name"] for argument in manifest["arguments"]], manifest["backward"].get("operands", ())
        like = [behind[1 + names.index(name)].numpy() for name in made]
        if made:
            further = [tvm.runtime.tensor(np.empty_like(array), device) for array in like]
            calls.append((f", backward with {' '.join(made)}", manifest["functions"]["backward"], (*backward, None, *further)))
    found = []
    for label, name, arguments in calls:  # the forward pass first, whose out and lse the other takes
        timer = module.time_evaluator(name, device, number=1, repeat=repeat, min_repeat_ms=20)
        times = [1e3 * seconds for seconds in timer(*arguments).results]
        found.append((label + told_bucket(module, manifest, name, q_len), statistics.median(times), min(times), max(times)))
    return found


def parse(argv):
    parser = argparse.ArgumentParser(prog="python -m scripts.run", description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("artefact", type=Path, help="the .so that scripts.export wrote")
    parser.add_argument("--workload", nargs="+", default=[], help="names of the artefact's workloads that are meant; none: all")
    parser.add_argument("--check", type=Path, default=argparse.SUPPRESS, help="its check cases (default: <artefact>.check.npz beside it)")
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 1024], help="sequence lengths to time; none to check only")
    parser.add_argument("--batch", type=int, default=1, help="batch size of the timed calls")
    parser.add_argument("--heads", type=int, default=8, help="query heads of the timed calls")
    parser.add_argument("--kv-heads", type=int, default=argparse.SUPPRESS, help="key heads of the timed calls (default: those of --heads)")
    parser.add_argument("--arguments", type=float, nargs="*", default=[],
                        help="numbers behind the scale in the timed calls, such as left and right of a window; none: those of the manifest")
    parser.add_argument("--repeat", type=int, default=10, help="measurements, of 20 ms or one call each; the median counts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the timed calls' data")
    args = parser.parse_args(argv)
    args.check = getattr(args, "check", args.artefact.with_suffix(".check.npz"))
    args.kv_heads = getattr(args, "kv_heads", args.heads)
    if min(args.heads, args.kv_heads) < 1 or args.heads % args.kv_heads:
        parser.error(f"--heads must be a multiple of --kv-heads, found {args.heads} and {args.kv_heads}")
    if min([args.batch, args.repeat, *args.lengths]) < 1 or args.seed < 0:
        parser.error("--batch, --repeat and --lengths must be at least 1, --seed at least 0")
    return args


def tell(path, manifest):
    """Print what an artefact holds of a workload."""
    name, parts = manifest["workload"]["name"], [("", manifest), (" backward", manifest["backward"] or {"variants": ()})]
    for what, variant in [(what, variant) for what, part in parts for variant in part["variants"]]:
        target, plan, measured = variant["target"], text_of(variant["plan"]), variant["measured"] or {}
        code = f" ({' '.join(target['archs'])})" if target["archs"] else ""
        lent = f", borrowed: measured on {measured['device']}, {measured['date']}" if "borrowed_for" in measured else ""
        print(f"{path}: {name}{what} for {target['lowered_for']}{code}, family {variant['family']}, {plan}{lent}")
    for what, it in [(what, it) for what, part in parts for it in part.get("buckets", ())]:
        print(f"  {what and 'backward, '}lengths near {it['q_len']}x{it['kv_len']}: {it['family']}, {text_of(it['plan'])}, tuned on "
              f"{it['measured']['device']}, {1e3 * it['measured']['seconds']:.3f} ms")


def device_of(manifest):
    """The device that the kernels of a workload need."""
    kind = manifest["variants"][0]["target"]["kind"]
    device = tvm.runtime.device(kind, 0)
    if not device.exist:
        raise RunError(f"the artefact needs a {kind} device, found none: run it where there is one")
    return device


def check_workload(module, manifest, path):
    """(number of calls that were checked, number of wrong ones) of a workload's check cases in a file, with a line about each."""
    device, functions, found = device_of(manifest), manifest["functions"], []
    index, arrays = read_cases(path, manifest["workload"]["name"], manifest["front"])
    print(f"{manifest['workload']['name']}:\n" if manifest["front"] else "", end="")
    directions = [("", functions["forward"], manifest["variants"], check)]
    if manifest["backward"]:
        directions.append(("backward, ", functions["backward"], manifest["backward"]["variants"], check_gradients))
    for backward, name, variants, checked in directions:
        found.append(check_all(module[name], index, arrays, device, backward, checked))
        for number, variant in enumerate(variants if len(variants) > 1 else ()):  # cases are small: each must see them, whatever it is for
            label = f"{backward}variant {number + 1}, {variant['family']}: "
            found.append(check_all(functools.partial(module[name + BY_VARIANT], number), index, arrays, device, label, checked))
    found = [wrong for wrong in found if wrong is not None]
    return len(found) * len(index["cases"]), sum(found)


def timed_numbers(manifest, given):
    """Names and values of the numbers behind the scale in timed calls of a workload: those that are given, or those of the manifest."""
    known = [argument for argument in manifest["arguments"] if not argument["axes"]]
    names, numbers = [argument["name"] for argument in known], given or [argument["sample"] for argument in known]
    if len(numbers) != len(names):
        raise RunError(f"{manifest['workload']['name']} takes --arguments {' '.join(names)}, found {len(numbers)} numbers: correct them")
    for argument, number in zip(known, numbers):
        if number < 0 or argument["kind"] == "count" and number != int(number):
            raise RunError(f"{argument['name']} must be a {argument['kind']} number from 0 up, found {number:g}: correct --arguments")
    return names, [int(number) if argument["kind"] == "count" else number for argument, number in zip(known, numbers)]


def time_workload(module, manifest, args):
    """Time calls of a workload, with a line about each."""
    names, numbers = timed_numbers(manifest, args.arguments)
    name = f"{manifest['workload']['name']}, " if manifest["front"] else ""
    sizes = "".join(f", {name} {value:g}" for name, value in zip(names, numbers))
    for length in args.lengths:
        shape = (args.batch, args.heads, args.kv_heads, length, length)
        told = f"{name}batch {args.batch}, heads {args.heads}, length {length}{sizes}"
        for label, median, least, most in measure(module, manifest, shape, numbers, args.seed, args.repeat, device_of(manifest)):
            print(f"  {told}{label}: {median:.3f} ms ({least:.3f} to {most:.3f})")


def run(args):
    module = load(args.artefact)
    manifests = manifests_of(module, args.artefact, args.workload)
    for manifest in manifests:
        tell(args.artefact, manifest)
    count, wrong = map(sum, zip(*[check_workload(module, manifest, args.check) for manifest in manifests]))
    print(f"{count - wrong} of {count} check cases passed")
    if wrong:
        raise RunError(f"{wrong} check cases failed: do not use this artefact")
    for manifest in manifests:
        time_workload(module, manifest, args)


def main(argv=None):
    args = parse(argv)
    print(json.dumps({name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}, sort_keys=True))
    try:
        run(args)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except MemoryError:
        print("error: more memory than there is was wanted: choose smaller --lengths", file=sys.stderr)
        return FAILED
    return DONE


if __name__ == "__main__":
    sys.exit(main())
