"""O02, O14, O21, O22: training goes on while the background writes, processes fork, and two of them want one store."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from deltastore.errors import Backend, Conflict
from tests.cases.kit import Store, raises, same
from tests.cases.warm import child

# ---------------------------------------------------------------- O02: saving races with updates in place


def test_updates_in_place_after_a_save_are_not_seen_by_it(tmp_path: Path) -> None:
    parameters = [nn.Parameter(torch.zeros(250_000)) for _ in range(8)]
    # With a gradient of -1 every element grows by exactly 1 a step.
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    with Store(tmp_path / "store", background=True) as store:
        for step in range(1, 21):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, -1.0)
            optimizer.step()
            with torch.no_grad() if step % 2 else torch.enable_grad():
                store.save(step, {"model": {f"p{i}": p for i, p in enumerate(parameters)}})  # training goes on at once
        store.wait()
        for step in range(1, 21):
            for name, tensor in store.read(step)["model"].items():
                assert (tensor == step).all(), (step, name, tensor.unique()[:4])
                assert not tensor.requires_grad


def test_updates_in_inference_mode_and_of_plain_values_are_not_seen(tmp_path: Path) -> None:
    with torch.inference_mode():
        weight = torch.zeros(300_000)
    history: list[float] = []
    nested = {"step": 0, "log": history, "extra": {"names": ["a"]}}
    with Store(tmp_path / "store") as store:
        for step in range(10):
            with torch.inference_mode():
                weight += 1
            history.append(step * 0.5)
            nested["step"] = step
            store.save(step, {"model": {"w": weight}, "user": nested})
        store.wait()
        for step in range(10):
            back = store.read(step)
            assert (back["model"]["w"] == step + 1).all()
            assert back["user"]["log"] == [k * 0.5 for k in range(step + 1)]
            assert back["user"]["step"] == step


def test_updates_through_another_name_of_the_same_memory_are_not_seen(tmp_path: Path) -> None:
    flat = torch.zeros(400_000)
    views = {"left": flat[:200_000].view(400, 500), "right": flat[200_000:], "columns": flat.view(400, 1000)[:, ::2]}
    array = flat.numpy()
    with Store(tmp_path / "store", max_pending=1) as store:
        for step in range(8):
            store.save(step, {"model": views, "user": {"array": array}})
            array += 1
        store.wait()
        for step in range(8):
            back = store.read(step)
            assert all((tensor == step).all() for tensor in back["model"].values())
            assert (back["user"]["array"] == step).all()


# ---------------------------------------------------------------- O14: a background save fails, or is lost at exit


def test_a_failure_in_the_background_is_told_once_and_the_next_save_works(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = Store(root)
    store.save(1, {"model": {"w": torch.ones(4)}})
    store.wait()
    away = tmp_path / "away"
    root.rename(away)
    root.write_text("in the way")  # the folder is gone

    def save_and_wait() -> None:
        store.save(2, {"model": {"w": torch.ones(4)}})
        store.wait()

    error = raises(save_and_wait, Backend)
    assert "2" in str(error)
    store.wait()  # told once
    root.unlink()
    away.rename(root)
    store.save(3, {"model": {"w": torch.full((4,), 3.0)}})
    store.wait()
    assert store.steps() == [1, 3]
    store.close()


def test_what_is_pending_at_the_end_of_a_script_is_written(tmp_path: Path) -> None:
    root = tmp_path / "store"
    script = child(f"""
        store = Store({str(root)!r})
        for step in (5, 6, 7):
            store.save(step, {{"model": {{"w": torch.full((1_000_000,), float(step))}}}})  # and the script just ends
    """)
    assert script.wait(60) == 0
    with Store(root, owner=False) as reader:
        assert reader.steps() == [5, 6, 7]
        assert (reader.read(7)["model"]["w"] == 7).all()


def test_what_cannot_be_written_at_the_end_of_a_script_makes_it_fail(tmp_path: Path) -> None:
    root = tmp_path / "store"
    script = child(f"""
        import shutil
        store = Store({str(root)!r})
        store.save(1, {{"model": {{"w": torch.ones(4)}}}})
        store.wait()
        shutil.rmtree({str(root)!r})
        Path({str(root)!r}).write_text("in the way")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what it says of the loss
        store.save(2, {{"model": {{"w": torch.ones(4)}}}})
    """)
    assert script.wait(60) != 0


def test_an_exception_in_training_still_writes_what_was_saved(tmp_path: Path) -> None:
    root = tmp_path / "store"
    script = child(f"""
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the traceback
        with Store({str(root)!r}) as store:
            for step in range(100):
                store.save(step, {{"model": {{"w": torch.full((100_000,), float(step))}}}})
                if step == 4:
                    raise RuntimeError("the loss is NaN")
    """)
    assert script.wait(60) == 1
    with Store(root, owner=False) as reader:
        assert reader.steps() == [0, 1, 2, 3, 4]
        assert (reader.read(4)["model"]["w"] == 4).all()


# ---------------------------------------------------------------- O21: fork


def test_workers_of_a_data_loader_read_while_their_parent_writes(tmp_path: Path) -> None:
    script = child(f"""
        from torch.utils.data import DataLoader, Dataset
        root = {str(tmp_path / "store")!r}
        store = Store(root)
        store.save(1, {{"model": {{"w": torch.full((1000,), 1.)}}}})
        store.wait()
        store.read(1)  # threads and codecs are warm
        class Samples(Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                return Store(root, owner=False).read(1)["model"]["w"].sum()
        for step in (2, 3):
            store.save(step, {{"model": {{"w": torch.full((3_000_000,), float(step))}}}})  # written while we fork
            loader = DataLoader(Samples(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=30)
            assert sum(x.item() for x in loader) == 8000
        pid = os.fork()
        if pid == 0:
            sys.exit(0)  # a child that ends politely
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        raises(lambda: Store(root))  # the parent still holds the store
        store.wait()
        assert store.steps() == [1, 2, 3]
        assert (store.read(3)["model"]["w"] == 3).all()
        store.close()
    """)
    assert script.wait(120) == 0


def test_a_forked_child_reads_the_inherited_store_and_may_not_commit(tmp_path: Path) -> None:
    script = child(f"""
        from deltastore.errors import Conflict
        store = Store({str(tmp_path / "store")!r})
        for step in range(3):
            store.save(step, {{"model": {{"w": torch.full((500_000,), float(step))}}}})
        pid = os.fork()  # with two of them pending
        if pid == 0:
            raises(lambda: store.product.commit(9, {{"model": {{}}}}), Conflict)
            raises(lambda: store.product.flush(), Conflict)
            store.close()  # neither writes, nor unlocks
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        raises(lambda: Store({str(tmp_path / "store")!r}), Conflict)
        store.save(3, {{"model": {{"w": torch.ones(4)}}}})
        store.close()
    """)
    assert script.wait(60) == 0
    with Store(tmp_path / "store", owner=False) as reader:
        assert reader.steps() == [0, 1, 2, 3]
        assert (reader.read(2)["model"]["w"] == 2).all()
        assert not reader.verify()


def test_a_child_that_outlives_its_parent_does_not_keep_the_store(tmp_path: Path) -> None:
    root = tmp_path / "store"
    script = child(f"""
        store = Store({str(root)!r})
        store.save(1, {{"model": {{"w": torch.ones(10)}}}})
        store.wait()
        pid = os.fork()
        if pid == 0:
            time.sleep(60)  # a worker that nobody ended
            os._exit(0)
        print(pid, flush=True)
        time.sleep(60)
    """)
    worker = int(script.line())
    script.kill()
    try:
        with Store(root) as store:
            store.save(2, {"model": {"w": torch.full((10,), 2.0)}})
            store.wait()
            assert store.steps() == [1, 2]
    finally:
        os.kill(worker, 9)


# ---------------------------------------------------------------- O22: two writers


def test_a_second_writer_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    root = tmp_path / "store"
    first = child(f"""
        store = Store({str(root)!r})
        store.save(1, {{"model": {{"w": torch.full((10,), 1.)}}}})
        store.wait()
        print("held", flush=True)
        time.sleep(60)
    """)
    assert first.line() == "held"
    error = raises(lambda: Store(root), Conflict)
    assert isinstance(error, Conflict)
    assert str(first.pid) in str(error)
    assert os.uname().nodename in str(error)
    assert (error.pid, error.host) == (first.pid, os.uname().nodename)
    with Store(root, owner=False) as reader:  # reading is free
        same({"model": {"w": torch.full((10,), 1.0)}}, reader.read(1))
    first.kill()
    with Store(root) as store:
        raises(lambda: Store(root), Conflict)  # twice in one process is refused as well
        store.save(2, {"model": {"w": torch.full((10,), 2.0)}})
        store.wait()
        assert store.steps() == [1, 2]


def test_one_of_many_that_open_at_once_wins(tmp_path: Path) -> None:
    root = tmp_path / "store"
    writers = [
        child(f"""
        from deltastore.errors import Conflict
        try:
            store = Store({str(root)!r})
        except Conflict as error:
            print("refused", error.pid, flush=True)
            sys.exit(0)
        print("won", os.getpid(), flush=True)
        store.save({number}, {{"model": {{"w": torch.full((10,), {number}.)}}}})
        store.wait()
        time.sleep(60)
        """)
        for number in range(4)
    ]
    said = [writer.line().split() for writer in writers]
    winners = [number for number, words in enumerate(said) if words[0] == "won"]
    assert len(winners) == 1
    assert {words[1] for words in said} == {str(writers[winners[0]].pid)}
    for writer in writers:
        writer.kill()
    with Store(root) as store:
        assert set(store.steps()) <= {winners[0]}
        assert not store.verify()


def test_a_writer_may_wait_in_another_thread_while_a_reader_reads(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = Store(root)
    store.save(0, {"model": {"w": torch.zeros(50_000)}})
    store.wait()
    done = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not done.is_set():
                with Store(root, owner=False) as reader:
                    step = reader.latest()
                    assert (reader.read(step)["model"]["w"] == step).all()
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    for step in range(1, 30):
        store.save(step, {"model": {"w": torch.full((50_000,), float(step))}})
    store.close()
    done.set()
    for thread in readers:
        thread.join()
    assert not failures, failures


@pytest.mark.parametrize("pending", [1, 3])
def test_threads_that_save_at_once_take_turns(tmp_path: Path, pending: int) -> None:
    with Store(tmp_path / "store", max_pending=pending) as store:
        states = {number: {"model": {f"w{number}": torch.full((1000 + number,), float(number))}} for number in range(4)}
        ids: dict[str, int] = {}

        def save(number: int) -> None:
            for _ in range(5):
                ids[store.product.commit(0, states[number]).wait().id] = number

        threads = [threading.Thread(target=save, args=(number,)) for number in states]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for commit, number in ids.items():
            same(states[number], store.product.at(commit).to_state_dict())
        assert set(ids.values()) == set(states)
