"""A hub on this machine: the routes of Hugging Face's that a download and an upload use."""

import base64
import hashlib
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serving(models):
    """Serve models, {name: {file: content}}, which uploads change; gives the hub's address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        @property
        def address(self):
            return f"http://127.0.0.1:{self.server.server_address[1]}"

        def log_message(self, *_):
            pass

        def _send(self, body, status=200, headers=()):
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = self.path.partition("?")[0]
            for name, files in models.items():
                if path.startswith(f"/{name}/resolve/"):
                    content = files.get(path.split("/", 5)[5])
                    if content is None:
                        self._send(b"", 404, [("X-Error-Code", "EntryNotFound")])
                        return
                    digest = hashlib.sha256(content).hexdigest()
                    marks = [("ETag", f'"{digest}"'), ("X-Repo-Commit", COMMIT)]
                    self._send(content, headers=marks)
                    return
                if path.startswith(f"/api/models/{name}"):
                    listed = [{"rfilename": file, "size": len(files[file])} for file in files]
                    if "/tree/" in path:
                        self._send([
                            {"type": "file", "path": file, "size": len(files[file]), "oid": "0"}
                            for file in files
                        ])  # fmt: skip
                        return
                    self._send({"id": name, "sha": COMMIT, "siblings": listed, "private": False})
                    return
            self._send({"error": "not found"}, 404, [("X-Error-Code", "RepoNotFound")])

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Authorization") != "Bearer hf_good":
                self._send({"error": "unauthorized"}, 401)
            elif self.path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                models.setdefault(name, {})
                self._send({"url": f"{self.address}/{name}"})
            elif "/preupload/" in self.path:
                files = json.loads(body)["files"]
                self._send({"files": [
                    {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for each in files
                ]})  # fmt: skip
            elif "/commit/" in self.path:
                name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
                for line in body.splitlines():
                    each = json.loads(line)
                    if each["key"] == "file":
                        models[name][each["value"]["path"]] = base64.b64decode(
                            each["value"]["content"]
                        )
                self._send({"commitUrl": f"{self.address}/{name}/commit/{COMMIT}",
                            "commitOid": COMMIT, "success": True})  # fmt: skip
            else:
                self._send({})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
