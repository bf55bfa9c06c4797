"""Which photos may be fetched: only from public hosts on the list, through every trick that names another one."""

import asyncio
from collections.abc import Sequence
from functools import cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from index.errors import LookalikeError
from service.url_fetcher import Fetcher, FetchError, is_public

LIMIT = 10_000


# What may be connected to


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8",
        "93.184.216.34",
        "172.15.255.255",
        "172.32.0.1",
        "100.63.255.255",
        "100.128.0.1",
        "169.253.1.1",
        "2606:4700::1111",
        "2a00:1450:4001::5",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
    ],
)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(ip_address(address))


PRIVATE = {
    "unspecified": ["0.0.0.0", "0.1.2.3", "::"],
    "loopback": ["127.0.0.1", "127.255.255.254", "::1"],
    "private": ["10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "fc00::1", "fd12:3456::1", "fec0::1"],
    "link-local": ["169.254.0.1", "fe80::1", "fe80::1%eth0"],
    "metadata": ["169.254.169.254", "fd00:ec2::254"],
    "carrier-grade NAT": ["100.64.0.1", "100.127.255.255"],
    "multicast": ["224.0.0.1", "224.0.1.1", "239.255.255.250", "ff02::1", "ff0e::1"],
    "broadcast and reserved": ["255.255.255.255", "240.0.0.1", "5f00::1", "100::1", "100:0:0:1::1", "4000::1"],
    "protocol assignments": ["192.0.0.8", "192.0.0.9", "192.88.99.1", "2001:1::1", "2001:20::1"],
    "documentation": ["192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "3fff::1"],
    "benchmarks": ["198.18.0.1", "198.19.255.255"],
    "IPv4-mapped": ["::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254"],
    "IPv4-compatible and translated": ["::127.0.0.1", "::8.8.8.8", "::ffff:0:127.0.0.1"],
    "NAT64": ["64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1", "64:ff9b:1::808:808"],
    "6to4": ["2002:7f00:1::", "2002:a9fe:a9fe::1", "2002:808:808::1"],
    "Teredo": ["2001::1", "2001:0:808:808::f5ff:fffe"],
}


@pytest.mark.parametrize(("kind", "address"), [(kind, it) for kind, those in PRIVATE.items() for it in those])
def test_addresses_that_are_not_of_the_internet_are_refused(kind: str, address: str) -> None:
    assert not is_public(ip_address(address)), kind


@given(st.ip_addresses(v=4))
def test_an_address_inside_another_is_judged_as_itself(inner: IPv4Address) -> None:
    mapped, nat64 = IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96")
    for network in (mapped, nat64):
        assert is_public(network[int(inner)]) == is_public(inner)
    assert not is_public(IPv6Address((0x2002 << 112) | (int(inner) << 80)))
    if not inner.is_global:
        assert not is_public(inner)


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
