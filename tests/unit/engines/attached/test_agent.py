"""A server that is not ours beside a real scheduler: there while it is well, and else away with the reason."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from serving.engines.attached import agent as agent_module
from serving.engines.attached import server as server_module
from serving.engines.attached.agent import AttachedLane
from serving.engines.attached.server import ServerError
from serving.scheduler import channel as channel_module
from serving.scheduler.protocol import Refused
from tests.stand_in_server import StandInServer, serving
from tests.unit.engines.attached.test_server import lane
from tests.unit.scheduler.control_plane import ControlPlane, control_plane, until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEALTH_PERIOD_S", "RETRY_S"):
        monkeypatch.setattr(agent_module, name, 0.01)
    monkeypatch.setattr(agent_module, "LOOKS_A_MODEL", 1)
    monkeypatch.setattr(server_module, "LOOK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(channel_module, "RECONNECT_DELAY_S", 0.01)


@contextlib.asynccontextmanager
async def attached(plane: ControlPlane, *urls: str, **settings: Any) -> AsyncIterator[AttachedLane]:
    """Servers attached as the lane `batched` that the scheduler of these tests knows."""
    agents = AttachedLane(lane(*urls, name="batched", **settings), plane.address)
    await agents.start("127.0.0.1")
    try:
        yield agents
        agents.check()
    finally:
        await agents.close()


def away(plane: ControlPlane) -> list[str]:
    return [absent["why"] for absent in plane.lane("batched")["absent"]]


def there(plane: ControlPlane) -> list[str]:
    return [replica["replica"] for replica in plane.lane("batched")["replicas"]]


async def test_each_url_is_a_replica_of_the_lane() -> None:
    async with control_plane() as plane, serving(StandInServer()) as one, serving(StandInServer()) as two:
        async with attached(plane, one.url, two.url):
            await until(lambda: len(there(plane)) == 2)
            shown = plane.service.replicas()
            assert {replica["server"] for replica in shown} == {one.url, two.url}
            assert {replica["served_model"] for replica in shown} == {"theirs/model-1"}
            assert away(plane) == []
        await until(lambda: there(plane) == [])


@pytest.mark.parametrize(
    ("change", "back", "why"),
    [
        ({"health_status": 500}, {"health_status": 200}, "/health answered 500"),
        ({"hangs": True}, {"hangs": False}, "was not answered within"),
        ({"key": "k"}, {"key": None}, "asks for an API key"),
        ({"models": ["other"]}, {"models": ["other"]}, None),
    ],
)
async def test_it_leaves_when_it_is_not_well_and_comes_back_under_a_new_name(
    change: dict[str, Any], back: dict[str, Any], why: str | None
) -> None:
    async with control_plane() as plane, serving(StandInServer()) as server, attached(plane, server.url):
        await until(lambda: len(there(plane)) == 1)
        (before,) = there(plane)
        for name, value in change.items():
            setattr(server, name, value)
        if why is not None:
            await until(lambda: any(why in said for said in away(plane)))
            assert there(plane) == []
        for name, value in back.items():
            setattr(server, name, value)
        await until(lambda: bool(there(plane)) and there(plane) != [before])
        await until(lambda: away(plane) == [])
        assert plane.service.replicas()[0]["served_model"] == server.models[0]


async def test_no_request_waits_for_a_server_that_is_known_to_be_away() -> None:
    async with (
        control_plane(settle_s=3) as plane,
        serving(StandInServer()) as server,
        plane.gateway("g") as gateway,
        attached(plane, server.url),
    ):
        plane.clock.now_s += 4
        await until(lambda: len(there(plane)) == 1)
        server.health_status = 500
        await until(lambda: there(plane) == [])
        await gateway.submit("a")
        assert isinstance(await gateway.hear(), Refused)


async def test_one_failed_look_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "LOOKS_A_MODEL", 10_000)
    looks: list[str] = []
    async with (
        control_plane() as plane,
        serving(StandInServer()) as server,
        attached(plane, server.url) as one,
    ):
        await until(lambda: len(there(plane)) == 1)
        before = there(plane)
        (agent,) = one._agents  # noqa: SLF001
        faults = iter(["busy", None, "busy", None])

        async def fault(health: str) -> str | None:
            looks.append(health)
            return next(faults, None)

        monkeypatch.setattr(agent._client, "fault", fault)  # noqa: SLF001
        await until(lambda: len(looks) > 6)
        assert there(plane) == before


async def test_one_look_at_its_models_that_failed_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    async with (
        control_plane() as plane,
        serving(StandInServer()) as server,
        attached(plane, server.url) as one,
    ):
        await until(lambda: len(there(plane)) == 1)
        before = there(plane)
        (agent,) = one._agents  # noqa: SLF001
        faults = iter(["/v1/models was not answered", None, "/v1/models was not answered", None])

        async def change(_: object) -> str | None:
            looks.append("")
            return next(faults, None)

        monkeypatch.setattr(agent, "_change", change)
        await until(lambda: len(looks) > 6)
        assert there(plane) == before


async def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    async with control_plane() as plane:
        server = StandInServer()
        async with serving(server):
            pass
        async with attached(plane, server.url):
            await until(lambda: any("cannot be reached" in said for said in away(plane)))
            async with serving(server):
                await until(lambda: len(there(plane)) == 1)
                assert away(plane) == []


async def test_completions_in_vain_are_not_asked_for_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    async with (
        control_plane() as plane,
        serving(StandInServer(paths=())) as server,
        attached(plane, server.url, "http://127.0.0.1:1") as both,
    ):
        await until(lambda: any("/v1/completions answered 404" in said for said in away(plane)))
        num_asked = len(server.asked)

        async def examine() -> None:
            looks.append("")
            raise ServerError("cannot be reached")

        monkeypatch.setattr(both._agents[1]._client, "examine", examine)  # noqa: SLF001
        await until(lambda: len(looks) > 10)
        assert len(server.asked) == num_asked


async def test_the_next_scheduler_hears_of_it_too() -> None:
    async with (
        control_plane() as plane,
        serving(StandInServer()) as server,
        attached(plane, server.url, "http://127.0.0.1:1"),
    ):
        await until(lambda: len(there(plane)) == 1 and len(away(plane)) == 1)
        before = there(plane)
        await plane.stop()
        await plane.start()
        await until(lambda: there(plane) == before and len(away(plane)) == 1)


async def test_its_page_gives_the_server_s_metrics_with_the_lab_s_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("THEIR_KEY", "a-key-of-theirs-1")
    server = StandInServer(key="a-key-of-theirs-1")
    async with (
        control_plane() as plane,
        serving(server),
        aiohttp.ClientSession() as http,
        attached(plane, server.url, api_key_env="THEIR_KEY"),
    ):
        await until(lambda: len(there(plane)) == 1)
        url = plane.lane("batched")["replicas"][0]["url"]
        async with http.get(f"{url}/metrics") as answer:
            assert await answer.text() == server.metrics
        async with http.get(f"{url}/health") as answer:
            assert answer.status == 200
        async with http.post(f"{url}/tandem/trace/start?seconds=5") as answer:
            recording = (await answer.json())["recording"]
        async with http.post(f"{url}/tandem/trace/stop?recording={recording}") as answer:
            assert answer.status == 200
        server.metrics = None
        async with http.get(f"{url}/metrics") as answer:
            assert (answer.status, await answer.text()) == (200, "")
