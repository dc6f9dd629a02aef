"""A small HTTP server for programs on this machine: routes, a key, and errors as JSON."""

import hmac
import json
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, TypeAlias

_MOST_BYTES = 1 << 28  # of a request


class Request(NamedTuple):
    """What a client asks."""

    body: bytes
    rest: str  # of the path, where a route ends with a slash

    def json(self) -> dict[str, Any]:
        """Return the fields of the body."""
        try:
            found = json.loads(self.body or b"{}")
        except ValueError as error:
            raise RequestError(400, f"expected JSON, got {error}") from error
        if not isinstance(found, dict):
            raise RequestError(400, f"expected fields, got {type(found).__name__}")
        return found


class Response(NamedTuple):
    """What it is answered."""

    body: bytes | Generator[bytes]  # whole, or in parts that are sent as they come
    kind: str = "application/json"
    status: int = 200


class RequestError(ValueError):
    """A request that cannot be answered, with the status that says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def refusing(status: int, expected: str = "") -> Iterator[None]:
    """Answer with this status where what a client sent is refused, or of another type."""
    try:
        yield
    except RequestError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise RequestError(status, f"{expected}{error}") from error


# "GET /v1/models", or "GET /v1/models/" for all paths that begin so
Routes: TypeAlias = Mapping[str, Callable[[Request], Response]]
# (path, message) -> the fields of an error
ErrorFn: TypeAlias = Callable[[str, str], dict[str, Any]]


def as_json(fields: Mapping[str, Any], status: int = 200) -> Response:
    """Return fields as a response."""
    return Response(json.dumps(fields).encode(), status=status)


@contextmanager
def listening(
    routes: Routes, error_fields: ErrorFn, host: str, port: int, key: str
) -> Iterator[ThreadingHTTPServer]:
    """Answer requests in threads until the block ends; port 0 is any that is free.

    Args:
        routes: a function for each method and path.
        error_fields: the form of errors that the routes' clients read.
        host: the address to listen at.
        port: its port.
        key: that each request must have, as `Authorization: Bearer KEY` or `X-API-Key: KEY`.
    """
    handler = _handler(routes, error_fields, key)
    try:
        server = _Server((host, port), handler)
    except OSError as error:
        raise OSError(
            f"serve expects an address that is free, got {host}:{port}: {error.strerror}; --port 0 "
            f"takes any that is."
        ) from error
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a client that waits does not keep the process
    request_queue_size = 128  # of clients that connect at once

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing of a client that has gone between two requests."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def _handler(routes: Routes, error_fields: ErrorFn, key: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept

        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self._answer("POST")

        def log_message(self, *_: Any) -> None:
            """Print nothing for each request."""

        def _answer(self, method: str) -> None:
            try:
                body = self._body()
                self._check_key()
                route, rest = _find(routes, method, self.path.partition("?")[0])
                response = route(Request(body, rest))
            except RequestError as error:
                response = as_json(error_fields(self.path, str(error)), error.status)
            except Exception as error:  # whatever it is, the client is told and others are served
                message = f"{type(error).__name__}: {error}"
                response = as_json(error_fields(self.path, message), 500)
            try:
                self._send(response)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client has gone

        def _body(self) -> bytes:
            length = self.headers.get("Content-Length", "0")
            if not length.isdigit() or int(length) > _MOST_BYTES:
                self.close_connection = True  # what follows cannot be told from a request
                raise RequestError(
                    413, f"expected a body of at most {_MOST_BYTES} bytes, got {length}"
                )
            return self.rfile.read(int(length))

        def _check_key(self) -> None:
            bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
            given = self.headers.get("X-API-Key") or bearer
            if not hmac.compare_digest(given.encode(), key.encode()):
                raise RequestError(401, "expected the server's key, got another or none")

        def _send(self, response: Response) -> None:
            self.send_response(response.status)
            self.send_header("Content-Type", response.kind)
            if isinstance(response.body, bytes):
                self.send_header("Content-Length", str(len(response.body)))
                self.end_headers()
                self.wfile.write(response.body)
                return
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with closing(response.body) as parts:  # which hears of a client that has gone
                for part in parts:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")

    return Handler


def _find(routes: Routes, method: str, path: str) -> tuple[Callable[[Request], Response], str]:
    """Return what answers a path, and the rest of the path."""
    wanted = f"{method} {path}"
    if wanted in routes:
        return routes[wanted], ""
    for name, route in routes.items():
        if name.endswith("/") and wanted.startswith(name):
            return route, wanted[len(name) :]
    raise RequestError(404, f"this server has no {wanted}")
