"""Tokenizers and doors for the rules of texts: a mesh in this process whose engine tells given ids.

A tokenizer is a row of TOKENIZERS; a way of asking is a row of DOORS, which returns what its client reads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from compat.triton import Response, Triton
from engine.config_fields import LEAVES
from engine_streams import serving
from recording_backend import INFO, RecordingBackend
from rich.console import Console
from router.scripted import RouterClient, eventually, serving_router
from smg_grpc_proto.generated import trtllm_service_pb2 as tpb
from tokenizer.serving import served
from tokenizer.tokenizers_zoo import (
    SPECIALS,
    byte_level_bpe,
    llama2_bpe,
    save_model_dir,
    unigram_metaspace,
    word_piece,
)
from tokenizers import Tokenizer, decoders, pre_tokenizers
from trtllm_client import generate, request, stub_of
from trtmesh.chassis.stopping import EndRule
from trtmesh.cli.generate import Request, stream
from trtmesh.cli.streams import choose_printer
from trtmesh.client.options import build_config
from trtmesh.engine.admission import admit
from trtmesh.engine.backend import SequenceEnd, StepOutput, Submission
from trtmesh.v1 import generation_pb2 as pb

PROMPT = "The quick brown"
PADDING = 40
"""Rows of the model beyond the ids of its tokenizer."""
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}


def _no_prefix_space() -> Tokenizer:
    """SentencePiece models that begin a text as it is."""
    tokenizer = unigram_metaspace()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    return tokenizer


def _bare(build: Callable[[], Tokenizer]) -> Callable[[], Tokenizer]:
    """A tokenizer whose file declares none of its tokens as special: the other files must."""

    def built() -> Tokenizer:
        content = json.loads(build().to_str())
        content["added_tokens"] = [
            token for token in content["added_tokens"] if token["content"] not in SPECIALS
        ]
        return Tokenizer.from_str(json.dumps(content))

    return built


def _by_id() -> dict[str, Any]:
    ids = {name: byte_level_bpe().token_to_id(name) for name in SPECIALS}
    return {str(ids[name]): {"content": name, "special": True} for name in SPECIALS}


TOKENIZERS: Mapping[str, tuple[Callable[[], Tokenizer], Mapping[str, Any]]] = {
    "byte level": (byte_level_bpe, PLAIN),
    "sentencepiece": (llama2_bpe, PLAIN),
    "sentencepiece without prefix": (_no_prefix_space, PLAIN),
    "word piece": (word_piece, PLAIN),
    "declared by name": (_bare(byte_level_bpe), PLAIN | {"additional_special_tokens": SPECIALS}),
    "declared by id": (_bare(byte_level_bpe), PLAIN | {"added_tokens_decoder": _by_id()}),
}
"""Builder and tokenizer_config.json. All models are padded."""


class TellingBackend(RecordingBackend):
    """Tells the ids of `script` for every sequence, a token a step, until a rule of the item ends it."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__(
            replace(
                INFO,
                supported_fields=frozenset(LEAVES),
                vocabulary_size=vocabulary_size,
                total_blocks=1000,
                end_ids=(vocabulary_size - 1,),
            )
        )
        self.script: Sequence[int] = ()

    def submit(self, item: Submission) -> None:
        rule = admit(item, self.info)
        super().submit(item)
        asyncio.get_running_loop().call_soon(self._tell, item, rule, item.emitted_tokens)

    def _tell(self, item: Submission, rule: EndRule, told: int) -> None:
        """Tells the next token; a worker that is told to stop has told a few more by then."""
        keys = [key for key in item.keys if key in self.live]
        if not keys:
            return
        prompt = item.token_ids[: len(item.token_ids) - item.emitted_tokens]
        before = [*prompt, *self.script[:told]]
        tokens = [*before, self.script[told]]
        self.step({key: [tokens[-1]] for key in keys}, offset=told)
        found = rule.first_end(tokens, len(before))
        reason, stop_ids = found[1] if found else (pb.FINISH_REASON_LENGTH, ())
        if found or told + 1 == len(self.script):
            for key in keys:
                del self.live[key]
            ends = [
                SequenceEnd(key, reason, len(item.token_ids), 0, told + 1, stop_ids) for key in keys
            ]
            self._advance()
            self.deliver(StepOutput(self.stats_now.step_count, ends=ends))
        else:
            asyncio.get_running_loop().call_soon(self._tell, item, rule, told + 1)


@dataclass
class Ask:
    """What a client wants, in no door's words."""

    stop: Sequence[str] = ()
    bad: Sequence[str] = ()
    bias: Sequence[str] = ()
    """Words, each with the weight 2.5."""
    min_tokens: int = 0
    sequences: int = 1
    beams: int = 1

    def native(self) -> dict[str, Any]:
        given = {
            "stop_texts": [*self.stop],
            "bad_texts": [*self.bad],
            "embedding_bias_texts": [*self.bias],
            "embedding_bias_weights": [2.5 for _ in self.bias],
            "min_tokens": self.min_tokens,
            "num_return_sequences": self.sequences if self.sequences > 1 else 0,
            "beam_width": self.beams if self.beams > 1 else 0,
            "temperature": 1.0 if self.sequences > 1 else 0,
        }
        return {name: value for name, value in given.items() if value} | {
            "max_tokens": 200,
            "include_stop_text": True,
        }

    def tensors(self) -> dict[str, Any]:
        given = {
            "stop_words": [*self.stop],
            "bad_words": [*self.bad],
            "embedding_bias_words": [*self.bias],
            "embedding_bias_weights": [2.5 for _ in self.bias],
            "min_tokens": self.min_tokens,
            "num_return_sequences": self.sequences if self.sequences > 1 else 0,
            "beam_width": self.beams if self.beams > 1 else 0,
            "top_k": 5 if self.sequences > 1 else 0,
        }
        return {name: value for name, value in given.items() if value}


@dataclass
class World:
    """A mesh of one tokenizer, and transformers' own."""

    tokenizer: Any
    client: RouterClient
    triton: Triton
    trtllm: Any
    backend: TellingBackend
    prompt_ids: Sequence[int]
    size: int

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids as transformers decodes them."""
        return str(self.tokenizer.decode([*ids], skip_special_tokens=True))

    def continuation(self, ids: Sequence[int]) -> str:
        """What ids add to the text of the prompt."""
        before, whole = self.text(self.prompt_ids), self.text([*self.prompt_ids, *ids])
        assert whole.startswith(before)
        return whole.removeprefix(before)

    def ids(self, text: str) -> list[int]:
        """The ids of a text behind the prompt."""
        whole = self.tokenizer(f"{PROMPT} {text}", add_special_tokens=False)["input_ids"]
        before = self.tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
        return list(whole[len(before) :])


Door = Callable[[World, Ask], Awaitable[list[str]]]
"""Asks in one way; returns the text of each sequence, without the prompt."""


@asynccontextmanager
async def world(name: str, folder: Path) -> AsyncIterator[World]:
    from transformers import AutoTokenizer

    build, config = TOKENIZERS[name]
    save_model_dir(build(), folder)
    (folder / "special_tokens_map.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(str(folder))
    size = len(theirs)
    backend = TellingBackend(size + PADDING)
    async with AsyncExitStack() as stack:
        tokenizer = await stack.enter_async_context(served(folder))
        offered = {"trtllm_service": True, "model_dir": folder}
        engine = await stack.enter_async_context(serving(backend, **offered))
        models = {
            model + suffix: {"template": model, "decoupled": not suffix}
            for model in ("ensemble", "tensorrt_llm_bls", "tensorrt_llm", "llmapi")
            for suffix in ("", "_whole")
        }
        models |= {name: {"template": name} for name in ("preprocessing", "postprocessing")}
        settings = {"triton": {"models": models}, "http": {"port": 0}}
        client = await stack.enter_async_context(
            serving_router([engine.address], [tokenizer.address], **settings)
        )
        triton = await stack.enter_async_context(Triton(client.address))
        trtllm = await stack.enter_async_context(stub_of(engine.address))
        await eventually(lambda: client.gauge("ready_workers") == 1)
        prompt_ids = theirs(PROMPT)["input_ids"]
        yield World(theirs, client, triton, trtllm, backend, prompt_ids, size)


async def native(world: World, ask: Ask, **more: Any) -> list[str]:
    (item,) = await world.client.complete([PROMPT], **(ask.native() | more))
    assert item.error is None
    return [sequence.text for sequence in item.sequences]


async def native_whole(world: World, ask: Ask) -> list[str]:
    return await native(world, ask, stream=False)


async def command_line(world: World, ask: Ask) -> list[str]:
    given = ask.native()
    config = build_config(None, given)
    printer = choose_printer(
        as_json_lines=True, items=1, sequences=max(ask.sequences, ask.beams), console=Console()
    )
    with redirect_stdout(StringIO()) as out:
        assert await stream(world.client, Request([PROMPT], config), printer) == 0
    texts: dict[int, str] = {}
    for line in out.getvalue().splitlines():
        event = json.loads(line)
        if event["event"] == "tokens":
            # Beams come again from their beginning.
            before = texts.get(event["sequence_index"], "") if event["token_offset"] else ""
            texts[event["sequence_index"]] = before + event["text"]
    return [texts[index] for index in sorted(texts)]


def _texts(responses: Sequence[Response]) -> list[str]:
    """The joined texts of each sequence; beams come whole each time."""
    joined: dict[int, str] = {}
    for response in responses:
        assert not response.error
        if not response.outputs:
            continue
        texts = [str(text, "utf-8") for text in response.outputs["text_output"].ravel().tolist()]
        if len(texts) > 1:
            joined = dict(enumerate(texts))
        else:
            index = int(response.number.get("sequence_index", 0))
            joined[index] = joined.get(index, "") + texts[0]
    return [joined[index] for index in sorted(joined)]


def streamed(model: str) -> Door:
    async def ask_stream(world: World, ask: Ask) -> list[str]:
        tensors = {"text_input": PROMPT, "max_tokens": 200, "stream": True} | ask.tensors()
        return _texts(await world.triton.stream(model, tensors))

    return ask_stream


def whole(model: str, *, with_prompt: bool) -> Door:
    async def ask_whole(world: World, ask: Ask) -> list[str]:
        tensors = {"text_input": PROMPT, "max_tokens": 200} | ask.tensors()
        tensors["exclude_input_in_output"] = not with_prompt
        texts = _texts([await world.triton.infer(f"{model}_whole", tensors)])
        if not with_prompt:
            return texts
        before = world.text(world.prompt_ids)
        assert all(text.startswith(before) for text in texts)
        return [text.removeprefix(before) for text in texts]

    return ask_whole


async def http_generate(world: World, ask: Ask) -> list[str]:
    body = {"text_input": PROMPT, "max_tokens": 200, "exclude_input_in_output": True}
    body |= ask.tensors()
    url = f"http://{world.client.http_address}/v2/models/ensemble_whole/generate"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        answer = await response.json()
    assert response.status == 200, answer
    texts = answer["text_output"]
    return [texts] if isinstance(texts, str) else list(texts)


async def core(world: World, ask: Ask) -> list[str]:
    """preprocessing, the core model, postprocessing: ids in between."""
    words = {
        "BAD_WORDS_DICT": [*ask.bad],
        "STOP_WORDS_DICT": [*ask.stop],
        "EMBEDDING_BIAS_WORDS": [*ask.bias],
        "EMBEDDING_BIAS_WEIGHTS": [2.5 for _ in ask.bias],
    }
    query = {"QUERY": PROMPT, "REQUEST_OUTPUT_LEN": 200} | {k: v for k, v in words.items() if v}
    made = (await world.triton.infer("preprocessing", query)).outputs
    tensors = {
        "input_ids": made["INPUT_ID"],
        "input_lengths": made["REQUEST_INPUT_LEN"],
        "request_output_len": 200,
    }
    tensors |= {"end_id": made["OUT_END_ID"]}
    lists = {"bad_words_list": "BAD_WORDS_IDS", "stop_words_list": "STOP_WORDS_IDS"}
    tensors |= {name: made[given] for name, given in lists.items() if f"{given[:-4]}_DICT" in query}
    if ask.bias:
        tensors["embedding_bias"] = made["EMBEDDING_BIAS"]
    named = ask.tensors()
    tensors |= {name: named[name] for name in named if "_words" not in name and "bias" not in name}
    if "top_k" in tensors:
        tensors["runtime_top_k"] = tensors.pop("top_k")
    told = (await world.triton.infer("tensorrt_llm_whole", tensors)).outputs
    row = {"TOKENS_BATCH": told["output_ids"], "SEQUENCE_LENGTH": told["sequence_length"]}
    decoded = await world.triton.infer("postprocessing", row)
    before = world.text(world.prompt_ids)
    texts = [str(text, "utf-8") for text in np.ravel(decoded.outputs["OUTPUT"]).tolist()]
    assert all(text.startswith(before) for text in texts)
    return [text.removeprefix(before) for text in texts]


async def trtllm_service(world: World, ask: Ask) -> list[str]:
    """A gateway decodes the ids itself."""
    more: dict[str, Any] = {"stop": [*ask.stop], "bad": [*ask.bad]}
    sampling = tpb.SamplingConfig(min_tokens=ask.min_tokens)
    if ask.sequences > 1:
        sampling.num_return_sequences, sampling.temperature = ask.sequences, 1.0
    if ask.beams > 1:
        sampling.beam_width = ask.beams
    asked = request(
        prompt=world.prompt_ids,
        max_tokens=200,
        sampling_config=sampling,
        include_stop_token_in_output=True,
        **more,
    )
    outputs = await generate(world.trtllm, asked)
    return [
        world.continuation(outputs[index].complete.output_token_ids) for index in sorted(outputs)
    ]


DOORS: Mapping[str, Door] = {
    "native": native,
    "native, whole": native_whole,
    "command line": command_line,
    "ensemble": streamed("ensemble"),
    "ensemble, whole": whole("ensemble", with_prompt=False),
    "ensemble, with the prompt": whole("ensemble", with_prompt=True),
    "bls": streamed("tensorrt_llm_bls"),
    "bls, with the prompt": whole("tensorrt_llm_bls", with_prompt=True),
    "http": http_generate,
    "core": core,
    "trtllm service": trtllm_service,
}
