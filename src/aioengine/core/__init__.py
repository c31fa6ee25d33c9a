"""The loop, and the interfaces on both sides of it.

- `engine_core`: finish, apply, schedule, launch, publish; and the calls of front ends.
- `protocol`: what a front end asks of a core, wherever the core runs. `executor_protocol`: what a core asks of a
  device, and of the group that it steps with.
- `control`: control calls, each a message that checks itself. `named_functions`: functions that calls and requests
  name.
- `listener`: the interface of a sequence's reader. `observers`: logs and metrics of steps. `tracing`: spans. `health`:
  alive, stalled or dead.
- `grammars`: compiles constraints in threads, each once.
- `in_process`: the backend for this process. `executor_makers`: a table of executors, filled by the package's root.
"""
