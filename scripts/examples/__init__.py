"""How users of TVM, PyTorch, JAX and C++ take what this project makes, one short file each."""
