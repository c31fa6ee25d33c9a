"""What the GPU path reaches (`python -m benchmarks.gpu`), and that its kernels compile (`… .compile`)."""
