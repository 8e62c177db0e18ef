"""Room strategies/registry.py: every strategy is tested and explained; the equivalence tests prove what it makes."""

import ast
import itertools
from pathlib import Path

import pytest

from strategies import spec
from strategies.registry import device_of
from strategies.spec import StrategyName
from tests.test_equivalence import NUM_RANKS


def doc_lines(class_name):
    """First line of the text under each member of a class in spec.py."""
    tree = ast.parse(Path(spec.__file__).read_text())
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name).body
    found = {}
    for node, following in itertools.pairwise(body):
        if isinstance(node, ast.Assign) and isinstance(following, ast.Expr):
            found[node.value.value] = ast.literal_eval(following.value).splitlines()[0]
    return found


@pytest.mark.parametrize("strategy", StrategyName)
def test_strategy_has_an_equivalence_test_over_more_than_one_rank(strategy):
    assert NUM_RANKS[strategy] == 1 if strategy is StrategyName.SINGLE else NUM_RANKS[strategy] >= 2


@pytest.mark.parametrize("strategy", StrategyName)
def test_strategy_has_a_doc_line(strategy):
    assert len(doc_lines("StrategyName").get(strategy.value, "").split()) >= 5


@pytest.mark.parametrize(
    ("kind", "local_rank", "device"), [("cpu", 3, "cpu"), ("cuda", 3, "cuda:3"), ("cuda", 0, "cuda:0")]
)
def test_rank_gets_its_own_gpu_or_the_cpu(kind, local_rank, device):
    assert str(device_of(kind, local_rank)) == device
