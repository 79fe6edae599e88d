"""The parts of bench/fidelity.py: tasks, fields, masks, budgets, records and what they come to."""

import json
import math
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bench.fidelity_attention import (
    RECENT_TOKENS,
    SINK_TOKENS,
    Reading,
    budget_bytes,
    masked_attention,
    order_by_keys,
    read,
    segments,
    terms_of,
    visible,
)
from bench.fidelity_free import same_tokens
from bench.fidelity_policies import OURS, POLICIES, QUEST, kept, layouts_of, selector_of
from bench.fidelity_run import (
    FREE,
    Case,
    Records,
    Runner,
    cases,
    code_version,
    right_fields,
)
from bench.fidelity_summary import (
    BARS,
    Wanted,
    kept_share,
    lost_share,
    rows,
    seeds_of,
    value_of,
    worst_seed,
)
from bench.fidelity_tasks import (
    JSON,
    NEEDLES,
    RETRIEVAL,
    TEXT,
    Piece,
    Question,
    Suffix,
    encode,
    make_task,
)
from kvtier.kernels.divergence import divergence
from kvtier.kernels.rotary import Rotary
from kvtier.tiering.adapters import attention
from tests.model_cases import prompt, qwen2

HEADS, GROUP, WIDTH, TOKENS, SUFFIX = 2, 3, 16, 800, 5
SCALE = WIDTH**-0.5
WIDTHS = WIDTH, WIDTH


def count(text: str) -> int:
    return len(text.split())


class Characters:
    """A tokenizer for which each character is a token."""

    def __call__(self, text: str) -> Any:
        return type("Encoded", (), {"input_ids": [ord(each) % 256 for each in text]})


def some(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reading(policy: str, budget: float, keys: torch.Tensor, values: torch.Tensor) -> Reading:
    """Of a context [heads, TOKENS, width], and queries as if it had been prefilled."""
    terms = terms_of(TOKENS, WIDTHS, SCALE)
    queries = some(7, HEADS * GROUP, TOKENS // 8, WIDTH)
    context = keys[:, :TOKENS], values[:, :TOKENS]
    return Reading(selector_of(POLICIES[policy], context, queries, terms), terms, budget)


# ---- tasks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [RETRIEVAL, JSON, TEXT])
def test_a_task_follows_from_its_seed(name: str) -> None:
    task = make_task(name, 900, 3, count)
    assert task == make_task(name, 900, 3, count)
    assert task != make_task(name, 900, 4, count)
    assert 800 < count(task.context) < 1000


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_is_asked_for_is_in_the_context(seed: int) -> None:
    for name, fields in ((RETRIEVAL, [1, NEEDLES]), (JSON, [30])):
        task = make_task(name, 900, seed, count)
        assert [len(each.fields) for each in task.questions] == fields
        for question in task.questions:
            assert all(task.context.count(field) >= 1 for field in question.fields)


def test_needles_are_listed_in_their_order() -> None:
    task = make_task(RETRIEVAL, 900, 5, count)
    places = [task.context.index(field) for field in task.questions[1].fields]
    assert places == sorted(places)


def test_names_do_not_repeat() -> None:
    task = make_task(JSON, 3000, 1, count)
    names = task.questions[0].fields[::6]
    assert len(set(names)) == len(names) == 5
    assert all(task.context.count(name) == 1 for name in names)


def test_a_text_goes_on_where_its_context_ends() -> None:
    one, longer = (make_task(TEXT, tokens, 2, count) for tokens in (500, 900))
    after = one.questions[0].answer[0].text
    assert longer.context.startswith(one.context + after)


def test_pieces_are_tokenised_apart() -> None:
    question = Question("ask", (Piece("a: "), Piece("12", True), Piece("\n"), Piece("3", True)))
    suffix = encode(question, Characters())
    assert suffix.ids == [ord(each) for each in "aska: 12\n3"]
    assert (suffix.answer, suffix.fields) == (7, [(3, 5), (6, 7)])


# ---- figures --------------------------------------------------------------------------------


def test_a_field_is_right_where_all_its_tokens_are() -> None:
    suffix = Suffix([9, 9, 1, 2, 3, 4], 4, [(0, 2), (2, 4)])
    logits = torch.eye(5)[[1, 2, 3, 0]]
    assert right_fields(logits, suffix) == [True, False]
    assert right_fields(torch.eye(5)[[1, 2, 3, 4]], suffix) == [True, True]


def test_divergence_is_that_of_distributions() -> None:
    logits = some(1, 4, 50)
    assert divergence(logits, logits + 3).max() < 1e-5
    assert divergence(logits, logits).tolist() == [0.0] * 4
    one, other = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert divergence(one, other).item() == pytest.approx(expected, rel=1e-5)


# ---- attention ------------------------------------------------------------------------------


def test_a_context_is_cut_into_whole_pages() -> None:
    for tokens in (320, 800, 2048, 4096):
        runs = segments(tokens)
        assert runs[0] == (0, SINK_TOKENS)
        assert runs[-1] == (tokens - RECENT_TOKENS, tokens)
        assert all(one[1] == other[0] for one, other in pairwise(runs))
        assert all((behind - first) % 16 == 0 for first, behind in runs)


def test_orders_stay_within_their_segments() -> None:
    keys = some(2, HEADS, TOKENS, WIDTH)
    order = order_by_keys(keys, Rotary((1.0, 0.1)))
    for head in order:
        assert head[:SINK_TOKENS].tolist() == list(range(SINK_TOKENS))
        for first, behind in segments(TOKENS):
            assert sorted(head[first:behind].tolist()) == list(range(first, behind))
    assert not torch.equal(order[0], torch.arange(TOKENS))


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("budget", [0.125, 0.25])
def test_sink_recent_and_suffix_are_always_seen(policy: str, budget: float) -> None:
    keys, values = (some(seed, HEADS, TOKENS + SUFFIX, WIDTH) for seed in (3, 4))
    found = reading(policy, budget, keys, values)
    limit = budget_bytes(found.terms, budget)
    query = some(5, HEADS * GROUP, SUFFIX, WIDTH)
    chosen = torch.stack([found.selector.select(query[:, at], limit).chosen for at in range(5)])
    seen = visible(chosen)
    assert seen.shape == (HEADS, SUFFIX, TOKENS + SUFFIX)
    assert seen[..., :SINK_TOKENS].all()
    assert seen[..., TOKENS - RECENT_TOKENS : TOKENS].all()
    assert torch.equal(seen[0, :, TOKENS:], torch.ones(SUFFIX, SUFFIX, dtype=torch.bool).tril())
    # The sink and recent tokens are inside of the budget, and padding counts.
    in_bytes = (chosen * found.terms.page_bytes).sum(2)
    assert int(in_bytes.max()) <= limit
    assert int(in_bytes.min()) > limit - 16 * 2 * WIDTH * 2
    assert not seen.all()


def test_a_budget_counts_bytes() -> None:
    terms = terms_of(800, (64, 64), SCALE)
    assert int(terms.page_bytes.sum()) == 800 * 128 * 2
    assert budget_bytes(terms, 0.125) == 100 * 128 * 2
    assert int(terms.always.sum()) == 5


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_budget_of_everything_is_dense_attention(policy: str) -> None:
    keys, values = (some(seed, HEADS, TOKENS + SUFFIX, WIDTH) for seed in (8, 9))
    query = some(10, HEADS * GROUP, SUFFIX, WIDTH)
    found = reading(policy, 1.0, keys, values)
    causal = torch.ones(SUFFIX, TOKENS + SUFFIX, dtype=torch.bool).tril(TOKENS)
    dense = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=causal, scale=SCALE, enable_gqa=True
    )
    assert (found.attend(query, keys, values) - dense).abs().max() < 1e-5
    assert found.pages_chosen == found.pages_there == SUFFIX * HEADS * TOKENS // 16


def test_an_estimate_stands_for_what_was_not_read() -> None:
    """Keys of a page that are all the same are estimated exactly, whatever is read."""
    base = some(11, HEADS, TOKENS // 16, 1, WIDTH).expand(-1, -1, 16, -1).flatten(1, 2)
    keys = torch.cat((base, some(12, HEADS, SUFFIX, WIDTH)), 1)
    values = some(13, HEADS, TOKENS + SUFFIX, WIDTH)
    query = some(14, HEADS * GROUP, SUFFIX, WIDTH)
    outs = [
        reading(policy, budget, keys, values).attend(query, keys, values)
        for policy, budget in (("ours-means+estimate", 0.125), ("ours-means", 1.0))
    ]
    without = reading("ours-means", 0.125, keys, values).attend(query, keys, values)
    # Means are kept in 8 bits.
    assert (outs[0] - outs[1]).abs().max() < 0.02
    assert (without - outs[1]).abs().max() > 0.1


def test_a_partial_has_the_logarithm_of_its_sum() -> None:
    query, keys, values = some(15, 2, 1, 4), some(16, 1, 3, 4), some(17, 1, 3, 4)
    seen = torch.tensor([[[True, False, True]]])
    part = masked_attention(query, keys, values, seen, 0.5)
    scores = (query[:, 0] @ keys[0].T * 0.5)[:, [0, 2]]
    assert torch.allclose(part.lse[:, 0], scores.logsumexp(1))
    assert torch.allclose(part.out[:, 0], scores.softmax(1) @ values[0, [0, 2]])


# ---- a model --------------------------------------------------------------------------------


@pytest.fixture
def model() -> PreTrainedModel:
    attention.register()
    made: Any = qwen2()
    made.set_attn_implementation(attention.NAME)
    return made  # type: ignore[no-any-return]


@pytest.mark.usefixtures("one_thread")
def test_a_simulated_layer_reads_what_a_model_would(model: PreTrainedModel, tmp_path: Path) -> None:
    ids = prompt(1, 700)[0].tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, -20:]
    held = kept(tmp_path / "context.safetensors", model, ids[:640])
    layouts = layouts_of(model, held)
    assert (held.tokens, held.queries.shape[2]) == (640, 80)
    full = read(model, layouts.layers(None, 1.0), ids[640:], 20)
    everything = read(model, layouts.layers(POLICIES[OURS], 1.0), ids[640:], 20)
    some_of_it = read(model, layouts.layers(POLICIES["window"], 0.25), ids[640:], 20)
    assert (full - expected).abs().max() < 1e-3
    assert (everything - expected).abs().max() < 1e-3
    assert (some_of_it - expected).abs().max() > 0.1
    again = kept(tmp_path / "context.safetensors", model, ids[:640])
    assert torch.equal(again.keys, held.keys)


@pytest.mark.usefixtures("one_thread")
def test_what_was_measured_is_not_measured_again(model: PreTrainedModel, tmp_path: Path) -> None:
    records = Records(tmp_path / "records.jsonl")
    runner = Runner(model, Characters(), tmp_path, records)
    case = Case(RETRIEVAL, 4000, 1)
    assert not runner.run(case, [QUEST], [0.25], ends=time.monotonic() - 1)
    assert runner.run(case, [QUEST], [0.25], ends=math.inf)
    (found,) = records.find(version=code_version(RETRIEVAL), **asdict(case))
    assert found["fields"] == NEEDLES + 1
    assert found["kept"] <= found["full"]
    assert found["context_tokens"] % 16 == 0
    assert 0.2 < found["read"] <= 0.25
    assert found["kl_max"] >= found["kl"] > 0
    assert runner.run(case, [QUEST], [0.25], ends=time.monotonic() - 1)
    assert records.find() == [found]
    assert runner.run(case, [QUEST, "oracle"], [0.25, 1.0], ends=math.inf)
    assert max(each["kl"] for each in records.find(budget=1.0)) < 1e-4
    assert len(records.find()) == 4


# ---- records --------------------------------------------------------------------------------


def line(**values: Any) -> dict[str, Any]:
    known = {
        "version": "v",
        "task": JSON,
        "tokens": 2048,
        "seed": 1,
        "policy": OURS,
        "budget": 0.125,
        "kl": 0.01,
        "kl_max": 0.1,
        "nll": 1.1,
        "nll_full": 1.0,
        "full": 10,
        "kept": 10,
        "read": 0.12,
    }
    return {**known, **values}


def test_records_are_found_again_by_the_same_code(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records = Records(path)
    records.add(line())
    records.add(line(seed=2))
    with path.open("a") as file:
        file.write(json.dumps(line(seed=3))[:-20])
    again = Records(path)
    assert again.find(task=JSON, seed=2) == [line(seed=2)]
    assert again.find(seed=3) == again.find(version="w") == []
    again.add(line(seed=3))
    assert len(Records(path).find(seed=3)) == 1


def test_a_version_is_that_of_what_figures_depend_on() -> None:
    assert code_version(JSON) == code_version(RETRIEVAL) != code_version(TEXT)
    assert code_version(FREE) not in (code_version(JSON), code_version(TEXT))


def test_cases_come_seed_by_seed() -> None:
    found = list(cases([JSON, TEXT], [100], 2))
    assert found == [Case(t, 100, s) for s in (1, 2) for t in (JSON, TEXT)]


def test_bars_take_the_median_of_seeds_and_the_worst_length() -> None:
    lines = [line(seed=seed, kl=kl) for seed, kl in ((1, 0.1), (2, 0.2), (3, 9.0))]
    lines += [line(tokens=4096, seed=seed, kl=0.3, kept=8) for seed in (1, 2, 3)]
    lines += [line(policy=QUEST, kl=50.0, kept=2)]
    wanted = Wanted("", "kl", (JSON,), 0.125, 1, 1)
    assert value_of(wanted, lines) == 0.3
    assert value_of(Wanted("", "kl", (JSON, TEXT), 0.125, 1, 1), lines) is None
    assert value_of(Wanted("", "kl", (JSON,), 0.25, 1, 1), lines) is None
    assert value_of(Wanted("", "fields", (JSON,), 0.125, 1, 1), lines) == pytest.approx(90)
    assert value_of(Wanted("", "kl", (JSON,), 0.125, 1, 1, 3000), lines[:3]) is None
    assert seeds_of(lines) == 3
    assert len({each.name for each in BARS}) == len(BARS)


def test_fields_are_pooled_and_the_worst_seed_is_known() -> None:
    lines = [line(seed=1, kept=10), line(seed=2, kept=4), line(seed=2, kept=10)]
    assert kept_share(lines) == 24 / 30
    assert worst_seed(lines) == 14 / 20
    assert kept_share([line(full=0, kept=0)]) == 1.0


def test_losses_are_compared_where_both_were_measured() -> None:
    lines = [line(kept=9), line(policy=QUEST, kept=6), line(seed=2, kept=0)]
    assert lost_share(lines) == 25
    assert lost_share(lines[:1]) is None
    assert lost_share([line(), line(policy=QUEST)]) is None


def test_rows_say_what_was_measured() -> None:
    found = rows([line(seed=1), line(seed=2, kl=0.03), line(seed=1, policy=QUEST)])
    (title, (ours, quest)) = next(iter(found.items()))
    assert title == "json, 2,048 tokens"
    assert ours[:5] == [OURS, "12.50%", "12.00%", "2", "0.0200"]
    assert quest[3] == "1"


def test_answers_are_the_same_up_to_a_token() -> None:
    assert same_tokens([1, 2, 3], [1, 2, 4, 5]) == 2
    assert same_tokens([1, 2], [1, 2, 3]) == 2
