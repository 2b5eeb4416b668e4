"""Rewards over HTTP: a batch is posted as JSON, and the answer is a list of numbers. Only the standard library."""

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

PAUSES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each further try."""
LONGEST_ANSWER = 2**26
QUOTED = 200


def post(url: str, /, **arguments: Any) -> list[Any]:
    """The rewards that the server gives for a batch, where null says that it does not apply to a completion.

    The request's body is a JSON object with a batched function's arguments, except for `examples`; the answer is
    a list, or an object with the list `rewards`. Connections that fail, and the statuses 429 and 5xx, are tried again;
    any other status, and an answer of another form, raise. The time limit is the caller's, who ends the process.
    """
    body = {name: value for name, value in arguments.items() if name not in ("examples", "answer")}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body, default=str).encode(), headers)
    for pause in (*PAUSES, None):
        try:
            with urllib.request.urlopen(request) as response:
                return rewards(response.read(LONGEST_ANSWER))
        except urllib.error.HTTPError as error:
            said = error.read(QUOTED).decode(errors="replace")
            problem = f"HTTP {error.code} {error.reason}: {said}"
            if error.code != 429 and error.code < 500:
                raise ValueError(problem) from None
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
            problem = f"{type(error).__name__}: {error}"
        if pause is not None:
            time.sleep(pause)
    raise ConnectionError(f"{len(PAUSES) + 1} tries: {problem}")


def rewards(answer: bytes) -> list[Any]:
    """The list in a server's answer; ValueError where there is none."""
    try:
        found = json.loads(answer)
    except ValueError:
        found = None
    found = found.get("rewards") if isinstance(found, dict) else found
    if not isinstance(found, list):
        text = answer[:QUOTED].decode(errors="replace")
        raise ValueError(f"expected a JSON list, or an object with the list rewards; the answer was {text!r}")
    return found
