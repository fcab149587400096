"""serve_app.conversations.store: memory and a real Redis behave the same; and what each does that the other cannot."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from redis_server import RedisServer, redis_server

from serve_app.conversations.history import Entry, entry_of, first_kept
from serve_app.conversations.store import MemoryStore, RedisStore, Store, Unavailable, key_of
from serve_app.service_schema import Conversations

Make = Callable[..., Store]
KEY = key_of("me", "chat", "one")


def settings(**given: Any) -> Conversations:
    return Conversations(enabled=True, **given)


def entry(number: int, tokens: int = 10, continues: bool = False) -> Entry:
    made = entry_of(f"id{number}", [{"role": "user", "content": f"número {number}"}])
    return Entry(made.id, made.items, tokens, continues)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture(params=["memory", "redis"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    made: list[Store] = []

    def new(**given: Any) -> Store:
        if request.param == "redis":
            server: RedisServer = request.getfixturevalue("server")
            server.client().flushall()
            made.append(RedisStore(settings(redis_url=server.url, **given)))
        else:
            made.append(MemoryStore(settings(**given)))
        return made[-1]

    yield new
    for store in made:
        await store.close()


async def kept(store: Store, key: str = KEY) -> list[int]:
    found = await store.read(key)
    return [int(each.id.removeprefix("id")) for each in found.entries] if found else []


# The contract


async def test_what_is_added_is_read_in_order(make: Make) -> None:
    store = make()
    assert await store.read(KEY) is None
    await store.append(KEY, [entry(1)], b"head")
    await store.append(KEY, [entry(2), entry(3)])
    found = await store.read(KEY)
    assert found
    assert (found.head, found.entries) == (b"head", (entry(1), entry(2), entry(3)))


async def test_a_new_head_replaces_the_old_one_and_none_leaves_it(make: Make) -> None:
    store = make()
    for head in (b"old", b"new", None):
        await store.append(KEY, [], head)
    found = await store.read(KEY)
    assert found
    assert found.head == b"new"


async def test_turns_of_requests_that_end_at_once_are_all_kept(make: Make) -> None:
    store = make()
    await asyncio.gather(*(store.append(KEY, [entry(number)]) for number in range(50)))
    assert sorted(await kept(store)) == list(range(50))


async def test_adding_an_entry_again_changes_nothing(make: Make) -> None:
    store = make()
    for _ in range(2):
        await store.append(KEY, [entry(1)])
    assert await kept(store) == [1]


async def test_beyond_the_limit_whole_turns_go_from_the_oldest(make: Make) -> None:
    store = make(max_tokens=30)
    for number, continues in enumerate([False, True, False, False]):
        await store.append(KEY, [entry(number, continues=continues)])
    # All four are too many, and the second cannot be without the first.
    assert await kept(store) == [2, 3]


async def test_the_newest_turn_stays_however_large(make: Make) -> None:
    store = make(max_tokens=5)
    for number, continues in enumerate([False, False, True]):
        await store.append(KEY, [entry(number, 100, continues)])
    assert await kept(store) == [1, 2]


@pytest.mark.parametrize("seed", range(6))
async def test_both_trim_as_the_pure_rule_says(make: Make, seed: int) -> None:
    # A pattern that differs from seed to seed, and always the same one.
    sizes = [((seed * 7 + place * 13) % 23, (seed + place * place) % 3 == 0) for place in range(12)]
    store = make(max_tokens=40)
    await store.append(KEY, [entry(place, *size) for place, size in enumerate(sizes)])
    assert await kept(store) == list(range(12))[first_kept(sizes, 40) :]


async def test_the_head_stays_when_its_turn_goes(make: Make) -> None:
    store = make(max_tokens=10)
    await store.append(KEY, [entry(1)], b"system")
    await store.append(KEY, [entry(2)])
    found = await store.read(KEY)
    assert found
    assert (found.head, await kept(store)) == (b"system", [2])


async def test_deleting_forgets_it_and_only_it(make: Make) -> None:
    store = make()
    other = key_of("me", "chat", "other")
    for key in (KEY, other):
        await store.append(key, [entry(1)], b"head")
    assert await store.delete(KEY)
    assert not await store.delete(KEY)
    assert await store.read(KEY) is None
    assert await kept(store, other) == [1]


async def test_it_ends_some_time_after_the_last_turn(make: Make) -> None:
    store = make(ttl_s=0.4)
    await store.append(KEY, [entry(1)], b"head")
    await asyncio.sleep(0.25)
    await store.append(KEY, [entry(2)])
    await asyncio.sleep(0.25)
    assert await kept(store) == [1, 2]
    await asyncio.sleep(0.3)
    assert await store.read(KEY) is None
    assert not await store.delete(KEY)


def test_keys_are_apart_by_owner_kind_and_name_and_tell_none_of_them() -> None:
    names = [("me", "chat", "one"), ("you", "chat", "one"), ("me", "response", "one"), ("m", "echat", "one")]
    keys = {key_of(*name) for name in names}
    assert len(keys) == len(names)
    assert not any("one" in key for key in keys)


# Memory


async def test_memory_forgets_what_was_unused_for_the_longest() -> None:
    store = MemoryStore(settings(max_conversations=2))
    for key in "ab":
        await store.append(key, [entry(1)])
    await store.read("a")
    await store.append("c", [entry(1)])
    assert [bool(await store.read(key)) for key in "abc"] == [True, False, True]


async def test_memory_is_bounded_in_bytes() -> None:
    size = len(entry(1).encode())
    store = MemoryStore(settings(), most_bytes=3 * size)
    for key in "abcd":
        await store.append(key, [entry(1)])
    assert [bool(await store.read(key)) for key in "abcd"] == [False, True, True, True]
    await store.delete("b")
    await store.append("c", [entry(2)])
    assert store._bytes == sum(held.size for held in store._held.values()) == 3 * size


# Redis


async def test_two_routers_see_one_conversation(server: RedisServer) -> None:
    one, two = (RedisStore(settings(redis_url=server.url)) for _ in range(2))
    key = key_of("me", "chat", "shared")
    await one.append(key, [entry(1)])
    await two.append(key, [entry(2)])
    assert await kept(one, key) == [1, 2]
    await one.close()
    await two.close()


async def test_a_redis_that_is_killed_is_unavailable_at_once_and_comes_back() -> None:
    with redis_server() as server:
        store = RedisStore(settings(redis_url=server.url), rest_s=0.2)
        await store.append(KEY, [entry(1)])
        server.kill()
        began = time.monotonic()
        for call in (store.read(KEY), store.append(KEY, [entry(2)]), store.delete(KEY)):
            with pytest.raises(Unavailable):
                await call
        assert time.monotonic() - began < 2
        server.start()
        await asyncio.sleep(0.2)
        # With connections that the first server left behind, and a script that this one has never seen.
        assert await store.read(KEY) is None
        await store.append(KEY, [entry(3)])
        assert await kept(store) == [3]
        await store.close()


async def test_a_redis_that_was_restarted_between_two_calls_is_not_noticed() -> None:
    with redis_server() as server:
        store = RedisStore(settings(redis_url=server.url))
        await store.append(KEY, [entry(1)])
        server.kill()
        server.start()
        await store.append(KEY, [entry(2)])
        assert await kept(store) == [2]
        await store.close()


async def test_a_redis_that_hangs_costs_a_second_at_most_and_not_every_request() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    store = RedisStore(settings(redis_url=f"redis://127.0.0.1:{port}"))
    began = time.monotonic()
    for _ in range(20):
        with pytest.raises(Unavailable):
            await store.read(KEY)
    assert time.monotonic() - began < 2.5
    await store.close()
    listening.close()


async def test_what_somebody_else_wrote_there_is_unavailable_and_no_fault(server: RedisServer) -> None:
    store = RedisStore(settings(redis_url=server.url), rest_s=0)
    server.client().rpush(f"switchyard:conversation:1:{{{KEY}}}:entries", b"nonsense")
    with pytest.raises(Unavailable):
        await store.read(KEY)
    await store.close()


async def test_a_wrong_password_is_unavailable() -> None:
    with redis_server() as server:
        server.client().config_set("requirepass", "right")
        store = RedisStore(settings(redis_url=server.url.replace("//", "//:wrong@")))
        with pytest.raises(Unavailable):
            await store.read(KEY)
        await store.close()
