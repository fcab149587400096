"""serve_app.engines.fake: a wrong `fake[...]` is the fault of the test, says so, and crashes nothing."""

import pytest
from asgi_call import Call

from serve_app.engines.base import EngineSpec
from serve_app.engines.fake import serve


async def asked(text: object, **script: object) -> Call:
    spec = EngineSpec("m", "fake", "", dict(script), {}, 8)
    async with serve(spec, lambda phase: None) as served:
        return await Call(served.app, {"messages": [{"role": "user", "content": text}], "max_tokens": 3}).done()


@pytest.mark.parametrize("text", ["fake[tokens=many]", "fake[ttft_s=]", "fake[fail_at=1.5]"])
async def test_override_of_the_wrong_type_is_a_400(text: str) -> None:
    assert (await asked(text)).status == 400


@pytest.mark.parametrize(
    "text", ["fake[]", "fake[nonsense]", "fake[unknown=1]", "fake[", None, ["odd", 3], [{"text": 5}]]
)
async def test_override_that_says_nothing_is_ignored(text: object) -> None:
    assert (await asked(text)).status == 200


async def test_override_holds_for_its_request_only_whatever_number_the_script_gave() -> None:
    call = await asked("fake[text=a b c,ttft_s=0.001]", ttft_s=0)
    assert (call.status, call.json["choices"][0]["message"]["content"]) == (200, "a b c")
