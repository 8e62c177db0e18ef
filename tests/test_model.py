"""Room strategies/model.py: the reference has the promised size, weights, attention, loss; checkpoints fit or not."""

import math

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3ForCausalLM

from strategies import model as room
from strategies.batch import IGNORE_INDEX, Batch, from_ids, synthetic_batch
from strategies.layout import default_workload
from strategies.loss import loss_share
from strategies.model import ATTENTION, build_model, forward, initialise, load_checkpoint
from strategies.shapes import SIZES
from tests.equivalence import CPU, SHAPE, sharpen

UNTIED = msgspec.structs.replace(SHAPE, tied_embeddings=False)


def weights(shape=SHAPE, seed=0):
    return dict(build_model(shape, device=CPU, seed=seed).named_parameters())


def random_ids(shape=SHAPE, sequences=2, length=16):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(shape.vocab_size, (sequences, length), generator=generator)


def batch_of(ids):
    """Sequences whose labels nobody looks at."""
    return from_ids(ids, ids)


def batch_with_losses(*tokens):
    """A sequence in which each token has this loss, None: its label does not count. Two words; word 0 is right."""
    labels = torch.tensor([[IGNORE_INDEX if loss is None else 0 for loss in tokens]])
    wrong = [0.0 if loss is None else math.log(math.expm1(loss)) for loss in tokens]
    logits = torch.stack([torch.zeros(len(tokens)), torch.tensor(wrong)], dim=-1)[None].requires_grad_()
    return logits, from_ids(torch.zeros_like(labels), labels)


def shard_of(batch, positions):
    """Some positions of all sequences, as context parallelism cuts them: normalised by the global batch."""
    return Batch(
        ids_BS=batch.ids_BS[:, positions],
        labels_BS=batch.labels_BS[:, positions],
        positions_BS=batch.positions_BS[:, positions],
        num_label_tokens=batch.num_label_tokens,
    )


@pytest.mark.parametrize("size", SIZES)
def test_model_of_each_size_has_as_many_parameters_as_its_shape_says(size, monkeypatch):
    monkeypatch.setattr(room, "initialise", lambda *_, **__: None)  # the meta device holds no values
    model = build_model(SIZES[size], device=torch.device("meta"), seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == SIZES[size].num_parameters
    is_tied = model.get_parameter("model.embed_tokens.weight") is model.get_parameter("lm_head.weight")
    assert is_tied == SIZES[size].tied_embeddings
    assert model.training


def test_weights_depend_on_seed_and_name_not_on_the_order_of_creation():
    forth = nn.ModuleDict({"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)})
    back = nn.ModuleDict({"second": nn.Linear(8, 8), "first": nn.Linear(8, 8)})
    for module in (forth, back):
        torch.manual_seed(len(repr(module)))
        initialise(module, seed=3)
    expected = dict(forth.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in back.named_parameters())
    assert not torch.equal(expected["first.weight"], expected["second.weight"])


@pytest.mark.parametrize("other", [msgspec.structs.replace(SHAPE, num_layers=3), UNTIED], ids=["deeper", "untied"])
def test_weights_of_shared_names_are_those_of_any_other_layout(other):
    mine, theirs = weights(), weights(other)
    assert mine.keys() < theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_weights_of_another_seed_differ_everywhere_but_in_the_norms():
    mine, theirs = weights(seed=0), weights(seed=1)
    same = {name for name in mine if torch.equal(mine[name], theirs[name])}
    assert same == {name for name in mine if "norm" in name}


def test_weights_are_normal_with_std_002_and_norms_one():
    norms = {name: weight for name, weight in weights(SIZES["tiny"]).items() if "norm" in name}
    assert len(norms) == 4 * SIZES["tiny"].num_layers + 1
    assert all((weight == 1).all() for weight in norms.values())
    for name, weight in weights(SIZES["tiny"]).items():
        if name not in norms:
            assert weight.std().item() == pytest.approx(room.INIT_STD, rel=0.05), name
            assert weight.mean().abs().item() < 4 * room.INIT_STD / math.sqrt(weight.numel()), name
            assert weight.dtype is torch.float32


def test_fresh_model_starts_at_the_expected_loss():
    shape, workload = SIZES["tiny"], default_workload("tiny")
    batch = synthetic_batch(shape, workload, step=0, device=CPU)
    loss = loss_share(forward(build_model(shape, device=CPU, seed=0), batch), batch)
    assert loss.item() == pytest.approx(shape.expected_start_loss, abs=0.3)


@pytest.mark.parametrize("changed", [0, 7, 15])
def test_token_is_seen_by_itself_and_all_later_positions_and_by_no_earlier_one(changed):
    model = build_model(SHAPE, device=CPU, seed=0)
    sharpen(model)
    before = random_ids()
    after = before.clone()
    after[:, changed] = (before[:, changed] + 1) % SHAPE.vocab_size
    with torch.no_grad():
        moved_BS = (forward(model, batch_of(after)) - forward(model, batch_of(before))).abs().amax(-1)
    assert (moved_BS[:, :changed] == 0).all()
    assert (moved_BS[:, changed:] > 1e-5).all()


def hf_logits(model, batch):
    """By Hugging Face's own forward, with its masks."""
    return Qwen3ForCausalLM.forward(model, input_ids=batch.ids_BS, position_ids=batch.positions_BS).logits


@pytest.mark.parametrize("theirs", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", [SHAPE, SIZES["tiny"], UNTIED], ids=["small", "tiny", "untied"])
def test_model_equals_that_of_transformers(theirs, shape):
    batch = batch_of(random_ids(shape))
    logits, gradients = [], []
    for name in (ATTENTION, theirs):
        model = build_model(shape, device=CPU, seed=0)
        sharpen(model)
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name
        logits.append(forward(model, batch) if name == ATTENTION else hf_logits(model, batch))
        logits[-1].square().mean().backward()
        gradients.append(model.get_parameter("model.layers.0.self_attn.k_proj.weight").grad)
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    assert (gradients[0] - gradients[1]).abs().max() < 1e-4 * gradients[1].abs().max()


@pytest.mark.parametrize(
    ("tokens", "shards", "mean"),
    [
        ((2.0,) * 6 + (None,) * 4 + (4.0,) * 2, (slice(0, 6), slice(6, 12)), 20 / 8),
        ((2.0,) * 6 + (None,) * 6, (slice(0, 6), slice(6, 12)), 2.0),
        ((3.0, 1.0, None, 2.0, 6.0), (slice(0, 1), slice(1, 2), slice(2, 5)), 3.0),
    ],
    ids=["uneven", "one-shard-without-labels", "three"],
)
def test_loss_shares_of_uneven_shards_add_up_to_the_mean_over_all_tokens(tokens, shards, mean):
    logits, batch = batch_with_losses(*tokens)
    shares = [loss_share(logits[:, shard], shard_of(batch, shard)) for shard in shards]
    torch.stack(shares).sum().backward()
    assert sum(share.item() for share in shares) == pytest.approx(mean, rel=1e-6)
    assert loss_share(logits, batch).item() == pytest.approx(mean, rel=1e-6)
    assert torch.isfinite(logits.grad).all()


def test_batch_without_a_label_has_loss_zero_and_zero_gradients():
    model = build_model(SHAPE, device=CPU, seed=0)
    ids = random_ids()
    batch = from_ids(ids, torch.full_like(ids, IGNORE_INDEX))
    loss = loss_share(forward(model, batch), batch)
    loss.backward()
    assert loss.item() == 0.0
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_loss_is_computed_in_float32_at_least(dtype, computed):
    logits, batch = batch_with_losses(2.0, 4.0)
    assert loss_share(logits.to(dtype), batch).dtype is computed


def stored(folder, shape=SHAPE, seed=7, dtype=torch.float32, **changes):
    """A checkpoint in two files; `changes`: other tensors by name with `__` for dots, None: left out."""
    tensors = {name: weight.detach().to(dtype) for name, weight in weights(shape, seed).items()}
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    whole = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    save_file(dict(whole[:5]), folder / "model-00001-of-00002.safetensors")
    save_file(dict(whole[5:]), folder / "model-00002-of-00002.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoint_round_trip_gives_the_stored_weights_in_float32(tmp_path, dtype):
    stored(tmp_path, dtype=dtype, lm_head__weight=torch.zeros(SHAPE.vocab_size, SHAPE.hidden_size))
    loaded = dict(build_model(SHAPE, device=CPU, seed=0, checkpoint=tmp_path).named_parameters())
    for name, weight in weights(seed=7).items():
        assert loaded[name].dtype is torch.float32
        assert torch.equal(loaded[name], weight.to(dtype).float()), name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__norm__weight": None}, r"missing \['model\.norm\.weight'\], shapes \[\]"),
        (
            {"model__norm__weight": torch.ones(31)},
            r"missing \[\], shapes \['model\.norm\.weight \(31,\) is not \(32,\)",
        ),
        (
            {"model__layers__1__mlp__up_proj__weight": torch.ones(32, 64)},
            r"model\.layers\.1\.mlp\.up_proj\.weight \(32, 64\) is not \(64, 32\)",
        ),
    ],
    ids=["missing", "wrong-length", "transposed"],
)
def test_checkpoint_that_does_not_fit_is_refused_with_names_and_shapes(tmp_path, changes, words):
    model = build_model(SHAPE, device=CPU, seed=0)
    with pytest.raises(ValueError, match=words):
        load_checkpoint(model, stored(tmp_path, **changes))
    expected = weights(seed=0)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


def test_checkpoint_of_another_shape_is_refused(tmp_path):
    stored(tmp_path, shape=msgspec.structs.replace(SHAPE, num_layers=1))
    with pytest.raises(ValueError, match=r"missing \['model\.layers\.1\.input_layernorm\.weight'"):
        build_model(SHAPE, device=CPU, seed=0, checkpoint=tmp_path)


@pytest.mark.parametrize("name", ["", "nowhere"], ids=["empty", "absent"])
def test_folder_without_a_checkpoint_is_refused_by_name(tmp_path, name):
    with pytest.raises(ValueError, match=r"no \*\.safetensors in .*; pass a folder"):
        build_model(SHAPE, device=CPU, seed=0, checkpoint=tmp_path / name)
