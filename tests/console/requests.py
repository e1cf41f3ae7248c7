"""Requests to a console, as a browser sends them."""

import http.client
import json
from typing import Any


class Browser:
    """Sends requests as a page of the console does, unless a test changes them."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self.fields = {
            "Origin": url,
            "Sec-Fetch-Site": "same-origin",
            "Content-Type": "application/json",
        }

    def ask(
        self, method: str, path: str, body: Any = None, **changed: str | None
    ) -> tuple[int, dict[str, str], Any]:
        """Return the status, the fields and the document of an answer."""
        fields = dict(self.fields)
        for name, value in changed.items():
            fields.pop(name.replace("_", "-"), None)
            if value is not None:
                fields[name.replace("_", "-")] = value
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        data = json.dumps(body).encode() if method == "POST" else None
        connection.request(method, path, data, fields)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        found = {name.lower(): value for name, value in answer.getheaders()}
        document = text
        if found.get("content-type") == "application/json":
            document = json.loads(text)
        return answer.status, found, document

    def sign_in(self, link: str) -> tuple[int, dict[str, str], Any]:
        answer = self.ask("POST", "/session", {"link": link.partition("#link=")[2]})
        if answer[0] == 200:
            self.fields["Cookie"] = answer[1]["set-cookie"].partition(";")[0]
            self.fields["X-Wirecall-Tab"] = answer[2]["tab"]
        return answer
