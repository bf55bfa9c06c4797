"""Which photos may be fetched: only from public hosts on the list, through every trick that names another one."""

import asyncio
from collections.abc import Sequence
from functools import cache

import pytest

from index.errors import LookalikeError
from service.url_fetcher import Fetcher, FetchError

LIMIT = 10_000


# What an address may look like. Nothing here may reach the network, so nothing is answered for the test.


class Offline(Fetcher):
    """Its resolver knows a few names, and the rest of it is as in service."""

    names = {
        "shop.example.com": ["10.0.0.1"],
        "both.example.com": ["93.184.216.34", "10.0.0.1"],
        "six.example.com": ["2606:4700::1111", "::ffff:169.254.169.254"],
    }

    async def resolve(self, host: str) -> Sequence[str]:
        if host not in self.names:
            raise OSError("Name or service not known")
        return self.names[host]


def refusal(fetcher: Fetcher, url: str) -> FetchError:
    with pytest.raises(FetchError) as caught:
        asyncio.run(fetcher.fetch(url))
    assert caught.value.problem and caught.value.remedy
    return caught.value


@cache  # the certificates of a fetcher take a while to load
def everywhere(fetcher: type[Fetcher] = Fetcher) -> Fetcher:
    return fetcher(["*"], max_bytes=LIMIT, timeout=20, allow_http=True)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://localhost/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://0.0.0.0/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[fd00:ec2::254]/latest/",
        "http://[64:ff9b::7f00:1]/",
    ],
)
def test_an_inner_address_is_refused_by_the_real_resolver(url: str) -> None:
    assert refusal(everywhere(), url).reason == "host_not_public"


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "0x7f000001",
        "0x7f.0.0.1",
        "0x7f.1",
        "127.1",
        "0177.0.0.1",
        "017700000001",
        "127.0.0.01",
        "127.0.0.1.",
        "[fe80::1%25eth0]",
        "[2606:4700::1111%25eth0]",
        "1.2.3.4.5",
        "256.1.1.1",
        "shop.0x",
        "a%2eexample.com",
    ],
)
def test_other_spellings_of_an_address_are_no_host(host: str) -> None:
    assert refusal(everywhere(Offline), f"http://{host}/photo.jpg").reason == "bad_url"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "photo.jpg",
        "https:///photo.jpg",
        "https://a b.example.com/",
        "//shop.example.com/a.jpg",
        "file:///etc/passwd",
        "ftp://shop.example.com/a",
        "data:image/png,x",
        "gopher://shop.example.com:80/",
        "https://user:word@shop.example.com/",
        "https://user@shop.example.com/",
        "https://trusted.example.com\\@shop.example.com/",
        "https://shop.example.com:port/",
        "https://a\r\nb.example.com/",
        "unix:/run/docker.sock",
        "http://[::1/",
        "https://" + "a" * 64 + ".example.com/",
        "https://" + "a" * 70_000,
    ],
)
def test_what_is_not_the_address_of_a_photo_is_refused(url: str) -> None:
    assert refusal(everywhere(Offline), url).reason == "bad_url"


def test_plain_http_is_refused_unless_allowed() -> None:
    strict = Offline(["*"], max_bytes=LIMIT)
    assert "https://" in refusal(strict, "http://shop.example.com/").problem
    assert refusal(strict, "http://shop.example.com/").reason == "bad_url"
    assert refusal(everywhere(Offline), "http://shop.example.com/").reason == "host_not_public"


@pytest.mark.parametrize("host", ["shop.example.com", "both.example.com", "six.example.com", "unknown.example.com"])
def test_one_private_address_disqualifies_a_host_and_none_is_revealed(host: str) -> None:
    error = refusal(everywhere(Offline), f"https://{host}/photo.jpg?signature=secret")
    assert error.reason == "host_not_public"
    assert str(error) == f"The host {host} has no public address. Give an address on the public internet."


@cache
def choosy() -> Fetcher:
    allowed = ["cdn.example.com", "*.shop.example", "*.port.example:8443", "one.example:8080", "münchen.example"]
    return Offline(allowed, max_bytes=LIMIT, allow_http=True)


@pytest.mark.parametrize(
    "url",
    [
        "https://cdn.example.com/a",
        "https://CDN.Example.COM:443/a",
        "http://cdn.example.com:80/",
        "https://a.shop.example/",
        "https://a.b.shop.example/",
        "https://x.port.example:8443/",
        "https://one.example:8080/",
        "https://münchen.example/",
        "https://xn--mnchen-3ya.example/",
    ],
)
def test_hosts_on_the_list_pass_to_the_next_check(url: str) -> None:
    assert refusal(choosy(), url).reason == "host_not_public"


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/",
        "https://cdn.example.com.evil.example/",
        "https://evilcdn.example.com/",
        "https://shop.example/",
        "https://evilshop.example/",
        "https://cdn.example.com:8443/",
        "http://cdn.example.com:443/",
        "https://cdn.example.com:80/",
        "https://x.port.example/",
        "https://one.example/",
        "https://93.184.216.34/",
        "https://cdn.example.com:22/",
        "https://[2606:4700::1111]/",
    ],
)
def test_hosts_and_ports_that_are_not_on_the_list_are_refused(url: str) -> None:
    assert refusal(choosy(), url).reason == "host_not_allowed"


def test_an_empty_list_allows_nothing() -> None:
    assert refusal(Offline([], max_bytes=LIMIT), "https://cdn.example.com/").reason == "host_not_allowed"


@pytest.mark.parametrize(
    "pattern",
    [
        "*cdn.com",
        "cdn.*.com",
        "**",
        "*.",
        "*.*",
        "https://cdn.com",
        "cdn.com/path",
        "me@cdn.com",
        "cdn.com:x",
        "0x7f.1",
        "cdn..com",
        ".cdn.com",
        "cdn.com.",
        "",
        " ",
        "cdn.com\n",
    ],
)
def test_a_pattern_that_is_not_a_host_is_refused(pattern: str) -> None:
    with pytest.raises(LookalikeError, match=r"is not a valid host to fetch photos from\. Write cdn\.example\.com"):
        Fetcher([pattern], max_bytes=LIMIT)
