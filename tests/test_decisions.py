"""Every strategy and product, with every option and mode, is decided: equal to the unsharded model, or refused.

What is called equal here is proved by test_equivalence, test_equivalence_grid and test_product, which take up the same
names and options; docs/strategies.md shows the table.
"""

import msgspec
import pytest

from perf.measure.connection import ROOT
from strategies.rules import refusal
from strategies.spec import ComputeDtype, LinkProfile, Mode, Options, StrategyName
from tests.test_equivalence import small_case
from tests.test_product import MORE, PRODUCTS, case

PAGE = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
NAMES = [*map(str, StrategyName), *PRODUCTS, *MORE]
COLUMNS = {
    "eager": (Mode.EAGER, Options()),
    "checkpointed": (Mode.EAGER, Options(activation_checkpointing=True)),
    "bf16 state": (Mode.EAGER, Options(optimizer_state=ComputeDtype.BFLOAT16)),
    "clipped": (Mode.EAGER, Options(clip_norm=1.0)),
    "compile": (Mode.COMPILE, Options()),
    "compile, async": (Mode.COMPILE, Options(async_tp=True)),
    "cudagraph": (Mode.CUDAGRAPH, Options()),
}
REASONS = {
    "zb": "runs each backward in two parts",
    "sp": "async TP splits the products of `tp_sp`",
    "host": "the host waits in every layer of `ep`",
}


def decision(name: str, column: str) -> str:
    """`=`, `GPU` where no CPU can tell, or the short name of the reason of a refusal."""
    mode, options = COLUMNS[column]
    of = case(name) if "." in name else small_case(StrategyName(name))
    layout = msgspec.structs.replace(of.layout, mode=mode, options=options, link=LinkProfile.NATIVE)
    if reason := refusal(layout):
        (short,) = [short for short, text in REASONS.items() if text in reason]
        return short
    return "GPU" if mode is Mode.CUDAGRAPH else "="


def row(name: str) -> str:
    return f"| `{name}` | {' | '.join(decision(name, column) for column in COLUMNS)} |"


@pytest.mark.parametrize("name", NAMES)
def test_page_shows_what_is_decided(name):
    assert row(name) in PAGE


def test_page_names_the_columns_and_the_reasons():
    assert f"| strategy or product | {' | '.join(COLUMNS)} |" in PAGE
    assert all(f"`{short}`: " in PAGE for short in REASONS)
