"""Names without wrappers, and the matching of the names of two states."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.loading.names import canonical_names, match_names

CORE = ["0.weight", "0.bias", "1.weight", "3.bias"]


@pytest.mark.parametrize(
    "pattern",
    [
        "module.{}",
        "_orig_mod.{}",
        "module._orig_mod.{}",
        "_orig_mod.module.{}",
        "module.module.{}",
        "_fsdp_wrapped_module.{}",
        "_checkpoint_wrapped_module._orig_mod.{}",
    ],
)
def test_wrappers_around_the_whole_model_go(pattern: str) -> None:
    assert canonical_names([pattern.format(name) for name in CORE]) == CORE


def test_wrappers_inside_go() -> None:
    inner = ["0._fsdp_wrapped_module.weight", "1._checkpoint_wrapped_module._orig_mod.bias"]
    assert canonical_names(inner) == ["0.weight", "1.bias"]


def test_a_module_that_is_really_called_module_stays() -> None:
    real = ["module.weight", "head.weight", "blocks.0.module.bias"]
    assert canonical_names(real) == real


def test_names_that_would_become_one_stay_as_they_are() -> None:
    keys = ["a._orig_mod.weight", "a.weight", "b._orig_mod.weight"]
    assert canonical_names(keys) == ["a._orig_mod.weight", "a.weight", "b.weight"]


def test_a_leaf_with_the_name_of_a_wrapper_stays() -> None:
    assert canonical_names(["_orig_mod", "a._orig_mod._orig_mod"]) == ["_orig_mod", "a._orig_mod"]


def test_no_names() -> None:
    assert canonical_names([]) == []


segments = st.sampled_from(["a", "b", "weight", "0", "layers", "head"])
names = st.lists(st.lists(segments, min_size=1, max_size=4).map(".".join), min_size=1, max_size=8, unique=True)


@given(names, st.data())
def test_any_wrapping_gives_the_same_canonical_names(core: list[str], data: st.DataObject) -> None:
    wrapper = st.sampled_from(["_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."])

    def wrapped(name: str) -> str:
        *modules, leaf = name.split(".")
        parts = [part + "." + "".join(data.draw(st.lists(wrapper, max_size=2))) for part in modules]
        return "".join(parts) + leaf

    outside = data.draw(st.lists(wrapper | st.just("module."), max_size=3))
    keys = ["".join(outside) + wrapped(name) for name in core]
    assert canonical_names(keys) == core
    assert match_names(core, keys) == dict(zip(core, keys, strict=True))
    assert match_names(keys, core) == dict(zip(keys, core, strict=True))


def test_names_match_as_they_are_first() -> None:
    live = ["module.weight", "weight"]
    assert match_names(live, ["weight", "module.weight"]) == {"module.weight": "module.weight", "weight": "weight"}


def test_a_part_of_a_model_matches_a_wrapped_whole() -> None:
    stored = ["module.lora.a", "module.lora.b"]  # "module" is real: the whole model has "head" beside it
    live = ["_orig_mod.module.lora.a", "_orig_mod.module.lora.b", "_orig_mod.head"]
    assert match_names(live, stored) == {live[0]: stored[0], live[1]: stored[1]}


def test_what_has_no_partner_is_left_out() -> None:
    assert match_names(["a", "b"], ["b", "c"]) == {"b": "b"}
