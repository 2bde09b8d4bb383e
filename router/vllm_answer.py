"""Events of a request as vLLM's engine service tells them: chunks of ids, and one end for each choice."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.request import Event, Finished, Prompt, Started, Tokens
from pdserve.rpc.v1 import vllm_engine_pb2 as pb
from pdserve.sampling import FinishReason, TokenLogprobs


class VllmAnswer:
    """Of one request. streams: whether its client wants chunks. stop: the texts that may end it."""

    def __init__(self, *, streams: bool, stop: Sequence[str]) -> None:
        self._streams = streams
        self._stop = stop
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._prompt: pb.InputLogProbs | None = None
        self._latest: dict[int, Tokens] = {}  # by choice: the last ones, or all

    def take(self, event: Event) -> list[pb.GenerateResponse]:
        """What to say now."""
        match event:
            case Started():
                self._num_prompt_tokens = event.num_prompt_tokens
                self._num_cached_tokens = event.num_cached_tokens
                return []
            case Prompt():
                self._take_prompt(event)
                return []
            case Tokens() if self._streams:
                is_first = event.choice not in self._latest
                self._latest[event.choice] = event
                return [pb.GenerateResponse(chunk=self._chunk(event, is_first=is_first))]
            case Tokens():
                self._latest[event.choice] = _joined(self._latest.get(event.choice), event)
                return []
            case Finished():
                return [pb.GenerateResponse(complete=self._complete(event))]

    def _take_prompt(self, part: Prompt) -> None:
        if not part.logprobs:
            return
        if self._prompt is None:
            self._prompt = pb.InputLogProbs()
        scores: list[TokenLogprobs | None] = list(part.logprobs)
        if part.first_index == 0:
            scores.insert(0, None)  # nothing comes before the first token
        for token_id, score in zip(part.token_ids, scores):
            self._prompt.token_ids.append(token_id)
            one = self._prompt.token_logprobs.add()
            if score is not None:
                one.value = score.logprob
            self._prompt.top_logprobs.append(_top(score))

    def _chunk(self, tokens: Tokens, *, is_first: bool) -> pb.GenerateStreamChunk:
        return pb.GenerateStreamChunk(
            token_ids=tokens.token_ids,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(tokens.token_ids),
            cached_tokens=self._num_cached_tokens,
            output_logprobs=_output(tokens),
            input_logprobs=self._prompt if is_first else None,
            index=tokens.choice,
        )

    def _complete(self, finished: Finished) -> pb.GenerateComplete:
        nothing = Tokens(choice=finished.choice, first_index=0, token_ids=(), text="")
        tokens = self._latest.get(finished.choice, nothing)
        complete = pb.GenerateComplete(
            output_ids=tokens.token_ids,
            finish_reason="length" if finished.reason is FinishReason.LENGTH else "stop",
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(tokens.token_ids),
            cached_tokens=self._num_cached_tokens,
            output_logprobs=_output(tokens),
            input_logprobs=self._prompt,
            index=finished.choice,
        )
        if finished.reason is FinishReason.STOP_TOKEN and tokens.token_ids:
            complete.matched_token_id = tokens.token_ids[-1]
        if finished.reason is FinishReason.STOP_TEXT and len(self._stop) == 1:
            complete.matched_stop_str = self._stop[0]
        return complete


def _joined(before: Tokens | None, tokens: Tokens) -> Tokens:
    if before is None:
        return tokens
    return Tokens(
        choice=tokens.choice,
        first_index=before.first_index,
        token_ids=before.token_ids + tokens.token_ids,
        text="",
        logprobs=before.logprobs + tokens.logprobs,
    )


def _output(tokens: Tokens) -> pb.OutputLogProbs | None:
    if not tokens.logprobs:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[score.logprob for score in tokens.logprobs],
        token_ids=tokens.token_ids,
        top_logprobs=[_top(score) for score in tokens.logprobs],
    )


def _top(score: TokenLogprobs | None) -> pb.TopLogProbs:
    top = () if score is None else score.top
    return pb.TopLogProbs(values=[value for _, value in top], token_ids=[token_id for token_id, _ in top])
