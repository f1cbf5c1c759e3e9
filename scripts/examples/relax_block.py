"""A Transformer block in Relax, compiled with this project's attention and, beside it, with what TVM has.

    python -m scripts.examples.relax_block --target cpu --batch 1 --length 512 --heads 8 --head-dim 64

Builds it three times: `stock` by tvm.compile alone, `theirs` by the front end of schedules.relax with TVM's attention, `ours` by the same
with the FlashAttention pass. relax_run.py then loads them by TVM's runtime alone, checks them against NumPy and times them in turns.
"""
import json
import logging
import math
import subprocess
import sys
from pathlib import Path

import tvm
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op
from tvm.target import Target

from schedules.artefact.kernels import compiler
from schedules.relax import FlashAttention, front_end
from schedules.relax.cleanup import RemoveNoOps
from schedules.relax.device import plans_for
from scripts import cli, options
from scripts.kernels import build_artefact, cuda_toolkit
from te_defs.workload import Workload

EXECUTABLES = ("stock", "theirs", "ours")


class Projection(nn.Module):
    """A linear layer whose products are summed in float32."""

    def __init__(self, channels, outputs):
        self.linear = nn.Linear(channels, outputs, bias=False, out_dtype="float32")

    def forward(self, x):
        return op.astype(self.linear(x), x.dtype)


class Attention(nn.Module):
    """Multi-head self-attention of x [B,N,C], as textbooks have it: heads first, [B,H,N,D], behind keys of earlier calls."""

    def __init__(self, heads, head_dim, causal):
        self.heads, self.head_dim, self.causal = heads, head_dim, causal
        self.q, self.k, self.v, self.o = (Projection(heads * head_dim, heads * head_dim) for _ in range(4))

    def split(self, x):
        batch, length, _ = x.shape
        return op.permute_dims(op.reshape(x, (batch, length, self.heads, self.head_dim)), (0, 2, 1, 3))

    def forward(self, x):
        batch, length, channels = x.shape
        q, k, v = (self.split(of(x)) for of in (self.q, self.k, self.v))
        past = op.zeros((batch, self.heads, 0, self.head_dim), x.dtype)  # the first call has none
        k, v = (op.concat([past, it], dim=2) for it in (k, v))
        q, k, v = (op.permute_dims(it, (0, 2, 1, 3)) for it in (q, k, v))
        out = op.permute_dims(op.scaled_dot_product_attention(q, k, v, is_causal=self.causal), (0, 2, 1, 3))
        return self.o(op.reshape(op.permute_dims(out, (0, 2, 1, 3)), (batch, length, channels)))


class Block(nn.Module):
    """Token embedding, sinusoids for positions, attention and feed-forward, each with a norm before and a residual around it."""

    def __init__(self, heads, head_dim, causal=True, vocabulary=512, residual=1.0):
        channels = heads * head_dim
        self.channels, self.residual = channels, residual
        self.tokens = nn.Embedding(vocabulary, channels)
        self.before_attention, self.before_forward = (nn.RMSNorm(channels, axes=-1, bias=False) for _ in range(2))
        self.attention = Attention(heads, head_dim, causal)
        self.up, self.down = Projection(channels, 4 * channels), Projection(4 * channels, channels)

    def angles(self, length):
        """Position times frequency [N, C / 2], in float64: far positions turn an error of float32 into one of many of its steps."""
        frequency = op.exp(op.arange(0, self.channels, 2, "float64") * (-math.log(10000.0) / self.channels))
        return op.reshape(op.arange(0, length, 1, "float64"), (length, 1)) * op.reshape(frequency, (1, self.channels // 2))

    def positions(self, length, dtype):
        """Sinusoids [N, C]."""
        sine, cosine = (op.wrap_nested(of(self.angles(length)._expr), name)
                        for of, name in ((relax.op.sin, "sine"), (relax.op.cos, "cosine")))
        return op.astype(op.concat([sine, cosine], dim=-1), dtype)

    def forward(self, tokens):
        # Clipped, since TVM's default reads whatever a token past the vocabulary points to.
        x = op.wrap_nested(relax.op.take(self.tokens.weight._expr, tokens._expr, axis=0, mode="clip"), "embedded")
        x = x + self.positions(x.shape[1], x.dtype)
        x = x * self.residual + self.attention(self.before_attention(x))
        return x * self.residual + self.down(op.gelu(self.up(self.before_forward(x))))


def module_of(batch, length, heads, head_dim, dtype, causal=True):
    """(IRModule with forward(tokens [B,N], weights...), [(name, shape)] of the weights)."""
    block = Block(heads, head_dim, causal)
    block.to(dtype)
    mod, weights = block.export_tvm({"forward": {"tokens": nn.spec.Tensor((batch, length), "int32")}})
    return mod, [(name, tuple(map(int, weight.shape))) for name, weight in weights]


def target_of(arch):
    """What TVM compiles the rest of the block for; its schedules for tensor cores do not know sm_90a, and take sm_90."""
    return arch.target() if arch.kind == "cpu" else Target({"kind": "cuda", "arch": arch.name.rstrip("a")}, host="llvm")


def compiled(mod, target, front, records=None):
    """The Executable of a module, after `front`, a function from module to module.

    records  folder of MetaSchedule's records for functions that TVM schedules
    """
    with target:
        mod = front(mod)
        if records is not None:
            mod = relax.transform.MetaScheduleApplyDatabase(str(records))(mod)
        return tvm.compile(mod, target)


def build(mod, arch, folder, logs, records, toolkit):
    """Write the executables of EXECUTABLES into a folder."""
    target = target_of(arch)
    # Without RemoveNoOps TVM folds the keys of no earlier calls into a constant without elements, which its runtime does not load.
    fronts = {"stock": RemoveNoOps, "theirs": lambda it: front_end.run(it, None)[0],
              "ours": lambda it: front_end.run(it, FlashAttention(logs, target, toolkit))[0]}
    with compiler(toolkit, arch, (), {}):
        for name in EXECUTABLES:
            compiled(mod, target, fronts[name], records if name != "stock" else None).export_library(str(folder / f"{name}.so"))


def make_parser():
    parser = options.parser("examples.relax_block", __doc__)
    parser.add_argument("--target", default="auto", help="auto: the GPU of this machine, else its CPU; or cpu, sm_80, sm_90a, ...")
    for name, size, what in (("batch", 1, "sequences"), ("length", 512, "tokens of each"), ("heads", 8, "heads"),
                             ("head-dim", 64, "channels of a head")):
        parser.add_argument(f"--{name}", type=int, default=size, help=what)
    parser.add_argument("--dtype", choices=("float16", "float32"), default=None, help="None: float16 on a GPU, float32 on a CPU")
    options.add_logs(parser)
    parser.add_argument("--records", type=Path, default=None, help="folder of MetaSchedule's records for what TVM schedules; None: none")
    parser.add_argument("--output", type=Path, default=Path("build/block"), help="folder to write")
    parser.add_argument("--rounds", type=int, default=5, help="turns of the timing; 0: do not run")
    return parser


def run(args):
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.records is not None and not (args.records / "database_workload.json").is_file():
        raise cli.UsageError("--records must be a folder of MetaSchedule's records, found no database_workload.json in "
                             f"{args.records}: name the work_dir of a tuning")
    device, logs = cli.find_device(args.target), cli.log_folder(args.logs)
    arch, dtype = device.arch, args.dtype or ("float16" if device.kind == "cuda" else "float32")
    workload, described = Workload(args.head_dim, args.head_dim, dtype, "causal"), args.output / "block.json"
    plans, _ = plans_for(workload, arch, logs)
    cli.require_room_for("--output", described)
    cli.echo(command="examples.relax_block", device=device.description, **{**vars(args), "dtype": dtype})
    args.output.mkdir(parents=True, exist_ok=True)
    described.unlink(missing_ok=True)  # written last: relax_run.py takes a folder with it for whole
    mod, weights = module_of(args.batch, args.length, args.heads, args.head_dim, dtype)
    build(mod, arch, args.output, logs, args.records, cuda_toolkit(arch))
    build_artefact(plans, workload, arch, args.output / "attention.so")
    described.write_text(json.dumps({"device": device.kind, "dtype": dtype, "batch": args.batch, "length": args.length,
                                     "heads": args.heads, "weights": weights, "executables": EXECUTABLES}))
    if args.rounds:
        what = [str(args.output.resolve()), "--rounds", str(args.rounds)]
        return subprocess.run([sys.executable, "-m", "scripts.examples.relax_run", *what], cwd=cli.ROOT).returncode
    return cli.DONE


if __name__ == "__main__":
    sys.exit(cli.main(run, make_parser().parse_args()))
