"""Names, parts and dtypes change on the way; everything else stays."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch

import deltastore
from deltastore import formats
from deltastore.errors import InvalidInput, NotFound
from deltastore.formats.contents import take_apart
from deltastore.formats.rewrite import Rewrite, parse_rename
from deltastore.testing.compare import assert_same
from tests.formats.kit import training_state

W, B = torch.ones(2, 2), torch.zeros(2)


def rewritten(state: object, rule: Rewrite) -> object:
    return rule.apply(take_apart(state)).state(optimizer_names=True)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module."])
def test_wrappers_go(prefix: str) -> None:
    wrapped = {"model": OrderedDict({f"{prefix}0.weight": W, f"{prefix}0.bias": B}), "lr": 0.1}
    assert_same(
        rewritten(wrapped, Rewrite(unwrap=True)), {"model": OrderedDict({"0.weight": W, "0.bias": B}), "lr": 0.1}
    )


def test_a_real_module_of_that_name_stays() -> None:
    state = {"model": {"module.weight": W, "head.weight": W}}
    assert_same(rewritten(state, Rewrite(unwrap=True)), state)


def test_prefixes_and_expressions() -> None:
    state = {"a.h.0.w": W, "a.h.1.w": B}
    rule = Rewrite(strip=("a.",), renames=((r"^h\.(\d)", r"layers.\1"),), add="net.")
    assert_same(rewritten(state, rule), {"net.layers.0.w": W, "net.layers.1.w": B})


def test_an_optimizer_is_renamed_with_the_weights(tmp_path: Path) -> None:
    from deltastore.adapters.pytorch import Checkpointer

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with deltastore.open(tmp_path / "store") as store:
        with Checkpointer(store, model=model, optimizer=optimizer) as checkpointer:
            checkpointer.restore()
            checkpointer.step(0)
        before = store.at("latest").to_state_dict()
        named = rewritten(store.at("latest"), Rewrite(only=("optimizer", "model"), add="net."))
        assert list(named["optimizer"]["state"]) == ["net.weight", "net.bias"]  # type: ignore[index]
        plain = Rewrite(only=("optimizer",), add="net.").apply(take_apart(store.at("latest"))).state()
    assert_same(plain, {"optimizer": before["optimizer"]})


def test_integer_keys_and_what_is_inside_an_optimizer_stay() -> None:
    state = training_state()
    assert_same(rewritten(state, Rewrite(add="x."))["optimizer"], state["optimizer"])  # type: ignore[index]


def test_two_names_in_one_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"'w' would stand for a\.w and for b\.w"):
        rewritten({"a.w": W, "b.w": B}, Rewrite(renames=(("^[ab].", ""),)))
    for rule in (("(", "x"), ("a", r"\7")):
        with pytest.raises(InvalidInput, match="no regular expression"):
            rewritten({"a": W}, Rewrite(renames=(rule,)))


def test_parts() -> None:
    state = {"model": {"h.0.w": W, "h.1.w": B, "ln": B}, "optimizer": {"state": {}}, "step": 3}
    assert_same(rewritten(state, Rewrite(only=("model/h.1", "step"))), {"model": {"h.1.w": B}, "step": 3})
    with pytest.raises(NotFound, match=r"only ema: .* at its top: model, optimizer, step"):
        rewritten(state, Rewrite(only=("model", "ema")))


def test_a_cast_rounds_to_the_nearest_and_says_so(tmp_path: Path) -> None:
    weight = torch.tensor([1.0, 1.00390625, -0.0, float("inf"), 1e-45])
    state = {"w": weight, "tied": weight, "half": torch.ones(2, dtype=torch.float16), "n": torch.arange(2)}
    contents = Rewrite(cast="bfloat16").apply(take_apart(state))
    kinds = {loss.path[0]: loss.text for loss in formats.losses(contents, tmp_path / "x.h5") if loss.kind == "cast"}
    assert kinds["w"].startswith(
        "float32 becomes bfloat16, rounded to the nearest: off by 0.00391 of an element at most"
    )
    assert "float16 becomes bfloat16" in kinds["half"]
    formats.save(contents, tmp_path / "x.safetensors")
    loaded = formats.load(tmp_path / "x.safetensors")
    assert_same(loaded["w"], weight.to(torch.bfloat16))
    assert loaded["tied"] is loaded["w"]
    assert loaded["n"].dtype == torch.int64
    wide = Rewrite(cast="float64").apply(take_apart(state))
    assert {loss.text for loss in formats.losses(wide, tmp_path / "x.npz") if loss.kind == "cast"} == {
        "float32 becomes float64, exactly",
        "float16 becomes float64, exactly",
    }
    formats.save(Rewrite(cast="float32").apply(take_apart({"w": weight})), tmp_path / "same.npz", strict=True)
    with pytest.raises(InvalidInput, match="floating-point dtypes only"):
        Rewrite(cast="int8").apply(take_apart(state))


def test_an_inexact_commit_is_told(tmp_path: Path) -> None:
    weight = torch.randn(100, 100)
    with deltastore.open(tmp_path / "store") as store:
        store.set_policy(deltastore.Policy(budget=0.05))
        for step in range(2):
            store.commit(step, {"model": {"w": weight + step * torch.randn(100, 100) / 100}}).wait()
        state = store.at(1)
        assert not state.fidelity.exact
        (loss,) = (loss for loss in formats.losses(state, tmp_path / "x.safetensors") if loss.kind == "fidelity")
        assert loss.text == f"within {state.fidelity.bound('model', 'w'):.3g} of the training state"
        with pytest.raises(InvalidInput, match="fidelity"):
            formats.save(state, tmp_path / "x.h5", strict=True)
        formats.save(state, tmp_path / "x.h5")
        bounds = formats.open_contents(tmp_path / "x.h5").bounds
        assert bounds == {("model", "w"): state.fidelity.bound("model", "w")}
        renamed = Rewrite(add="n.").apply(take_apart(state))
        assert renamed.bounds == {("model", "n.w"): state.fidelity.bound("model", "w")}


def test_a_rule_as_text() -> None:
    assert parse_rename(r"^h\.=layers.") == (r"^h\.", "layers.")
    assert parse_rename(r"a\=b=c") == ("a=b", "c")
    with pytest.raises(InvalidInput, match="PATTERN=REPLACEMENT"):
        parse_rename("nothing")
