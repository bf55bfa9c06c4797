"""Settings: from variables and a file, with all mistakes reported in one error."""

import re
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from index.errors import LookalikeError
from service.settings import Settings, SettingsError, load_settings
from service.state import check_exposure


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOOKALIKE_GALLERY", "g")
    monkeypatch.setenv("LOOKALIKE_BUNDLE", "b")
    monkeypatch.setenv("LOOKALIKE_MAX_PIXELS", "1000")
    settings = Settings()  # type: ignore[call-arg]  # both required values are in the environment
    assert (settings.gallery, settings.bundle, settings.port) == ("g", Path("b"), 8000)
    assert settings.image_limits.max_pixels == 1000
    monkeypatch.setenv("LOOKALIKE_EXAMPLES", str(tmp_path / "nowhere"))
    with pytest.raises(ValidationError, match="examples"):
        Settings()  # type: ignore[call-arg]


def test_the_sample_shop_of_the_compose_file_needs_nothing_that_only_the_service_mounts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deploy = Path(__file__).parents[2] / "deploy"
    explained = re.findall(r"^#(LOOKALIKE_\w+)=(.*)$", (deploy / ".env.example").read_text(), re.MULTILINE)
    given = {name: value for name, value in explained if "/shop" in value or "/bundles" in value}
    given["LOOKALIKE_CONFIG"] = "/shop/lookalike.toml"
    demo = yaml.safe_load((deploy / "compose.yaml").read_text())["services"]["demo"]["environment"]
    for name, value in {**given, **demo, "LOOKALIKE_EXAMPLES": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert (settings.bundle, settings.bundles, settings.sources) == (None, {}, {})


def test_all_mistakes_in_the_settings_are_reported_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lookalike.toml"
    file.write_text('rate = -1\nmax_batch = "many"\n')
    monkeypatch.setenv("LOOKALIKE_CONFIG", str(file))
    monkeypatch.setenv("LOOKALIKE_PORT", "70000")
    with pytest.raises(LookalikeError) as raised:
        load_settings()
    assert all(name in str(raised.value) for name in ("gallery", "rate", "max_batch", "port"))


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


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEYS", "RATE", "BUNDLE"):
        monkeypatch.setenv(f"LOOKALIKE_{name}", "")
    settings = load_settings(gallery="g", host="0.0.0.0")
    assert (settings.keys, settings.rate, settings.bundle) == (None, 50, None)
    with pytest.raises(SettingsError, match="without API keys"):
        check_exposure(settings)


def test_a_misspelt_variable_is_reported_with_all_other_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKALIKE_GALERY", "x")
    with pytest.raises(SettingsError, match="LOOKALIKE_GALERY"):
        load_settings(gallery="g")
    with pytest.raises(SettingsError, match=r"LOOKALIKE_GALERY.*rate"):
        load_settings(gallery="g", rate=-1)


def test_a_variable_that_is_not_json_is_reported_with_all_other_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKALIKE_URL_HOSTS", "cdn.example.com")
    monkeypatch.setenv("LOOKALIKE_SOURCES", '{"shop": ')
    monkeypatch.setenv("LOOKALIKE_CORS_ORIGINS", '["shop.example.com", "https://shop.example.com/path"]')
    monkeypatch.setenv("LOOKALIKE_PORT", "many")
    with pytest.raises(SettingsError) as raised:
        load_settings(gallery="g")
    for part in (
        "url_hosts: 'cdn.example.com' is not JSON",
        "sources: ",
        "cors_origins[0]: ",
        "cors_origins[1]: ",
        "port must be a whole number (got 'many')",
    ):
        assert part in str(raised.value)


def test_hosts_and_origins_are_checked_with_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKALIKE_URL_HOSTS", '["cdn.example.com:8443", "*.example.org"]')
    monkeypatch.setenv("LOOKALIKE_CORS_ORIGINS", '["https://shop.example.com", "http://localhost:3000"]')
    settings = load_settings(gallery="g")
    assert (len(settings.url_hosts), len(settings.cors_origins)) == (2, 2)
    with pytest.raises(SettingsError, match=r"url_hosts\[1\]: .*'bad host/'"):
        load_settings(gallery="g", url_hosts=["good.example.com", "bad host/"])


def test_a_file_that_cannot_be_read_hides_no_other_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lookalike.toml").write_text("rate = \n")
    monkeypatch.setenv("LOOKALIKE_CONFIG", str(tmp_path / "lookalike.toml"))
    monkeypatch.setenv("LOOKALIKE_GALERY", "x")
    with pytest.raises(SettingsError, match=r"LOOKALIKE_GALERY.*LOOKALIKE_CONFIG: .*line 1"):
        load_settings(gallery="g")
