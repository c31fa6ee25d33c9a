"""The caller's side of a request.

`stream`: the `Stream` of a request being read. `runtime`: what a started engine consists of, and the one task that owns
it. `call_options`: the options of a call, by name. `call`: a call's arguments, checked, its prompt rendered and
tokenized, and turned into a sequence. `admission`: the open requests, and the bound on those that do not run yet.
`request_state`: a request's choices, and the text of each. `answer_format`: what an answer consists of beside content,
tools and reasoning, and so what constrains it and what reads it. `output_type`: a type that an answer is read as.
`clients`: makers of other packages' clients.
"""
