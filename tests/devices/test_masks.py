import pytest

from stratagem.devices.masks import apply


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        (None, (0, 1, 2, 3)),
        ("1", (1,)),
        ("0,1", (0, 1)),
        ("0,2,3", (0, 2, 3)),
        (" 0 , 2 ", (0, 2)),
        ("3,2,1,0", (3, 2, 1, 0)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("none", ()),
        ("0,1,", (0, 1)),
        ("00,01", (0, 1)),
    ],
)
def test_mask_chooses_and_orders_like_the_driver(text: str | None, visible: tuple[int, ...]) -> None:
    mask = apply(text, 4)
    assert mask.indices == visible
    assert mask.complaint is None


@pytest.mark.parametrize(
    ("text", "visible", "words"),
    [
        ("0,9,1", (0,), "there is no GPU 9 among 4; that entry and all after it are ignored"),
        ("9", (), "there is no GPU 9 among 4"),
        ("0,-1,1", (0,), "'-1' is not an index from 0 up"),
        ("0,one", (0,), "'one' is not an index from 0 up"),
        ('"0,1"', (), "is not an index from 0 up"),
        ("0,,1", (0,), "'' is not an index"),
        ("0-2", (0,), "'0-2' is read as 0; separate indices by commas"),
        ("0;1", (0,), "'0;1' is read as 0"),
        ("1gpu,2ampere", (1, 2), "is read as"),
        ("1,1", (), "GPU 1 is listed twice, which hides every GPU"),
        ("GPU-1234", (), "'GPU-1234' is not an index"),
    ],
)
def test_mask_explains_what_it_ignores(text: str, visible: tuple[int, ...], words: str) -> None:
    mask = apply(text, 4)
    assert mask.indices == visible
    assert mask.complaint is not None
    assert f"CUDA_VISIBLE_DEVICES={text!r}" in mask.complaint
    assert words in mask.complaint
