"""SentencePiece tokenizers (`llama`) of GGUF files: BPE over characters, spaces spelled ▁, bytes where nothing fits.

Files give each token a score and mostly no merges: the merges are all ways to put a token together from two others,
the best token first. Unless the file says no, one ▁ stands before every stretch of text between special tokens, even if
that begins with a space, and one is taken off when decoding. Gemma's files, which only their architecture tells, write
runs of spaces as they are, and there the best token is the one that comes first. Equal to what llama.cpp makes of the
same file.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from pdserve.errors import Incompatible
from pdserve.modelstore.gguf_byte_level import merge_pairs
from pdserve.modelstore.gguf_file import GgufFile

SPACE = "\u2581"  # ▁


def sentencepiece(file: GgufFile) -> Tokenizer:
    """Vocabulary, merges, spaces and decoder; tokens of special meaning come later.

    Raises Incompatible for a vocabulary without scores and merges, or whose merges don't fit.
    """
    if file.architecture().startswith("gemma"):
        return _gemma(file)
    tokens = file.tokens()
    tokenizer = Tokenizer(_bpe(file, tokens, _scores(file, tokens)))
    prepends = file.typed("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prepends else spaces
    tokenizer.decoder = _decoder(strips=prepends)
    return tokenizer


def _gemma(file: GgufFile) -> Tokenizer:
    # Runs of spaces are written as they are, all others with ▁.
    tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in file.tokens()]
    tokenizer = Tokenizer(_bpe(file, tokens, [-float(index) for index in range(len(tokens))]))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    # Only cuts where a normalizer was not applied: what comes out of it holds no spaces.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = _decoder(strips=False)
    return tokenizer


def _decoder(*, strips: bool) -> decoders.Decoder:
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _bpe(file: GgufFile, tokens: list[str], scores: list[float]) -> models.BPE:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in file.metadata:
        merges = merge_pairs(file.listed("tokenizer.ggml.merges", str))
    else:
        merges = _merges(vocab, tokens, scores)
    unknown_id = file.token_id("unknown")
    unknown = None if unknown_id is None else tokens[unknown_id]
    try:
        return models.BPE(
            vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True, dropout=None
        )
    except Exception as error:  # the package raises plain Exception
        raise Incompatible(
            "GGUF vocabulary and merges don't fit together", why=" ".join(str(error).split())
        ) from error


def _scores(file: GgufFile, tokens: list[str]) -> list[float]:
    scores = file.listed("tokenizer.ggml.scores", float, [])
    if len(scores) != len(tokens):
        if "tokenizer.ggml.merges" in file.metadata:
            return []
        raise Incompatible(
            "GGUF vocabulary needs a score for each token, or merges", tokens=len(tokens), scores=len(scores)
        )
    return scores


def _merges(vocab: dict[str, int], tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens whose join is a token: by the joint token's score, then the longer left part first."""
    found: list[tuple[tuple[float, int, int], tuple[str, str]]] = []
    score_of = dict(zip(tokens, scores, strict=True))
    for token, score in score_of.items():
        pairs = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocab and token[cut:] in vocab
        ]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found.extend(((score, len(left), len(right)), (left, right)) for left, right in pairs)
    found.sort(key=lambda entry: entry[0], reverse=True)
    return [pair for _, pair in found]
