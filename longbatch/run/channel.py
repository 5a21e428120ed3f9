"""Messages between the supervisor and a worker: one JSON object a line over a socket pair. Nothing is pickled."""

from __future__ import annotations

import json
import select
import socket
from typing import Any

_RECEIVE_BYTES = 1 << 16

Message = dict[str, Any]


class Channel:
    """One end. `closed` once the other end is gone and all that it had sent is taken.

    Sending never waits, because a process that is stopped or in a long step must not hold up the other one: what the
    socket does not take at once goes out with the next call of any method.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent = bytearray()
        self._pending = bytearray()
        self._taken: list[Message] = []
        self.closed = False

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits until the other end takes more."""
        return bool(self._unsent)

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message of this kind; silently nothing where the other end is gone."""
        self._unsent += json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"
        self.push()

    def push(self) -> None:
        """Send of what waits as much as the other end takes now."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            # Not `closed`: its last messages may still be there to be read.
            self._unsent.clear()

    def flush(self) -> None:
        """Return when nothing waits to be sent, or the other end is gone."""
        while self._unsent:
            select.select([], [self._socket], [])
            self.push()

    def receive(self, timeout: float | None = 0.0) -> list[Message]:
        """Every message that has come; waits up to `timeout` seconds (None: as long as it takes) for the first."""
        self.push()
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
