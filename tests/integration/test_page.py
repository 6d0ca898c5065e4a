"""The page of `kvstore serve`, in a real browser, over a real daemon with records. Debian's chromium (apt-get install
chromium) and Playwright; without them it is skipped, or fails with PAGE_TESTS=required. Pictures are kept in out/page/.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.control.app import build_controller_app
from kvstore.control.controller import Controller
from kvstore.control.page import routes
from kvstore.control.server import HttpServer
from kvstore.control.settings import ControlSettings
from kvstore.metrics import Metrics
from kvstore.telemetry import History

_ROOT = Path(__file__).parents[2]
_PICTURES = _ROOT / "out" / "page"
_TOKEN = "admin-of-the-page-tests"
_SIZES = {"desktop": (1280, 900), "tablet": (800, 1000), "phone": (390, 844), "small": (320, 600)}
_RECORDS = 24  # of 1 MiB each, in a memory of 16 MiB: some have to lie below


def _missing(what: str) -> None:
    if os.environ.get("PAGE_TESTS") == "required":
        pytest.fail(what)
    pytest.skip(what)


class Daemon:
    """`kvstore serve` in a process of its own, with an admin token and two namespaces."""

    def __init__(self, folder: Path, *flags: str, name: str = "gpu-07") -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        path = os.pathsep.join([str(_ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
        (folder / "team.token").write_text("team-a")
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "kvstore_cli", "serve", "--json", "--listen", "127.0.0.1:0", "--http",
                "127.0.0.1:0", "--name", name, "--memory", "24MiB", "--disk", f"file://{folder}/disk?bytes=64MiB",
                "--remote", f"file://{folder}/remote", *flags, "--namespace", "team-a", "--memory", "8MiB",
                "--token-file", str(folder / "team.token"),
            ],
            stdout=subprocess.PIPE, text=True,
            env={**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "KVSTORE_SERVE_HTTP_ADMIN_TOKEN": _TOKEN},
        )  # fmt: skip
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.url, self.address = said["http"], said["address"]

    def data(self, token: str = _TOKEN) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/page/data", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def work(self, first: int, count: int) -> None:
        """Put records, read them, and ask for as many that are not there."""
        with kvstore.open_store(f"node://{self.address}") as store:
            names = [f"record {number}" for number in range(first, first + count)]
            below = self.data()["tiers"][1]["records"]
            for number, name in enumerate(names, 1):
                store.put_many({name: name.encode().ljust(64) * (1 << 14)})
                end = time.monotonic() + 30  # what comes faster than the disk takes it lives in memory only
                while self.data()["tiers"][1]["records"] < below + number:
                    assert time.monotonic() < end, "the disk does not get what is put"
            for name in names:
                assert store.get_many([name])[0] is not None
                assert store.get_many([f"no {name}"]) == [None]

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    found = Daemon(tmp_path_factory.mktemp("daemon"))
    try:
        found.work(0, _RECORDS)
        yield found
    finally:
        found.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if executable is None:
        _missing("no chromium here: apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("playwright is not installed: pip install playwright")
    with sync_playwright() as playwright:
        # As root there is no sandbox; in a container /dev/shm may be small.
        chromium = playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


class View:
    """A page in a context of its own, and what it said and asked for meanwhile."""

    def __init__(self, browser: Any, url: str, size: str, scheme: str) -> None:
        width, height = _SIZES[size]
        self.width = width
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce",
            device_scale_factor=2 if size in ("phone", "small") else 1,
        )  # fmt: skip
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.url = url

    def open(self, token: str = _TOKEN) -> Any:
        self.page.goto(f"{self.url}/")
        if token:
            self.page.fill("#token", token)
            self.page.click("#login button")
            self.page.wait_for_selector("#main:not([hidden])")
            self.until("document.getElementById('state').textContent !== 'connecting'")
        return self.page

    def until(self, condition: str, seconds: float = 30.0) -> None:
        """Wait for it. (Playwright's own way is `eval` within the page, which the page's policy forbids.)"""
        end = time.monotonic() + seconds
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"not so after {seconds:g} s: {condition}; the page said {self.said}"
            self.page.wait_for_timeout(50)

    def text(self, selector: str) -> str:
        found: str = self.page.inner_text(selector)
        return found.replace("\u00a0", " ")

    def wide(self) -> float:
        found: float = self.page.evaluate("document.documentElement.scrollWidth")
        return found


@contextlib.contextmanager
def look(
    browser: Any, daemon: Daemon, size: str = "desktop", scheme: str = "light", url: str = ""
) -> Iterator[View]:  # fmt: skip
    view = View(browser, url or daemon.url, size, scheme)
    try:
        yield view
    finally:
        view.context.close()


def test_the_data_is_the_admins(daemon: Daemon) -> None:
    for token in ("wrong", "team-a"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            daemon.data(token)
        assert caught.value.code == 401
        caught.value.close()
    with urllib.request.urlopen(f"{daemon.url}/", timeout=30) as answer:
        policy = answer.headers["Content-Security-Policy"]
        page = answer.read().decode()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "gpu-07" not in page
    assert "http://" not in re.sub(r"http://www\.w3\.org/\d+/svg", "", page)


def test_it_asks_for_the_token_and_keeps_it_in_its_tab(browser: Any, daemon: Daemon) -> None:
    with look(browser, daemon) as view:
        page = view.open(token="")
        page.wait_for_selector("#login:not([hidden])")
        assert not page.is_visible("#main")
        for token, said in (("señor", "A token is letters, digits"), ("wrong", "That is not the admin token.")):
            page.fill("#token", token)
            page.click("#login button")
            view.until(f"document.getElementById('login-said').textContent.startsWith('{said}')")
        view.open()
        page.reload()
        page.wait_for_selector("#main:not([hidden])")
        assert page.evaluate("localStorage.length + document.cookie.length") == 0
        errors = [line for line in view.said if "401" not in line]
        assert errors == []


def test_it_shows_what_the_daemon_has(browser: Any, daemon: Daemon) -> None:
    with look(browser, daemon) as view:
        page = view.open()
        data = daemon.data()
        memory, disk, remote = data["tiers"]
        assert memory["used"] > 8 << 20
        assert memory["evicted"] > 0
        assert disk["records"] >= _RECORDS
        assert view.text("#state") == "ready"
        assert view.text("#node-name") == f"gpu-07 · {daemon.address}"
        for number, tier in enumerate((memory, disk)):
            part = tier["used"] / tier["capacity"]
            shown = view.text(f"#tier-{number} .pct")
            assert abs(float(shown.removesuffix(" %")) / 100 - part) < 0.006
            height = page.evaluate(
                f"(() => {{ const v = document.querySelector('#tier-{number} .vessel');"
                "return v.querySelector('.fill').getBoundingClientRect().height / v.clientHeight; })()"
            )
            assert abs(height - part) < 0.03
        assert remote["capacity"] == 0
        assert page.eval_on_selector("#tier-2 .vessel", "node => node.classList.contains('open')")
        asked, hits = sum(filter(None, data["hour"]["asked"])), sum(filter(None, data["hour"]["hits"]))
        assert hits >= _RECORDS
        assert asked >= 2 * _RECORDS
        assert abs(float(view.text("#kpi-hit .big").removesuffix(" %")) / 100 - hits / asked) < 0.006
        assert "records found" in view.text("#kpi-hit")
        served = view.text("#served")
        assert f"memory {memory['hits']}" in served
        assert f"disk {disk['hits']}" in served
        assert disk["hits"] > 0
        operations = view.text("#ops")
        assert "disk put" in operations
        assert "remote put" in operations
        assert "gpu-07 (this one)" in view.text("#nodes")
        assert "team-a" in view.text("#spaces")
        assert page.locator("#rate svg path.l").count() == 1
        assert "Hit rate by minute" in (page.get_attribute("#rate svg", "aria-label") or "")
        assert {url.split("/")[2] for url in view.asked} == {daemon.url.split("/")[2]}


def test_the_page_of_a_controller_shows_all_nodes(browser: Any, tmp_path: Path) -> None:
    metrics = Metrics()
    controller = Controller(metrics=metrics)
    settings = ControlSettings(admin_token=_TOKEN.encode(), tokens={})
    page = routes(None, metrics, History(metrics), service=controller)
    app = build_controller_app(controller, settings=settings, metrics=metrics, page=page)
    with contextlib.ExitStack() as undo:
        server = undo.enter_context(HttpServer(app, settings))
        daemons = []
        for name in ("gpu-08", "gpu-09"):
            (tmp_path / name).mkdir()
            daemons.append(Daemon(tmp_path / name, "--controller", server.url, name=name))
            undo.callback(daemons[-1].end)
        daemons[0].work(0, 2)
        with look(browser, daemons[0], url=server.url) as view:
            view.open()
            view.until("document.querySelectorAll('#nodes tbody tr').length === 2")
            view.until("/gpu-08\\s*100/.test(document.getElementById('placement').textContent)")
            assert "gpu-09" in view.text("#nodes")
            assert daemons[1].address in view.text("#nodes")
            assert view.text("#node-name") == "controller"
            assert not view.page.is_visible("#kpi-hit")
            view.until("document.querySelector('#tier-0 .pct').textContent[0] > '0'")  # nodes report usage now and then


def test_it_is_live(browser: Any, daemon: Daemon) -> None:
    with look(browser, daemon) as view:
        page = view.open()
        before = daemon.data()["tiers"][1]["records"]
        page.evaluate("document.querySelector('#tier-1').dataset.mark = 'the same element'")
        daemon.work(1000, 3)
        view.until(f"document.querySelector('#tier-1 .name').textContent.includes('{before + 3} records')")
        assert page.get_attribute("#tier-1", "data-mark") == "the same element"
        view.until(r"/read [0-9.]+\s[KM]iB\/s/.test(document.querySelector('#flow-0 .up').textContent)")
        assert page.eval_on_selector("#flow-0 .up", "node => node.classList.contains('on')")


def test_it_says_when_the_daemon_is_gone(browser: Any, tmp_path: Path) -> None:
    own = Daemon(tmp_path)
    try:
        with look(browser, own) as view:
            page = view.open()
            own.end(signal.SIGKILL)
            view.until("document.body.classList.contains('stale')")
            assert view.text("#state") == "unreachable"
            assert view.text("#notice").startswith("No answer")
            assert page.is_visible("#main")  # what was known last
    finally:
        own.end(signal.SIGKILL)


_CONTRAST = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const [r, g, b, a = 1] = rgb(getComputedStyle(at).backgroundColor);
      if (a > 0.99) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll("h1, h2, p, td, th, b, a, button, .pill, .chip, .muted, .tip")) {
    const text = node.textContent.trim();
    if (!text || !node.getClientRects().length) continue;
    const pair = [light(rgb(getComputedStyle(node).color)), light(behind(node))].sort((a, b) => b - a);
    found.push([(pair[0] + 0.05) / (pair[1] + 0.05), `${node.tagName}.${node.className} ${text.slice(0, 30)}`]);
  }
  return found;
}"""
"""Contrast of every text with what lies behind it, as WCAG 2 computes it."""


_CUT = """() => [...document.querySelectorAll(".card, .card *")]
  .filter((node) => node.getClientRects().length && !node.closest("svg") && node.clientWidth)
  .filter((node) => node.scrollWidth > node.clientWidth + 1)
  .map((node) => `${node.tagName}#${node.id}.${node.className} ${node.textContent.slice(0, 40)}`)"""
"""What does not fit into its box, whether it is cut off or sticks out."""


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        ("desktop", "light"), ("desktop", "dark"), ("tablet", "dark"), ("phone", "light"), ("phone", "dark"),
        ("small", "light"),
    ],
)  # fmt: skip
def test_it_is_readable(browser: Any, daemon: Daemon, size: str, scheme: str) -> None:
    with look(browser, daemon, size, scheme) as view:
        page = view.open()
        view.until("document.querySelectorAll('#ops tbody tr').length > 2")
        _PICTURES.mkdir(parents=True, exist_ok=True)
        picture = _PICTURES / f"{size}-{scheme}.png"
        picture.write_bytes(page.screenshot(full_page=True))  # given a path, it would leave a thread behind
        assert picture.stat().st_size > 20_000
        assert view.wide() <= view.width, "the page is wider than its window"
        assert page.evaluate(_CUT) == []
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        dark = sum(map(int, re.findall(r"\d+", background)[:3])) < 200
        assert dark == (scheme == "dark")
        measured = page.evaluate(_CONTRAST)
        assert len(measured) > 40
        assert [text for ratio, text in measured if ratio < 4.5] == []  # WCAG AA
        if size != "desktop":
            assert page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 14
            boxes = [page.locator(f"#tier-{number}").bounding_box() for number in range(3)]
            assert boxes[0]["y"] < boxes[1]["y"] < boxes[2]["y"], "tiers stand below each other"
        assert [line for line in view.said if "401" not in line] == []


def test_colours_as_chosen_outlast_a_reload(browser: Any, daemon: Daemon) -> None:
    with look(browser, daemon, scheme="light") as view:
        page = view.open()
        shown = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(shown)
        page.click("#theme")
        assert (view.text("#theme"), page.evaluate(shown)) == ("light", light)
        page.click("#theme")
        assert view.text("#theme") == "dark"
        assert page.evaluate(shown) != light
        page.reload()
        page.wait_for_selector("#main:not([hidden])")
        assert view.text("#theme") == "dark"
        assert page.evaluate(shown) != light


def test_numbers_as_people_read_them(browser: Any, daemon: Daemon) -> None:
    with look(browser, daemon) as view:
        page = view.open()
        expected = {
            "bytes(0)": "0 B", "bytes(999)": "999 B", "bytes(1536)": "1.5 KiB", "bytes(2 ** 30)": "1.0 GiB",
            "bytes(123 * 2 ** 20)": "123 MiB", "rate(null)": "–", "rate(0)": "idle", "rate(2048)": "2.0 KiB/s",
            "count(9999)": "9999", "count(12345)": "12.3 k", "count(2500000)": "2.5 M", "count(-1)": "?",
            "seconds(0.00025)": "250 µs", "seconds(0.0042)": "4.2 ms", "seconds(0.195)": "195 ms",
            "seconds(3.14)": "3.1 s", "seconds(125)": "2 min", "seconds(9000)": "2.5 h", "seconds(null)": "–",
            "percent(0.5)": "50 %", "percent(0)": "0 %", "percent(0.9999)": "100 %", "percent(0.042)": "4.2 %",
            "plural(1, 'record')": "1 record", "plural(2, 'record')": "2 records",
        }  # fmt: skip
        calls = ", ".join(f"d.{call}" for call in expected)
        found = page.evaluate(f"async () => {{ const d = await import('./page/draw.js'); return [{calls}]; }}")
        assert dict(zip(expected, (text.replace("\u00a0", " ") for text in found), strict=True)) == expected


def test_text_of_the_daemon_is_never_markup(browser: Any, daemon: Daemon) -> None:
    data = daemon.data()
    evil = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>"
    data["node"]["name"] = data["nodes"][0]["name"] = data["tiers"][0]["url"] = evil
    data["namespaces"][0]["name"] = evil
    data["errors"] = [{"backend": evil, "operation": evil, "error": evil, "count": 1}]
    data["breakers"] = [{"backend": evil, "side": "read", "state": "open", "refused": 1}]
    data["node"]["problems"] = [evil]
    with look(browser, daemon) as view:
        view.page.route("**/page/data", lambda route: route.fulfill(json=data))
        view.page.goto(f"{daemon.url}/")
        view.page.wait_for_selector("#main:not([hidden])")
        assert "<b>bold</b>" in view.text("#errors")
        assert "<b>bold</b>" in view.text("#notice")
        assert view.page.locator("img").count() == 0
        assert view.page.title() != "owned"
        assert view.wide() <= view.width
