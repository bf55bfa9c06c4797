"""API keys: shown once, kept as digests, followed by a running service, and edited by several at once."""

import hashlib
import json
import re
import stat
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookalike import main
from service.auth.api_keys import SCOPES, KeyFileError, KeyFileUnreadable, KeyMissing, KeyRing, Scope
from tests.support.processes import lookalike

HOUR = timedelta(hours=1)


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ring(path: Path, clock: Clock) -> KeyRing:
    return KeyRing(path, clock=clock)


def id_of(token: str) -> str:
    return token.split("_")[1]


def test_a_token_is_verified_as_its_key(ring: KeyRing, clock: Clock) -> None:
    shop = ring.create("shop", ["search"])
    clock.now += HOUR
    importer = ring.create("importer", ["write"], HOUR)
    key = ring.verify(importer)
    assert key
    assert (key.id, key.name, set(key.scopes)) == (id_of(importer), "importer", {"write"})
    assert (key.created, key.expires, key.rotated) == (clock.now, clock.now + HOUR, None)
    assert ring.list() == [ring.verify(shop), key]


def test_a_token_can_be_recognised_where_it_leaked(ring: KeyRing) -> None:
    assert re.fullmatch(r"lk_[0-9a-f]{8}_[0-9a-f]{64}", ring.create("shop", ["search"]))


def test_the_file_holds_no_token_and_is_its_owners_alone(ring: KeyRing, path: Path) -> None:
    token = ring.create("shop", ["search"])
    kept = path.read_text()
    assert token.split("_")[2] not in kept
    assert hashlib.sha256(token.encode()).hexdigest() in kept
    assert {stat.S_IMODE(it.stat().st_mode) for it in path.parent.iterdir()} == {0o600}


@given(text=st.text(max_size=100))
def test_an_invalid_token_is_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    assert KeyRing(tmp_path_factory.getbasetemp() / "none.json").verify(text) is None


def test_only_the_exact_token_is_accepted(ring: KeyRing) -> None:
    token, other = ring.create("shop", ["search"]), ring.create("other", ["admin"])
    swapped = f"lk_{id_of(other)}_{token.split('_')[2]}"
    unknown = f"lk_{'0' * 8}_{token.split('_')[2]}"
    changed = token[:-1] + ("0" if token[-1] != "0" else "1")
    for wrong in (swapped, unknown, changed, token[:-1], token + "0", token.upper(), f" {token}", "", "lk_", "\ud800"):
        assert ring.verify(wrong) is None
    assert ring.verify(f"lk_{id_of(token)}_") is None


@pytest.mark.parametrize(
    ("own", "allowed"),
    [
        (["search"], ["search"]),
        (["write"], ["search", "write"]),
        (["admin"], ["search", "write", "admin"]),
        (["search", "write"], ["search", "write"]),
    ],
)
def test_a_scope_includes_the_lesser_ones(ring: KeyRing, own: list[Scope], allowed: list[str]) -> None:
    key = ring.verify(ring.create("shop", own))
    assert key
    assert [scope for scope in SCOPES if key.allows(scope)] == allowed


def test_a_key_ends_when_it_expires(ring: KeyRing, clock: Clock) -> None:
    token = ring.create("shop", ["search"], HOUR)
    clock.now += HOUR - timedelta(microseconds=1)
    assert ring.verify(token)
    clock.now += timedelta(microseconds=1)
    assert ring.verify(token) is None
    assert [key.name for key in ring.list()] == ["shop"]
    with pytest.raises(KeyFileError, match="has expired"):
        ring.rotate(id_of(token))


def test_a_running_service_refuses_a_revoked_key_at_once(ring: KeyRing, path: Path) -> None:
    service = KeyRing(path)
    tokens = [ring.create(f"shop {number}", ["search"]) for number in range(20)]
    for token in tokens:
        assert service.verify(token)
        ring.revoke(id_of(token))
        assert service.verify(token) is None
    assert service.list() == []


def test_edits_in_the_same_tick_of_the_clock_are_all_seen(ring: KeyRing, path: Path) -> None:
    stamps = set()
    token = ring.create("shop", ["search"])
    for _ in range(30):
        token = ring.rotate(id_of(token))
        stamps.add(path.stat().st_mtime_ns)
    assert len(stamps) == 30


def test_the_file_is_read_only_when_it_changed(ring: KeyRing, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = ring.create("shop", ["search"])
    assert ring.verify(token)

    def opened(*_: object, **__: object) -> None:
        raise AssertionError("the file was read again")

    monkeypatch.setattr(Path, "open", opened)
    assert ring.verify(token)


def test_without_the_file_every_token_is_refused(ring: KeyRing, path: Path) -> None:
    token = ring.create("shop", ["search"])
    assert ring.verify(token)
    path.unlink()
    assert ring.verify(token) is None


def test_rotating_replaces_the_token_and_keeps_the_key(ring: KeyRing, clock: Clock) -> None:
    old = ring.create("shop", ["search"], 5 * HOUR)
    created = clock.now
    clock.now += HOUR
    new = ring.rotate(id_of(old))
    key = ring.verify(new)
    assert key
    assert ring.verify(old) is None
    assert (key.id, key.created, key.rotated, key.expires) == (id_of(old), created, clock.now, created + 5 * HOUR)


def test_a_former_token_works_through_its_grace_and_no_longer(ring: KeyRing, clock: Clock) -> None:
    old = ring.create("shop", ["search"])
    new = ring.rotate(id_of(old), grace=HOUR)
    clock.now += HOUR - timedelta(microseconds=1)
    assert ring.verify(old) == ring.verify(new) is not None
    clock.now += timedelta(microseconds=1)
    assert ring.verify(old) is None and ring.verify(new)


def test_a_second_rotation_ends_the_token_before_the_former(ring: KeyRing) -> None:
    first = ring.create("shop", ["search"])
    second = ring.rotate(id_of(first), grace=HOUR)
    third = ring.rotate(id_of(first), grace=HOUR)
    assert ring.verify(first) is None and ring.verify(second) and ring.verify(third)


def test_grace_does_not_outlive_the_key(ring: KeyRing, clock: Clock) -> None:
    old = ring.create("shop", ["search"], HOUR)
    ring.rotate(id_of(old), grace=5 * HOUR)
    clock.now += HOUR
    assert ring.verify(old) is None


def test_edits_at_the_same_time_are_all_kept(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        tokens = list(pool.map(lambda number: KeyRing(path).create(f"shop {number}", ["search"]), range(24)))
    assert all(KeyRing(path).verify(token) for token in tokens)


@pytest.mark.parametrize("name", ["", "x" * 101, "two\nlines", "\x1b[31mred"])
def test_a_name_that_would_confuse_a_list_is_refused(ring: KeyRing, path: Path, name: str) -> None:
    with pytest.raises(KeyFileError, match="is not valid for a key"):
        ring.create(name, ["search"])
    assert not path.exists()


@pytest.mark.parametrize("scopes", [[], ["root"], ["search", "root"]])
def test_an_unknown_scope_is_refused(ring: KeyRing, scopes: list[Scope]) -> None:
    with pytest.raises(KeyFileError, match="Choose from search, write, admin"):
        ring.create("shop", scopes)


def test_times_gone_by_are_refused(ring: KeyRing) -> None:
    with pytest.raises(KeyFileError, match="would expire"):
        ring.create("shop", ["search"], timedelta(0))
    with pytest.raises(KeyFileError, match="is negative"):
        ring.rotate(id_of(ring.create("shop", ["search"])), grace=-HOUR)


def test_an_unknown_id_is_named(ring: KeyRing) -> None:
    for edit in (ring.revoke, ring.rotate):
        with pytest.raises(KeyMissing, match="no key 'cafe0000'"):
            edit("cafe0000")


def damaged(path: Path) -> list[bytes]:
    kept = json.loads(path.read_text())
    other_version, short_digest = {**kept, "version": 2}, {**kept, "keys": [{**kept["keys"][0], "digest": "ü"}]}
    return [b"", b"{", b"[]", b"\xff\xfe", json.dumps(other_version).encode(), json.dumps(short_digest).encode()]


def test_with_a_damaged_file_every_token_is_refused_and_it_is_not_overwritten(ring: KeyRing, path: Path) -> None:
    token = ring.create("shop", ["search"])
    for content in damaged(path):
        path.write_bytes(content)
        for call in (lambda: ring.verify(token), ring.list, lambda: ring.create("other", ["search"])):
            with pytest.raises(KeyFileError, match=r"keys\.json is damaged"):
                call()
        assert path.read_bytes() == content


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot be read: Is a directory"):
        KeyRing(tmp_path).list()
    with pytest.raises(KeyFileError, match=r"nowhere/keys\.json cannot be written: No such file"):
        KeyRing(tmp_path / "nowhere" / "keys.json").create("shop", ["search"])


def test_a_file_that_becomes_unreadable_is_reported_once_for_each_reason(path: Path) -> None:
    reports: list[str] = []
    ring = KeyRing(path, on_change=lambda error: reports.append(error.problem if error else "readable"))
    token = ring.create("shop", ["search"])
    content = path.read_bytes()
    assert ring.verify(token) and not reports
    path.write_bytes(b"{")
    for _ in range(3):
        with pytest.raises(KeyFileUnreadable):
            ring.verify(token)
    path.unlink()
    path.mkdir()
    with pytest.raises(KeyFileUnreadable):
        ring.check()
    path.rmdir()
    path.write_bytes(content)
    assert ring.verify(token)
    assert [report.removeprefix(f"The key file {path} ") for report in reports] == [
        "is damaged.",
        "cannot be read: Is a directory.",
        "readable",
    ]


@pytest.fixture
def run_keys(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """Runs `lookalike keys ...` in this process: its exit code, output and errors."""

    def run(*arguments: str | Path) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["lookalike", "keys", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_code:
            main()
        return (exit_code.value.code, *capfd.readouterr())

    return run


def test_the_command_line_leads_a_key_through_its_life(
    run_keys: Callable[..., tuple[object, str, str]], path: Path
) -> None:
    ring = KeyRing(path)
    code, out, error = run_keys("create", "Shop front", "--scope", "write", "--expires-in", "90d", "--keys", path)
    assert code == 0 and "not shown again" in error
    token = out.strip()
    key = ring.verify(token)
    assert key and key.expires
    assert (key.name, set(key.scopes), key.expires - key.created) == ("Shop front", {"write"}, timedelta(days=90))

    code, out, _ = run_keys("list", "--keys", path)
    assert code == 0 and key.id in out and "write" in out and "Shop front" in out and "expires" in out
    assert token.split("_")[2] not in out

    code, out, _ = run_keys("rotate", key.id, "--grace", "1h", "--keys", path)
    assert code == 0 and ring.verify(token) and ring.verify(out.strip())
    assert "rotated" in run_keys("list", "--keys", path)[1]

    assert run_keys("revoke", key.id, "--keys", path)[0] == 0
    assert ring.verify(token) is None and ring.verify(out.strip()) is None
    assert "There are no keys" in run_keys("list", "--keys", path)[2]


def test_by_default_a_key_may_only_search_and_does_not_expire(
    run_keys: Callable[..., tuple[object, str, str]], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOKALIKE_KEYS", str(path))
    key = KeyRing(path).verify(run_keys("create", "shop")[1].strip())
    assert key and key.scopes == {"search"} and key.expires is None


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("revoke cafe0000 --keys {0}", 1, "no key 'cafe0000'"),
        ("rotate cafe0000 --keys {0}", 1, "no key 'cafe0000'"),
        ("create shop --expires-in soon --keys {0}", 2, "'soon' is not a duration"),
        ("create shop --expires-in 0d --keys {0}", 1, "would expire"),
        ("create shop --scope root --keys {0}", 2, "root"),
        ("list", 2, "LOOKALIKE_KEYS"),
    ],
)
def test_a_mistake_is_reported(
    run_keys: Callable[..., tuple[object, str, str]], path: Path, line: str, code: int, message: str
) -> None:
    exit_code, _, error = run_keys(*line.format(path).split())
    assert exit_code == code
    assert message in error


@pytest.mark.parametrize("command", ["create", "list", "revoke", "rotate"])
def test_every_command_of_keys_has_help_with_an_example(
    run_keys: Callable[..., tuple[object, str, str]], command: str
) -> None:
    code, out, _ = run_keys(command, "--help")
    assert code == 0 and f"Example: lookalike keys {command}" in out


def test_another_process_that_revokes_is_followed(path: Path) -> None:
    service = KeyRing(path)
    token = service.create("shop", ["search"])
    assert service.verify(token)
    finished = lookalike("keys", "revoke", id_of(token), "--keys", path)
    assert finished.returncode == 0, finished.stderr
    assert service.verify(token) is None
