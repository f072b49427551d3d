"""O11, O26: resuming elsewhere: another number of ranks, another device, little memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from deltastore.errors import InvalidInput
from tests.cases.kit import Store, full, mlp, raises, same, train

# ---------------------------------------------------------------- O11: another world size


def shard(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Cut as ZeRO does: flatten, pad, cut evenly."""
    size = -(-tensor.numel() // world)
    flat = torch.cat([tensor.flatten(), tensor.new_zeros(size * world - tensor.numel())])
    return flat[rank * size : (rank + 1) * size].clone()


def join(parts: list[torch.Tensor], shape: list[int]) -> torch.Tensor:
    return torch.cat(parts)[: torch.Size(shape).numel()].view(shape)


WHOLE = {"w": torch.arange(10_007.0), "exp_avg": torch.randn(7, 11), "tiny": torch.tensor([1.0, 2.0])}


def test_shards_of_four_ranks_make_up_the_whole(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        shards = {rank: {name: shard(tensor, rank, 4) for name, tensor in WHOLE.items()} for rank in range(4)}
        shapes = {name: list(tensor.shape) for name, tensor in WHOLE.items()}
        store.save(1, {"optim": {"world": 4, "shape": shapes, "rank": shards}})
        store.wait()
        back = store.read(1)["optim"]
        logical = {
            name: join([back["rank"][rank][name] for rank in range(back["world"])], back["shape"][name])
            for name in WHOLE
        }
        same(WHOLE, logical)
        for world in (1, 2, 3, 6, 16):
            for tensor in logical.values():
                same(tensor, join([shard(tensor, rank, world) for rank in range(world)], list(tensor.shape)))


@pytest.mark.parametrize("world", [1, 2, 3, 6, 16, 64])
def test_a_rank_reads_its_own_rows_of_a_whole_tensor(tmp_path: Path, world: int) -> None:
    with Store(tmp_path / "store") as store:
        store.save(1, {"optim": WHOLE})
        changed = {name: tensor + 1 for name, tensor in WHOLE.items()}
        store.save(2, {"optim": changed})
        store.wait()
        for name, tensor in changed.items():
            lazy = store.product.at(2)["optim", name]
            rows = -(-len(lazy) // world)
            parts = [lazy[rank * rows : (rank + 1) * rows] for rank in range(world)]  # also more ranks than rows
            same(tensor, torch.cat(parts))


def test_a_rank_whose_state_is_missing_is_named(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        store.save(1, {"rng": {rank: torch.get_rng_state() for rank in range(2)}})
        store.wait()
        error = raises(lambda: store.product.at(1)["rng", 2], LookupError)
        assert "rng/[2]" in str(error)
        assert store.product.at(1)["rng", 1].shape == torch.get_rng_state().shape


# ---------------------------------------------------------------- O26: another device


def test_model_and_optimizer_move_and_nothing_else(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    state = full(model, optimizer, rng={"torch": torch.get_rng_state()}, user={"best": torch.tensor(0.5)})
    with Store(tmp_path / "store") as store:
        store.save(1, state)
        store.wait()
        back = store.read(1, map_location="meta")
        assert all(tensor.device.type == "meta" for tensor in back["model"].values())
        assert back["rng"]["torch"].device.type == "cpu"
        assert back["user"]["best"].item() == 0.5
        for moments in back["optim"]["state"].values():
            assert moments["step"].device.type == "cpu"
            assert moments["exp_avg"].device.type == "meta"
        torch.set_rng_state(back["rng"]["torch"])
        with torch.device("meta"):
            empty = mlp()
        empty.load_state_dict(store.read(1)["model"], assign=True, strict=True)
        assert not any(parameter.is_meta for parameter in empty.parameters())
        same(dict(model.state_dict()), dict(empty.state_dict()))
        part = dict(store.read(1)["model"])
        part.pop("3.bias")
        with torch.device("meta"):
            lacking = mlp()
        raises(lambda: lacking.load_state_dict(part, assign=True, strict=True))


def test_random_states_of_a_plain_commit_stay_on_the_cpu(tmp_path: Path) -> None:
    """Without an adapter's hints, too: whoever calls `Store.commit` has no other way to say it."""
    state = {
        "model": {"w": torch.ones(3)},
        "rng": {"torch": torch.get_rng_state()},
        "user": {"best": torch.tensor(0.5)},
    }
    with Store(tmp_path / "store") as store:
        store.product.commit(1, state).wait()
        back = store.read(1, map_location="meta")
        assert back["model"]["w"].is_meta
        assert not back["rng"]["torch"].is_meta
        assert not back["user"]["best"].is_meta


def test_arrays_stay_on_the_cpu_wherever_the_tensors_go(tmp_path: Path) -> None:
    tensor = torch.arange(6.0)
    state = {"model": {"w": tensor, "array": tensor.numpy()}}
    with Store(tmp_path / "store") as store:
        store.save(1, state)
        store.wait()
        back = store.read(1, map_location="meta")["model"]
        assert back["w"].is_meta
        same(state["model"]["array"], back["array"])


def test_a_model_on_meta_is_filled_in_place(tmp_path: Path) -> None:
    model = mlp()
    with Store(tmp_path / "store") as store:
        store.save(1, full(model))
        store.wait()
        with torch.device("meta"):
            empty = mlp()
        assert store.product.at(1).load_into(model=empty).ok
        same(dict(model.state_dict()), dict(empty.state_dict()))
        with torch.device("meta"):
            more = nn.Sequential(*mlp(), nn.Linear(4, 2))
        error = raises(lambda: store.product.at(1).load_into(model=more, strict=False), InvalidInput)
        assert "meta" in str(error)
        assert "4.weight" in str(error)


def test_tied_weights_stay_tied_on_any_device(tmp_path: Path) -> None:
    weight = torch.randn(20, 4)
    with Store(tmp_path / "store") as store:
        store.save(1, {"model": {"a": weight, "b": weight}})
        store.wait()
        for device in ("cpu", "meta", torch.device("cpu"), None):
            back = store.read(1, map_location=device)["model"]
            assert back["a"] is back["b"]
