"""A TCP proxy before a NameNode that can drop an answer: the one fault that a real HDFS cannot be made to show."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class Proxy:
    """Passes everything on; the requests that :meth:`drop` names are done, but never answered."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._pattern, self._times = b"", 0
        self.dropped = 0
        """How many answers were lost."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def drop(self, pattern: bytes, times: int) -> None:
        """Lose the answers to the next so many requests that hold ``pattern``."""
        self._pattern, self._times = pattern, times

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        doomed = threading.Event()
        with client, socket.create_connection(self._target) as server, contextlib.suppress(OSError):
            threading.Thread(target=self._return, args=(server, client, doomed), daemon=True).start()
            while request := client.recv(1 << 16):  # one request is one packet here: short, and without a body
                if self._times and self._pattern in request:
                    self._times -= 1
                    doomed.set()
                server.sendall(request)

    def _return(self, server: socket.socket, client: socket.socket, doomed: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while answer := server.recv(1 << 16):
                if doomed.is_set():
                    self.dropped += 1
                    break
                client.sendall(answer)
            client.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
