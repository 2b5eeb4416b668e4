"""Google's object store in memory, as tensorstore and gcsfs ask for it. Its requests fail when a test says so.

The store has objects, their ranges, lists in a single page, and uploads in one request or several. A write may depend
on an object's generation. Credentials are not checked.
"""

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from unittest import mock
from urllib.parse import parse_qsl, unquote, urlsplit

BUCKET = "test-runs"
Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and content."""
Fault = Callable[[str, str], str | None]
"""The status that a request fails with, such as 503, from its method and path; None: it does not fail."""


class ObjectStore:
    """A server, its objects, the requests that it got, and its faults."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, str]] = {}
        """The content and generation of each object."""
        self.generations = count(1)
        self.uploads: dict[str, tuple[str, bytearray]] = {}
        """The name and the bytes so far of each upload in several requests."""
        self.fault: Fault = lambda method, path: None
        self.written: list[str] = []
        """The names of the objects that were written."""
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(self))
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # clients close connections that they need no more
        self.url = f"gs://{BUCKET}/{self.server.server_port}"  # clients remember the address of each folder
        threading.Thread(target=self.server.serve_forever, args=[0.05], daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which a process's clients find the server."""
        plain = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}  # else gcsfs asks Google which kind of bucket it is
        return {"TENSORSTORE_GCS_HTTP_URL": self.address, "STORAGE_EMULATOR_HOST": self.address, **plain}

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        place, query = urlsplit(path).path, dict(parse_qsl(urlsplit(path).query))
        name = query.get("name", unquote(place.partition("/o/")[2]))
        with self.lock:
            if place.startswith("/upload/") and query.get("uploadType") == "resumable":
                return self.upload(query, headers, body)
            content, generation = self.objects.get(name, (b"", "0"))
            if query.get("ifGenerationMatch", generation) != generation:
                return 412, {}, b""
            if method in ("POST", "PUT"):
                return 200, {}, json.dumps(self.put(name, body)).encode()
            if not name:
                listing = place.rstrip("/").endswith("/o")
                return 200, {}, json.dumps(self.names_from(query) if listing else {"name": BUCKET}).encode()
            if generation == "0":
                return 404, {}, b""
            if method == "DELETE":
                del self.objects[name]
                return 204, {}, b""
        if query.get("alt") != "media":
            return 200, {}, json.dumps(self.about(name, content, generation)).encode()
        tags = {"x-goog-generation": generation}
        if "Range" not in headers:
            return 200, tags, content
        first, _, last = headers["Range"].removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1 if last else None]
        where = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        return (206, {**tags, "Content-Range": where}, part) if part else (416, {}, b"")

    def put(self, name: str, content: bytes) -> dict[str, str]:
        self.objects[name] = bytes(content), (generation := str(next(self.generations)))
        self.written.append(name)
        return self.about(name, content, generation)

    def about(self, name: str, content: bytes, generation: str) -> dict[str, str]:
        """An object's description."""
        date = f"2026-01-01T00:00:{int(generation) % 60:02}.{int(generation) % 1000:03}Z"
        size = {"size": str(len(content)), "updated": date, "timeCreated": date}
        return {"kind": "storage#object", "name": name, "bucket": BUCKET, "generation": generation, **size}

    def names_from(self, query: Mapping[str, str]) -> dict[str, object]:
        """The list of the objects by a range or a prefix of their names. Folders are apart if the query says so."""
        first, last = query.get("startOffset", ""), query.get("endOffset", "\U0010ffff")
        prefix, items, folders = query.get("prefix", ""), [], set()
        for name, (content, generation) in sorted(self.objects.items()):
            if first <= name < last and name.startswith(prefix):
                head, slash, _ = name[len(prefix) :].partition("/")
                if query.get("delimiter") and slash:
                    folders.add(f"{prefix}{head}/")
                else:
                    items.append(self.about(name, content, generation))
        return {"items": items, "prefixes": sorted(folders)}

    def upload(self, query: Mapping[str, str], headers: Mapping[str, str], body: bytes) -> Answer:
        """A step of an upload in several requests: the first request, or a later request."""
        if "upload_id" not in query:
            number = str(next(self.generations))
            self.uploads[number] = query["name"], bytearray()
            place = f"{self.address}/upload/storage/v1/b/{BUCKET}/o?uploadType=resumable&upload_id={number}"
            return 200, {"Location": place}, b""
        name, content = self.uploads[query["upload_id"]]
        if begins := re.match(r"bytes (\d+)-", headers["Content-Range"]):
            content[int(begins[1]) :] = body  # a part comes again if its answer was lost
        if headers["Content-Range"].endswith("/*"):
            return 308, {"Range": f"bytes=0-{len(content) - 1}"}, b""
        return 200, {}, json.dumps(self.put(name, content)).encode()


def make_handler(store: ObjectStore) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else each answer waits for 40 ms

        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fault = store.fault(self.command, self.path)
            refused = (int(fault), {}, b"") if fault else None
            status, headers, content = refused or store.answer(self.command, self.path, self.headers, body)
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
def object_store() -> Iterator[ObjectStore]:
    """A server with an empty bucket. This process's clients find it as well."""
    store = ObjectStore()
    try:
        with mock.patch.dict(os.environ, store.environment):
            yield store
    finally:
        store.server.shutdown()
        store.server.server_close()
