"""An object store in memory that answers as Google's or Amazon's does, and whose requests fail when a test says so.

It knows what tensorstore asks for: objects and ranges of them, lists in one page, and writes on the condition that an
object's generation or entity tag is still the one given. Credentials are not looked at.
"""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from unittest import mock
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from mllm.store.bucket import make_context

BUCKET = "test-runs"
Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and content."""
Fault = Callable[[str, str], str | None]
"""Given a request's method and path, how it fails: a status such as 503, `reset` before or `lost` after it was
carried out, `late`; None: it does not."""


class ObjectStore:
    """A server, its objects, what it was asked for, and its faults."""

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self.objects: dict[str, tuple[bytes, str]] = {}
        """The content and generation of each."""
        self.generations = count(1)
        self.fault: Fault = lambda method, path: None
        self.faults: Counter[str] = Counter()
        self.written: list[str] = []
        """The names of the objects that were written."""
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(self))
        self.server.daemon_threads = True
        self.url = f"{scheme}://{BUCKET}/{self.server.server_port}"  # clients remember the address of each folder
        threading.Thread(target=self.server.serve_forever, args=[0.05], daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs so that its clients find the server."""
        address = f"http://127.0.0.1:{self.server.server_port}"
        if self.scheme == "gs":
            return {"TENSORSTORE_GCS_HTTP_URL": address}
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
        return {"AWS_ENDPOINT_URL": address, "AWS_REGION": "us-east-1", **keys}

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        place, query = unquote(urlsplit(path).path), dict(parse_qsl(urlsplit(path).query))
        name = query.get("name", place.partition("/o/" if self.scheme == "gs" else f"/{BUCKET}/")[2])
        with self.lock:
            content, generation = self.objects.get(name, (b"", "0"))
            expected = "0" if headers.get("If-None-Match") == "*" else headers.get("If-Match", generation)
            if (name in self.objects or method != "HEAD") and (
                query.get("ifGenerationMatch", expected).strip('"') != generation
            ):
                return 412, {}, b""
            if method in ("POST", "PUT"):
                generation = str(next(self.generations))
                self.objects[name] = body, generation
                self.written.append(name)
                return 200, tags(generation), json.dumps({"name": name, "generation": generation}).encode()
            if not name and method == "GET":
                return 200, {}, self.names_from(query)
            if generation == "0":
                return 404, {}, b""
            if method == "DELETE":
                del self.objects[name]
                return 204, {}, b""
        if query.get("alt") == "json":
            return 200, {}, json.dumps({"name": name, "generation": generation}).encode()
        if "Range" not in headers:
            return 200, tags(generation), content
        first, _, last = headers["Range"].removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1 if last else None]
        where = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        return (206, {**tags(generation), "Content-Range": where}, part) if part else (416, {}, b"")

    def names_from(self, query: Mapping[str, str]) -> bytes:
        """The list of the objects whose names are in a range, or begin alike."""
        first, last = query.get("startOffset", ""), query.get("endOffset", "\U0010ffff")
        names = [name for name in sorted(self.objects) if first <= name < last]
        if self.scheme == "gs":
            return json.dumps({"items": [{"name": name, "size": "0"} for name in names]}).encode()
        found = [name for name in names if name.startswith(query.get("prefix", ""))]
        items = "".join(f"<Contents><Key>{escape(name)}</Key><Size>0</Size></Contents>" for name in found)
        counted = f"<KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated>"
        return f"<ListBucketResult>{counted}{items}</ListBucketResult>".encode()


def tags(generation: str) -> dict[str, str]:
    return {"x-goog-generation": generation, "ETag": f'"{generation}"'}


def make_handler(store: ObjectStore) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else each answer waits for 40 ms

        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fault = store.fault(self.command, self.path)
            if fault:
                store.faults[fault] += 1
            if fault == "late":
                time.sleep(0.3)
            if fault != "reset":
                refused = (int(fault), {}, b"") if fault and fault.isdecimal() else None
                status, headers, content = refused or store.answer(self.command, self.path, self.headers, body)
            if fault in ("reset", "lost"):
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def object_store(scheme: str) -> Iterator[ObjectStore]:
    """A server for gs or s3 with an empty bucket; this process's clients find it, too."""
    store = ObjectStore(scheme)
    make_context.cache_clear()  # it remembers where an earlier server was
    try:
        with mock.patch.dict(os.environ, store.environment):
            yield store
    finally:
        store.server.shutdown()
        store.server.server_close()
