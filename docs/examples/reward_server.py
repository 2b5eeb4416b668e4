"""A server that scores completions: python docs/examples/reward_server.py [PORT]"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def score(completion: str, answer: str) -> float:
    digits = sum(character in "0123456789" for character in completion)
    return digits / max(len(completion), 1) + float(completion == answer)


class Scores(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        batch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rewards = [score(*pair) for pair in zip(batch["completions"], batch["answers"], strict=True)]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"rewards": rewards}).encode())

    def log_request(self, *_: object) -> None:
        """Print nothing for each request."""


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 8000), Scores).serve_forever()
