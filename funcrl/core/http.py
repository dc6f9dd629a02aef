"""Questions to services that answer in JSON."""

import json
import time
import urllib.error
import urllib.request
from typing import Any

_LONGEST = 120.0  # seconds without a byte
_FIRST_WAIT = 0.5  # seconds before the second attempt, and twice as long before each other


def ask(function: str, address: str, content: bytes, key: str = "", attempts: int = 4) -> Any:
    """Return what a service answers to a POST; a busy or failing one is asked again.

    Args:
        function: the public function that asks, for errors.
        address: to post to.
        content: JSON.
        key: of the service, if it wants one.
        attempts: how often the request is sent, with longer waits between, before it is an error.
    """
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    request, wait = urllib.request.Request(address, content, headers), _FIRST_WAIT
    for attempt in range(1, attempts + 1):
        try:
            with urllib.request.urlopen(request, timeout=_LONGEST) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:200]
            failure = f"{error.code} {said}"
            may_pass = error.code in (408, 409, 429) or error.code >= 500
        except (OSError, ValueError) as error:
            failure, may_pass = f"{type(error).__name__}: {error}", isinstance(error, OSError)
        if not may_pass or attempt == attempts:
            break
        time.sleep(wait)
        wait *= 2
    raise ConnectionError(
        f"{function} expects an answer from {address}, got {failure} after {attempt} of "
        f"{attempts} attempts."
    )
