"""The core in a process of its own; docs/internals/processes.md explains how.

- `wire`: all messages. `channel`: a socket with one owner. `link`, `client`: a front end's side. `peers`, `server`:
  the engine's side. `backends`: an engine in a child process, and one at an address.
- `handshake`: HELLO, INIT, READY. `engine_process`: an engine's life in its process. `child`: its command.
- `addresses`: where an engine may be reached. `security`: keys.
"""
