"""API keys, scopes and rate limits of requests."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.auth.api_keys import KeyRing
from service.settings import Settings, SettingsError
from service.state import check_exposure
from tests.service.conftest import problem, serving
from tests.support.tiny_gallery import tiny_photo

PHOTO = {"image": tiny_photo(0, 0)}


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(tmp_path / "keys.json")


@pytest.fixture
def guarded(settings: Settings, ring: KeyRing, tmp_path: Path) -> Iterator[httpx.Client]:
    ring.create("first", ["search"])
    guarded = settings.model_copy(update={"keys": tmp_path / "keys.json", "rate": 1.0, "burst": 5})
    with serving(guarded) as client:
        yield client


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_a_search_needs_a_key_in_either_header(guarded: httpx.Client, ring: KeyRing) -> None:
    refused = guarded.post("/v1/search", files=PHOTO)
    problem(refused, 401, "key-missing")
    assert refused.headers["WWW-Authenticate"] == "Bearer"
    problem(guarded.post("/v1/search", files=PHOTO, headers=bearer("lk_nonsense")), 401, "key-invalid")
    token = ring.create("shop", ["search"])
    assert guarded.post("/v1/search", files=PHOTO, headers=bearer(token)).status_code == 200
    assert guarded.post("/v1/search", files=PHOTO, headers={"X-API-Key": token}).status_code == 200


def test_the_status_names_the_widest_scope_of_the_key(
    guarded: httpx.Client, client: httpx.Client, ring: KeyRing
) -> None:
    token = ring.create("shop", ["search", "write"])
    assert guarded.get("/v1/status", headers=bearer(token)).json()["scope"] == "write"
    assert client.get("/v1/status").json()["scope"] is None


def test_a_revoked_key_is_refused_at_once(guarded: httpx.Client, ring: KeyRing) -> None:
    token = ring.create("shop", ["search"])
    assert guarded.get("/v1/status", headers=bearer(token)).status_code == 200
    ring.revoke(next(key.id for key in ring.list() if key.name == "shop"))
    problem(guarded.get("/v1/status", headers=bearer(token)), 401, "key-invalid")


def test_a_key_beyond_its_rate_gets_429_with_retry_after(guarded: httpx.Client, ring: KeyRing) -> None:
    busy, calm = ring.create("busy", ["search"]), ring.create("calm", ["search"])
    answers = [guarded.get("/v1/status", headers=bearer(busy)) for _ in range(8)]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused, "8 requests at once are more than 5 and one a second"
    problem(refused[0], 429, "too-many-requests")
    assert int(refused[0].headers["Retry-After"]) >= 1
    assert guarded.get("/v1/status", headers=bearer(calm)).status_code == 200


def test_probes_and_the_page_need_no_key(guarded: httpx.Client) -> None:
    assert [guarded.get(path).status_code for path in ("/healthz", "/readyz", "/")] == [200, 200, 200]


def test_beyond_this_machine_keys_are_needed(settings: Settings, tmp_path: Path) -> None:
    exposed = settings.model_copy(update={"host": "0.0.0.0"})
    with pytest.raises(SettingsError, match="without API keys"):
        check_exposure(exposed)
    check_exposure(exposed.model_copy(update={"open": True}))
    check_exposure(exposed.model_copy(update={"keys": tmp_path / "keys.json"}))
