"""`offload-rt generate`: continue a text. The new text is written to stdout, and all other output to stderr."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import warnings
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.prompts import TRUNCATE, shortened
from ..errors import InputError
from ..sampling_params import SamplingParams
from ..utils.config_fields import check_choice
from ..utils.texts import check_writable, read_text
from .common import INTERRUPTED, add_command, load_llm, stderr_console, write_file
from .flags import add_engine_flags, add_sampling_flags, engine_config, sampling_for, sampling_given

if TYPE_CHECKING:
    from rich.console import Console

    from ..llm import LLM

TAIL = 40
"""Number of prompt tokens to show before the new text."""

_SEAM = 8
"""If a truncated text is tokenized again, it may have up to this many more tokens, because its first word was cut."""


def run(args: argparse.Namespace) -> int:
    """Continue a text, or respond to it with --chat. Stream the new text, then show statistics."""
    sampling = sampling_given(args)
    params = SamplingParams(**sampling)
    _check_flags(args, params)
    planned, most = _planned(args, params), params.max_tokens
    config = engine_config(args, **planned, progress=not args.quiet)
    text = _text(args)
    check_writable(args.stats_json)
    check_writable(args.plot)
    console = stderr_console(args.quiet)

    llm = load_llm(args.model, config, console)
    params = llm.get_default_sampling_params(**sampling_for(llm, sampling))
    if planned:  # the checkpoint may define a larger number, which would not fit
        params = replace(params, max_tokens=min(params.max_tokens, most))
    prompt = (_chat_ids if args.chat else _prompt_ids)(llm, text, args, params.max_tokens)
    if _several(params):
        return _write_all(llm, prompt, params, console)
    if args.compare_full and params.seed is None:
        params = replace(params, seed=secrets.randbits(31))  # full attention must use the same random numbers
    written, finished = _write_stream(llm, prompt, params, console)
    stats = _report(llm, args, console)
    if args.compare_full and finished:
        stats["against_full"] = _compare(llm, prompt, written, params, args.plot, console)
    if args.stats_json is not None and stats:
        write_file(args.stats_json, json.dumps(stats, indent=1) + "\n")
        console.print(f"wrote {args.stats_json}")
    return 0 if finished else INTERRUPTED


def add(commands: Any) -> None:
    parser = add_command(commands, "generate", run)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue (default: stdin, if piped)")
    parser.add_argument("--prompt-file", metavar="BOOK", help="file to continue (UTF-8); '-' is stdin")
    parser.add_argument("--chat", action="store_true", help="apply the chat template of an instruct model")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: system prompt")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="use only the first N tokens of the text (default: all)",
    )
    parser.add_argument(
        "--truncate",
        metavar="|".join(TRUNCATE),
        help="part to remove from a text that exceeds the context length (default: raise an error)",
    )
    add_sampling_flags(parser, several=True)
    output = parser.add_argument_group("output")
    output.add_argument("--stats", action="store_true", help="show all statistics at the end, not only a summary")
    output.add_argument("--stats-json", metavar="FILE", help="write the statistics as JSON")
    output.add_argument(
        "--compare-full", action="store_true", help="then continue with full attention too, and compare"
    )
    output.add_argument("--plot", metavar="FILE", help="with --compare-full: draw attention and transfers (PNG)")
    output.add_argument("--quiet", action="store_true", help="print only notes and errors on stderr")
    add_engine_flags(parser)


def _several(params: SamplingParams) -> bool:
    return params.n > 1 or params.num_beams > 1


def _check_flags(args: argparse.Namespace, params: SamplingParams) -> None:
    if args.system is not None and not args.chat:
        raise InputError("--system needs --chat")
    if args.prompt_tokens is not None and args.chat:
        raise InputError("--prompt-tokens needs a text to continue: remove --chat")
    if args.truncate is not None:
        check_choice("truncate", args.truncate, TRUNCATE)
    if args.stats_json and _several(params):
        raise InputError("--stats-json needs a single streamed text: remove -n and --num-beams")
    if args.plot and not args.compare_full:
        raise InputError("--plot needs --compare-full")
    if args.plot and find_spec("matplotlib") is None:
        raise ModuleNotFoundError(name="matplotlib")
    if args.compare_full:
        given = {"-n and --num-beams": _several(params), "--exact": args.exact, "--eviction": args.eviction_policy}
        given |= {"--device-memory": args.device_memory, "--policy full": args.policy == "full"}
        if wrong := [flag for flag, value in given.items() if value]:
            raise InputError(f"--compare-full cannot be combined with {wrong[0]}: remove one of them")


def _text(args: argparse.Namespace) -> str:
    if args.prompt is not None and args.prompt_file is not None:
        raise InputError("give either PROMPT or --prompt-file, not both")
    if args.prompt is not None:
        if os.path.isfile(args.prompt):  # unlike `Path.is_file`, it accepts names of any length
            cure = f"--prompt-file {args.prompt} reads the file"
            warnings.warn(f"the text {args.prompt!r} is continued, not the file of this name: {cure}", stacklevel=2)
        return str(args.prompt)
    if args.prompt_file is None and sys.stdin.isatty():
        raise InputError("no prompt: give a PROMPT or --prompt-file, or pipe a text to stdin")
    return read_text("-" if args.prompt_file is None else args.prompt_file)


def _planned(args: argparse.Namespace, params: SamplingParams) -> dict[str, Any]:
    """Return {"max_model_len": n} if the flags determine the length of the text, and {} otherwise."""
    if args.max_model_len is not None or args.prompt_tokens is None:
        return {}
    return {"max_model_len": max(1, args.prompt_tokens) + params.max_tokens}


def _prompt_ids(llm: LLM, text: str, args: argparse.Namespace, max_tokens: int) -> list[int]:
    """Return the token ids of the prompt: the first `--prompt-tokens` tokens of the text, or all if the flag is not
    set.

    Raise InputError if the prompt does not fit in the context and `--truncate` is not set.
    """
    ids, wanted = llm.encode(text), args.prompt_tokens
    available = llm.runner.max_positions - max_tokens
    if wanted is None:
        if available < 1:
            raise InputError(
                f"--max-new-tokens {max_tokens} leaves no tokens for a prompt: it must be less than "
                f"{llm.runner.position_limit}"
            )
        return shortened(ids, available, args.truncate, args.prompt_file or "the prompt")
    if not 1 <= wanted <= len(ids):
        raise InputError(f"--prompt-tokens {wanted} must be between 1 and {len(ids)}, the length of the text")
    return ids[:wanted]


def _chat_ids(llm: LLM, text: str, args: argparse.Namespace, max_tokens: int) -> list[int]:
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    _, ids = llm.chat_prompt([*system, {"role": "user", "content": text}])
    available = llm.runner.max_positions - max_tokens
    if len(ids) <= available:
        return ids
    message_ids = llm.encode(text, special_tokens=False)
    around = len(ids) - len(message_ids) + _SEAM
    kept = shortened(message_ids, available - around, args.truncate, args.prompt_file or "the prompt")
    assert llm.tokenizer is not None
    _, ids = llm.chat_prompt([*system, {"role": "user", "content": llm.tokenizer.decode(kept)}])
    return ids


def _write_stream(llm: LLM, prompt: list[int], params: SamplingParams, console: Console) -> tuple[list[int], bool]:
    """Show the end of the prompt on stderr, then stream the new text to stdout.

    Return the new tokens and whether the text is complete (False if Ctrl-C ended it).
    """
    written: list[int] = []
    end = "" if console.is_terminal else "\n"  # without colours, a line break separates prompt and new text
    tail = llm.tokenizer.decode(prompt[-TAIL:]) if llm.tokenizer is not None else ""
    with closing(llm.stream(prompt, params)) as events:  # type: ignore[type-var]
        try:
            for event in events:
                if event.index == 0:
                    console.print(f"{llm.name} continues {len(prompt):,} tokens:", soft_wrap=True)
                    console.print(f"… {tail}", style="dim", markup=False, soft_wrap=True, end=end)
                written.append(event.token_id)
                sys.stdout.write(event.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            return written, False
        finally:
            if sys.stdout.isatty():
                sys.stdout.write("\n")
    return written, True


def _write_all(llm: LLM, prompt: list[int], params: SamplingParams, console: Console) -> int:
    [output] = llm.generate([prompt], params)
    for one in output.outputs:
        console.print(
            f"{one.index + 1} of {len(output.outputs)}: {len(one.token_ids):,} tokens, {one.finish_reason}", style="dim"
        )
        sys.stdout.write(one.text + "\n")
        sys.stdout.flush()
    return 0


def _report(llm: LLM, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    from .tables import stats_table, summary_table

    stats = llm.last_stats
    console.print()
    if stats is None:
        console.print("Interrupted during prefill: no statistics.")
        return {}
    console.print(stats_table(stats) if args.stats else summary_table(stats))
    return stats.to_dict()


def _compare(
    llm: LLM, prompt: list[int], written: list[int], params: SamplingParams, plot: str | None, console: Console
) -> dict[str, Any]:
    """Generate the continuation again with full attention, and show how the two texts differ.

    Return the comparison. If `plot` is not None, also write a plot to this PNG file.
    """
    from ..eval.quality.comparison import compare
    from .tables import comparison_table, texts_table, verdict

    found = compare(llm, prompt, written, params, None if plot is None else Path(plot))
    if found.full_tokens == written:
        console.print(f"\nWith the same seed, full attention has generated the same {len(written):,} tokens.")
    elif llm.tokenizer is not None:
        console.print(texts_table(llm.config.policy, llm.tokenizer, written, found.full_tokens))
    console.print(comparison_table(found))
    console.print(verdict(found), soft_wrap=True, markup=False)
    if plot is not None:
        console.print(f"wrote {plot}", soft_wrap=True)
    return found.to_dict()
