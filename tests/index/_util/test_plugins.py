"""Names of plug-ins: `module:name`, entry points of installed packages, and names that refer to nothing."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from index._util.plugins import PluginError, load_plugin, plugin_names


@pytest.fixture
def shop_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module and the metadata of an installed package that declares it."""
    (tmp_path / "shop_plugins.py").write_text("class Tools:\n    def double(x): return 2 * x\n")
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no licence')\n")
    metadata = tmp_path / "shop_plugins-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shop-plugins\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[lookalike.losses]\nshop_double = shop_plugins:Tools.double\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("shop_plugins", None)


def test_a_module_and_an_attribute_name_a_plugin(shop_plugins: Path) -> None:
    double = load_plugin("lookalike.losses", "shop_plugins:Tools.double")
    assert double is not None and double(4) == 8


def test_an_entry_point_names_a_plugin_of_its_group_only(shop_plugins: Path) -> None:
    double = load_plugin("lookalike.losses", "shop_double")
    assert double is not None and double(4) == 8
    assert plugin_names("lookalike.losses") == ["shop_double"]
    assert load_plugin("lookalike.backbones", "shop_double") is None and plugin_names("lookalike.backbones") == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent_module:Loss", "No module named 'absent_module'"),
        ("shop_plugins:Absent", "has no attribute 'Absent'"),
        ("broken_plugin:Loss", "RuntimeError: no licence"),
        (":Loss", "ValueError: Empty module name"),
        ("shop_plugins:", "has no attribute ''"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_named_with_the_reason(shop_plugins: Path, name: str, reason: str) -> None:
    with pytest.raises(PluginError) as caught:
        load_plugin("lookalike.losses", name)
    assert repr(name) in caught.value.problem and reason in caught.value.problem
