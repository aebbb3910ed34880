"""A Hub on the loopback interface: whoami, create, preupload, LFS batch and upload, commit; and its failures.

It speaks the HTTP API that `huggingface_hub` calls when `HF_HUB_DISABLE_XET=1`. Files arrive as the Hub would get them:
`folder_of(repo)` is what somebody who downloads the repository gets.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN, USER = "hf_loopback", "user"
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".png", ".parquet")


class HubServer(ThreadingHTTPServer):
    """The state of the Hub.

    Attributes:
        role: of the token: `write` or `read`.
        theirs: repositories of others, which everybody may read.
        drop: `commit` or `lfs`: such requests are cut off without an answer.
        broken: so many requests of kind `drop` are cut off; all if None.
        seen: every request, as `METHOD /path`.
    """

    daemon_threads = True

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.role, self.drop, self.broken = root, "write", None, None
        self.repos: dict[str, dict[str, bytes]] = {}
        self.theirs = {"other/model"}
        self.blobs: dict[str, bytes] = {}
        self.commits: list[tuple[str, str, list[str]]] = []
        self.seen: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def environment(self, token: str = TOKEN) -> dict[str, str]:
        """Variables of a process that uses this Hub."""
        return {
            "HF_ENDPOINT": self.url, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0",
        }  # fmt: skip

    def folder_of(self, repo: str) -> Path:
        """The files of a repository in a folder."""
        folder = self.root / repo.replace("/", "--")
        for name, content in self.repos[repo].items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return folder


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        """Silence."""

    def answer(self, value=None, status: int = 200, **headers: str) -> None:
        body = json.dumps({} if value is None else value).encode()
        self.send_response(status)
        for name, content in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), content)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, message: str, code: str | None = None) -> None:
        extra = {"X_Error_Code": code} if code else {}
        self.answer({"error": message}, status, X_Error_Message=message, **extra)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def cut(self, kind: str) -> bool:
        """Whether this request is dropped: the connection ends without an answer."""
        server = self.server
        if server.drop != kind or server.broken == 0:
            return False
        server.broken = None if server.broken is None else server.broken - 1
        self.close_connection = True
        self.connection.close()
        return True

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (OSError, ValueError):  # the dropped ones
            self.close_connection = True

    def _route(self) -> None:
        server, path = self.server, self.path.split("?")[0]
        server.seen.append(f"{self.command} {path}")
        if path.startswith("/lfs/"):
            return self._blob(path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.body()
            return self.refuse(401, "Invalid credentials in Authorization header")
        if path == "/api/whoami-v2":
            auth = {"type": "access_token", "accessToken": {"displayName": "t", "role": server.role}}
            return self.answer({"type": "user", "name": USER, "orgs": [], "auth": auth})
        if path == "/api/validate-yaml":
            self.body()
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create()
        parts = path.strip("/").split("/")
        if path.startswith("/api/models/") and len(parts) >= 4:
            return self._of_repo("/".join(parts[2:4]), parts[4:])
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch()
        self.body()
        self.refuse(404, "Not found")

    do_GET = do_HEAD = do_POST = do_PUT = _route

    def _create(self) -> None:
        wanted = json.loads(self.body())
        repo = f"{wanted.get('organization') or USER}/{wanted['name']}"
        if self.server.role != "write" or not repo.startswith(f"{USER}/"):
            return self.refuse(403, f"You don't have the rights to create a model under the namespace of {repo}")
        status = 409 if repo in self.server.repos else 200
        self.server.repos.setdefault(repo, {})
        self.answer({"url": f"{self.server.url}/{repo}", "id": repo}, status)

    def _of_repo(self, repo: str, rest: list[str]) -> None:
        body, server = self.body(), self.server
        may_write = repo in server.repos and server.role == "write"
        if repo not in server.repos and repo not in server.theirs:
            return self.refuse(404, "Repository not found", "RepoNotFound")
        if not rest or rest[0] == "revision":
            return self.answer({"id": repo, "modelId": repo, "sha": "0" * 40, "siblings": [], "tags": []})
        if not may_write:
            return self.refuse(403, "Forbidden: you must have write access to this repository")
        if rest == ["auth-check", "write"]:
            return self.answer()
        if rest[0] == "preupload":
            files = [
                {"path": f["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if f["path"].endswith(LFS_SUFFIXES) else "regular"}
                for f in json.loads(body)["files"]
            ]  # fmt: skip
            return self.answer({"files": files})
        if rest[0] == "commit" and not self.cut("commit"):
            self._commit(repo, [json.loads(line) for line in body.splitlines()])

    def _commit(self, repo: str, lines: list[dict]) -> None:
        """All files of a commit at once, as git does."""
        files, summary = {}, ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                summary = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
        self.server.repos[repo].update(files)
        self.server.commits.append((repo, summary, sorted(files)))
        sha = hashlib.sha1(summary.encode()).hexdigest()
        self.answer({"commitUrl": f"{self.server.url}/{repo}/commit/{sha}", "commitOid": sha, "success": True})

    def _batch(self) -> None:
        objects = [
            {"oid": o["oid"], "size": o["size"], "actions": {"upload": {"href": f"{self.server.url}/lfs/{o['oid']}"}}}
            for o in json.loads(self.body())["objects"]
        ]
        self.answer({"transfer": "basic", "objects": objects})

    def _blob(self, path: str) -> None:
        content, oid = self.body(), path.rsplit("/", 1)[1]
        if self.cut("lfs"):
            return
        if hashlib.sha256(content).hexdigest() != oid:
            return self.refuse(400, "the content has another hash")
        self.server.blobs[oid] = content
        self.answer()


@contextmanager
def hub(root: Path) -> Iterator[HubServer]:
    """A running Hub that keeps nothing."""
    server = HubServer(root)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
