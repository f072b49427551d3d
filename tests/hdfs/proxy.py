"""A TCP proxy before a NameNode that can drop an answer: the one fault that a real HDFS cannot be made to show."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class Proxy:
    """Passes everything on; while ``drops`` is set, a request that holds these bytes is done but never answered."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self.drops = b""
        self.dropped = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as server, contextlib.suppress(OSError):
            while request := client.recv(1 << 16):  # one request is one packet here: short, and without a body
                server.sendall(request)
                answer = server.recv(1 << 16)
                if self.drops and self.drops in request:
                    self.dropped += 1
                    return
                client.sendall(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
