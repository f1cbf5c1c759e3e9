"""Attention in graphs of TVM's Relax: a pass that replaces it by calls of kernels of this project, and what it needs around it.

    from schedules.relax import FlashAttention
    executable = tvm.compile(FlashAttention(logs, target)(mod), target)
"""
from schedules.relax.flash_attention import FlashAttention
from schedules.relax.torch_export import SCALED_DOT_PRODUCT_ATTENTION

__all__ = ["FlashAttention", "SCALED_DOT_PRODUCT_ATTENTION"]
