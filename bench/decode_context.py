"""The contexts of bench/decode.py: a real model's keys, values and queries, kept in a folder.

The model reads a prompt once (needles in the Python documentation, and the question for all of
them) and answers greedily with full attention. What its layers hold, and every query of the answer,
is kept as float32. Contexts longer than that are made of it: keys and queries are turned back to
where no position is in them, runs of RUN_TOKENS tokens are drawn anew, a tenth of each dimension's
deviation is added to keys and values as noise, and all are turned to their new positions. The first
Page, the last tokens, and how queries follow each other stay what they were.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from bench.fidelity_attention import SimulatedLayer, read
from bench.fidelity_tasks import RETRIEVAL, make_task
from kvtier.kernels.rotary import Rotary, unrotated
from kvtier.tiering.adapters import attention
from kvtier.tiering.adapters.model_identity import geometry_of
from kvtier.tiering.adapters.model_rotary import rotaries_of
from kvtier.tiering.geometry import PAGE_TOKENS, SEGMENT_TOKENS

RUN_TOKENS = 64
"""So many neighbours stay neighbours in a context that is made longer."""
TAIL_TOKENS = 64
"""The last tokens, which no Segment holds."""
NOISE = 0.1
"""Of the deviation of a dimension."""
ANSWER_TOKENS = 64
SEED = 1
SLACK_TOKENS = 128
"""By which a haystack may be shorter than was asked for."""


@dataclass(frozen=True, slots=True)
class Layer:
    """keys, values float32 [kv_heads, tokens, width]; queries float32 [steps, q_heads, width]."""

    keys: Tensor
    values: Tensor
    queries: Tensor


@dataclass(frozen=True, slots=True)
class Context:
    """ids: int64 of the prompt, which layers hold, and of the answer, all but the last. rotaries:
    of each layer."""

    ids: np.ndarray[Any, np.dtype[np.int64]]
    layers: list[Layer]
    rotaries: list[Rotary]

    @property
    def tokens(self) -> int:
        return self.layers[0].keys.shape[1]

    @property
    def steps(self) -> int:
        return self.layers[0].queries.shape[0]

    def of_layers(self, numbers: list[int]) -> "Context":
        """These layers alone."""
        return Context(
            self.ids, [self.layers[at] for at in numbers], [self.rotaries[at] for at in numbers]
        )

    def lengthened(self, tokens: int) -> "Context":
        """Of `tokens` tokens, more than there are, whose KV is drawn from this one's."""
        chance = torch.Generator().manual_seed(SEED)
        source = drawn(self.tokens, tokens, chance)
        layers = [
            _lengthened(layer, source, rotary, chance)
            for layer, rotary in zip(self.layers, self.rotaries, strict=True)
        ]
        ids = np.concatenate([self.ids[source.numpy()], self.ids[self.tokens :]])
        return Context(ids, layers, self.rotaries)

    def save(self, path: Path) -> None:
        arrays = {
            f"{name}{at}": getattr(layer, name).numpy()
            for at, layer in enumerate(self.layers)
            for name in ("keys", "values", "queries")
        }
        with path.with_suffix(".part").open("wb") as file:
            np.savez(file, ids=self.ids, **arrays)
        path.with_suffix(".part").replace(path)

    @classmethod
    def load(cls, path: Path, rotaries: list[Rotary]) -> Self:
        with np.load(path) as file:
            layers = [
                Layer(*(torch.from_numpy(file[f"{name}{at}"]) for name in Layer.__slots__))
                for at in range(len(rotaries))
            ]
            return cls(file["ids"], layers, rotaries)


def drawn(have: int, tokens: int, chance: torch.Generator) -> Tensor:
    """Which of `have` tokens stands at each of `tokens` positions, int64: the first Page and the
    last tokens are those that there are, runs of others lie between."""
    first, last = torch.arange(PAGE_TOKENS), torch.arange(have - TAIL_TOKENS, have)
    count = tokens - PAGE_TOKENS - TAIL_TOKENS
    runs = -(-count // RUN_TOKENS)
    past = have - TAIL_TOKENS - RUN_TOKENS + 1
    starts = torch.randint(PAGE_TOKENS, past, (runs, 1), generator=chance)
    between = (starts + torch.arange(RUN_TOKENS)).view(-1)[:count]
    return torch.cat((first, between, last))


def turned(rows: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """Rows [..., tokens, width] with positions put in: what `unrotated` takes out."""
    # Undoing the opposite position turns the same way, but for the scaling, which it divides by.
    return unrotated(rows, -positions, rotary).mul_(rotary.scaling**2)


def _lengthened(layer: Layer, source: Tensor, rotary: Rotary, chance: torch.Generator) -> Layer:
    have, tokens = layer.keys.shape[1], len(source)
    keys = unrotated(layer.keys, torch.arange(have), rotary)
    steps = torch.arange(len(layer.queries))
    queries = unrotated(layer.queries.transpose(0, 1), have + steps, rotary)
    return Layer(
        turned(_noisy(keys, source, chance), torch.arange(tokens), rotary),
        _noisy(layer.values, source, chance),
        turned(queries, tokens + steps, rotary).transpose(0, 1).contiguous(),
    )


def _noisy(rows: Tensor, source: Tensor, chance: torch.Generator) -> Tensor:
    """Rows [heads, tokens, width] as `source` names them; those in between with noise."""
    deviation = rows.std(1, keepdim=True) * NOISE
    made = rows[:, source]
    middle = made[:, PAGE_TOKENS : len(source) - TAIL_TOKENS]
    middle += torch.randn(middle.shape, generator=chance) * deviation
    return made


# ---- measured ---------------------------------------------------------------------------------


def rotaries(model: PreTrainedModel) -> list[Rotary]:
    """Of each layer. Raises AssertionError where they are not known."""
    found = rotaries_of(model, geometry_of(model))
    known = [each for each in found if each is not None]
    assert len(known) == len(found), "keys of this model cannot be turned back"
    return known


def measured(model: PreTrainedModel, tokenizer: Any, tokens: int, folder: Path) -> Context:
    """What the model holds of a prompt of this many tokens, and asks in its answer: computed, or as
    it was kept in `folder`. tokens: a multiple of 512, and TAIL_TOKENS."""
    assert tokens % SEGMENT_TOKENS == TAIL_TOKENS
    path = folder / f"context-{tokens}-{ANSWER_TOKENS}.npz"
    if not path.exists():
        _compute(model, _prompt(tokenizer, tokens), rotaries(model)).save(path)
    return Context.load(path, rotaries(model))


def _prompt(tokenizer: Any, tokens: int) -> list[int]:
    """Ids of a context and its question, which is cut in the middle to have so many."""
    task = make_task(
        RETRIEVAL, tokens + SLACK_TOKENS, SEED, lambda text: len(tokenizer(text).input_ids)
    )
    question: list[int] = tokenizer(task.questions[-1].text).input_ids
    context: list[int] = tokenizer(task.context).input_ids
    cut = len(context) + len(question) - tokens
    assert cut >= 0, "the haystack is too small"
    middle = len(context) // 2
    return [*context[:middle], *context[middle + cut :], *question]


def _compute(model: PreTrainedModel, ids: list[int], rotary: list[Rotary]) -> Context:
    attention.register()
    module: Any = model
    before = module.config._attn_implementation
    module.set_attn_implementation(attention.NAME)
    cache = DynamicCache(config=module.config)
    with torch.inference_mode():
        logits = module(torch.tensor([ids]), cache=cache, logits_to_keep=1).logits[0, -1]
    layers = []
    for each in cache.layers:
        assert isinstance(each, DynamicLayer)
        assert each.keys is not None
        assert each.values is not None
        layers.append(SimulatedLayer(each.keys[0], each.values[0]))
        layers[-1].queries = []
    held = [layer.held for layer in layers]
    answer: list[int] = []
    for _ in range(ANSWER_TOKENS):
        answer.append(int(logits.argmax()))
        logits = read(model, layers, answer[-1:], 1)[-1]
    module.set_attn_implementation(before)
    found = []
    for layer, (keys, values) in zip(layers, held, strict=True):
        assert layer.queries is not None
        found.append(Layer(keys, values, torch.stack([each[:, 0] for each in layer.queries])))
    return Context(np.array([*ids, *answer]), found, rotary)
