"""`operations`: what a step consists of, each operation with its contract and its plain torch form, of which
`torch/` has the larger parts; the layouts of weights (`packed_weight`). Kernels replace these forms: `triton/` on a
GPU, an operation a file, `native/` on a CPU. `kernel_check`: they run beside plain torch in child processes, at a
GPU's first start and in `aioengine check`; `kernel_cases`: with what, for benchmarks, too; `cache_folder`: what is
kept.
"""
