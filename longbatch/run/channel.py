"""Messages between the supervisor and a worker: one JSON object a line over a socket pair. Nothing is pickled."""

from __future__ import annotations

import json
import select
import socket
from typing import Any

_RECEIVE_BYTES = 1 << 16

Message = dict[str, Any]


class Channel:
    """One end. `closed` once the other end is gone; what it had sent before can still be taken."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self._socket = end
        self._pending = bytearray()
        self._taken: list[Message] = []
        self.closed = False

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message of this kind; silently nothing where the other end is gone."""
        try:
            self._socket.sendall(json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True

    def receive(self, timeout: float | None = 0.0) -> list[Message]:
        """Every message that has come; waits up to `timeout` seconds (None: as long as it takes) for the first."""
        while not self.closed:
            ready, _, _ = select.select([self._socket], [], [], timeout)
            if not ready:
                break
            self._read()
            if self._taken:
                timeout = 0.0
        messages, self._taken = self._taken, []
        return messages

    def close(self) -> None:
        """Close this end."""
        self.closed = True
        self._socket.close()

    def _read(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            self.closed = True
            return
        self._pending += data
        *lines, rest = self._pending.split(b"\n")
        self._pending = bytearray(rest)
        self._taken += [json.loads(line) for line in lines]
