"""A small Llama-like block of PyTorch through torch.export and Relax to one executable with this project's attention.

    python -m scripts.examples.torch_export

Rotary positions, grouped heads, causal attention; the answer is as near to float64 as PyTorch's own, by the rule that all kernels here
pass. Needs PyTorch (pip install torch).
"""
import logging
import sys

import torch
import torch.nn.functional as F
import tvm
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program

from schedules.relax import SCALED_DOT_PRODUCT_ATTENTION, FlashAttention
from scripts import cli, options


class Llama(torch.nn.Module):
    """One decoder block on x [B,N,C], with `groups` key heads for `heads` query heads."""

    def __init__(self, heads=8, groups=2, head_dim=32):
        super().__init__()
        self.heads, self.groups, self.head_dim, channels = heads, groups, head_dim, heads * head_dim
        self.q, self.o = (torch.nn.Linear(channels, channels, bias=False) for _ in range(2))
        self.k, self.v = (torch.nn.Linear(channels, groups * head_dim, bias=False) for _ in range(2))
        self.gate, self.up = (torch.nn.Linear(channels, 2 * channels, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(2 * channels, channels, bias=False)
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2)))
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(channels, eps=1e-5) for _ in range(2))

    def rotated(self, x):
        """Pairs of channels of x [B,H,N,D], turned by angles that grow with the row."""
        half = self.head_dim // 2
        angles = torch.outer(torch.arange(x.shape[2], dtype=x.dtype), self.frequencies)
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1)

    def attention(self, x):
        batch, length, channels = x.shape
        q, k, v = (of(x).view(batch, length, heads, self.head_dim).transpose(1, 2)
                   for of, heads in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups)))
        out = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(batch, length, channels))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def imported(module, inputs):
    """IRModule of a PyTorch module with attention whole and all else broken up as TVM's importer does it; its weights are constants."""
    broken_up = torch.export.default_decompositions()
    del broken_up[torch.ops.aten.scaled_dot_product_attention.default]
    with torch.no_grad():
        program = torch.export.export(module.eval(), inputs).run_decompositions(broken_up)
    return from_exported_program(program, run_ep_decomposition=False, custom_convert_map=SCALED_DOT_PRODUCT_ATTENTION,
                                 unwrap_unit_return_tuple=True)


def run(args):
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = cli.find_device("cpu")
    target = device.arch.target()
    torch.manual_seed(0)
    block, x = Llama(), torch.randn(args.batch, args.length, 8 * 32)
    mod = FlashAttention(cli.log_folder(args.logs), target)(imported(block, (x,)))
    machine = relax.VirtualMachine(tvm.compile(mod, target), tvm.cpu())
    found = torch.from_numpy(machine["main"](tvm.runtime.tensor(x.numpy())).numpy())
    with torch.no_grad():
        plain, exact = block(x), block.double()(x.double())
    error, error_of_torch = ((answer - exact).abs().max().item() for answer in (found, plain))
    allowed = 2 * error_of_torch + torch.finfo(x.dtype).eps * exact.abs().max().item()
    print(f"largest error {error:.2e}, PyTorch's own {error_of_torch:.2e}, allowed {allowed:.2e}")
    return cli.DONE if error <= allowed else cli.FAILED


def make_parser():
    parser = options.parser("examples.torch_export", __doc__)
    parser.add_argument("--batch", type=int, default=2, help="sequences")
    parser.add_argument("--length", type=int, default=100, help="tokens of each")
    options.add_logs(parser)
    return parser


if __name__ == "__main__":
    sys.exit(cli.main(run, make_parser().parse_args()))
