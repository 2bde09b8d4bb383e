"""Flags for what a request asks of the sampler and of its answer; docs/sampling.md defines each."""

from __future__ import annotations

import argparse
from dataclasses import replace

from pdserve.cli.structure_flags import add_structure, structure_of
from pdserve.cli.unicode import unicode_of
from pdserve.errors import InvalidRequest
from pdserve.request import GenerateRequest, Input
from pdserve.sampling import SamplingParams

_WORDS = 32  # bits of the numbers that the wire carries
_SEED = 64


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen and when the text ends. What isn't given is the router's default."""
    group = parser.add_argument_group("sampling")
    _number(group, "--max-tokens", "most tokens to generate (default: what is left of the window)")
    _fraction(group, "--temperature", 1.0, "0 = greedy (default 1)")
    _number(group, "--top-k", "only the N most likely (default 0 = off)", default=0)
    _fraction(group, "--top-p", 1.0, "only the most likely of this sum (default 1 = off)")
    _fraction(group, "--min-p", 0.0, "only those F times as likely as the best one (default 0 = off)")
    _fraction(group, "--typical-p", 1.0, "only the most typical of this sum (default 1 = off)")
    _fraction(group, "--repetition-penalty", 1.0, "above 1: against tokens that have come, the prompt's too")
    _fraction(group, "--presence-penalty", 0.0, "-2 to 2; above 0: against tokens that were generated")
    _fraction(group, "--frequency-penalty", 0.0, "-2 to 2; the same, for each time that they were")
    group.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        type=_bias,
        metavar="ID=F",
        help="add F to its logit; repeatable",
    )
    _ids(group, "--allowed-token-id", "only these ids; repeatable")
    _ids(group, "--banned-token-id", "never this id; repeatable")
    _texts(group, "--bad-word", "never this word; repeatable")
    group.add_argument("--seed", type=int, metavar="N", help="equal seeds give equal text (default: drawn)")
    _number(group, "--min-tokens", "nothing ends the text before so many tokens (default 0)", default=0)
    _texts(group, "--stop", "end before this text; repeatable")
    _ids(group, "--stop-token-id", "end with this id; repeatable")
    group.add_argument("--include-stop", action="store_true", help="show what the text was stopped by")
    group.add_argument("--ignore-eos", action="store_true", help="go on behind the end-of-sequence token")
    add_structure(parser)


def add_output(parser: argparse.ArgumentParser) -> None:
    """What else the answer holds; beside `add_sampling`."""
    group = parser.add_argument_group("answer")
    _number(group, "--n", "so many answers (default 1)", default=1)
    _number(group, "--best-of", "generate so many and give the --n most likely ones, at the end")
    _number(group, "--logprobs", "log probability of each token and of the N most likely ones (see --json)")
    _number(group, "--prompt-logprobs", "the same for the prompt's tokens (see --json)")
    group.add_argument("--echo", action="store_true", help="begin with the prompt")
    _number(group, "--truncate-prompt-tokens", "use only the prompt's last N tokens")


def sampling_of(arguments: argparse.Namespace) -> SamplingParams:
    """Values are checked by the router; here only what the wire can't carry."""
    _check_numbers(arguments, ("max_tokens", "top_k", "min_tokens"), _WORDS)
    _check_numbers(arguments, ("seed",), _SEED)
    return SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        typical_p=arguments.typical_p,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        logit_bias=tuple(sorted(dict(arguments.logit_bias).items())),
        allowed_token_ids=_ids_of(arguments, "allowed_token_id"),
        banned_token_ids=_ids_of(arguments, "banned_token_id"),
        bad_words=_texts_of(arguments, "bad_word"),
        min_tokens=arguments.min_tokens,
        max_tokens=arguments.max_tokens,
        stop=_texts_of(arguments, "stop"),
        include_stop=arguments.include_stop,
        stop_token_ids=_ids_of(arguments, "stop_token_id"),
        ignore_eos=arguments.ignore_eos,
        structure=structure_of(arguments),
    )


def request_with(arguments: argparse.Namespace, prompt: Input) -> GenerateRequest:
    """A request from the flags of `add_sampling` and `add_output`."""
    _check_numbers(
        arguments, ("n", "best_of", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"), _WORDS
    )
    sampling = replace(
        sampling_of(arguments), logprobs=arguments.logprobs, prompt_logprobs=arguments.prompt_logprobs
    )
    return GenerateRequest(
        input=prompt,
        sampling=sampling,
        seed=arguments.seed,
        n=arguments.n,
        best_of=arguments.best_of,
        echo=arguments.echo,
        truncate_prompt_tokens=arguments.truncate_prompt_tokens,
    )


def _number(group: argparse._ArgumentGroup, flag: str, text: str, *, default: int | None = None) -> None:
    group.add_argument(flag, type=int, default=default, metavar="N", help=text)


def _fraction(group: argparse._ArgumentGroup, flag: str, default: float, text: str) -> None:
    group.add_argument(flag, type=float, default=default, metavar="F", help=text)


def _ids(group: argparse._ArgumentGroup, flag: str, text: str) -> None:
    group.add_argument(flag, type=int, action="append", default=[], metavar="ID", help=text)


def _texts(group: argparse._ArgumentGroup, flag: str, text: str) -> None:
    group.add_argument(flag, action="append", default=[], metavar="S", help=text)


def _bias(text: str) -> tuple[int, float]:
    token_id, equals, bias = text.partition("=")
    try:
        pair = (int(token_id), float(bias))
    except ValueError:
        raise argparse.ArgumentTypeError(f"want ID=F, got {text!r}") from None
    if not equals or not 0 <= pair[0] < 1 << _WORDS:
        raise argparse.ArgumentTypeError(f"want an id from 0 to 2^{_WORDS} - 1, got {token_id}")
    return pair


def _check_numbers(arguments: argparse.Namespace, names: tuple[str, ...], bits: int) -> None:
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not 0 <= value < 1 << bits:
            raise InvalidRequest(f"{_flag(name)} out of range", limit=f"0 to 2^{bits} - 1", value=value)


def _ids_of(arguments: argparse.Namespace, name: str) -> tuple[int, ...]:
    for value in getattr(arguments, name):
        if not 0 <= value < 1 << _WORDS:
            raise InvalidRequest(f"{_flag(name)} out of range", limit=f"0 to 2^{_WORDS} - 1", value=value)
    return tuple(getattr(arguments, name))


def _texts_of(arguments: argparse.Namespace, name: str) -> tuple[str, ...]:
    return tuple(unicode_of(text, _flag(name)) for text in getattr(arguments, name))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
