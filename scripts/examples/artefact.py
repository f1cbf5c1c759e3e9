"""Load an artefact by tvm_ffi and TVM's runtime library alone: no `import tvm`, no compiler, nothing of this project.

The examples for PyTorch and JAX need this file beside them, wherever they are copied to.
"""
import ctypes
import importlib.metadata
import importlib.util
import json
from pathlib import Path

import tvm_ffi

#: Of the manifests that this file reads.
SCHEMA = 3
#: What an artefact of a plain workload is called with; masks and scores with arguments of their own have more behind the scale.
FORWARD = "flash_attention_forward(q, k, v, out, lse, scale)"


class ArtefactError(Exception):
    """Why an artefact cannot be used here, in one sentence."""


def load(path):
    """(module, manifest) of an artefact of scripts.export whose calls are FORWARD's; ArtefactError where there is none that runs here."""
    if not Path(path).is_file():
        raise ArtefactError(f"an artefact of scripts.export is wanted, found no file {path}: export one first")
    _load_library("tvm_runtime")
    try:
        module = tvm_ffi.load_module(str(path))
    except RuntimeError as error:
        if "{cuda}" not in str(error):
            raise ArtefactError(f"{path} does not load: {str(error).strip().splitlines()[-1]}") from error
        _load_cuda_runtime()
        module = tvm_ffi.load_module(str(path))
    return module, _manifest_of(module, path)


def _load_library(name):
    """Load a library of TVM's package for all that are loaded later, whose symbols it has."""
    try:
        tvm_ffi.libinfo.load_lib_ctypes("apache-tvm", name, "RTLD_GLOBAL")
    except (OSError, RuntimeError) as error:
        raise ArtefactError(f"TVM's library {name} is wanted, found that it does not load ({str(error).splitlines()[0]}): "
                            "pip install apache-tvm; for a GPU, install its driver and nvidia-cuda-runtime, too") from error


def _load_cuda_runtime():
    """TVM's CUDA runtime; where pip installed CUDA 13's own, which it needs, that is in a folder of a package."""
    wheels = importlib.util.find_spec("nvidia")
    for folder in wheels.submodule_search_locations if wheels else ():
        cudart = Path(folder, "cu13/lib/libcudart.so.13")
        if cudart.is_file():
            ctypes.CDLL(str(cudart), ctypes.RTLD_GLOBAL)
    _load_library("tvm_runtime_cuda")


def _manifest_of(module, path):
    """The manifest, which must be one that the examples know how to call."""
    if not module.implements_function("flash_attention_manifest"):
        raise ArtefactError(f"an artefact of scripts.export is wanted, found no manifest in {path}: name another file")
    manifest = json.loads(module.flash_attention_manifest())
    if manifest.get("schema") != SCHEMA:
        raise ArtefactError(f"a manifest of schema {SCHEMA} is wanted, found {manifest.get('schema')} in {path}: export again")
    built, here = manifest["versions"]["tvm"], importlib.metadata.version("apache-tvm")
    if built.split(".")[:2] != here.split(".")[:2]:
        raise ArtefactError(f"an artefact for TVM {here} is wanted, found {path} by TVM {built}: export again with {here}, or "
                            f"install apache-tvm=={built}")
    if manifest["signature"] != FORWARD:
        raise ArtefactError(f"an artefact with {FORWARD} is wanted, found {manifest['signature']} in {path}: hand its further arguments "
                            "through, or export a workload without")
    return manifest
