from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import torch

import holdfast
from holdfast._tools.serving import RunServer, answers, serve
from holdfast._tools.serving.server import is_for_this_machine
from tests.manager.managed import a_run, damage_data, file_of, state_of
from tests.tools.serving.visiting import visit

ODD = 'größe <script>alert("1")</script> & %2F #1'
"""A name that must be shown as it is, and open as it is."""


@pytest.fixture
def server(tmp_path) -> Iterator[RunServer]:
    """Of a run that the test may change."""
    a_run(tmp_path / "run", 100, 200)
    with serve(tmp_path / "run") as server:
        yield server


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[RunServer]:
    """Of a run that stays as it is."""
    folder = tmp_path_factory.mktemp("served")
    a_run(folder / "run", 100, 200)
    (folder / "secret").write_text("a secret outside of the run")
    with serve(folder / "run") as server:
        yield server


def test_it_listens_on_this_machine_alone_and_at_a_free_port(served) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", served.url)
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        assert connection.getpeername()[0] == "127.0.0.1"
    with serve(served.location) as other:
        assert other.port != served.port


def test_the_page_and_all_that_it_is_made_of_are_there(served) -> None:
    page = visit(served, "/")
    assert page.status == 200
    wanted = set(re.findall(r'(?:src|href)="(/assets/[^"]+)"', page.text))
    wanted |= {
        f"/assets/{name}" for path in wanted for name in re.findall(r'from "\./([^"]+)"', visit(served, path).text)
    }
    assert len(wanted) > 8

    assert {path: visit(served, path).status for path in wanted} == dict.fromkeys(wanted, 200)


def test_the_run_is_reported_as_json_and_not_again_if_nothing_changed(server) -> None:
    first = visit(server, "/api/run.json")
    assert [one["step"] for one in first.json["checkpoints"]] == [100, 200]

    again = visit(server, "/api/run.json", If_None_Match=first.headers["etag"])

    assert (again.status, again.body) == (304, b"")
    a_run(server.location, 300)
    server._answers.watch.forget_look()
    changed = visit(server, "/api/run.json", If_None_Match=first.headers["etag"])
    assert changed.status == 200
    assert [one["step"] for one in changed.json["checkpoints"]] == [100, 200, 300]


@pytest.mark.parametrize("target", ["/", "/api/run.json", "/assets/main.js", "/c/step-00000100", "/no", "/c/no"])
def test_every_answer_keeps_other_sites_out(served, target) -> None:
    headers = visit(served, target).headers

    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert ("'unsafe-inline'" in policy) == (target == "/c/step-00000100")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_but_reading_is_allowed(served, method) -> None:
    answer = visit(served, "/api/run.json", method=method)

    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


def test_head_tells_what_get_would_send(served) -> None:
    whole, head = visit(served, "/api/run.json"), visit(served, "/api/run.json", method="HEAD")

    assert head.status == 200
    assert head.headers["content-length"] == str(len(whole.body))
    with socket.create_connection(("127.0.0.1", served.port)) as connection, connection.makefile("rb") as stream:
        connection.sendall(b"HEAD /api/run.json HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert stream.read().endswith(b"\r\n\r\n")  # and nothing behind the headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "", "[", "a b"]
)
def test_a_site_whose_name_points_here_gets_nothing(served, host) -> None:
    answer = visit(served, "/api/run.json", Host=host)

    assert answer.status == 421
    assert b"step-" not in answer.body


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:9000"])
def test_this_machine_is_answered_also_through_a_tunnel(served, host) -> None:
    assert visit(served, "/api/run.json", Host=host).status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize("target", ["/c/step-00000100", "/api/run.json", "/api/report.json?of=step-00000100", "/"])
def test_pages_of_other_sites_can_ask_for_nothing(served, target, site) -> None:
    picture = visit(served, target, Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors", Sec_Fetch_Dest="image")
    link = visit(served, target, Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="document")

    assert picture.status == 403
    assert link.status == (200 if target == "/" else 403)  # which somebody has clicked


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_own_pages_and_people_are_answered(served, site) -> None:
    assert visit(served, "/c/step-00000100", Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate").status == 200


def test_many_can_ask_at_once(served) -> None:
    assert served._server.request_queue_size >= 100  # those who find no room try again after a second


def test_a_name_that_was_chosen_to_listen_at_is_answered() -> None:
    assert is_for_this_machine("training-box:8000", "training-box")
    assert is_for_this_machine(f"{socket.gethostname()}:8000", "0.0.0.0")
    assert not is_for_this_machine("evil.example", "0.0.0.0")
    assert not is_for_this_machine(None, "0.0.0.0")


@pytest.mark.parametrize(
    "target",
    [
        "/../secret",
        "/assets/../../server.py",
        "/assets/run.html",
        "/assets/%2e%2e/server.py",
        "/c/../secret",
        "/c/..%2fsecret",
        "/c/%2e%2e%2fsecret",
        "/c//etc/passwd",
        "/c/%2Fetc%2Fpasswd",
        "/c/step-00000100%2F..%2F..%2Fsecret",
        "/c/step-00000100/../step-00000200",
        "/c/step-00000100%00",
        "/c/",
        "/c/holdfast-run.json",
        "/c/step-00000100?compare=../secret",
        "/c/step-00000100?compare=%2Fetc%2Fpasswd",
        "//etc/passwd",
        "file:///etc/passwd",
    ],
)
def test_no_url_leads_to_a_file(served, target) -> None:
    answer = visit(served, target)

    assert answer.status == 404
    assert b"secret outside" not in answer.body
    assert b"root:" not in answer.body


def test_a_report_is_made_and_kept(server, monkeypatch) -> None:
    first = visit(server, "/c/step-00000100")
    assert first.status == 200
    assert "model.weight" in first.text
    assert '<a class="brand" href="/">' in first.text
    monkeypatch.setattr("holdfast._tools.reporting.report.make_report", None)

    assert visit(server, "/c/step-00000100").body == first.body


def test_two_steps_are_compared(served) -> None:
    alone, both = visit(served, "/c/step-00000200"), visit(served, "/c/step-00000200?compare=step-00000100")

    assert both.status == 200
    assert "step-00000100" in both.text
    assert "step-00000100" not in alone.text


def test_names_may_be_anything_and_run_nothing(server) -> None:
    path = Path(server.location) / ODD.replace("/", "|")
    holdfast.save({"<img src=x onerror=alert(1)>": torch.ones(2)}, path)
    server._answers.watch.forget_look()
    odd = next(one for one in visit(server, "/api/run.json").json["checkpoints"] if "größe" in one["name"])

    report = visit(server, f"/c/{odd['quoted']}")
    missing = visit(server, f"/c/{quote(ODD, safe='')}x")

    assert odd["name"] == path.name
    assert report.status == 200
    assert missing.status == 404
    for page in (report, missing):
        assert "<script>alert" not in page.text
        assert "<img src=x" not in page.text


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_name_that_is_no_text_can_be_opened(server) -> None:
    os.mkdir(os.fsencode(server.location) + b"/bad-\xff-name")
    holdfast.save({"w": torch.ones(2)}, os.fsdecode(os.fsencode(server.location) + b"/bad-\xff-name"))
    server._answers.watch.forget_look()
    names = [one["quoted"] for one in visit(server, "/api/run.json").json["checkpoints"]]

    assert "bad-%FF-name" in names
    assert visit(server, "/c/bad-%FF-name").status == 200
    assert visit(server, "/c/step-00000100?compare=bad-%FF-name").status == 200


def test_a_damaged_checkpoint_has_a_page_that_says_so(server) -> None:
    os.truncate(file_of(Path(server.location), 100, "holdfast.json"), 300)

    answer = visit(server, "/c/step-00000100")

    assert answer.status == 422
    assert "cannot be shown" in answer.text


def test_damage_in_the_data_is_reported_and_not_hidden(server) -> None:
    damage_data(Path(server.location), 100)

    answer = visit(server, "/c/step-00000100?compare=step-00000200")

    assert answer.status in (200, 422)
    assert "damaged" in answer.text


def test_a_checkpoint_that_retention_has_deleted_is_gone(server) -> None:
    assert visit(server, "/c/step-00000100").status == 200
    with holdfast.CheckpointManager(
        server.location, keep=holdfast.keep.last(1), background=False, save_at_end=False
    ) as manager:
        manager.save(300, state_of(300))
        manager.wait()
    server._answers.watch.forget_look()

    answer = visit(server, "/c/step-00000100")

    assert answer.status == 410
    assert "step-00000100" in answer.text
    assert [one["step"] for one in visit(server, "/api/run.json").json["checkpoints"]] == [300]


def test_a_save_that_is_not_committed_cannot_be_opened_yet(server) -> None:
    folder = Path(server.location) / "step-00000300"
    folder.mkdir()
    (folder / "data-00112233aabbccdd-0-0.safetensors").write_bytes(b"x")
    server._answers.watch.forget_look()

    assert visit(server, "/c/step-00000300").status == 409


def test_a_report_that_takes_long_is_waited_for_on_a_page(server, monkeypatch) -> None:
    told, go_on = threading.Event(), threading.Event()

    def slow_report(place, *, compare, allow_pickle, on_progress):
        on_progress(40, 100)
        told.set()
        assert go_on.wait(60)
        return holdfast.serving_stand_in

    monkeypatch.setattr(holdfast, "serving_stand_in", type("Page", (), {"html": "<p>the report</p>"}), raising=False)
    monkeypatch.setattr("holdfast._tools.reporting.report.make_report", slow_report)
    monkeypatch.setattr(answers, "_PATIENCE", 0.0)
    waiting = visit(server, "/c/step-00000100")
    assert waiting.status == 202
    assert told.wait(60)
    assert visit(server, "/api/report.json?of=step-00000100").json == {"is_working": True, "done": 40, "total": 100}
    go_on.set()
    monkeypatch.setattr(answers, "_PATIENCE", 60.0)

    assert visit(server, "/c/step-00000100").text == "<p>the report</p>"
    assert visit(server, "/api/report.json?of=step-00000100").json["is_working"] is False


def test_names_are_not_searched_for_places_to_fill() -> None:
    assert b"<h1>Reading {{of}} and {{compare}}</h1>" in answers._waiting_page(["{{of}}", "{{compare}}"]).content


def test_a_report_that_fails_after_long_is_reported_once_and_then_tried_again(server, monkeypatch) -> None:
    tried = []

    def failing_report(place, **options):
        tried.append(place)
        raise OSError("the disk is gone")

    monkeypatch.setattr("holdfast._tools.reporting.report.make_report", failing_report)
    monkeypatch.setattr(answers, "_PATIENCE", 0.0)
    statuses = [visit(server, "/c/step-00000100").status]
    while visit(server, "/api/report.json?of=step-00000100").json["is_working"]:
        pass
    monkeypatch.setattr(answers, "_PATIENCE", 60.0)
    if statuses == [202]:  # or else it failed before that was asked
        statuses.append(visit(server, "/c/step-00000100").status)
    assert (statuses[-1], len(tried)) == (500, 1)

    assert "the disk is gone" in visit(server, "/c/step-00000100").text
    assert len(tried) == 2


@pytest.mark.timeout(60)
def test_closing_hangs_up_on_those_who_never_asked(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        "holdfast._tools.serving.server._Handler.timeout", None
    )  # or else they would give up by themselves
    before = set(threading.enumerate())
    server = serve(tmp_path)
    with socket.create_connection(("127.0.0.1", server.port)) as idle:
        idle.settimeout(60)
        visit(server, "/")
        server.close()
        assert idle.recv(1) == b""
    assert set(threading.enumerate()) <= before
    with pytest.raises(OSError, match="refused"):
        visit(server, "/")


def test_a_port_that_is_taken_is_an_error(served) -> None:
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{served.port}: .*in use; port 0 takes"):
        serve(served.location, port=served.port)


def test_words_that_are_no_request_do_no_harm(served) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.settimeout(60)
        connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b"400" in connection.recv(1000)

    assert visit(served, "/").status == 200


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_the_command_prints_its_address_and_ends_with_ctrl_c(tmp_path, options) -> None:
    a_run(tmp_path, 100)
    with subprocess.Popen(
        [sys.executable, "-m", "holdfast", "serve", str(tmp_path), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        line = process.stdout.readline()
        url = json.loads(line)["url"] if options else line.split()[-1]
        with urllib.request.urlopen(url + "api/run.json") as answer:
            assert b"step-00000100" in answer.read()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)

    assert process.returncode == 130
    assert "Traceback" not in said
