from __future__ import annotations

import pytest
import torch

from headwater.kernels.layout import PlainLayout
from headwater.run.memory import page_bytes, plan_groups
from headwater.run.store import KVStore
from headwater.step import SlotCopy
from headwater.types import GroupKind, GroupSpec
from tests.run.tiny import HYBRID

GROUPS = plan_groups(HYBRID, 4)
LAYOUT = PlainLayout(n_kv_heads=2, head_dim=16, block_size=4, dtype=torch.bfloat16)


def make_store() -> KVStore:
    return KVStore(GROUPS, 9, LAYOUT)


def test_layers_are_views_of_one_zeroed_pool() -> None:
    store = make_store()
    assert [layer.group for layer in store.layers] == [1, 1, 0, 2, 2, 0]
    assert store.n_bytes == 9 * page_bytes(GROUPS, LAYOUT)
    assert store.n_blocks == 9
    for layer in store.layers:
        assert layer.k.shape == layer.v.shape == (9, 4, 2, 16)
        assert layer.k.is_contiguous() and layer.v.is_contiguous()
        assert not layer.k.any() and not layer.v.any()


def test_a_page_belongs_to_one_group_at_a_time() -> None:
    store = make_store()
    first, second = store.layers[0], store.layers[1]  # one group
    other = store.layers[3]  # layer 0 of another group: the same bytes
    first.k[5] = 1.0
    assert not second.k.any() and not first.v.any()
    assert (other.k[5] == 1.0).all()
    assert not other.k[4].any()


def test_copy_takes_k_and_v_of_all_layers_and_no_more_slots_than_told() -> None:
    store = make_store()
    for i, layer in enumerate(store.layers[:2]):
        layer.k[3] = 1.0 + i
        layer.v[3] = 5.0 + i
    store.copy([SlotCopy(1, 3, 7, 2), SlotCopy(1, 7, 8, 1)])
    for i, layer in enumerate(store.layers[:2]):
        assert (layer.k[7, :2] == 1.0 + i).all() and (layer.v[7, :2] == 5.0 + i).all()
        assert not layer.k[7, 2:].any() and not layer.v[7, 2:].any()
        assert (layer.k[8, :1] == 1.0 + i).all() and not layer.k[8, 1:].any()


@pytest.mark.parametrize(
    "groups",
    [
        (GroupSpec(GroupKind.FULL, 4, (0, 1)), GroupSpec(GroupKind.FULL, 4, (2,))),
        (GroupSpec(GroupKind.FULL, 4, (0,)), GroupSpec(GroupKind.FULL, 8, (1,))),
        (GroupSpec(GroupKind.FULL, 4, (0,)), GroupSpec(GroupKind.FULL, 4, (2,))),
        (GroupSpec(GroupKind.FULL, 4, (0,)), GroupSpec(GroupKind.FULL, 4, (0,))),
    ],
)
def test_groups_that_do_not_fit_one_pool(groups: tuple[GroupSpec, ...]) -> None:
    with pytest.raises(ValueError, match=r"same number of layers|name every layer once"):
        KVStore(groups, 9, LAYOUT)
