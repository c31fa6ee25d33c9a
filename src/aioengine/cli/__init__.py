"""Commands; flags are made from the config structs."""

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
