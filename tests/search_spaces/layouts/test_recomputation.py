"""What is recomputed: forms of one value, and what is none."""

import pytest

from layout_tuner.errors import LayoutInvalidError
from layout_tuner.search_spaces.layouts.layout import Layout


@pytest.mark.parametrize(
    ("stated", "kept"),
    [
        (["core_attention"], "selective"),
        ("core_attention", "selective"),
        (["mlp", "core_attention"], "core_attention+mlp"),
        ("layernorm+moe_act", "moe_act+layernorm"),
        ("full", "full"),
    ],
)
def test_modules_have_one_text(stated: object, kept: str) -> None:
    assert Layout(recompute=stated).recompute == kept  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "stated", [[], ["mlp", "mlp"], ["mlp", "full"], ["full"], "mlp+", 1, None, [1]]
)
def test_other_modules_are_refused(stated: object) -> None:
    with pytest.raises(LayoutInvalidError, match=r"^recompute=.* is not one of none, selective"):
        Layout(recompute=stated)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stated", "kept"),
    [(8, "8"), ("8", "8"), ([8, 6, 4, 0], "8/6/4/0"), ("2/2", "2"), ("all", "all"), ([0], "0")],
)
def test_layers_have_one_text(stated: object, kept: str) -> None:
    assert Layout(recompute_layers=stated).recompute_layers == kept  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "stated", [-1, True, [True], 1.0, "08", "8/", "", [], "8/x", [10**6, 1], "12/" * 30 + "1", "２"]
)
def test_other_layers_are_refused(stated: object) -> None:
    with pytest.raises(LayoutInvalidError, match=r"^recompute_layers=.* is not all, a number"):
        Layout(recompute_layers=stated)  # type: ignore[arg-type]


def test_a_key_has_the_levers() -> None:
    layout = Layout(
        pp=4,
        recompute=["mlp", "layernorm"],  # type: ignore[arg-type]
        recompute_layers=[8, 6, 4, 0],  # type: ignore[arg-type]
        offload="optimizer",
        optimizer_states="bf16",
    )
    assert "-rc_mlp+layernorm-rl8.6.4.0-off_optimizer-os_bf16-sp0" in layout.key
    assert Layout.of_key(layout.key) == layout
    assert Layout.from_mapping(layout.to_mapping()) == layout


def test_keys_without_levers_stay() -> None:
    stays = "n1-tp1-pp1-dp1-vpp1-mbs1-mb1-z0-rc_selective-sp0-fp32"
    assert Layout(recompute="selective").key == stays
    assert (
        Layout(recompute="selective").to_mapping().keys()
        & {
            "recompute_layers",
            "offload",
            "optimizer_states",
        }
        == set()
    )
