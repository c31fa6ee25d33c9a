"""`torch_executor` with its threads (`device_thread`); `runner`, `batch`, `graphs`, over an `accelerator`; `memory`
(KV sizing), `weights`, `profiler`; `model_info` (what a model would need, without its weights); `gloo`: reductions
over the engines of a group.
"""
