"""The table of a request's headers: the same answers as starlette's own."""

from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from serve_app.router.headers import RequestHeaders, headers_of

NAMES = st.sampled_from(["host", "Host", "x-session-id", "X-Session-ID", "accept", "prefer"])
# As a server gives them to an app: names in lower case.
HEADERS = st.lists(st.tuples(NAMES.map(str.lower).map(str.encode), st.binary(max_size=4)))


@given(HEADERS, NAMES)
def test_it_answers_as_starlettes_own(raw: list[tuple[bytes, bytes]], name: str) -> None:
    ours, theirs = RequestHeaders({"headers": list(raw)}), Headers(raw=raw)
    assert ours.get(name) == theirs.get(name)
    assert ours.get(name, "none") == theirs.get(name, "none")
    assert (name in ours) is (name in theirs)
    assert ours.getlist(name) == theirs.getlist(name)
    assert dict(ours) == dict(theirs)
    assert (ours[name] == theirs[name]) if name in theirs else True


def test_a_request_that_a_layer_gave_other_headers_has_those() -> None:
    scope = {"headers": [(b"host", b"a")]}
    assert headers_of(scope)["host"] == "a"
    assert headers_of(scope) is headers_of(scope)
    inner = {**scope, "headers": [(b"host", b"b")]}
    assert headers_of(inner)["host"] == "b"
    assert headers_of(scope)["host"] == "a"
