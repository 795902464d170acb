"""The HTTP client against a server that misbehaves on purpose: problems, broken event streams, nobody at home."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from services.cli.client import ApiClient, parse_events
from services.cli.output import CliError, Unreachable, UsageProblem


class Server(BaseHTTPRequestHandler):
    """Answers from the class attribute `answers`: path -> (status, body) or a function of the handler."""

    answers: dict  # set by the fixture, one class a test

    def do_GET(self):
        found = self.answers[self.path]
        if callable(found):
            found(self)
            return
        status, body = found
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/problem+json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(answers):
        handler = type("Handler", (Server,), {"answers": answers})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return ApiClient(f"http://127.0.0.1:{server.server_port}")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_refusal_is_told_in_the_servers_words_with_its_rows(serve):
    problem = {
        "title": "The request was refused",
        "detail": "2 rows cannot be used",
        "todo": "correct these rows",
        "errors": [
            {"row": 3, "field": "answer", "message": "does not parse"},
            {"field": "data", "message": "ids repeat"},
        ],
    }
    client = serve({"/v1/jobs": (422, problem)})
    with pytest.raises(UsageProblem) as caught:
        client.submit({})
    assert caught.value.code == 2
    assert caught.value.what.splitlines() == [
        "The request was refused: 2 rows cannot be used",
        "  - row 3, answer: does not parse",
        "  - data: ids repeat",
    ]
    assert caught.value.todo == "correct these rows"


@pytest.mark.parametrize(
    ("status", "kind", "code"), [(404, UsageProblem, 2), (503, Unreachable, 3), (500, CliError, 1)]
)
def test_exit_codes_mirror_the_status(serve, status, kind, code):
    client = serve({"/v1/jobs/x": (status, {"title": "Oh", "detail": "no"})})
    with pytest.raises(CliError) as caught:
        client.job("x")
    assert type(caught.value) is kind
    assert caught.value.code == code
    assert "Oh: no" in caught.value.what


def test_nobody_at_home_names_the_address_and_what_to_start():
    client = ApiClient("http://127.0.0.1:1")
    with pytest.raises(Unreachable) as caught:
        client.job("x")
    assert "http://127.0.0.1:1" in caught.value.what
    assert "rollwise up" in caught.value.todo
    assert caught.value.code == 3


def test_a_broken_event_stream_is_taken_up_after_the_last_event_seen(serve):
    asked: list[str | None] = []

    def events(handler):
        asked.append(handler.headers.get("Last-Event-ID"))
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()

        def chunk(text):
            data = text.encode()
            handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        if len(asked) == 1:
            chunk(': ping\n\nid: 1-0\nevent: step\ndata: {"step": 0}\n\nid: 2-0\nevent: step\ndata: {"st')
            handler.wfile.flush()
            handler.close_connection = True  # in the middle of an event, without the last chunk
            return
        chunk('id: 2-0\nevent: step\ndata: {"step": 1}\n\nid: 3-0\nevent: state\ndata: {"state": "succeeded"}\n\n')
        handler.wfile.write(b"0\r\n\r\n")

    client = serve({"/v1/jobs/x/events": events})
    found = list(client.events("x", patience=5.0))
    assert asked == [None, "1-0"]
    assert [(event.id, event.kind) for event in found] == [("1-0", "step"), ("2-0", "step"), ("3-0", "state")]
    assert [event.data.get("step") for event in found] == [0, 1, None]


def test_events_are_read_as_the_standard_says():
    lines = [": comment", "id: 7", "event: note", "data: one", "data:two", "", "data: [1]", "", "event: empty", ""]
    assert [(e.id, e.kind, e.data) for e in parse_events(iter(lines))] == [
        ("7", "note", "one\ntwo"),
        ("7", "message", [1]),
    ]
