r"""Adapter that makes this runtime available as a model in the LM Evaluation Harness (0.4).

    offload-rt lm-eval --model_args pretrained=reference,policy=infinigen --tasks piqa
    offload-rt lm-eval --model_args pretrained=FOLDER,policy=infinigen --tasks niah_single_1,ruler_vt,ruler_cwe \
        --metadata '{"max_seq_lengths": [4096]}' --limit 20

The second command runs RULER tasks that need no downloads. It requires the extra `lm_eval[ruler]`. The harness's own
command cannot load models from other packages, so `main` registers the model and calls the harness.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ...config import DType, EngineConfig
from ...errors import ConfigError, InputError
from ...llm import LLM
from ...sampling_params import SamplingParams
from ...sessions.chat_render import render_chat
from ..core.rival_options import register_rivals
from .ruler import without_downloads

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASKS = Path(__file__).parent / "tasks"
"""Folder with the package's task files. Their tasks use local files, and the names of these tasks end in `_local`."""

Request = tuple[Any, list[int], list[int]]
"""A request: (the harness's cache key, token ids of the context, token ids of the continuation)."""

MAX_BATCH = EngineConfig.max_num_seqs
"""Default number of sequences per batch."""

_SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")


@register_model("offload-rt")
class OffloadLM(TemplateLM):  # type: ignore[misc]
    """Harness model that uses this runtime. Requests with equal contexts share one prefill.

    Args:
        decode_from: Maximum number of prefilled tokens per request. By default, all context tokens except the last are
            prefilled.
        max_length: Maximum number of tokens per request. By default, the context length of the model.
        add_bos_token: Whether to add special tokens. None uses the default of the tokenizer.
        **options: Options of the policy. A list is written as 0:1, and None as "none".

    Raises:
        InputError: The model has no tokenizer. `LLM` can raise other errors.
    """

    def __init__(
        self,
        pretrained: str,
        policy: str = "infinigen",
        *,
        dtype: DType = "auto",
        device: str | None = None,
        host_memory: int | str | None = None,
        eviction: str | None = None,
        skew: str | None = None,
        decode_from: int | None = None,
        max_length: int | None = None,
        batch_size: int | str = MAX_BATCH,
        max_batch_size: int | None = None,
        add_bos_token: bool | None = None,
        **options: Any,
    ) -> None:
        register_rivals()
        llm = LLM(
            pretrained,
            policy=policy,
            policy_options={name: _option(name, value) for name, value in options.items()},
            dtype=dtype,
            device=device or "auto",
            host_memory=host_memory,
            eviction=eviction,
            skew=skew,
            progress=True,
        )
        self._setup(llm, decode_from, max_length, _batch(batch_size, max_batch_size), add_bos_token)

    @classmethod
    def around(cls, llm: LLM, *, decode_from: int | None = None, batch_size: int = MAX_BATCH) -> OffloadLM:
        made = cls.__new__(cls)
        made._setup(llm, decode_from, None, batch_size, None)
        return made

    def _setup(
        self, llm: LLM, decode_from: int | None, max_length: int | None, batch_size: int, add_bos_token: bool | None
    ) -> None:
        super().__init__()
        if llm.tokenizer is None:
            raise InputError(f"{llm.name} has no tokenizer, which the harness needs")
        self.llm = llm
        self.tokenizer: PreTrainedTokenizerBase = llm.tokenizer
        self.max_length = max_length or llm.geometry.max_positions
        self.batch_size = batch_size
        self.decode_from, self.add_bos_token = decode_from, add_bos_token
        self.fractions: list[tuple[float, float]] = []  # (exact attention, fetched) fractions of each request
        self.shares: dict[str, list[tuple[float, float]]] = {}  # (exact attention, fetched) fractions by task

    @property
    def eot_token_id(self) -> int:
        return int(cast(Any, self.tokenizer).eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that precedes a text if there is no context: BOS if the tokenizer defines it, otherwise the
        end-of-text token.
        """
        begin = cast(Any, self.tokenizer).bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokenize `string`. By default, no special tokens are added if the text already begins with BOS."""
        wanted = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(str(self.tokenizer.decode([self.prefix_token_id]))):
            wanted = False
        extra = {} if wanted is None else {"add_special_tokens": wanted}
        ids: Any = self.tokenizer(string, verbose=False, **extra)["input_ids"]
        return list(ids)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """For each continuation, return the sum of log-probabilities, and whether greedy decoding would generate all of
        its tokens.

        Requests longer than `max_length` are truncated on the left, as the harness's own transformers class does.
        """
        prompts, targets = [], []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise InputError(
                    f"a continuation of {len(continuation)} tokens exceeds max_length={self.max_length}: raise it"
                )
            kept = (context + continuation)[-(self.max_length + 1) :]
            prompts.append(kept[: len(kept) - len(continuation)])
            targets.append(kept[len(kept) - len(continuation) :])
        found = []
        scores = self.llm.score(prompts, targets, self.decode_from, batch=self.batch_size)
        for (key, _, _), score in zip(requests, scores, strict=True):
            self.fractions.append((score.stats.exact_fraction, score.stats.fetched_fraction))
            found.append((sum(score.logprobs), all(score.is_greedy)))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, found[-1])
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each complete text.

        A text is scored in windows of `max_length` tokens. Each token is scored exactly once.
        """
        windows: list[Request] = []
        counts = []
        for (text,) in (request.args for request in requests):
            rolled = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            mine: list[Request] = [(None, *make_disjoint_window(window)) for window in rolled]
            windows += mine
            counts.append(len(mine))
        scored = iter(self._loglikelihood_tokens(windows))
        totals = [sum(next(scored)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate a continuation for each request, up to a stop string or the end of the text.

        Decoding is greedy unless the task sets sampling parameters.
        """
        prompts: list[list[int]] = []
        params: list[SamplingParams] = []
        for context, settings in (request.args for request in requests):
            kwargs = dict(normalize_gen_kwargs(settings, 256))
            room = self.max_length - int(kwargs["max_gen_toks"])
            if room < 1:
                raise InputError(
                    f"max_gen_toks={kwargs['max_gen_toks']} must be less than max_length={self.max_length}"
                )
            prompts.append(self.tok_encode(context)[-room:])
            params.append(_sampling(kwargs))
        texts: list[str] = []
        for start in range(0, len(prompts), self.batch_size):
            part = slice(start, start + self.batch_size)
            for request, output in zip(requests[part], self.llm.generate(prompts[part], params[part]), strict=True):
                [completion] = output.outputs
                assert completion.stats is not None
                self.fractions.append((completion.stats.exact_fraction, completion.stats.fetched_fraction))
                self.shares.setdefault(str(request.task_name), []).append(self.fractions[-1])
                self.cache_hook.add_partial("generate_until", request.args, completion.text)
                texts.append(completion.text)
        self._say_shares()
        return texts

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        before = len(self.fractions)
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        for request, fractions in zip(requests, self.fractions[before:], strict=True):
            self.shares.setdefault(str(request.task_name), []).append(fractions)
        self._say_shares()
        return found

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise InputError(f"{self.llm.name} has no chat template: leave --apply_chat_template out")
        return render_chat(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def get_model_info(self) -> dict[str, Any]:
        """Return the exact attention fraction and the fetched fraction of each task.

        The harness adds them to its results.
        """
        means = {name: _mean_shares(shares) for name, shares in self.shares.items()}
        return {"attended_and_fetched_fractions": means}

    def _say_shares(self) -> None:
        for name, shares in self.shares.items():
            attended, fetched = _mean_shares(shares)
            what = f"{name}: {len(shares)} requests, attended {attended:.2%}, over the fetched {fetched:.2%} (means)"
            print(what, file=sys.stderr, flush=True)


def _mean_shares(shares: Sequence[tuple[float, float]]) -> tuple[float, float]:
    attended, fetched = zip(*shares, strict=True)
    return sum(attended) / len(shares), sum(fetched) / len(shares)


def _sampling(kwargs: dict[str, Any]) -> SamplingParams:
    known = {"until", "max_gen_toks", "temperature", "do_sample", *_SAMPLING}
    unknown = sorted(set(kwargs) - known)
    if unknown:
        raise ConfigError(f"generation settings {', '.join(unknown)} are not supported; {sorted(known)} are")
    return SamplingParams(
        max_tokens=int(kwargs["max_gen_toks"]),
        temperature=float(kwargs.get("temperature", 0.0)),
        stop=tuple(stop for stop in kwargs.get("until", ()) if stop),
        **{name: kwargs[name] for name in _SAMPLING if name in kwargs},
    )


def _batch(size: int | str, most: int | None) -> int:
    if str(size).startswith("auto"):
        return most or MAX_BATCH
    if not str(size).isdigit() or int(size) < 1:
        raise ConfigError(f"batch_size={size!r} must be a positive number or 'auto'")
    return int(size)


def _option(name: str, value: Any) -> Any:
    """Convert a value parsed by the harness to a policy option.

    "none" becomes None. For `dense_layers`, "0:1" becomes the tuple (0, 1), and "none" becomes ().
    """
    if name == "dense_layers" and not isinstance(value, (tuple, list)):
        return () if value == "none" else tuple(int(layer) for layer in str(value).split(":"))
    return None if value == "none" else value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of the harness. If `arguments` is None, use the arguments of this process."""
    from lm_eval.__main__ import cli_evaluate

    given = list(sys.argv[1:] if arguments is None else arguments)
    flags = {argument.split("=")[0] for argument in given}
    if given and given[0] not in ("ls", "validate", "-h", "--help"):
        if not flags & {"--model", "-M", "--config", "-C"}:
            given += ["--model", "offload-rt"]
        if "--device" not in flags:
            given += ["--device", "auto"]  # the harness defaults to cuda:0 on every machine
        if not flags & {"--batch_size", "-b"}:
            given += ["--batch_size", "auto"]  # the harness defaults to one sequence at a time
        if "--include_path" not in flags:
            given += ["--include_path", str(TASKS)]
    before, sys.argv = sys.argv, ["lm-eval", *given]
    try:
        with without_downloads():
            cli_evaluate()
    finally:
        sys.argv = before
    return 0
