"""Small real tokenizers of every family, made of a few lines, saved as model directories.

Each is identical in every process. Trainers iterate over tables in random order, so ties would change the ids; a given
alphabet fixes the order.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog doesn't mind; it isn't quick.",
    "Hello, world! How are you? I'm fine, they've said we're late, he can't and do not care.",
    "Größe, Straße, naïve café, señor, Übermut, 100 € und 3 £.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "我能吞下玻璃而不伤身体。你好，世界！こんにちは世界。안녕하세요 세계.",  # noqa: RUF001 - is Chinese
    "नमस्ते दुनिया। مرحبا بالعالم. שלום עולם.",
    "Emoji: 😀 👍🏽 👨‍👩‍👧‍👦 🇩🇪 ❤️ done.",
    "def add(a: int, b: int) -> int:\n    return a + b  # sum\n\nprint(add(1, 2))\n",
    "for (int i = 0; i < n; ++i) {\n\tx[i] = y[i] * 2.0f;\n}\n",
    '{"key": "value", "list": [1, 2, 3], "nested": {"null": null}}',
]

SPECIALS = ["<s>", "</s>", "<pad>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level_bpe() -> Tokenizer:
    """GPT-2, Llama 3, Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return with_added_tokens(tokenizer)


def llama2_bpe() -> Tokenizer:
    """Llama 2, Mistral: SentencePiece BPE with byte fallback and a strip of the beginning."""
    trained = Tokenizer(models.BPE())
    prepend = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    trained.normalizer = normalizers.Sequence(prepend)
    counted = Counter(sorted("".join(CORPUS).replace(" ", "▁")))
    letters = [letter for letter, _ in counted.most_common(60)]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        show_progress=False,
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = model_of(trained)
    vocabulary = numbered(["<unk>", *SPECIALS, *BYTES, *model["vocab"]])
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return with_added_tokens(tokenizer)


def unigram_byte_fallback() -> Tokenizer:
    """SentencePiece Unigram with byte fallback and Metaspace."""
    vocabulary = [("<unk>", 0.0), *((token, 0.0) for token in SPECIALS + BYTES)]
    # Letters beyond the first plane of the corpus are left to the bytes.
    vocabulary += [(t, s) for t, s in unigram_pieces() if all(ord(c) < 0x3000 for c in t)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(SPECIALS)
    return with_added_tokens(tokenizer)


def unigram_metaspace() -> Tokenizer:
    """T5, XLM-R: Unigram without byte fallback."""
    specials = ["<unk>", *SPECIALS]
    vocabulary = [*((token, 0.0) for token in specials), *unigram_pieces()]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(specials)
    return with_added_tokens(tokenizer)


def word_piece() -> Tokenizer:
    """BERT, with the clean-up of spaces before punctuation."""
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer = normalizers.BertNormalizer(strip_accents=False)
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[UNK]", "[CLS]", "[SEP]", *SPECIALS]
    words = [
        word
        for line in CORPUS
        for word, _ in trained.pre_tokenizer.pre_tokenize_str(
            trained.normalizer.normalize_str(line)
        )
    ]
    inner = sorted({f"##{letter}" for word in words for letter in word[1:]})
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=specials + inner, show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    vocabulary = numbered(model_of(trained)["vocab"])
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = trained.normalizer
    tokenizer.pre_tokenizer = trained.pre_tokenizer
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return with_added_tokens(tokenizer)


def word_end_bpe() -> Tokenizer:
    """GPT, CLIP: a suffix marks the end of a word, and the last token is decoded unlike the others."""
    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    last = sorted({f"{word[-1]}</w>" for line in CORPUS for word in line.split()})
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS + last,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = model_of(trained)
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(numbered(model["vocab"]), merges, end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = trained.pre_tokenizer
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer.add_special_tokens(SPECIALS)
    return with_added_tokens(tokenizer)


def no_decoder() -> Tokenizer:
    """A decoder component is optional; without one tokens are joined by spaces."""
    tokenizer = unigram_metaspace()
    tokenizer.decoder = None
    return tokenizer


def unstreamable() -> Tokenizer:
    """A decoder that looks back without limit: a z takes away what came before it."""
    tokenizer = unigram_metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Replace(Regex(".*z"), "z")]
    )
    return tokenizer


def unigram_pieces() -> list[tuple[str, float]]:
    """Letters and frequent parts of words, with the logarithms of their frequencies.

    These are the initial pieces of a Unigram trainer. The trainer itself sums floats in random order, so the scores
    would differ in the last bits.
    """
    words = [w for line in CORPUS for w, _ in pre_tokenizers.Metaspace().pre_tokenize_str(line)]
    counts = Counter(
        word[begin:end]
        for word in words
        for begin in range(len(word))
        for end in range(begin + 1, len(word) + 1)
    )
    longer = [part for part, count in counts.items() if len(part) > 1 and count > 1]
    longer.sort(key=lambda part: (-counts[part] * len(part), part))
    pieces = [*sorted(part for part in counts if len(part) == 1), *longer][:400]
    whole = sum(counts[piece] for piece in pieces)
    return [(piece, math.log(counts[piece] / whole)) for piece in pieces]


def model_of(trained: Tokenizer) -> dict[str, Any]:
    """The model as a tokenizer.json has it, its vocabulary by ids."""
    model: dict[str, Any] = json.loads(trained.to_str())["model"]
    return model | {"vocab": sorted(model["vocab"], key=model["vocab"].get)}


def numbered(tokens: Iterable[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Added tokens without the special flag; one looks like text of the family."""
    tokenizer.add_tokens(
        [AddedToken("<tool>", normalized=False), AddedToken("é▁ x", normalized=False)]
    )
    return tokenizer


ZOO: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "byte_level_bpe": (byte_level_bpe, "byte_level"),
    "llama2_bpe": (llama2_bpe, "pieces"),
    "unigram_byte_fallback": (unigram_byte_fallback, "pieces"),
    "unigram_metaspace": (unigram_metaspace, "pieces"),
    "word_piece": (word_piece, "pieces"),
    "word_end_bpe": (word_end_bpe, "windowed"),
    "no_decoder": (no_decoder, "pieces"),
    "unstreamable": (unstreamable, "whole"),
}
"""Builder and expected decoding of each tokenizer."""


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    """Ids of tokens that the vocabulary has."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return [vocabulary[token] for token in tokens]


def save_model_dir(tokenizer: Tokenizer, directory: Path) -> Path:
    """Writes the tokenizer files of a model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<pad>"}))
    return directory
