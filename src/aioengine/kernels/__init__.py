"""The arithmetic of a step.

- `operations`: each operation with its contract and its plain torch form; `torch/` has the larger parts of these.
- `triton/`: kernels for GPUs. `native/`: kernels for CPUs. A kernel replaces the plain form of its operation.
- `packed_weight`: layouts of weights. `sample_rows`: the words of a token to sample. `attention_launches`: launch
  parameters by shape. `launch_checks`: arguments that launchers refuse. `zeros`: memory that is not touched yet.
- `kernel_check`: runs kernels beside plain torch in child processes. `kernel_cases`: the cases of that, which the
  benchmarks share. `cache_folder`: where compiled kernels and findings are kept.
"""
