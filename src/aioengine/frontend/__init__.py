"""The caller's side of a request.

- `call_options`: the options of a call, by name. `call`: a call's arguments, checked and turned into a sequence.
- `admission`: the open requests, and the bound on those that do not run yet.
- `request_state`: a request's choices, and the text of each. `stream`: a request that is being read.
- `answer_format`: tools, reasoning and constraints of an answer. `output_type`: a type that an answer is read as.
- `runtime`: the parts of a started engine, and the task that owns them.
- `clients`: a table of other packages' clients, filled by the package's root.
"""
