"""Child processes, threads, and the turns of the loop.

- `child`: a child process, held by a pidfd. `own_side`: the child's half of that: it ends with its parent.
- `own_process`: signals, standard files and garbage collection of a process that is ours.
- `worker_threads`: work that is too long for the loop. `threads`: stacks, and the number of processors.
- `turns`: the budget of a turn of the loop. `backoff`: the pause before a restart.
- `progress`: the bar of a loading model. `plugins`: functions of installed packages, called at the start.
"""
