"""Model folders: transformers loads what is written, with the same outputs, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import deltastore
from deltastore import formats
from deltastore.errors import InvalidInput
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
