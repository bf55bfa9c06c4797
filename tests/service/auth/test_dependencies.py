"""Who may do what, and how often."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from index.errors import LookalikeError
from service.auth.api_keys import KeyRing
from service.settings import Settings, SettingsError, load_settings
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


def test_a_revoked_key_is_refused_at_once(guarded: httpx.Client, ring: KeyRing) -> None:
    token = ring.create("shop", ["search"])
    assert guarded.get("/v1/status", headers=bearer(token)).status_code == 200
    ring.revoke(next(key.id for key in ring.list() if key.name == "shop"))
    problem(guarded.get("/v1/status", headers=bearer(token)), 401, "key-invalid")


def test_a_key_that_comes_too_often_is_told_when_to_come_again(guarded: httpx.Client, ring: KeyRing) -> None:
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


def test_all_mistakes_in_the_settings_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lookalike.toml"
    file.write_text('rate = -1\nmax_batch = "many"\n')
    monkeypatch.setenv("LOOKALIKE_CONFIG", str(file))
    monkeypatch.setenv("LOOKALIKE_PORT", "70000")
    with pytest.raises(LookalikeError) as told:
        load_settings()
    assert all(name in str(told.value) for name in ("gallery", "rate", "max_batch", "port"))


def test_an_option_wins_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lookalike.toml"
    file.write_text('gallery = "g"\nport = 1\nrate = 3.5\nhost = "::1"\n')
    monkeypatch.setenv("LOOKALIKE_CONFIG", str(file))
    monkeypatch.setenv("LOOKALIKE_PORT", "2")
    monkeypatch.setenv("LOOKALIKE_HOST", "localhost")
    settings = load_settings(host="127.0.0.1", port=None)
    assert (settings.host, settings.port, settings.rate) == ("127.0.0.1", 2, 3.5)


def test_an_empty_variable_is_as_if_it_were_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEYS", "RATE", "BUNDLE"):
        monkeypatch.setenv(f"LOOKALIKE_{name}", "")
    settings = load_settings(gallery="g", host="0.0.0.0")
    assert (settings.keys, settings.rate, settings.bundle) == (None, 50, None)
    with pytest.raises(SettingsError, match="without API keys"):
        check_exposure(settings)


def test_a_misspelt_variable_is_told_with_all_other_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKALIKE_GALERY", "x")
    with pytest.raises(SettingsError, match="LOOKALIKE_GALERY"):
        load_settings(gallery="g")
    with pytest.raises(SettingsError, match=r"LOOKALIKE_GALERY.*rate"):
        load_settings(gallery="g", rate=-1)


def test_a_variable_that_is_no_json_is_told_with_all_other_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKALIKE_URL_HOSTS", "cdn.example.com")
    monkeypatch.setenv("LOOKALIKE_SOURCES", '{"shop": ')
    monkeypatch.setenv("LOOKALIKE_CORS_ORIGINS", '["shop.example.com", "https://shop.example.com/path"]')
    monkeypatch.setenv("LOOKALIKE_PORT", "many")
    with pytest.raises(SettingsError) as told:
        load_settings(gallery="g")
    for part in (
        "url_hosts: 'cdn.example.com' is not JSON",
        "sources: ",
        "cors_origins.0: ",
        "cors_origins.1: ",
        "port: ",
    ):
        assert part in str(told.value)


def test_hosts_and_origins_are_checked_with_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKALIKE_URL_HOSTS", '["cdn.example.com:8443", "*.example.org"]')
    monkeypatch.setenv("LOOKALIKE_CORS_ORIGINS", '["https://shop.example.com", "http://localhost:3000"]')
    settings = load_settings(gallery="g")
    assert (len(settings.url_hosts), len(settings.cors_origins)) == (2, 2)
    with pytest.raises(SettingsError, match=r"url_hosts\.1: .*'bad host/'"):
        load_settings(gallery="g", url_hosts=["good.example.com", "bad host/"])


def test_a_file_that_cannot_be_read_hides_no_other_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lookalike.toml").write_text("rate = \n")
    monkeypatch.setenv("LOOKALIKE_CONFIG", str(tmp_path / "lookalike.toml"))
    monkeypatch.setenv("LOOKALIKE_GALERY", "x")
    with pytest.raises(SettingsError, match=r"LOOKALIKE_GALERY.*LOOKALIKE_CONFIG: .*line 1"):
        load_settings(gallery="g")
