"""Rows of a batch: beams, several answers, assisted decoding, selection, restoring and saving."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvtier
from kvtier.tiering.adapters.huggingface import TieredCache
from kvtier.tiering.listing import describe
from tests.model_cases import (
    FAMILIES,
    PAD,
    expected,
    gemma3,
    generate,
    llama,
    padded,
    plain,
    prompt,
    qwen2,
    require_varied,
)

pytestmark = pytest.mark.usefixtures("one_thread", "always_loads")


def opened(path: Path, model: Any) -> kvtier.Store:
    return kvtier.open(path / "kv", model=model, region="16MiB", hot="4MiB")


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_three_beams_with_and_without_a_restored_prefix(family: str, tmp_path: Path) -> None:
    """A101."""
    ids = prompt(1, 90)
    options = {"num_beams": 3}
    reference = expected(family, ids, 70, options)
    model = FAMILIES[family]()
    with opened(tmp_path, model) as store:
        for restored in (0, 60, 89):
            cache = TieredCache(store, ids)
            assert cache.restored_tokens == restored
            assert torch.equal(generate(model, ids, cache, 70, options), reference)
            assert cache.batch_size == 3
            first = TieredCache(store, ids)
            generate(model, ids[:, : 60 if restored == 0 else 90], first, 1)
            first.save("prefix", tokens=ids[:, : first.get_seq_length()])


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_several_sampled_answers_with_a_fixed_seed(family: str, tmp_path: Path) -> None:
    ids, mask = padded([prompt(2, 80), prompt(3, 50)])
    options = {"do_sample": True, "num_return_sequences": 3, "top_k": 20, "attention_mask": mask}
    torch.manual_seed(7)
    reference = expected(family, ids, 25, options)
    assert len({tuple(row) for row in reference.tolist()}) == 6
    model = FAMILIES[family]()
    with opened(tmp_path, model) as store:
        for restored in (0, 79):
            cache = TieredCache(store, ids, mask)
            assert cache.restored_tokens == restored
            torch.manual_seed(7)
            output = generate(model, ids, cache, 25, options)
            assert torch.equal(output, reference)
            assert cache.save("answers", tokens=output) == 3 * (79 + 25 + 49 + 25)
        names = [f"answers/{row}" for row in range(6)]
        assert sorted(each.name for each in store.names()) == names


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@pytest.mark.parametrize("drafts", ["prompt lookup", "assistant"])
def test_assisted_decoding(
    family: str, drafts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.cat([prompt(4, 60)] * 2, 1)
    reference = expected(family, ids, 40)
    cropped: list[int] = []
    crop = TieredCache.crop

    def counting(self: TieredCache, tokens_to_remove: int) -> None:
        cropped.append(tokens_to_remove)
        crop(self, tokens_to_remove)

    monkeypatch.setattr(TieredCache, "crop", counting)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    if drafts == "assistant":
        options = {"assistant_model": llama()}
    model = FAMILIES[family]()
    with opened(tmp_path, model) as store:
        for restored in (0, 119):
            cache = TieredCache(store, ids)
            assert cache.restored_tokens == restored
            output = generate(model, ids, cache, 40, options)
            assert torch.equal(output, reference)
            cache.save("assisted", tokens=output)
    # The drafts of the same weights are all accepted, and others never are all.
    same = (family, drafts) == ("qwen2", "assistant")
    assert cropped
    assert any(each < 0 for each in cropped) is not same


def continued(model: Any, cache: Any, rows: int) -> list[list[int]]:
    """Choices of the model after reading 30 more tokens, and then one."""
    with torch.no_grad():
        return [
            model(prompt(seed, count, rows), cache=cache).logits.argmax(-1).tolist()
            for seed, count in ((11, 30), (12, 1))
        ]


@pytest.mark.parametrize(
    ("change", "argument", "rows"),
    [
        ("batch_select_indices", torch.tensor([2, 0]), 2),
        ("batch_select_indices", torch.tensor([1, 1, 1, 0, 2]), 5),
        ("batch_select_indices", torch.tensor([True, False, True]), 2),
        ("batch_select_indices", torch.tensor([-1]), 1),
        ("batch_repeat_interleave", 3, 9),
        ("reorder_cache", torch.tensor([1, 1, 0]), 3),
        ("crop", -33, 3),
        ("crop", 0, 3),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_rows_are_rearranged_like_those_of_a_dynamic_cache(
    family: str, change: str, argument: Any, rows: int, tmp_path: Path
) -> None:
    """A101."""
    other = plain(family)
    reference: Any = DynamicCache(config=other.config)
    reference.activate_past_recording()
    model = FAMILIES[family]()
    ids = prompt(10, 75, 3)
    with opened(tmp_path, model) as store, torch.no_grad():
        cache = TieredCache(store, ids)
        other(ids, cache=reference)
        model(ids, cache=cache)
        getattr(reference, change)(argument)
        getattr(cache, change)(argument)
        assert cache.get_seq_length() == reference.get_seq_length()
        assert len(cache.rows.sequences) == rows
        assert continued(model, cache, rows) == continued(other, reference, rows)


@pytest.mark.parametrize("used", [False, True])
def test_reset_forgets_everything(used: bool, tmp_path: Path) -> None:
    model = qwen2()
    ids, other = prompt(13, 50), prompt(14, 40)
    with opened(tmp_path, model) as store:
        cache = TieredCache(store, ids)
        if used:
            generate(model, ids, cache, 5)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(generate(model, other, cache, 20), expected("qwen2", other, 20))
        assert cache.save("b") == 59


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_rows_that_share_different_lengths(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    known = prompt(15, 160)
    with opened(tmp_path, model) as store:
        cache = TieredCache(store, known)
        cache.save("known", tokens=generate(model, known, cache, 1))
        for shared, fresh, restored in [
            ((100, 131), (20, 9), 100),  # 140 columns; pads 20 and 0: at 120 and at 131
            ((160, 100), (0, 30), 130),
            ((100, 0), (50, 50), 50),  # pads 0 and 100: nothing is shared by the second row
            ((0, 0), (50, 30), 0),
            ((160, 160), (0, 0), 159),
        ]:
            rows = [
                torch.cat([known[:, :count], prompt(16 + row, fresh[row])], 1)
                for row, count in enumerate(shared)
            ]
            ids, mask = padded(rows)
            pads = [ids.shape[1] - row.shape[1] for row in rows]
            cache = TieredCache(store, ids, mask)
            columns = [pad + count for pad, count in zip(pads, shared, strict=True)]
            restored = min(*columns, ids.shape[1] - 1)
            assert cache.restored_tokens == restored
            options = {"attention_mask": mask}
            output = generate(model, ids, cache, 10, options)
            assert torch.equal(output, expected(family, ids, 10, options))


def test_a_length_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = qwen2()
    ids = prompt(17, 40, 2)
    with opened(tmp_path, model) as store:
        cache = TieredCache(store, ids)
        output = generate(model, ids, cache, 5)
        for wrong in (output[:, :-2], torch.cat([output, output[:, :1]], 1), output[:1]):
            with pytest.raises(kvtier.KvtierError) as refusal:
                cache.save("a", tokens=wrong)
            assert str(list(wrong.shape)) in str(refusal.value)
            assert "2 rows of 44 tokens" in str(refusal.value)
        odds: list[Any] = [output.float(), output[None], []]
        for odd in odds:
            with pytest.raises(kvtier.KvtierError, match="integer ids"):
                cache.save("a", tokens=odd)
        with pytest.raises(kvtier.KvtierError, match="differ"):
            cache.save("a", tokens=output.flip(1))
        assert not store.names()
        assert cache.save("a", tokens=output[:, :-1]) == 2 * 44


@pytest.mark.parametrize("left_padded", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_padding_is_never_stored(left_padded: bool, given: bool, tmp_path: Path) -> None:
    """Neither on the left, nor behind a row that ended before the others."""
    rows = [prompt(18, 40), prompt(19, 23 if left_padded else 40)]
    ids, mask = padded(rows)
    free = expected("qwen2", ids, 30, {"attention_mask": mask})
    answer = free[1, 40:].tolist()
    end = next(token for token in answer[9:] if token not in free[0, 40:].tolist())
    stop = answer.index(end)
    options = {"attention_mask": mask, "eos_token_id": end}
    model = qwen2()
    with opened(tmp_path, model) as store:
        cache = TieredCache(store, ids, mask)
        output = generate(model, ids, cache, 30, options)
        assert (output[1, 40 + stop + 1 :] == PAD).all()
        saved = cache.save("batch", tokens=output if given else None)
        streams = [output[0, :69], output[1, 40 - rows[1].shape[1] : 40 + stop + 1]]
        assert saved == sum(len(each) for each in streams)
        assert {each.name: each.token_count for each in store.names()} == {
            f"batch/{row}": len(each) for row, each in enumerate(streams)
        }
        pads = torch.full((20,), PAD)
        for stream in streams:
            assert PAD not in stream.tolist()
            assert store.lookup(torch.cat([stream, pads])) == len(stream)
            assert store.lookup(torch.cat([pads, stream])) == 0
        assert sum(each.tokens for each in describe(tmp_path / "kv").segments) == saved


def test_a_saved_batch_is_restored_row_by_row(tmp_path: Path) -> None:
    rows = [prompt(20, 700), prompt(21, 130), prompt(22, 64)]
    ids, mask = padded(rows)
    model = gemma3()
    with opened(tmp_path, model) as store:
        cache = TieredCache(store, ids, mask)
        output = generate(model, ids, cache, 8, {"attention_mask": mask})
        cache.save("batch", tokens=output)
        require_varied(output[:, 700:])
    model = gemma3()
    with opened(tmp_path, model) as store:
        for row, each in enumerate(rows):
            cache = TieredCache(store, each)
            assert cache.restored_tokens == each.shape[1] - 1
            alone = generate(model, each, cache, 8)
            assert torch.equal(alone[0, each.shape[1] :], output[row, 700:])
