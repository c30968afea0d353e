"""A small Hub on this machine: the calls that huggingface_hub makes to create, fill and read repositories of models."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

TOKEN = "hf_token_of_a_test"


class Hub:
    """Repositories by name: for each the files of its one branch, and whether it is hidden from those without the token."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.asked: list[str] = []
        self.headers: dict[str, dict[str, str]] = {}  # of answers for files, by name, in place of honest ones
        self.meanwhile: dict[str, bytes] = {}  # files that somebody else pushes while an upload is under way

    def commit(self, repo: str) -> str:
        """The name of what is there now."""
        files = self.repositories[repo]
        told = json.dumps({name: hashlib.sha1(data).hexdigest() for name, data in sorted(files.items())})
        return hashlib.sha1(told.encode()).hexdigest()

    def push(self, repo: str, lines: list[dict]) -> bool:
        """Apply a commit; return False for one that was made for another state than the newest."""
        files = self.repositories[repo]
        parents = [line["value"].get("parentCommit") for line in lines if line["key"] == "header"]
        if parents not in ([None], [self.commit(repo)]):
            return False
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        return True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_) -> None:
        pass

    def _send(self, status: int, document: object = None, body: bytes = b"", headers: dict | None = None) -> None:
        body = body if document is None else json.dumps(document).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str, message: str) -> None:
        self._send(status, {"error": message}, headers={"X-Error-Code": code, "X-Error-Message": message})

    def _known(self, repo: str) -> bool:
        """See that a repository is there and open to whoever asks; answer if not."""
        ours = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo not in self.hub.repositories or (repo in self.hub.private and not ours):
            self._error(404 if ours else 401, "RepoNotFound", "Repository not found")
        elif repo in self.hub.gated:
            self._error(403, "GatedRepo", "Access to this model is restricted")
        else:
            return True
        return False

    def do_GET(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        parts = unquote(self.path.partition("?")[0]).strip("/").split("/")
        if parts == ["api", "whoami-v2"]:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._error(401, "", "Invalid username or password.")
            return self._send(200, {"name": "somebody", "type": "user", "auth": {"type": "access_token"}})
        if parts[:2] == ["api", "models"]:
            repo = "/".join(parts[2:4])
            return self._describe(repo, parts[4:]) if self._known(repo) else None
        if len(parts) > 4 and parts[2] == "resolve":
            repo = "/".join(parts[:2])
            return self._file(repo, parts[3], "/".join(parts[4:])) if self._known(repo) else None
        return self._error(501, "", f"this Hub does not answer {self.path}")

    do_HEAD = do_GET

    def _describe(self, repo: str, rest: list[str]) -> None:
        files, commit = self.hub.repositories[repo], self.hub.commit(repo)
        if rest[:1] in (["revision"], ["tree"]) and rest[1] not in ("main", commit):
            return self._error(404, "RevisionNotFound", "Invalid rev id")
        if rest[:1] == ["tree"]:
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": _oid(data)} for name, data in files.items()
            ]
            return self._send(200, listed)
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": _oid(data), **(_large(data) if _is_large(name) else {})}
            for name, data in files.items()
        ]
        return self._send(200, {"id": repo, "sha": commit, "siblings": siblings, "private": repo in self.hub.private})

    def _file(self, repo: str, revision: str, name: str) -> None:
        files, commit = self.hub.repositories[repo], self.hub.commit(repo)
        if revision not in ("main", commit):
            return self._error(404, "RevisionNotFound", "Invalid rev id")
        odd = self.hub.headers.get(name, {})
        if name not in files:
            error = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": commit}
            return self._send(404, {"error": "Entry not found"}, headers={**error, **odd})
        headers = {"ETag": f'"{_oid(files[name])}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        return self._send(200, body=files[name], headers={**headers, **odd})

    def do_POST(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._error(401, "", "Invalid username or password.")
        if self.path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
            self.hub.repositories[repo] = {".gitattributes": b""}
            if asked.get("visibility") == "private" or asked.get("private"):
                self.hub.private.add(repo)
            return self._send(200, {"url": f"http://{self.headers['Host']}/{repo}", "name": repo})
        parts = unquote(self.path.partition("?")[0]).strip("/").split("/")
        repo, call = "/".join(parts[2:4]), parts[4]
        if not self._known(repo):
            return None
        if call == "preupload":
            self.hub.repositories[repo] |= self.hub.meanwhile
            paths = [file["path"] for file in json.loads(body)["files"]]
            return self._send(
                200, {"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]}
            )
        if call == "commit":
            return self._commit(repo, [json.loads(line) for line in body.splitlines()])
        return self._error(501, "", f"this Hub does not answer {self.path}")

    def _commit(self, repo: str, lines: list[dict]) -> None:
        if not self.hub.push(repo, lines):
            return self._error(412, "", "A commit has happened since. Please refresh and try again.")
        url = f"http://{self.headers['Host']}/{repo}/commit/{self.hub.commit(repo)}"
        return self._send(200, {"commitUrl": url, "commitOid": self.hub.commit(repo), "success": True})


def _is_large(name: str) -> bool:
    """Say whether the Hub keeps a file beside git, as it does models."""
    return name.endswith(".onnx")


def _large(data: bytes) -> dict:
    """What the Hub says of such a file beside its pointer."""
    return {"lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}}


def _oid(data: bytes) -> str:
    """What git calls a file of these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serving():
    """Yields a Hub and its address, for the time of a block."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
