"""Pure state machines; time, randomness and ids come in as arguments.

`scheduler`, `policy` (in which order), `preemption` (which sequences give way), `row_table`, `steps` (what each
computes, and those in flight); `cache_layout` (what layers keep of a sequence, and which of them share blocks),
`kv_manager`, `block_pool`, `prefix_cache`; `sequence`, `plan` (also as bytes).
"""
