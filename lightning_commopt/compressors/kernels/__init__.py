"""Memory-bound arithmetic of the compressors: each operation in plain torch, many also in C for CPU or in Triton."""
