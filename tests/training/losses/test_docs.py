"""docs/loss.md against the code: its example runs, and its table holds every setting."""

import re
from pathlib import Path
from typing import Any

from training.losses.proxy_isa import ProxyISALoss, ProxyISASettings
from training.losses.registry import default_settings, loss_names

PAGE = (Path(__file__).parents[3] / "docs" / "loss.md").read_text(encoding="utf-8")


def test_the_example_trains_with_queue_and_filter_on() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    loss = names["loss"]
    assert isinstance(loss, ProxyISALoss)
    assert loss.hardness.steps == 4 * 8 and loss.hardness.filter_is_on
    assert loss.hardness.class_counts[:8].sum() > 0
    figures = loss.diagnostics()
    assert {"s_avg", "sigma", "easy", "gradient_positive"} < set(figures)
    assert all(f"`{name}`" in PAGE for name in figures), "the page explains every figure"


def test_the_table_lists_every_setting_with_its_default() -> None:
    table = dict(re.findall(r"^\| `(\w+)` \| ([^\s`]+) \|", PAGE, re.MULTILINE))
    assert table == {name: written(field.default) for name, field in ProxyISASettings.model_fields.items()}


def written(default: object) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default).lower()


def test_the_page_names_every_loss() -> None:
    assert all(f"`{name}`" in PAGE for name in loss_names())


def test_the_page_lists_the_settings_of_every_loss() -> None:
    common = default_settings("proxy_isa")
    for name in loss_names():
        settings = default_settings(name)
        if shares := "volume" in settings:
            missing = [f"`{key}`" for key in sorted(common.keys() - settings.keys())]
            settings = {key: value for key, value in settings.items() if key not in common}
        own = ", ".join(f"{key}={written(default)}" for key, default in settings.items())
        cells = [f"`{own}`"] if own else []
        if shares:
            cells.append("those of Proxy-ISA [above](#settings)" + (f" but {' and '.join(missing)}" if missing else ""))
        assert f"| `{name}` | {', '.join(cells)} |" in PAGE
