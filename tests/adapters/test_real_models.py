"""Real model layouts, random weights: every step of a short training comes back bit for bit, tied weights tied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import deltastore
from deltastore.adapters.pytorch import Checkpointer
from deltastore.testing.compare import assert_same

STEPS = 3
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}

Build = Callable[[], torch.nn.Module]

MODELS: dict[str, Build] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=200, n_positions=32)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(vocab_size=200, **SMALL)),
    "llama-bf16": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(vocab_size=200, num_key_value_heads=2, tie_word_embeddings=True, **SMALL)
    ).bfloat16(),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=200)
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(vocab_size=200, num_key_value_heads=2, num_local_experts=4, **SMALL)
    ),
    "resnet": lambda: hf.ResNetForImageClassification(
        hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1])
    ),
}


def loss_of(name: str, model: torch.nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    if name == "resnet":
        images = torch.randn(2, 3, 32, 32, generator=generator)
        return model(images).logits.float().square().mean()  # type: ignore[no-any-return]
    tokens = torch.randint(0, 200, (2, 16), generator=generator)
    more = {"decoder_input_ids": tokens} if name == "t5" else {}
    return model(input_ids=tokens, labels=tokens, **more).loss  # type: ignore[no-any-return]


def tied_groups(model: torch.nn.Module) -> list[set[str]]:
    """Return the names of the weights that are one in memory."""
    by_address: dict[int, set[str]] = {}
    for name, tensor in model.state_dict().items():
        if tensor.numel():
            by_address.setdefault(tensor.data_ptr(), set()).add(name)
    return [names for names in by_address.values() if len(names) > 1]


@pytest.mark.parametrize("name", MODELS)
def test_every_step_of_a_real_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    truth = []
    with (
        deltastore.open(tmp_path / "store") as store,
        Checkpointer(store, model=model, optimizer=optimizer) as ckpt,
    ):
        assert ckpt.restore() == 0
        for step in range(STEPS):
            torch.autograd.backward(loss_of(name, model, step))
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step)
            truth.append({key: tensor.detach().clone() for key, tensor in model.state_dict().items()})
    with deltastore.open(tmp_path / "store", "r") as store:
        assert store.verify(deep=True).ok
        for step, expected in enumerate(truth):
            assert_same(expected, dict(store.at(step).to_state_dict()["model"]))
        fresh = MODELS[name]()
        assert store.at(STEPS - 1).load_into(model=fresh).ok
        assert_same(truth[-1], dict(fresh.state_dict()))
        assert tied_groups(fresh) == tied_groups(model)
        with torch.device("meta"):
            empty = MODELS[name]()
        assert store.at(0).load_into(model=empty).ok
        assert_same(truth[0], dict(empty.state_dict()))
