"""Tensor intrinsics: each stands with its meaning in plain TensorIR and its spelling for the hardware."""
