"""Loading valid and invalid model directories."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
from forks import fork_server, start_module
from tokenizer.tokenizers_zoo import CORPUS, ZOO, byte_level_bpe, save_model_dir
from tokenizers import Tokenizer
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.tokenizer import conversion
from trtmesh.tokenizer.vocabulary import load_vocabulary
from trtmesh.v1 import generation_pb2 as generation_pb

IMPORTS = (
    *(
        "trtmesh.chassis.errors",
        "trtmesh.chassis.json_text",
        "sentencepiece.sentencepiece_model_pb2",
    ),
    *("tokenizers", "transformers.models.auto.tokenization_auto"),
)
"""Of a conversion."""


@pytest.fixture(autouse=True)
def conversions_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """They import transformers once."""

    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        _, _, module, *arguments = command
        timeout = options["timeout"]
        with start_module(
            fork_server(IMPORTS), module, arguments, os.environ, text=True
        ) as process:
            out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    monkeypatch.setattr(conversion, "subprocess", SimpleNamespace(run=run))


@pytest.fixture
def own_model_dir(model_dir: Path, tmp_path: Path) -> Path:
    """A model directory for the test to modify."""
    return shutil.copytree(model_dir, tmp_path / "my-model")


@pytest.mark.parametrize("name", list(ZOO))
def test_vocabulary_of_every_family_loads(model_dirs: dict[str, Path], name: str) -> None:
    vocabulary = load_vocabulary(model_dirs[name])
    assert vocabulary.detokenizer.name == ZOO[name][1]
    assert vocabulary.model == name
    assert vocabulary.size == vocabulary.tokenizer.get_vocab_size()


def test_metadata_of_the_files(own_model_dir: Path) -> None:
    vocabulary = load_vocabulary(own_model_dir)
    tokenizer = vocabulary.tokenizer
    assert vocabulary.kind == "BPE"
    assert vocabulary.bos_id == tokenizer.token_to_id("<s>")
    assert vocabulary.eos_id == tokenizer.token_to_id("</s>")
    assert vocabulary.pad_id == tokenizer.token_to_id("<pad>")
    assert [tokenizer.id_to_token(i) for i in vocabulary.special_ids] == [
        "<s>",
        "</s>",
        "<pad>",
        "<|im_end|>",
    ]
    template = vocabulary.chat_templates.default
    assert template is not None
    assert template.startswith("{% for m in messages")


def test_equal_content_has_equal_fingerprints(own_model_dir: Path, model_dir: Path) -> None:
    first = load_vocabulary(own_model_dir).fingerprint
    assert first == load_vocabulary(model_dir).fingerprint
    tokenizer = byte_level_bpe()
    tokenizer.add_tokens(["another"])
    save_model_dir(tokenizer, own_model_dir)
    assert load_vocabulary(own_model_dir).fingerprint != first


def test_template_file_wins(own_model_dir: Path) -> None:
    (own_model_dir / "chat_template.jinja").write_text("{{ messages }}")
    assert load_vocabulary(own_model_dir).chat_templates.default == "{{ messages }}"


def test_default_of_several_templates_is_used(own_model_dir: Path) -> None:
    templates = [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]
    config = own_model_dir / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": templates}))
    assert load_vocabulary(own_model_dir).chat_templates.default == "b"


def test_defaults_are_those_of_the_model(
    own_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = load_vocabulary(own_model_dir).door_fingerprint
    given = {"temperature": 0.5, "top_k": 20, "top_p": 7, "max_new_tokens": 9, "do_sample": True}
    (own_model_dir / "generation_config.json").write_text(json.dumps(given | {"min_p": "x"}))
    read = load_vocabulary(own_model_dir)
    sampling = generation_pb.SamplingConfig(temperature=0.5, top_k=20)
    stopping = generation_pb.StoppingConfig(max_tokens=9)
    assert read.defaults == generation_pb.GenerationConfig(sampling=sampling, stopping=stopping)
    assert read.door_fingerprint != before
    assert "top_p is left out" in caplog.text
    assert "min_p is left out" in caplog.text


def test_only_tokenizer_json_is_required(own_model_dir: Path) -> None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (own_model_dir / name).unlink()
    vocabulary = load_vocabulary(own_model_dir)
    assert (vocabulary.bos_id, vocabulary.chat_templates.default) == (None, None)


def test_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    tokenizer = byte_level_bpe()
    plain = tokenizer.encode(CORPUS[0]).ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=500)
    loaded = load_vocabulary(save_model_dir(tokenizer, tmp_path)).tokenizer
    assert loaded.encode(CORPUS[0]).ids == plain


@pytest.mark.slow
def test_older_files_are_converted(tmp_path: Path) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "##s", "world", "!"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    config = {"tokenizer_class": "BertTokenizer", "pad_token": "[PAD]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    vocabulary = load_vocabulary(tmp_path)
    assert (vocabulary.kind, vocabulary.size, vocabulary.pad_id) == ("WordPiece", len(tokens), 0)
    ids = vocabulary.tokenizer.encode("hellos world!").ids
    state = vocabulary.detokenizer.open(skip_special_tokens=True)
    assert "".join(map(state.push, ids)) + state.flush() == "hellos world!"


@pytest.mark.slow
def test_sentencepiece_model_is_converted(tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=450,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        minloglevel=2,
    )
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    vocabulary = load_vocabulary(tmp_path)
    assert (vocabulary.kind, vocabulary.bos_id, vocabulary.eos_id) == ("BPE", 1, 2)
    assert vocabulary.detokenizer.name == "pieces"
    ids = vocabulary.tokenizer.encode(CORPUS[6]).ids
    state = vocabulary.detokenizer.open(skip_special_tokens=True)
    assert "".join(map(state.push, ids)) + state.flush() == CORPUS[6]


@pytest.mark.slow
def test_unusable_sentencepiece_is_the_reason_of_a_failed_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "path" / "sentencepiece"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    stub = package / "sentencepiece_model_pb2.py"
    stub.write_text("raise RuntimeError('its stubs are newer than protobuf')")
    monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=os.pathsep)
    (tmp_path / "tokenizer.model").touch()
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(ModelUnusable, match="RuntimeError: its stubs are newer than protobuf"):
        load_vocabulary(tmp_path)


@pytest.mark.slow
def test_tokenizer_with_code_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "own.py").write_text("raise SystemExit('this ran')")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelUnusable, match="code of the model") as caught:
        load_vocabulary(tmp_path)
    assert "trust_remote_code" not in str(caught.value)


@pytest.mark.slow
def test_failed_conversion_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("hello\nworld")
    with pytest.raises(ModelUnusable, match=f"{tmp_path} has no tokenizer.json, and its other"):
        load_vocabulary(tmp_path)


def test_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match=f"model directory {tmp_path / 'gone'} does not exist"):
        load_vocabulary(tmp_path / "gone")


def test_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match=f"{tmp_path} has neither tokenizer.json nor"):
        load_vocabulary(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": {"type": "BPE"}}', "\x00"])
def test_invalid_tokenizer_file_is_refused(own_model_dir: Path, content: str) -> None:
    (own_model_dir / "tokenizer.json").write_text(content)
    with pytest.raises(
        ModelUnusable, match=r"my-model/tokenizer.json is not a usable tokenizer: ."
    ):
        load_vocabulary(own_model_dir)


def test_empty_vocabulary_is_refused(own_model_dir: Path) -> None:
    from tokenizers.models import BPE

    Tokenizer(BPE()).save(str(own_model_dir / "tokenizer.json"))
    with pytest.raises(ModelUnusable, match="the vocabulary is empty"):
        load_vocabulary(own_model_dir)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    ("content", "what"),
    [("{", "is refused: Expecting"), ("[]", "is refused: it must hold a JSON object")],
)
def test_invalid_config_file_is_refused(
    own_model_dir: Path, name: str, content: str, what: str
) -> None:
    (own_model_dir / name).write_text(content)
    with pytest.raises(ModelUnusable, match=f"{name} {what}"):
        load_vocabulary(own_model_dir)
