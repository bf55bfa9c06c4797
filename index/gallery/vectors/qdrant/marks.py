"""Marks of how far a collection was written, and the nodes that know them.

A node that was cut off, or has hung, takes its own copies for complete until it has learned what happened meanwhile.
Nodes learn everything in one order: one that knows a mark also knows which copies had failed before. A mark is an
alias, as each node reads those from what it knows itself; the metadata of a collection it may ask of another one.
"""

from typing import Any

from index.gallery.vectors.qdrant.nodes import Nodes, messages


class Marks:
    """The marks of one collection."""

    def __init__(self, nodes: Nodes, collection: str) -> None:
        self._nodes = nodes
        self._collection = collection
        self._required = 0
        self._current: set[int] = set()
        """Nodes that have learned of a mark which is high enough."""

    def require(self, revision: int) -> None:
        """Lets only those nodes count as current that know the mark of a revision, or of a later one."""
        self._required, self._current = revision, set()

    def is_current(self, node: int, timeout: float) -> bool:
        current, required = self._current, self._required
        if node not in current:
            known = self._nodes.ask(node, "Collections", "ListCollectionAliases", self._request(), timeout)
            if max(self._revisions(known), default=0) >= required:
                current.add(node)
        return node in current

    def replacement(self, revision: int) -> Any:
        """Returns the request that replaces all earlier marks."""
        q = messages()
        known = self._revisions(self._nodes.call("Collections", "ListCollectionAliases", self._request()))
        new = q.CreateAlias(collection_name=self._collection, alias_name=self._name(revision))
        old = [q.DeleteAlias(alias_name=self._name(earlier)) for earlier in known if earlier < revision]
        actions = [q.AliasOperations(delete_alias=one) for one in old]
        return q.ChangeAliases(actions=[q.AliasOperations(create_alias=new), *actions])

    def _name(self, revision: int) -> str:
        return f"{self._collection}@{revision}"

    def _request(self) -> Any:
        return messages().ListCollectionAliasesRequest(collection_name=self._collection)

    def _revisions(self, response: Any) -> list[int]:
        """Returns the revisions of the marks among aliases."""
        names = [one.alias_name.rpartition("@") for one in response.aliases]
        return [int(text) for name, _, text in names if name == self._collection and text.isdigit()]
