"""What runs beside the loop.

`child`: a child process, held by a pidfd, with its output, its end, and that of what descends from it; `own_side`: the
child's half of that. `own_process`: signals, standard files and garbage collection of a process that is ours.
`worker_threads`: threads for long texts, chats and calls that may be abandoned; `threads`: stacks of their own size,
and how many processors this process may use. `turns`: the budget of a turn of the loop. `backoff`: the pause before
what has ended is started again. `progress`: the bar of a loading model; `plugins`: what installed packages have called
before it.
"""
