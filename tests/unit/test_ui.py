"""serve_app.router.ui: the page is served closed in, and lets nobody in who was outside before."""

from __future__ import annotations

import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from asgi_call import Call
from front import by, key, settings
from scripted_pool import Pool

import serve_app
from serve_app.config import Config, ConfigError, parse_config
from serve_app.router.app import RouterApp

PAGE = Path(serve_app.__file__).parent / "ui"
FILES = sorted(path for path in PAGE.iterdir() if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
ON: dict[str, Any] = {"ui": {"enabled": True}}
KEYED: dict[str, Any] = {**ON, "security": {"keys": [key("one")]}}
LOCAL = "127.0.0.1:8000"


async def asked(path: str, config: Config, *, front_door: bool = True, **request: Any) -> Call:
    app = RouterApp(config, {"hot": "Hot"}, Pool(), "test", front_door=front_door)
    call = await Call(app, path=path, **{"method": "GET", **request}).done()
    await app._relay.close()
    return call


def paths() -> list[str]:
    return ["/ui" if file.name == "index.html" else f"/ui/{file.name}" for file in FILES]


TYPES = {"": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@pytest.mark.parametrize("path", paths())
async def test_every_file_has_its_type_and_is_closed_in(path: str) -> None:
    call = await asked(path, settings(**ON))
    assert call.status == 200
    assert call.headers["content-type"].split(";")[0] == TYPES[Path(path).suffix]
    assert call.headers["x-content-type-options"] == "nosniff"
    assert call.headers["x-frame-options"] == "DENY"
    assert call.headers["cache-control"] == "no-cache"
    policy = dict(part.strip().split(" ", 1) for part in call.headers["content-security-policy"].split(";"))
    assert policy.pop("default-src") == "'none'"
    assert (policy.pop("frame-ancestors"), policy.pop("base-uri"), policy.pop("form-action")) == ("'none'",) * 3
    assert (policy.pop("require-trusted-types-for"), policy.pop("trusted-types")) == ("'script'", "'none'")
    assert policy == dict.fromkeys(("script-src", "style-src", "img-src", "connect-src"), "'self'")


async def test_file_that_the_browser_has_is_not_sent_again() -> None:
    first = await asked("/ui/app.js", settings(**ON))
    again = await asked("/ui/app.js", settings(**ON), headers={"if-none-match": first.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    other = await asked("/ui/app.js", settings(**ON), headers={"if-none-match": '"0000000000000000"'})
    assert (other.status, other.body) == (200, first.body)


async def test_slash_behind_it_leads_to_the_page() -> None:
    call = await asked("/ui/", settings(**ON))
    assert (call.status, call.headers["location"]) == (307, "../ui")


@pytest.mark.parametrize("path", ["/ui", "/ui/", "/ui/app.js"])
async def test_page_is_off_unless_switched_on_and_never_at_serves_own_ingress(path: str) -> None:
    assert (await asked(path, settings())).status == 404
    assert (await asked(path, settings(**ON), front_door=False)).status == 404


@pytest.mark.parametrize("path", ["/", "/ui/index.html", "/ui/../app.py", "/ui/%2e%2e/app.py", "/ui//app.js", "/UI"])
async def test_nothing_else_is_there(path: str) -> None:
    assert (await asked(path, settings(**ON))).status == 404


async def test_page_needs_no_key_and_opens_nothing_else() -> None:
    for path in paths():
        assert (await asked(path, settings(**KEYED))).status == 200
    for path in ("/", "/ui/nothing", "/ui/index.html", "/ui/../v1/models", "/v1/models", "/v1/router/events"):
        assert (await asked(path, settings(**KEYED))).status == 401, path
    assert (await asked("/ui", settings(**KEYED), method="POST")).status == 405
    assert (await asked("/v1/models", settings(**KEYED), headers=by("one"))).status == 200


# Who may call from a page, where there are no keys


@pytest.mark.parametrize("host", [LOCAL, "localhost:8000", "[::1]:8000", "LOCALHOST:8000"])
async def test_our_own_page_may_call_the_api(host: str) -> None:
    sent = {"host": host, "origin": f"http://{host.lower()}"}
    assert (await asked("/v1/models", settings(**ON), headers=sent)).status == 200
    off = await asked("/v1/models", settings(), headers=sent)
    assert (off.status, off.error["code"]) == (403, "wrong_origin")


async def test_own_page_behind_a_proxy_may_call_by_the_proxys_name() -> None:
    config = settings(**ON, security={"hosts": ["llm.example.org"]})
    sent = {"host": "llm.example.org", "origin": "https://llm.example.org"}
    assert (await asked("/v1/models", config, headers=sent)).status == 200


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        (LOCAL, "http://127.0.0.1:3000"),
        (LOCAL, "http://localhost:8000"),
        (LOCAL, "https://evil.example"),
        (LOCAL, "null"),
        (LOCAL, ""),
        (LOCAL, f"http://{LOCAL}.evil.example"),
        # Names that were bound anew to this machine's address.
        ("evil.example:8000", "http://evil.example:8000"),
        ("evil.local:8000", "http://evil.local:8000"),
        ("intranet:8000", "http://intranet:8000"),
        ("", "http://"),
    ],
)
async def test_other_pages_may_not_call_although_ours_may(host: str, origin: str) -> None:
    call = await asked("/v1/models", settings(**ON), headers={"host": host, "origin": origin})
    assert (call.status, call.error["code"]) == (403, "wrong_origin")


# Where it may be switched on


def test_page_that_others_reach_needs_keys() -> None:
    model = {"id": "hot", "tier": "resident", "source": "org/hot", "context": 4096}
    args: dict[str, Any] = {"models": [model], **ON, "router": {"host": "0.0.0.0"}}
    with pytest.raises(ConfigError, match=r"^ui\.enabled: others reach router\.host 0\.0\.0\.0"):
        parse_config(args)
    assert parse_config({**args, "security": {"keys": [key("one")]}}).ui.enabled
    assert parse_config({**args, "security": {"keys_file": "keys.yaml"}}).ui.enabled
    assert parse_config({**args, "router": {"host": "::1"}}).ui.enabled
    assert not parse_config({**args, "ui": {}}).ui.enabled


# What the files are


def test_page_is_small() -> None:
    assert sum(file.stat().st_size for file in FILES) < 80_000


def test_all_of_it_is_in_the_package() -> None:
    project = tomllib.loads((PAGE.parents[1] / "pyproject.toml").read_text())
    packed = {
        path for glob in project["tool"]["setuptools"]["package-data"]["serve_app"] for path in PAGE.parent.glob(glob)
    }
    assert set(FILES) <= packed


class _Markup(HTMLParser):
    """What the page's markup refers to, and what its policy would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.words: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href") and not (value or "").startswith("#"):
                self.links.append(value or "")
            if re.fullmatch(r"data-t(-aria-label|-placeholder)?", name):
                self.words.append(value or "")
            if name == "style" or name.startswith("on"):
                self.inline.append(f"{tag} {name}")
        if tag == "style" or (tag == "script" and not dict(attrs).get("src")):
            self.inline.append(tag)


def markup() -> _Markup:
    parser = _Markup()
    parser.feed((PAGE / "index.html").read_text())
    return parser


def test_page_loads_its_own_files_only_and_has_nothing_inline() -> None:
    found = markup()
    assert found.links
    assert {link.removeprefix("ui/") for link in found.links} <= {file.name for file in FILES}
    assert not found.inline
    for script in SCRIPTS:
        text = script.read_text()
        imported = re.findall(r'from "\./([^"]+)"', text)
        assert {PAGE / name for name in imported} <= set(SCRIPTS)
        assert text.count("import ") == len(imported) or script.name in ("api.js", "code.js")
    said = {url for file in FILES for url in re.findall(r"https?://[^\s\"'`<>]+", file.read_text())}
    assert said == {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.name))
def test_no_script_makes_markup_of_text(script: Path) -> None:
    unsafe = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|\beval\b|Function\("
    )
    assert not re.search(unsafe, script.read_text())


def words() -> dict[str, tuple[str, str]]:
    row = re.compile(r'^  "?([\w.]+)"?: \[("(?:[^"\\]|\\.)*"), ("(?:[^"\\]|\\.)*")\],$', re.M)
    return {name: (english, chinese) for name, english, chinese in row.findall((PAGE / "words.js").read_text())}


def test_every_word_is_there_in_both_languages() -> None:
    known = words()
    assert len(known) > 100
    for name, (english, chinese) in known.items():
        assert set(re.findall(r"\{\d\}", english)) == set(re.findall(r"\{\d\}", chinese)), name
        assert not re.search(r"[一-鿿]", english), name
    assert set(markup().words) <= known.keys()
    used = {
        name
        for script in SCRIPTS
        for name in re.findall(r'(?:say\([^"()]*(?:\([^()]*\))?,|said:|word\() ?"([\w.]+)"', script.read_text())
    }
    assert len(used) > 25
    assert used <= known.keys()
