"""Object stores on this machine, and a proxy before them whose requests fail when a test says so."""

import http.client
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

from mllm.store.bucket import make_context

BUCKET = "test-runs"
Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and content."""
Fault = Callable[[str, str], str | None]
"""Given a request's method and path, how it fails: a status such as 503, `reset` before or `lost` after it was
carried out, `late`; None: it does not."""


class ObjectStore:
    """A server's address, what it was asked for, and the faults of its proxy."""

    folders = count()
    """A folder belongs to one server: clients remember the address of each."""

    def __init__(self, scheme: str, backend: tuple[str, int]) -> None:
        self.scheme, self.backend = scheme, backend
        self.generations: dict[str, str] = {}
        """Google's emulator knows no generations in conditions and answers of reads, nor ranges of names in lists, and
        answers ranges of bytes that end too late: the proxy adds and refuses them."""
        self.renew()
        self.lock = threading.Lock()
        self.proxy = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(self))
        self.proxy.daemon_threads = True
        threading.Thread(target=self.proxy.serve_forever, daemon=True).start()

    def renew(self) -> None:
        """Begin a new folder, without faults."""
        self.url = f"{self.scheme}://{BUCKET}/team/{next(self.folders)}"
        self.fault: Fault = lambda method, path: None
        self.faults: Counter[str] = Counter()
        self.written: list[str] = []
        """The paths of requests that have written an object."""
        self.read: Counter[str] = Counter()
        """The bytes that were answered, by the path of the request."""

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs so that its clients find the server."""
        address = f"http://127.0.0.1:{self.proxy.server_port}"
        if self.scheme == "gs":
            return {"TENSORSTORE_GCS_HTTP_URL": address}
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
        return {"AWS_ENDPOINT_URL": address, "AWS_REGION": "us-east-1", **keys}

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """The server's answer."""
        connection = http.client.HTTPConnection(*self.backend, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        found = (self.answer_conditions if self.scheme == "gs" else self.forward)(method, path, headers, body)
        if method in ("POST", "PUT") and found[0] == 200:
            self.written.append(unquote(path))
        if method == "GET" and found[0] == 200:
            self.read[unquote(path)] += len(found[2])
        return found

    def answer_conditions(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        parts, query = urlsplit(path), parse_qs(urlsplit(path).query)
        name = query.get("name", [unquote(parts.path).partition("/o/")[2]])[0]
        with self.lock:
            if "ifGenerationMatch" in query and query["ifGenerationMatch"][0] != self.generations.get(name, "0"):
                return 412, {}, b"{}"
            status, found, content = self.forward(method, path, headers, body)
            if method == "POST" and status == 200:
                self.generations[name] = json.loads(content)["generation"]
            elif method == "DELETE":
                self.generations.pop(name, None)
            elif "startOffset" in query or "endOffset" in query:
                first, last = (query.get(name, [""])[0] for name in ("startOffset", "endOffset"))
                listed = json.loads(content)
                kept = [item for item in listed.get("items", ()) if first <= item["name"] < (last or "\U0010ffff")]
                content = json.dumps({**listed, "items": kept}).encode()
            elif name in self.generations and "alt" in query:
                found["x-goog-generation"] = self.generations[name]
            first, _, size = found.get("Content-Range", "").removeprefix("bytes ").replace("-", "/").rpartition("/")
            if size and int(first.partition("/")[0]) >= int(size):
                status = 416
        return status, found, content


def make_handler(store: ObjectStore) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fault = store.fault(self.command, self.path)
            if fault:
                store.faults[fault] += 1
            if fault == "reset":
                self.close_connection = True
                return
            if fault == "late":
                time.sleep(0.3)
            if fault and fault.isdecimal():
                status, headers, content = int(fault), {}, b"{}"
            else:
                status, headers, content = store.answer(self.command, self.path, dict(self.headers), body)
            if fault == "lost":
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("connection", "content-length", "transfer-encoding", "date", "server"):
                    self.send_header(name, value)
            length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = do

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def object_store(scheme: str) -> Iterator[ObjectStore]:
    """A server for gs or s3 with an empty bucket; this process's clients find it, too."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    BaseHTTPRequestHandler.disable_nagle_algorithm = True  # else each answer waits for 40 ms
    if scheme == "gs":
        from gcp_storage_emulator.server import create_server
        from gcp_storage_emulator.storage import Storage

        Storage._write_config_to_file = lambda self: None  # the list of all objects, at every write
        server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
        server.start()
        backend = server._api._httpd.server_address
    else:
        from moto.server import ThreadedMotoServer

        server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        backend = server.get_host_and_port()
    store = ObjectStore(scheme, backend)
    if scheme == "s3":
        store.forward("PUT", f"/{BUCKET}", {"Host": "localhost"}, b"")
    make_context.cache_clear()  # it remembers where an earlier server was
    try:
        with mock.patch.dict(os.environ, store.environment):
            yield store
    finally:
        store.proxy.shutdown()
        store.proxy.server_close()
        server.stop()
