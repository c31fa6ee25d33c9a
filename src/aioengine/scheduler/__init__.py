"""Decides what each step computes. Pure: time, randomness and ids come in as arguments.

- `scheduler`: one step. `steps`: the budget of a step, and the steps in flight. `row_table`: columns of the running
  sequences. `policy`: the order, and the queue. `preemption`: which sequence gives way.
- `plan`: what the device is told, what it returns, and both as bytes. `sequence`: requests and their choices.
- `cache_layout`: what each layer keeps of a sequence. `kv_manager`: the blocks of a sequence. `block_pool`: free
  blocks. `prefix_cache`: blocks by the hash of their tokens.
"""
