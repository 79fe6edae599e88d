"""`kvtier.generate`: the library's `generate` with a loop that can run a step twice.

    cache = TieredCache(store, input_ids, budget=0.125, guard="strict")
    answer = kvtier.generate(model, input_ids, cache, max_new_tokens=200)
    answer.tokens, answer.report

Sampling, processors of logits, streaming and stopping are the library's own: it prepares them as
always, and hands them to this loop in the place of its own. A step that is audited is read
sparsely, taken back, and read exactly; the answer goes on from the exact one.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from kvtier.errors import ConfigError, UnsupportedError
from kvtier.kernels.divergence import divergence
from kvtier.tiering.adapters.batch import as_batch
from kvtier.tiering.adapters.huggingface import TieredCache
from kvtier.tiering.adapters.report import Report
from kvtier.tiering.guard import Schedule, schedule_of

REFUSED = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "assistant_model": None,
    "prompt_lookup_num_tokens": None,
    "custom_generate": None,
    "return_dict_in_generate": False,
    "cache": None,
    "past_key_values": None,
}
"""Options of the library's `generate` that this one does not take, unless they say nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: int64 [1, prompt and answer], as `generate` returns them."""

    tokens: torch.Tensor
    report: Report


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: TieredCache,
    *,
    seed: int | None = None,
    **options: Any,
) -> Answer:
    """What `model.generate(input_ids, cache=cache, **options)` does, under the cache's guard.

    input_ids: int64 [1, tokens]. seed: of the sampling, if there is any; None: torch's own state.
    options: those of `generate` but for beams, several answers, assisted decoding and
    `return_dict_in_generate`. With guard "strict" a streamer gets tokens when an audit has
    confirmed them. Raises ConfigError, UnsupportedError.
    """
    if not isinstance(cache, TieredCache):
        raise ConfigError(f"cache must be a TieredCache: got {type(cache).__name__}")
    as_batch(input_ids, "input_ids")
    if not isinstance(input_ids, torch.Tensor):
        raise ConfigError(f"input_ids must be a tensor [1, tokens]: got {type(input_ids).__name__}")
    if input_ids.ndim != 2 or len(input_ids) != 1:
        raise UnsupportedError(
            f"kvtier.generate takes one prompt, input_ids [1, tokens]: got {list(input_ids.shape)}"
        )
    held = cache.get_seq_length()
    if held >= input_ids.shape[1]:
        raise ConfigError(
            f"nothing is left for the model to read: this cache holds {held} tokens, the prompt "
            f"has {input_ids.shape[1]}. Make a new TieredCache for it"
        )
    for name, nothing in REFUSED.items():
        if options.get(name, nothing) != nothing:
            raise UnsupportedError(f"kvtier.generate does not take {name}={options[name]!r}")
    cache.begin_tally()
    # The library hands no streamer on to a loop that is not its own.
    loop = _Loop(cache, seed, options.get("streamer"))
    with cache.mode.guarded():
        # The library's types say "a name of a repository"; its documentation "or a callable".
        decode: Any = model.generate
        tokens: torch.Tensor = decode(input_ids, cache=cache, custom_generate=loop.run, **options)
    return Answer(tokens, cache.report())


@dataclass(slots=True)
class _Confirmed:
    """Where an answer stood when an audit found nothing: how many ids, and what follows them."""

    length: int
    logits: torch.Tensor


@dataclass(slots=True)
class _Loop:
    """One answer; what it counts goes to the cache's tally."""

    cache: TieredCache
    seed: int | None
    streamer: Any
    schedule: Schedule = field(init=False)
    _streamed: int = 0

    def __post_init__(self) -> None:
        self.schedule = schedule_of(self.cache.mode.level)

    def run(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The decoding loop that the library calls, with what it has prepared."""
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        prompt = self._streamed = input_ids.shape[1]
        behind = input_ids[:, self.cache.get_seq_length() :]
        logits = self._prefill(model, behind, generation_config.prefill_chunk_size)
        confirmed = _Confirmed(prompt, logits)
        while True:
            scores = logits_processor(input_ids, logits.clone())
            chosen = _chosen(scores, generation_config.do_sample, generator)
            input_ids = torch.cat([input_ids, chosen], 1)
            if bool(stopping_criteria(input_ids, None).all()):
                break
            logits, alarm = self._step(model, chosen)
            if alarm is None:
                if not self.schedule.redoes:
                    self._stream(input_ids)
            elif alarm and self.schedule.redoes:
                input_ids, logits = self._go_back(input_ids, confirmed)
            else:
                confirmed = _Confirmed(input_ids.shape[1], logits)
                self._stream(input_ids)
        self._stream(input_ids)
        if self.streamer is not None:
            self.streamer.end()
        return input_ids

    def _prefill(
        self, model: PreTrainedModel, ids: torch.Tensor, chunk: int | None
    ) -> torch.Tensor:
        """`_read`, so many ids at a time where that was asked for."""
        *parts, last = torch.split(ids, chunk or ids.shape[1], 1)
        for part in parts:
            self._read(model, part)
        return self._read(model, last)

    def _read(self, model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
        """Have the model read ids [1, n]; float32 logits [1, vocabulary] of what follows them."""
        at = self.cache.get_seq_length()
        positions = torch.arange(at, at + ids.shape[1], device=ids.device)[None]
        output = model(
            input_ids=ids,
            position_ids=positions,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _step(
        self, model: PreTrainedModel, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, bool | None]:
        """Read one token [1, 1]: the logits of what follows it, and whether its audit was an alarm
        (None: it was not audited)."""
        mode, tally = self.cache.mode, self.cache.tally
        tally.steps += 1
        logits = self._read(model, chosen)
        if not mode.is_sparse(self.cache.get_seq_length() - 1, 1):
            return logits, False
        if not self.schedule.is_due(tally.steps, _margin(logits), tally.audits.last):
            return logits, None
        self.cache.crop(-1)
        with mode.exactly():
            exact = self._read(model, chosen)
        alarm = tally.audits.note(tally.steps, float(divergence(exact, logits)))
        if alarm:
            mode.widen(tally.audits.budget)
        return exact, alarm

    def _go_back(
        self, input_ids: torch.Tensor, confirmed: _Confirmed
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take back what was generated since an audit found nothing."""
        self.cache.tally.taken_back += input_ids.shape[1] - confirmed.length
        self.cache.crop(confirmed.length - self.cache.get_seq_length())
        return input_ids[:, : confirmed.length], confirmed.logits

    def _stream(self, input_ids: torch.Tensor) -> None:
        """Hand over what a streamer has not got yet."""
        if self.streamer is not None:
            for at in range(self._streamed, input_ids.shape[1]):
                self.streamer.put(input_ids[0, at : at + 1].cpu())
        self._streamed = input_ids.shape[1]


def _chosen(scores: torch.Tensor, samples: bool, generator: torch.Generator | None) -> torch.Tensor:
    """The next id, int64 [1, 1]."""
    if not samples:
        return scores.argmax(-1, keepdim=True)
    return torch.multinomial(scores.softmax(-1), 1, generator=generator)


def _margin(logits: torch.Tensor) -> float:
    """How much more probable the best token is than the second."""
    best = logits.softmax(-1).topk(2, -1).values[0]
    return float(best[0] - best[1])
