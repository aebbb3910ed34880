"""A scripted JSON server on loopback: each request is answered by a function of the test."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Reply(NamedTuple):
    """What the server says: `body` as JSON unless it is bytes, after `delay` seconds."""

    body: Any = b""
    status: int = 200
    headers: dict = {}
    delay: float = 0.0
    drip: float = 0.0  # seconds between single bytes of the body


class JsonServer:
    """The address, all requests (path, headers, body) so far, and the most that were open at a time."""

    def __init__(self, respond: Callable[[dict, int], Reply]):
        self.requests: list[tuple[str, dict, dict]] = []
        self.most_open = self._open = 0
        self._respond, self._lock = respond, threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, path: str, headers: dict, body: dict) -> Reply:
        """Count the request and ask the script."""
        with self._lock:
            self.requests.append((path, headers, body))
            number = len(self.requests) - 1
            self._open += 1
            self.most_open = max(self.most_open, self._open)
        reply = self._respond(body, number)
        time.sleep(reply.delay)
        with self._lock:
            self._open -= 1
        return reply

    def _handler(server):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                reply = server.answer(self.path, dict(self.headers), body)
                content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                try:
                    self.send_response(reply.status)
                    for name, value in {"Content-Length": str(len(content)), **reply.headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    for start in range(len(content) if reply.drip else 0):
                        self.wfile.write(content[start : start + 1])
                        time.sleep(reply.drip)
                    self.wfile.write(b"" if reply.drip else content)
                except OSError:  # the caller gave up
                    pass

            do_GET = do_POST

            def log_message(self, *_args):
                pass

        return Handler

    @contextmanager
    def running(self):
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
