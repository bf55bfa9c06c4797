"""Network addresses: which of them are public, and which others an operator allows."""

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple, Self

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# The last label must not be a number: resolvers read 2130706433, 0x7f.1 and 0177.0.0.1 as addresses.
HOST_NAME = re.compile(r"(?=.{1,253}$)([a-z0-9_-]{1,63}\.)*(?!\d+$|0x[0-9a-f]*$)[a-z0-9_-]{1,63}")

_NAT64 = IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = IPv6Network("2000::/3")
# Not public, although some versions of `ipaddress` call them global: protocol assignments, relays and tunnels with an
# embedded IPv4 address (6to4, Teredo), documentation.
_REFUSED = [ip_network(it) for it in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20")]


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet; an embedded IPv4 address is checked too."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped:
            return is_public(address.ipv4_mapped)
        if address in _NAT64:
            return is_public(IPv4Address(address.packed[-4:]))
        if address not in _GLOBAL_UNICAST:
            return False
    special = address.is_multicast or address.is_reserved or any(address in network for network in _REFUSED)
    return address.is_global and not special


class ForbiddenAddress(OSError):
    """A connection that is not allowed. Its text does not depend on what is at the address."""

    def __init__(self) -> None:
        super().__init__("the address is not public")


class AllowedAddresses(NamedTuple):
    """The public addresses, and the hosts and networks that an operator allows in addition."""

    hosts: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        """Parses host names, IP addresses and networks such as 10.0.0.0/8; raises ValueError for anything else."""
        hosts, networks = [], []
        for text in texts:
            name = _normal_name(text)
            if HOST_NAME.fullmatch(name):
                hosts.append(name)
            else:
                try:
                    networks.append(ip_network(text, strict=False))
                except ValueError:
                    raise ValueError(
                        f"{text!r} is not a host name, an IP address or a network such as 10.0.0.0/8"
                    ) from None
        return cls(frozenset(hosts), tuple(networks))

    def allows_host(self, name: str) -> bool:
        """Whether a host is allowed by its name, wherever that leads."""
        return _normal_name(name) in self.hosts

    def allows(self, address: str) -> bool:
        """Whether a connection to an IP address is allowed."""
        found = ip_address(address)
        inner = (found.ipv4_mapped if isinstance(found, IPv6Address) else None) or found
        return is_public(found) or any(inner in network for network in self.networks)


def _normal_name(host: str) -> str:
    return host.lower().removesuffix(".")
