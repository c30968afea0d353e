"""Ray and Triton Inference Server."""
