"""Addresses: which are public, through every form that hides another one, and which an operator allows in addition."""

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from index._util.addresses import AllowedAddresses, is_public


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


def test_hosts_addresses_and_networks_are_allowed_in_addition_to_the_public_ones() -> None:
    allowed = AllowedAddresses.parse(["Intranet.Example.", "minio", "10.1.2.3/8", "192.168.0.7", "fd00::/16"])
    assert allowed.allows_host("intranet.example") and allowed.allows_host("MINIO.")
    assert not allowed.allows_host("other.intranet.example")
    for address in ("8.8.8.8", "10.255.0.1", "::ffff:10.0.0.1", "192.168.0.7", "fd00::1"):
        assert allowed.allows(address), address
    for address in ("127.0.0.1", "192.168.0.8", "::ffff:192.168.0.8", "169.254.169.254", "fd01::1", "fe80::1%eth0"):
        assert not allowed.allows(address), address
    assert not AllowedAddresses().allows("10.0.0.1")


@pytest.mark.parametrize("text", ["", "http://intranet", "intranet:80", "10.0.0.0/33", "*.example.com", "0x7f.1"])
def test_anything_else_is_not_an_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a host name, an IP address or a network such as 10\.0\.0\.0/8"):
        AllowedAddresses.parse([text])
