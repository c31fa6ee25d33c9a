"""The loop.

`engine_core` runs it, and is what callers do to it (`control`: what is asked beside requests, each a message that
checks itself), `named_functions` that requests and control calls name, `tracing` (spans of generations), `listener` is
what follows a sequence, `observers` what sees each step, `health` judges beats. `grammars` compiles what requests ask
for, in threads, each once; what may take long in a lane of its own, in which tenants take turns. `in_process`: the
backend for this process, whose executor is made by a table that the package's root fills (`executor_makers`).
`protocol`: what the caller's side asks of a core, wherever it runs (`Core`, `Backend`). `executor_protocol`: what the
core asks of a device, and of the group that it steps with.
"""
