"""Sampling from any Hugging Face causal language model in process: no weights are copied, no server is needed.

Llama, Mistral, Qwen2, Qwen3, Gemma 2 and Gemma 3 have their own decoders (`accel/cpu_decoder.py`, `accel/decode_gpu`),
which read the model's parameters and keep up to `max_num_seqs` slots busy: a sequence that ends makes room for the next
one. The decoder is compared with the model's forward pass when the engine is built. Every other model is decoded by its
own modules with a KV cache: a call is cut into chunks of at most `max_num_seqs` sequences, longest prompts first, each
prompt is prefilled once for all its samples, and finished sequences leave the batch.

The result depends on the seed, the prompt's id and the sample's index. Batching changes logits only by rounding, and
each draw has its own uniform, so the same tokens are drawn whatever else is in the batch, unless a uniform falls within
rounding of the boundary between two tokens: on the tiny model about once in 100,000 draws in float32, more often in
bfloat16. The log-probs are correct either way. A prompt given twice in one call, as at the end of an epoch, gets
further samples.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from tether.data.chat import Encoder, prompt_token_ids
from tether.errors import ConfigError, DataError, Diverged
from tether.models.acceleration import AVAILABLE, MISSING, SLOWER, DecodeRequest, FastDecoder, StateCollector
from tether.models.backbones import causal_lm_of
from tether.models.load import LoadedModel, embedding_count
from tether.ops.sampling import Draw, by_sequence, check_sampling, draw, sample_uniforms
from tether.protocols import RolloutEngine, Sampling
from tether.types import Finish, Prompt, Rollout


class Tokenizer(Encoder, Protocol):
    """The part of a tokenizer that an engine uses."""

    @property
    def eos_token_id(self) -> int | None:
        """The end token."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str:
        """The text of the ids."""
        ...


def assemble_rollout(
    prompt: Prompt,
    *,
    group_id: int,
    sample_id: int,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    behavior: Tensor,
    untruncated: Tensor,
    completion: str,
    finish: Finish,
    policy_version: int,
) -> Rollout:
    """`behavior` and `untruncated` are (answer length,) log-probs; every column of the result has the whole length.

    The mask is made from the two lengths, so an end token (or a padding token that the policy really sampled) is
    trained like any other.
    """
    head, tail = len(prompt_ids), len(answer_ids)

    def column(answer: Tensor) -> Tensor:
        return torch.cat((torch.zeros(head), answer.float()))

    return Rollout(
        prompt=prompt,
        group_id=group_id,
        sample_id=sample_id,
        token_ids=torch.tensor([*prompt_ids, *answer_ids], dtype=torch.int64),
        response_mask=torch.arange(head + tail) >= head,
        behavior_logprobs=column(behavior),
        untruncated_logprobs=column(untruncated),
        completion=completion,
        finish=finish,
        policy_version=policy_version,
    )


def check_rollouts(
    engine: object, rollouts: Sequence[Rollout], prompts: Sequence[Prompt], samples_per_prompt: int
) -> None:
    """Raise where an engine's rollouts break its protocol: `samples_per_prompt` for each prompt, in order."""
    name, number = type(engine).__name__, len(prompts) * samples_per_prompt
    if len(rollouts) != number:
        raise DataError(
            f"engine: {name} gave {len(rollouts)} rollouts for {len(prompts)} prompts with {samples_per_prompt} "
            f"samples each: it must give {number}"
        )
    groups: set[int] = set()
    for place, rollout in enumerate(rollouts):
        where = f"engine: rollout {place} of {name}"
        if not isinstance(cast("object", rollout), Rollout):
            raise DataError(
                f"{where} is a {type(rollout).__name__}: return tether.types.Rollout, see docs/extending.md"
            )
        prompt, sample = prompts[place // samples_per_prompt], place % samples_per_prompt
        if rollout.prompt.id != prompt.id:
            raise DataError(
                f"{where} answers prompt {rollout.prompt.id!r}, and prompt {prompt.id!r} was asked there: give the "
                "samples of one prompt side by side, in the order of the prompts"
            )
        first = rollouts[place - sample].group_id
        if rollout.group_id != first or (sample == 0 and first in groups):
            raise DataError(
                f"{where} has group_id {rollout.group_id}: the samples of one prompt share one that no other prompt has"
            )
        groups.add(first)
        _check_columns(rollout, where)


def _check_columns(rollout: Rollout, where: str) -> None:
    length = len(rollout.token_ids)
    for name in ("token_ids", "response_mask", "behavior_logprobs", "untruncated_logprobs"):
        column: Tensor = getattr(rollout, name)
        if column.shape != (length,) or column.device.type != "cpu":
            raise DataError(
                f"{where} has {name} of shape {tuple(column.shape)} on {column.device}: every column has one value a "
                f"token, here {length}, on the CPU (tether.rollout.native.assemble_rollout makes them)"
            )
    if not length or bool(rollout.response_mask[0]):
        raise DataError(f"{where} has no prompt token: the policy cannot sample the first token of a row")


def check_request(prompts: Sequence[Prompt], samples_per_prompt: int) -> None:
    """Raise on a request that no engine can answer well."""
    if not prompts:
        raise DataError("prompts is empty: give the engine at least one prompt")
    if samples_per_prompt < 1:
        raise ConfigError(f"samples_per_prompt is {samples_per_prompt}: it must be at least 1")


def check_cached(model: Any) -> None:
    """Raise if a model's forward pass has no KV cache, which every engine needs."""
    if "past_key_values" not in inspect.signature(causal_lm_of(model).forward).parameters:
        raise _no_cache(model)


def _no_cache(model: Any) -> ConfigError:
    return ConfigError(
        f"model.path: {type(causal_lm_of(model)).__name__} returns no cache, which sampling needs: use a model whose "
        "forward pass takes and returns past_key_values"
    )


class CachedBatch:
    """Left-padded rows of a causal language model and their KV cache.

    Padding is on the left, so the last column is every row's newest token; position ids start at 0 on the first
    real token, so a row's numbers are those it would have alone. Where no row has padding, neither mask nor positions
    are passed, which lets attention use its faster kernels.
    """

    def __init__(self, loaded: LoadedModel, room: int) -> None:
        """`room` is how many tokens will be decoded at most."""
        self.loaded = loaded
        self.model: Any = loaded.model
        self.device: torch.device = loaded.model.device
        self.room = room
        self.cache: Any = None
        self.mask: Tensor | None = None  # (B, width + room) int64, 0 on padding
        self.lengths = torch.empty(0)  # (B, 1) int64 real tokens so far
        self.width = 0
        self.accepts = set(inspect.signature(causal_lm_of(self.model).forward).parameters)

    def read(self, prompts: list[list[int]], rows: list[int]) -> Tensor:
        """(B, V) logits after the prompts, where row b continues `prompts[rows[b]]`.

        Each prompt is read once and its cache rows are then repeated; a cache that cannot be repeated is made again
        with one prompt a row.
        """
        logits = self._prefill(prompts)
        if rows == list(range(len(prompts))):
            return logits
        if not self.can_select:
            return self._prefill([prompts[row] for row in rows])
        places = torch.tensor(rows, device=self.device)
        self.select(places)
        return logits[places]

    def step(self, tokens: Tensor) -> Tensor:
        """(B, V) logits after one more token, `tokens` (B,), in each row."""
        self.width += 1
        positions = self.lengths
        self.lengths = self.lengths + 1
        return self._forward(tokens.unsqueeze(-1), positions)

    @property
    def can_select(self) -> bool:
        """Whether rows of this model's cache can be dropped and repeated."""
        return hasattr(self.cache, "reorder_cache")

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be given more than once.

        The cache's `reorder_cache` is an index-select over rows that every kind of layer has, also those with a
        recurrent state; `batch_select_indices` forgets that state.
        """
        self.cache.reorder_cache(rows)
        self.lengths = self.lengths[rows]
        if self.mask is not None:
            self.mask = self.mask[rows]

    def _prefill(self, prompts: list[list[int]]) -> Tensor:
        lengths = [len(ids) for ids in prompts]
        self.width = max(lengths)
        tokens = torch.tensor([[self.loaded.pad_id] * (self.width - len(ids)) + ids for ids in prompts])
        self.lengths = torch.tensor(lengths, device=self.device).unsqueeze(-1)
        columns = torch.arange(self.width + self.room, device=self.device)
        padding = self.width - self.lengths
        self.mask = None if min(lengths) == self.width else (columns >= padding).long()
        self.cache = None
        return self._forward(tokens.to(self.device), (columns[: self.width] - padding).clamp_(min=0))

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        given: dict[str, Any] = {"input_ids": tokens, "use_cache": True, "past_key_values": self.cache}
        if "logits_to_keep" in self.accepts:
            given["logits_to_keep"] = 1
        if self.mask is not None:
            given["attention_mask"] = self.mask[:, : self.width]
            if "position_ids" in self.accepts:
                given["position_ids"] = positions
        outputs = self.model(**given)
        self.cache = getattr(outputs, "past_key_values", None)
        if self.cache is None:
            raise _no_cache(self.model)
        return outputs.logits[:, -1]


BATCH = 64  # default number of answers decoded at once


class LogitsNotFinite(Diverged, FloatingPointError):  # noqa: N818 (the run's state, not a fault)
    """The model gives no distribution to sample from."""


@dataclass(frozen=True)
class _Sequence:
    """One answer to be sampled."""

    prompt: Prompt
    group: int  # index of the prompt in the call
    sample: int
    stream: int  # which of the prompt id's random streams it draws from
    prompt_ids: list[int]


class NativeEngine(RolloutEngine):
    """Batched sampling with a KV cache. Answers include the stop token, which is sampled and so is trained.

    The distribution is the model's own, over every row of its output layer: ids past the tokenizer's length (padding
    of the embedding) are not masked out, because the trainer sees them too and masking would make the engine's
    log-probs differ from the trainer's. Trained models give such ids no measurable probability.

    `states_for` is told what one layer was given for each token, where the fast decoder runs, since that was computed
    anyway; the last token of an answer is stepped on for it alone.

    `max_num_seqs` is how many answers are decoded at once, at most. "auto" is 64, and with the GPU's own decoder up to
    1024, as many as the free memory holds.

    `notices` says in one sentence why the fast decoder is not used. `completion` is the text of the answer
    without special tokens. The loop sets `policy_version`, which every rollout carries. A KV cache whose rows cannot be
    selected keeps finished sequences to the end of the chunk: the result is the same, only slower.

    An `exact` one samples by the exact pass (`model.numerics`), or raises a ConfigError where that is not possible.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_num_seqs: int | Literal["auto"] = "auto",
        states_for: StateCollector | None = None,
        general: bool = False,
        exact: bool = False,
    ) -> None:
        if isinstance(max_num_seqs, int) and max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs is {max_num_seqs}: it must be at least 1, or auto")
        self.loaded = loaded
        self.max_num_seqs = max_num_seqs
        self.states_for = states_for
        self.fast = FastDecoder(exact=exact) if AVAILABLE else None
        check_cached(loaded.model)
        self._embeddings, self._end_ids = embedding_count(loaded.model), loaded.end_ids
        self._distrusted = "rollout.engine asks for it" if general else self._unsupported()
        if self._distrusted is None and self.fast is not None:
            with _eval_mode(loaded.model):
                self._distrusted = self.fast.disagreement(loaded.model, self._base)
        self.exact = exact
        self._check_exact(self._distrusted)
        self._notice(self._distrusted)

    def _check_exact(self, reason: str | None) -> None:
        """Raise where the exact decoder is asked for and cannot be taken: no other one gives training's log-probs."""
        if self.exact and reason is not None:
            raise ConfigError(f"model.numerics is exact, and the model cannot be sampled so: {reason}; set it to fast")

    @property
    def _base(self) -> Any:
        """The causal language model without adapters around it, also after `loaded` was replaced."""
        return causal_lm_of(self.loaded.model)

    def _unsupported(self) -> str | None:
        """Why the fast decoder cannot be taken for the model as it is now."""
        return MISSING if self.fast is None else self.fast.unsupported_reason(self.loaded.model, self._base)

    @property
    def cache_bytes(self) -> int:
        """The most device memory that its cache has taken; torch's counters do not see it."""
        return 0 if self.fast is None else self.fast.cache_bytes

    def release(self) -> None:
        """Hand back the device memory of the cache, as every call does at its end; the next one takes it again."""
        if self.fast is not None:
            self.fast.release()

    def _at_once(self, accelerated: bool) -> int:
        """The maximum number of answers decoded at once: as set, or what suits the device."""
        if isinstance(self.max_num_seqs, int):
            return self.max_num_seqs
        slots = self.fast.most_slots(self.loaded.model.device) if accelerated and self.fast is not None else None
        return slots or BATCH

    def _notice(self, reason: str | None) -> None:
        if reason and not self.notices:
            text = f"Rollouts take the general way, not the fast decoder: {reason}."
            self.notices = (SLOWER if reason == MISSING else text,)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, samples_per_prompt: int, seed: int
    ) -> list[Rollout]:
        """`samples_per_prompt` rollouts of each prompt, in the order given; `group_id` is the prompt's index."""
        check_request(prompts, samples_per_prompt)
        check_sampling(sampling)
        encoded = self._encode(prompts, sampling.max_new_tokens)
        work: list[_Sequence] = []
        streams: Counter[str] = Counter()
        for group, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
            for sample in range(samples_per_prompt):
                work.append(_Sequence(prompt, group, sample, streams[prompt.id], ids))
                streams[prompt.id] += 1
        work.sort(key=lambda item: -len(item.prompt_ids))  # stable: samples of one prompt stay side by side
        rollouts: list[Rollout] = []
        with _eval_mode(self.loaded.model):
            reason = self._distrusted or self._unsupported()
            self._check_exact(reason)
            self._notice(reason)
            size = self._at_once(accelerated=False) if reason else len(work)
            for start in range(0, len(work), size):
                decode = self._decode if reason else self._decode_accel
                rollouts += self._sample_chunk(work[start : start + size], sampling, seed, decode)
        return sorted(rollouts, key=lambda rollout: (rollout.group_id, rollout.sample_id))

    def _encode(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        """Each prompt's ids, checked against the model before anything is computed."""
        context = self.loaded.context_length
        known = self._embeddings
        encoded = [prompt_token_ids(self.loaded.tokenizer, prompt) for prompt in prompts]
        for prompt, ids in zip(prompts, encoded, strict=True):
            if len(ids) + max_new_tokens > context:
                raise DataError(
                    f"prompt {prompt.id!r} has {len(ids)} tokens, and with sampling.max_new_tokens {max_new_tokens} "
                    f"exceeds the model's context of {context}: shorten the prompt, or set max_new_tokens to at most "
                    f"{max(context - len(ids), 0)}"
                )
            if max(ids) >= known:
                raise DataError(
                    f"prompt {prompt.id!r} holds token {max(ids)}, and the model has embeddings for {known} tokens "
                    "only: use the tokenizer that belongs to the model"
                )
        return encoded

    def _sample_chunk(
        self, chunk: list[_Sequence], sampling: Sampling, seed: int, decode: Callable[..., list[Draw]]
    ) -> list[Rollout]:
        uniforms = torch.stack(
            [sample_uniforms(seed, item.prompt.id, item.stream, sampling.max_new_tokens) for item in chunk]
        )
        ends = self._end_ids
        stops = {*ends, *sampling.stop_token_ids}
        answers = decode(chunk, uniforms, sampling, stops)
        ids = [answer.tokens.tolist() for answer in answers]
        token_ids = [tokens[:-1] if tokens[-1] in ends else tokens for tokens in ids]  # an end token is not text
        texts = self.loaded.tokenizer.batch_decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return [
            assemble_rollout(
                item.prompt,
                group_id=item.group,
                sample_id=item.sample,
                prompt_ids=item.prompt_ids,
                answer_ids=tokens,
                behavior=answer.behavior,
                untruncated=answer.untruncated,
                completion=text,
                finish="stop" if tokens[-1] in stops else "length",
                policy_version=self.policy_version,
            )
            for item, tokens, answer, text in zip(chunk, ids, answers, texts, strict=True)
        ]

    def _decode_accel(self, work: list[_Sequence], uniforms: Tensor, sampling: Sampling, stops: set[int]) -> list[Draw]:
        """As `_decode`, for any number of sequences, by the decoder that is written for the model."""
        assert self.fast is not None
        prompts, groups = {item.group: item.prompt_ids for item in work}, [item.group for item in work]
        request = DecodeRequest(prompts, groups, uniforms, sampling, stops)

        def check(token: int, row: int, step: int) -> None:
            _check_finite([token], [row], work, step)

        return self.fast.draw(self._base, request, self._at_once(accelerated=True), check, self.states_for)

    @torch.inference_mode()
    def _decode(self, chunk: list[_Sequence], uniforms: Tensor, sampling: Sampling, stops: set[int]) -> list[Draw]:
        """The drawn tokens and log-probs of each sequence, (length,) each, on the CPU.

        A step makes one transfer from the device, of the drawn tokens, to see which sequences stopped.
        """
        groups = sorted({item.group: item.prompt_ids for item in chunk}.items(), key=lambda group: -len(group[1]))
        row_of = {group: row for row, (group, _) in enumerate(groups)}
        batch = CachedBatch(self.loaded, room=sampling.max_new_tokens)
        logits = batch.read([ids for _, ids in groups], [row_of[item.group] for item in chunk])
        wide = torch.float32 if batch.device.type == "mps" else torch.float64
        uniforms = uniforms.to(batch.device, wide)
        rows = list(range(len(chunk)))  # the sequence that each row of the batch holds; -1 once it is finished
        history: list[tuple[list[int], Draw]] = []
        for step in range(sampling.max_new_tokens):
            drawn = draw(logits, uniforms[:, step], sampling)
            tokens = drawn.tokens.tolist()
            _check_finite(tokens, rows, chunk, step)
            history.append((rows, drawn))
            rows = [-1 if token in stops else row for token, row in zip(tokens, rows, strict=True)]
            running = [place for place, row in enumerate(rows) if row >= 0]
            if not running or step + 1 == sampling.max_new_tokens:
                break
            inputs = drawn.tokens
            if len(running) < len(rows) and batch.can_select:
                kept = torch.tensor(running, device=batch.device)
                batch.select(kept)
                inputs, uniforms, rows = inputs[kept], uniforms[kept], [rows[place] for place in running]
            logits = batch.step(inputs)
        return by_sequence(history, len(chunk))


def _check_finite(tokens: list[int], rows: list[int], chunk: list[_Sequence], step: int) -> None:
    for token, row in zip(tokens, rows, strict=True):
        if token < 0 <= row:
            raise LogitsNotFinite(
                f"the model's logits are not finite at step {step} of prompt {chunk[row].prompt.id!r}: its weights "
                "have diverged or its dtype overflows; go back to an earlier checkpoint, or use float32 or bfloat16"
            )


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while: in training mode gradient checkpointing would silently turn the cache off."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
