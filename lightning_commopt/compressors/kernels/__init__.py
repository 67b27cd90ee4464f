"""Memory-bound arithmetic of the compressors: each operation in plain torch and, for CUDA, in Triton."""
