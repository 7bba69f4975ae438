"""A gRPC call without any library: what an attacker sends to a port that it finds."""

from __future__ import annotations

import socket
import struct

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _GOAWAY = 0, 1, 4, 7
_END_STREAM, _END_HEADERS = 1, 4


def call(host: str, port: int, method: str, *, token: str | None = None) -> bytes:
    """Everything that a server answers to an empty message; its trailers name the status."""
    headers = b"\x83\x86" + b"\x04" + _text(method) + b"\x01" + _text(f"{host}:{port}")
    headers += b"\x00" + _text("content-type") + _text("application/grpc")
    headers += b"\x00" + _text("te") + _text("trailers")
    if token is not None:
        headers += b"\x00" + _text("authorization") + _text(f"Bearer {token}")
    with socket.create_connection((host, port), 10) as connection:
        connection.sendall(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, b"")
            + _frame(_HEADERS, _END_HEADERS, 1, headers)
            + _frame(_DATA, _END_STREAM, 1, bytes(5))
        )
        return _answer(connection)


def _answer(connection: socket.socket) -> bytes:
    received = b""
    while True:
        head = _exactly(connection, 9)
        length, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
        received += _exactly(connection, length)
        ends_the_stream = kind in (_DATA, _HEADERS) and flags & _END_STREAM
        if ends_the_stream or kind == _GOAWAY:
            return received


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise ConnectionError(f"the server hung up after {data!r}")
        data += more
    return data


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + struct.pack(">BBI", kind, flags, stream) + payload


def _text(text: str) -> bytes:
    data = text.encode()
    assert len(data) < 127
    return bytes([len(data)]) + data
