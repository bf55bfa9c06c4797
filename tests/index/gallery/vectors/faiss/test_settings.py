"""Settings of FAISS indexes: the choice of the kind, and when a compaction is due."""

from index.gallery.vectors.faiss.settings import FaissSettings


def test_the_number_of_vectors_decides_the_kind() -> None:
    settings = FaissSettings(exact_up_to=10, hnsw_up_to=20)
    assert [settings.choose_kind(count) for count in (1, 10, 11, 20, 21)] == ["exact", "exact", "hnsw", "hnsw", "ivf"]


def test_a_compaction_is_due_above_a_number_and_a_share_of_changes() -> None:
    settings = FaissSettings(min_pending=10, pending_share=4)
    assert [settings.is_compaction_due(0, pending) for pending in (10, 11)] == [False, True]
    assert [settings.is_compaction_due(80, pending) for pending in (20, 21)] == [False, True]
