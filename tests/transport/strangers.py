"""What others than front ends may say to a socket of an engine's, without ZMQ or against its rules."""

from __future__ import annotations

import socket


def say(port: int, *chunks: bytes) -> None:
    """Connect over TCP, say something, and wait until the other side hangs up, or hang up at a silence."""
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(0.05)
        try:
            for chunk in chunks:
                stranger.sendall(chunk)
            while stranger.recv(4096):
                pass
        except OSError:  # a silence, or it was reset
            pass


def greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    return bytes([4, len(content)]) + content


def hello(user: bytes, secret: bytes) -> bytes:
    return command(b"HELLO", bytes([len(user)]) + user + bytes([len(secret)]) + secret)


STRANGERS: dict[str, tuple[bytes, ...]] = {
    "silent": (),
    "http": (b"GET / HTTP/1.0\r\n\r\n",),
    "zeros": (bytes(100),),
    "ones": (b"\xff" * 100,),
    "half a greeting": (greeting(b"PLAIN")[:12],),
    "NULL": (greeting(b"NULL"),),
    "CURVE": (greeting(b"CURVE"),),
    "greeting": (greeting(b"PLAIN"),),
    "older version": (b"\xff" + bytes(8) + b"\x7f\x01" + bytes(60),),
    "oldest version": (b"\x01\x00",),
    "wrong secret": (greeting(b"PLAIN"), hello(b"user", b"wrong")),
    "wrong secret, twice refused": (greeting(b"PLAIN"), hello(b"user", b"wrong") + command(b"INITIATE", b"")),
    "malformed HELLO": (greeting(b"PLAIN"), command(b"HELLO", b"\xff\xff")),
    "a message before all": (greeting(b"PLAIN"), b"\x00\x05abcde"),
}
"""What others than a front end may say."""
