"""Runs plans on a device.

- `torch_executor`: the `Executor` of this package. `device_thread`: its thread, and the one that waits for results.
- `runner`: one step. `batch`: a plan as words (`step_words`). `launched`: a step on its way. `graphs`: recorded decode
  steps. `paged_attention`: the KV cache, and attention over it.
- `accelerator`: what is asked of a device; `cuda` and `host` are devices. `make_runner`: a device and a model become
  a runner. `memory`: the size of the KV cache. `gloo`: reductions over the engines of a group.
- `weights`, `weight_transfer`: weights that load, move and change. `model_info`: what a model would need, without its
  weights. `profiler`: profiles.
"""
