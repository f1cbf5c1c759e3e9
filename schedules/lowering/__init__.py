"""From a scheduled function to machine code: named TIR pipelines, small rewrites, and the CUDA compiler."""
