"""Model folders: transformers loads what is written, with the same outputs, bit for bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import deltastore
from deltastore import formats
from deltastore.errors import Corruption, InvalidInput
from deltastore.formats.series import find_series, import_series
from deltastore.testing.compare import assert_same

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL = {"vocab_size": 200}
MODELS: dict[str, Any] = {
    "gpt2": lambda t: t.GPT2LMHeadModel(t.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=32, **SMALL)),
    "bert": lambda t: t.BertForMaskedLM(
        t.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, **SMALL)
    ),
    "t5": lambda t: t.T5ForConditionalGeneration(
        t.T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0, **SMALL)
    ),
    "llama bf16": lambda t: t.LlamaForCausalLM(
        t.LlamaConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=64,
            tie_word_embeddings=True,
            **SMALL,
        )
    ).to(torch.bfloat16),
    "mixtral": lambda t: t.MixtralForCausalLM(
        t.MixtralConfig(
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=64,
            num_local_experts=4,
            **SMALL,
        )
    ),
}
# transformers itself uses what newer versions of Python and torch warn of.
pytestmark = pytest.mark.filterwarnings("default")


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(1, 9).reshape(1, 8), **_decoder(model)).logits
    return result


def _decoder(model: Any) -> dict[str, torch.Tensor]:
    return {"decoder_input_ids": torch.zeros(1, 1, dtype=torch.long)} if model.config.is_encoder_decoder else {}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard_bytes", [None, 30_000])
def test_in_and_out_and_loaded_by_transformers(tmp_path: Path, name: str, shard_bytes: int | None) -> None:
    model = MODELS[name](transformers)
    model.save_pretrained(tmp_path / "from")
    state = formats.load(tmp_path / "from")
    assert {"config.json"} <= state["files"].keys()
    with deltastore.open(tmp_path / "store") as store:
        optimizer = torch.optim.AdamW(model.parameters())
        full = {**state, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}
        store.commit(5, full).wait()
        formats.save(store.at(5), tmp_path / "to", format="huggingface", strict=True, shard_bytes=shard_bytes)
    loaded, info = type(model).from_pretrained(tmp_path / "to", output_loading_info=True, dtype="auto")
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    # Against what the library loads of its own: buffers that are not saved may differ from the model in memory.
    assert torch.equal(logits(loaded), logits(type(model).from_pretrained(tmp_path / "from", dtype="auto")))
    again = formats.load(tmp_path / "to")
    assert_same(again["model"], model.state_dict())
    assert_same(again["optimizer"], optimizer.state_dict())
    assert again["step"] == 5
    assert again["files"] == state["files"]
    assert any(name.endswith("index.json") for name in map(str, (tmp_path / "to").iterdir())) == bool(shard_bytes)


def test_tied_weights_are_one_tensor_again(tmp_path: Path) -> None:
    model = MODELS["t5"](transformers)
    formats.save({"model": model.state_dict(), "files": {"config.json": b"{}"}}, tmp_path / "m", format="huggingface")
    loaded = formats.load(tmp_path / "m")["model"]
    assert loaded["shared.weight"] is loaded["lm_head.weight"] is loaded["encoder.embed_tokens.weight"]


def test_what_a_folder_needs_is_said(tmp_path: Path) -> None:
    (loss,) = formats.losses({"w": torch.ones(2)}, tmp_path / "m", format="huggingface")
    assert (loss.kind, loss.is_restored) == ("file", False)
    with pytest.raises(InvalidInput, match=r"no config\.json"):
        formats.save({"w": torch.ones(2)}, tmp_path / "m", format="huggingface", strict=True)
    with pytest.raises(InvalidInput, match="weights by name"):
        formats.save({"a": {"b": torch.ones(2)}}, tmp_path / "m", format="huggingface")
    evil = {"model": {"w": torch.ones(2)}, "files": {"../evil.json": b"{}"}}
    with pytest.raises(InvalidInput, match="not in the folder"):
        formats.save(evil, tmp_path / "m", format="huggingface")
    assert list(tmp_path.iterdir()) == []


def test_code_and_pickles_are_not_carried_along(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    formats.save(
        {"model": {"w": torch.ones(2)}, "files": {"config.json": json.dumps({"a": 1}).encode()}},
        folder,
        format="huggingface",
    )
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    (folder / "training_args.bin").write_bytes(b"\x80\x02cos\nsystem\n")
    assert formats.load(folder)["files"].keys() == {"config.json"}


@pytest.mark.parametrize("format_name", ["safetensors", "hdf5", "numpy", "zarr", "dcp", "torch"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_a_training_of_a_real_model_through_every_format(tmp_path: Path, name: str, format_name: str) -> None:
    model = MODELS[name](transformers)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(1, 9).reshape(1, 8), **_decoder(model)).logits.square().mean().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), "step": 1}
    formats.save(state, tmp_path / "state", format=format_name)
    loaded = formats.load(tmp_path / "state")
    assert_same(loaded, state)
    fresh = MODELS[name](transformers)
    fresh.load_state_dict(loaded["model"])
    torch.optim.AdamW(fresh.parameters()).load_state_dict(loaded["optimizer"])
    assert torch.equal(logits(fresh), logits(model))


def trainer_folder(folder: Path) -> dict[str, Any]:
    """Leave a folder as Trainer does, and return what it holds."""
    model = MODELS["gpt2"](transformers)
    model.save_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    logits_now = model(input_ids=torch.arange(1, 9).reshape(1, 8)).logits
    logits_now.square().mean().backward()
    optimizer.step()
    scheduler.step()
    model.save_pretrained(folder)
    random_state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - what Trainer stores
        "cpu": torch.random.get_rng_state(),
    }
    parts = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "rng_state": random_state}
    for name, part in parts.items():
        torch.save(part, folder / f"{name}.{'pth' if name == 'rng_state' else 'pt'}")
    torch.save(random_state, folder / "rng_state_1.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1, "log_history": []}))
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    return {**parts, "model": weights, "rng_state_1": random_state}


def test_a_folder_of_trainer_comes_in_and_goes_on(tmp_path: Path) -> None:
    wanted = trainer_folder(tmp_path / "checkpoint-1")
    with deltastore.open(tmp_path / "store") as store:
        import_series(store, find_series([str(tmp_path / "checkpoint-1")], steps_from_name=True))
        found = store.at(1).to_state_dict()
        assert_same({name: found[name] for name in wanted}, {**wanted, "model": dict(sorted(wanted["model"].items()))})
        out = tmp_path / "out" / "checkpoint-1"
        out.parent.mkdir()
        formats.save(store.at(1), out, format="huggingface")
    assert {path.name for path in out.iterdir()} == {path.name for path in (tmp_path / "checkpoint-1").iterdir()}
    # As Trainer resumes.
    model = transformers.GPT2LMHeadModel.from_pretrained(out)
    assert_same({name: model.state_dict()[name] for name in wanted["model"]}, wanted["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(torch.load(out / "optimizer.pt", weights_only=True))
    assert_same(optimizer.state_dict(), wanted["optimizer"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scheduler.load_state_dict(torch.load(out / "scheduler.pt", weights_only=True))
    state = torch.load(out / "rng_state.pth", weights_only=True)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.random.set_rng_state(state["cpu"])
    assert random.getstate() == wanted["rng_state"]["python"]
    assert_same(np.random.get_state(), wanted["rng_state"]["numpy"])  # noqa: NPY002
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 1


ADAPTER = {
    "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight": torch.randn(4, 32),
    "base_model.model.transformer.h.0.attn.c_attn.lora_B.weight": torch.randn(96, 4),
}


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_folder_of_an_adapter_alone(tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    formats.save(ADAPTER, folder / f"adapter_model.{suffix}")
    (folder / "adapter_config.json").write_text("{}")
    assert formats.format_of(str(folder)).name == "huggingface"
    state = formats.load(folder)
    assert_same(state, {"adapter": ADAPTER, "files": {"adapter_config.json": b"{}"}})
    assert formats.losses(state, tmp_path / "out", format="huggingface") == ()
    formats.save(state, tmp_path / "out", format="huggingface", strict=True, shard_bytes=1000)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    formats.save(state, tmp_path / "out", format="huggingface")  # in place of the one before
    assert_same(formats.load(tmp_path / "out"), state)
    (loss,) = formats.losses({"adapter": ADAPTER}, tmp_path / "out", format="huggingface")
    assert "adapter_config.json" in loss.text


def test_a_model_with_an_adapter_beside_it(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.ones(3)},
        "adapter": ADAPTER,
        "files": {"adapter_config.json": b"{}", "config.json": b"{}"},
    }
    formats.save(state, tmp_path / "both", format="huggingface", strict=True)
    assert_same(formats.load(tmp_path / "both"), state)


def test_peft_loads_an_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    torch.manual_seed(0)
    base = MODELS["gpt2"](transformers)
    base.save_pretrained(tmp_path / "base")
    tuned = peft.get_peft_model(base, config)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    tuned.save_pretrained(tmp_path / "checkpoint-3")
    with deltastore.open(tmp_path / "store") as store:
        import_series(store, find_series([str(tmp_path / "checkpoint-3")], steps_from_name=True))
        formats.save(store.at(3), tmp_path / "out", format="huggingface", strict=True)
    fresh = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "out")
    assert torch.equal(logits(loaded), logits(tuned))


def test_arrays_of_objects_in_torch_files_are_refused(tmp_path: Path) -> None:
    for name, array in (("o", np.array([{}], dtype=object)), ("u", np.array(["text"])), ("t", np.zeros(1, "M8[s]"))):
        torch.save({"a": array}, tmp_path / f"{name}.pt")
        with pytest.raises((InvalidInput, Corruption)):
            formats.open_contents(tmp_path / f"{name}.pt")
