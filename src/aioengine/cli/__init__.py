"""The commands. Flags are made from the config structs and from `SamplingParams`.

- `commands`: all commands. `command`: how a command reads flags, runs on a loop and ends.
- `generate`, `chat` (with `conversation`, `terminal`, `tool_file`), `serve`, `engine`, `bench`, `info`, `kernels`: one
  command each; the last has two, which compile kernels and check them.
"""

import os

INTERRUPTED = 130


def main() -> None:
    """Import the commands, and run the one that the command line names.

    Ctrl-C during the imports ends the process at once: an exception could come up anywhere in them.
    """
    try:
        import signal

        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a shell has it for what runs in its background
            signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        from aioengine.cli.commands import run_command_line
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    run_command_line()
