"""An environment behind HTTP, a game with a number: python docs/examples/environment_server.py [PORT]"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def guess(messages, seed, **rest):
    """The number follows from the seed, so that nothing is kept between two requests."""
    number, said = seed % 20 + 1, messages[-1]["content"]
    if messages[-1]["role"] == "user":
        return {"observation": " It is between 1 and 20."}  # the conversation begins, or takes leave
    tried = int(said) if said.isdecimal() else 0
    hint = "higher" if tried < number else "lower"
    return {"observation": hint, "reward": float(tried == number), "done": tried == number}


def server(answer, port):
    """A server that answers a request's JSON object with what `answer` returns for its fields."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = json.dumps(answer(**fields)).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_request(self, *_: object) -> None:
            """Print nothing for each request."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def serve(answer, port=8000):
    server(answer, port).serve_forever()


if __name__ == "__main__":
    serve(guess, int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
