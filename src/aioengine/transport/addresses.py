"""Where an engine may be reached: ``ipc://`` in a folder of one's own, ``tcp://`` on loopback, anything else with keys.

Decided before a socket exists, because ZMQ itself asks nothing: it binds to every interface, removes the socket file of
a server that still listens, and looks names up. `check_bind` and `check_connect` return an `Address` that ZMQ can be
given as it is, or raise a `ConfigError` that says what to do. They touch the file system for microseconds: call them
off the loop.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import re
import resource
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

import msgspec

from aioengine.errors import ConfigError

MAX_SOCKET_PATH_BYTES = 107
"""``sun_path`` of unix(7) without its terminator."""

START_DESCRIPTORS, LINK_DESCRIPTORS = 48, 24
"""File descriptors that the start of a child, and a link or server, may need; some to spare."""

_EVERY_INTERFACE = ("*", "0.0.0.0", "::")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
KEYS = "keys"
"""The folder of keys in a `PrivateFolder`."""
_FOLDER_PREFIX = "aioengine_"
"""Not ``aioengine-``: earlier versions lock a file in folders of that name, and a sweep takes them for abandoned."""


class NoServer(ConfigError):
    """An address is as it should be, and no server listens there."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """An address that was checked.

    Attributes:
        scheme: how it is reached.
        path: of the socket, for ipc.
        host: an IP address without brackets, ``*``, or a name, for tcp; ``localhost`` has become 127.0.0.1.
        port: 0 leaves the choice to the system.
        is_ipv6: the socket needs ``zmq.IPV6``. A name is looked up among IPv4 addresses only.
    """

    scheme: Literal["ipc", "tcp"]
    path: str = ""
    host: str = ""
    port: int = 0
    is_ipv6: bool = False

    def __str__(self) -> str:
        """As ZMQ takes it."""
        if self.scheme == "ipc":
            return f"ipc://{self.path}"
        host = f"[{self.host}]" if self.is_ipv6 else self.host
        return f"tcp://{host}:{self.port or '*'}"


def check_bind(address: str, *, has_keys: bool) -> Address:
    """The address to bind to. For ipc its folder exists afterwards, and no stale socket lies in the way.

    Two servers that start on one path in the same instant are not distinguished: the later one may get it.

    Raises:
        ConfigError: it cannot be had, is in use, or would be open to others than its owner and those with keys.
    """
    check_descriptors(LINK_DESCRIPTORS)
    found = _parse(address, has_keys=has_keys)
    if found.scheme == "ipc":
        try:
            folder = os.path.dirname(found.path)
            for each in reversed([Path(folder), *Path(folder).parents]):
                with contextlib.suppress(FileExistsError):  # another process has just made it
                    each.mkdir(0o700)
            _check_folder_to_bind(folder, os.path.basename(found.path))
            check_free(found.path, str(found))
            remove_stale(found.path)
        except OSError as error:
            raise ConfigError(f"cannot serve at {found}: {error.strerror} ({error.filename}); choose another") from None
    return found


def check_connect(address: str, *, has_keys: bool) -> Address:
    """The address to connect to; for ipc a server listens there.

    Raises:
        NoServer: none does.
        ConfigError: what lies there may be another user's, or it is not reached without keys.
    """
    check_descriptors(LINK_DESCRIPTORS)
    found = _parse(address, has_keys=has_keys)
    if found.scheme == "ipc":
        _check_served(found)
    elif found.host in _EVERY_INTERFACE:
        raise ConfigError(f"{address!r}: {found.host} is every interface, to bind to; name the host to connect to")
    elif found.port == 0:
        raise ConfigError(f"{address!r}: a port is needed to connect to; the server says which it was given")
    return found


def check_descriptors(num_needed: int) -> None:
    """Raise ConfigError unless so many file descriptors are left: where ZMQ gets none it aborts the process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        num_left = limit + 1 - sum(int(name) < limit for name in os.listdir("/dev/fd"))  # which takes one to list
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):  # there is no such folder here: it is not known
            return
        num_left = 0
    if limit != resource.RLIM_INFINITY and num_left < num_needed:
        raise ConfigError(
            f"no file descriptors left: {num_left} of {limit} are free, and sockets to an engine's process may need "
            f"{num_needed}; raise the limit (ulimit -n)"
        )


def _parse(address: str, *, has_keys: bool) -> Address:
    scheme, _, rest = address.partition("://")
    if scheme == "tcp":
        return _parse_tcp(address, rest, has_keys=has_keys)
    if scheme == "ipc":
        return _parse_ipc(address, rest)
    raise ConfigError(
        f"{address!r} is no address here: possible are ipc:///absolute/path in a folder that only you can enter, "
        "tcp://127.0.0.1:PORT or tcp://[::1]:PORT, and with keys (`aioengine keys`) tcp://HOST:PORT"
    )


def _parse_ipc(address: str, path: str) -> Address:
    num_bytes = len(path.encode(errors="replace"))
    problem = None
    if path.startswith("@"):
        problem = "any user can connect to an abstract socket; use ipc:///absolute/path"
    elif not path.startswith("/") or path.endswith(("/", "/.", "/..")):
        problem = "the absolute path of a socket is needed: ipc:///absolute/path"
    elif not path.isprintable():
        problem = "a path of printable characters is needed"
    elif num_bytes > MAX_SOCKET_PATH_BYTES:
        problem = f"the path has {num_bytes} bytes; {MAX_SOCKET_PATH_BYTES} are possible: choose a shorter folder"
    if problem is not None:
        raise ConfigError(f"{address!r}: {problem}")
    return Address(scheme="ipc", path=path)


def _parse_tcp(address: str, rest: str, *, has_keys: bool) -> Address:
    host, colon, port = rest.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not is_bracketed):
        raise ConfigError(f"{address!r}: tcp://HOST:PORT is needed, with an IPv6 address in brackets: tcp://[::1]:5555")
    if port != "*" and not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 2**16):
        raise ConfigError(f"{address!r}: a port from 1 to 65535 is needed, or * to bind to any")
    host = host[1:-1] if is_bracketed else host
    if host == "localhost" and not is_bracketed:  # never looked up: what a name means is up to others
        host = "127.0.0.1"
    ip = None
    # None is what may be a name, ``127.1`` too: what the system would make of it is not decided by us.
    with contextlib.suppress(ValueError):
        ip = ipaddress.ip_address(host)
    if is_bracketed and not isinstance(ip, ipaddress.IPv6Address):
        raise ConfigError(f"{address!r}: {host!r} is no IPv6 address")
    if ip is None and host != "*" and not _NAME.fullmatch(host):
        raise ConfigError(f"{address!r}: {host!r} is neither an IP address nor a name")
    # ZMQ itself names 127.0.0.1 by its IPv6 form on a socket that takes both kinds.
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    if not has_keys and (ip is None or not (mapped or ip).is_loopback):
        raise ConfigError(
            f"{address!r} can be reached from other machines, and needs keys: make them with `aioengine keys FOLDER`, "
            "and give FOLDER as --keys (where engines join: as --join-keys); without keys use ipc:// or "
            "tcp://127.0.0.1:PORT"
        )
    return Address(scheme="tcp", host=str(ip or host), port=0 if port == "*" else int(port), is_ipv6=is_bracketed)


def _check_folder_to_bind(folder: str, name: str) -> None:
    """Any user that can enter the folder can connect, whatever the socket's own mode: not every system heeds that."""
    status = os.lstat(folder)
    mode = stat.S_IMODE(status.st_mode)
    own = f"{folder.rstrip('/')}/aioengine"
    remedy = f"make one that only you can enter, mkdir -m 700 {own}, and serve at ipc://{own}/{name}"
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{folder!r} is not a folder; choose another path")
    if status.st_uid != os.geteuid():
        raise ConfigError(f"the folder {folder!r} is another user's; {remedy}")
    if mode & 0o077:
        raise ConfigError(f"others can enter the folder {folder!r} (mode {mode:o}); {remedy}")


def _check_served(address: Address) -> None:
    path = address.path
    try:
        folder_status, status = os.stat(os.path.dirname(path)), os.lstat(path)
    except OSError as error:
        raise NoServer(f"no engine serves at {address}: {error.strerror}") from None
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(f"no engine serves at {address}: it is not a socket")
    # Where others may write, what answers may be theirs. Root may use any user's engine.
    if folder_status.st_mode & 0o022 or os.geteuid() not in (0, folder_status.st_uid):
        raise ConfigError(f"{address}: its folder is not yours alone to write to, so that any user may serve there")
    if is_stale(path):
        raise NoServer(f"no engine serves at {address} any more: the socket is what is left of a server that died")


# Socket files, of any server


def check_free(path: str, address: str) -> None:
    """Raise ConfigError if a file that is no socket lies at ``path``, or a server listens there."""
    if os.path.lexists(path):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{path} exists and is not a socket; it is not overwritten: choose another path")
        if not is_stale(path):
            raise ConfigError(f"{address} is in use: another process serves there; end it or choose another path")


def is_stale(path: str) -> bool:
    """Whether no server listens on a socket file: a killed process leaves such a one. True if the file is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # with a full backlog it would wait; then a server listens
        outcome = probe.connect_ex(path)
    try:
        # A file that is no socket refuses, too.
        return outcome == errno.ECONNREFUSED and stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return True


def remove_stale(path: str) -> None:
    """Remove a stale socket file; what lies there else stays."""
    if is_stale(path):  # ZMQ and asyncio would remove any socket, also where a server still listens
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


class PrivateFolder:
    """A fresh folder that only its owner can enter, for sockets whose addresses only their two sides know.

    Made below ``XDG_RUNTIME_DIR`` where that is of use, else in the folder for temporary files. Those of processes that
    were killed are removed on the way: each is locked (flock) until its process ends.

    Raises:
        ConfigError: no folder is short enough, or none can be written to.
    """

    def __init__(self) -> None:
        self._lock: int | None
        self.path, self._lock = _make_locked_folder()
        _sweep(os.path.dirname(self.path))

    def address(self, name: str) -> Address:
        """A new address in this folder."""
        return _parse_ipc(f"ipc://{self.path}/{name}", f"{self.path}/{name}")

    def remove(self) -> None:
        """Remove the sockets and keys in it, and the folder unless other files lie there. Idempotent."""
        _remove_folder(self.path)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def pair_in(folder: str) -> str:
    """The file in a `PrivateFolder` with the pair by which front ends connect to replicas on other machines."""
    return f"{folder}/{KEYS}/front_ends.key_secret"


def remove_private(address: str) -> None:
    """Remove the `PrivateFolder` that an ipc address lies in, from another process than the one that made it.

    No peer can connect there any more; those that have are not concerned. Idempotent.
    """
    folder = os.path.dirname(address.removeprefix("ipc://"))
    if os.path.basename(folder).startswith(_FOLDER_PREFIX):
        _remove_folder(folder)


def _make_locked_folder() -> tuple[str, int]:
    """A new folder, and the descriptor that locks it."""
    problem = ""
    for parent in _parents():
        # What mkdtemp appends, and a name of 16 bytes.
        is_short = len(os.fsencode(parent)) + len(_FOLDER_PREFIX) + 10 + 16 <= MAX_SOCKET_PATH_BYTES
        if not is_short or not os.path.isabs(parent):
            continue
        try:
            # It takes its name when it is locked: until then a sweep would take it for an abandoned one.
            unnamed = tempfile.mkdtemp(prefix=f".{_FOLDER_PREFIX}", dir=parent)
            folder = f"{parent}/{os.path.basename(unnamed)[1:]}"
            try:
                lock = os.open(unnamed, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # no descriptor is left
                os.rmdir(unnamed)
                raise
            with contextlib.suppress(OSError):  # no locks on this file system: then a sweep gets none, either
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(unnamed, folder)
            return folder, lock
        except OSError as error:  # not ours to write to, or full: the next one
            problem = f" ({parent}: {error.strerror})"
    raise ConfigError(f"no folder for sockets can be made{problem}: set TMPDIR to a short one that you can write to")


def _sweep(parent: str) -> None:
    """Remove this user's folders whose processes have ended."""
    with contextlib.suppress(OSError):  # what lies there may not be listed, or no descriptor is left
        for name in os.listdir(parent):
            if name.startswith(_FOLDER_PREFIX):
                folder = f"{parent}/{name}"
                with contextlib.suppress(OSError):  # gone meanwhile, another user's, or in use
                    if os.lstat(folder).st_uid != os.geteuid():  # root, too, leaves what others may exchange for a link
                        continue
                    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        _remove_folder(folder)
                    finally:
                        os.close(lock)


def _remove_folder(folder: str) -> None:
    """Remove the sockets and keys in it, and then the folder, if it is there and was left empty."""
    with contextlib.suppress(OSError):  # other files lie in it, or it is gone
        for entry in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):  # its socket was closed meanwhile
                if stat.S_ISSOCK(os.lstat(f"{folder}/{entry}").st_mode):
                    os.unlink(f"{folder}/{entry}")
        shutil.rmtree(f"{folder}/{KEYS}", ignore_errors=True)
        os.rmdir(folder)


def _parents() -> Iterator[str]:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    with contextlib.suppress(OSError):
        status = os.stat(runtime)
        # After `sudo` or `su` it may be another user's.
        if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
            yield runtime
    with contextlib.suppress(OSError):
        yield tempfile.gettempdir()
    yield "/tmp"
