"""Fields common to the bodies of all generating endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trtmesh.chassis.errors import InvalidField, PromptTooLong
from trtmesh.chassis.parsing import MAX_PROMPT_TOKENS
from trtmesh.router.doors.openai.answer import Wanted
from trtmesh.router.doors.openai.answer_parser import THINK
from trtmesh.router.doors.openai.fields import OBJECT, Fields
from trtmesh.router.doors.openai.served import Served
from trtmesh.router.doors.openai.tools import guided
from trtmesh.router.tokenizers.pool import TokenizerPool
from trtmesh.router.values.request import parse_request
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb
from trtmesh.v1 import tokenizer_pb2 as tokenizer_pb


@dataclass(frozen=True, slots=True)
class Requested:
    """A body, with the named model."""

    fields: Fields
    served: Served
    request_id: str
    about: tokenizer_pb.GetTokenizerResponse
    """The tokenizer; empty before the first was ready."""
    predicted_ids: Sequence[int] = ()
    """The form of the answer asked for by the client."""
    defaults: pb.GenerationConfig | None = None
    """The model's recommendations, if they count."""

    def wanted(
        self,
        items: Sequence[router_pb.GenerateItem],
        config: pb.GenerationConfig,
        *,
        is_large: bool,
    ) -> Wanted:
        """Returns the request, after an endpoint has taken special fields. Raises TrtmeshError for the first bad
        prompt, because an answer has no place for the error."""
        fields = self.fields
        streamed = fields.take_flag("stream")
        with_usage, with_usage_so_far = self._stream_options(streamed=streamed)
        with_token_ids = fields.take_flag("return_token_ids")
        tokens_as_ids = fields.take_flag("return_tokens_as_token_ids")
        fields.refuse_rest()
        config.output.stream = streamed
        if self.predicted_ids:
            config.draft.token_ids.extend(self.predicted_ids)
            # The usage tells the share of right guesses.
            config.output.perf_metrics = True
        if self.served.adapter:
            config.lora.name = self.served.adapter
        message = router_pb.GenerateRequest(
            request_id=self.request_id, model=self.served.model, items=items, config=config
        )
        request = parse_request(message, "", is_large=is_large)
        for refused in request.refused:
            raise refused.error.of_item(refused.batch_index)
        sequences = request.items[0].sequences
        return Wanted(
            request,
            self.served.name,
            sequences,
            streamed,
            with_usage,
            with_usage_so_far,
            with_token_ids,
            tokens_as_ids,
        )

    def _stream_options(self, *, streamed: bool) -> tuple[bool, bool]:
        """Whether a stream ends with the usage, and whether each chunk has the usage."""
        given = self.fields.take("stream_options", OBJECT)
        if given is None:
            return False, False
        if not streamed:
            raise InvalidField("belongs to a request with stream", field="stream_options")
        options = Fields(given, "stream_options.")
        with_usage = options.take_flag("include_usage")
        # The option pads chunks against traffic analysis; the door pads nothing.
        options.refuse("include_obfuscation", "is not served", neutral=False)
        with_usage_so_far = options.take_flag("continuous_usage_stats")
        options.refuse_rest()
        return with_usage, with_usage_so_far and with_usage


async def encoded(
    tokenizers: TokenizerPool, model: str, command: tokenizer_pb.EncodeCommand
) -> tokenizer_pb.Encoded:
    """Ids of a text or a conversation. Raises PromptTooLong or the pool's errors."""
    text = command.chat.messages if command.HasField("chat") else command.text
    tokenizers.check_size(model, text)
    command.max_token_ids = MAX_PROMPT_TOKENS
    answer = await tokenizers.encode(model, command)
    if count := answer.omitted_token_ids:
        raise PromptTooLong(
            f"has {count} tokens or more, but a prompt has at most {MAX_PROMPT_TOKENS}",
            field="text",
        )
    return answer


def with_prompt(wanted: Wanted, prompt: tokenizer_pb.Encoded) -> Wanted:
    """Returns the request with the ids of the conversation, and with the guide and the reading for the conversation.
    Raises InvalidField."""
    request, reading, by_template = wanted.request, wanted.reading, wanted.by_template
    config = pb.GenerationConfig()
    config.CopyFrom(request.items[0].message)
    if reading is not None:
        is_thinking = prompt.text_end.rstrip().endswith(THINK)
        reading = replace(reading, is_thinking=is_thinking)
        reading = guided(config.guided_decoding, wanted.tools, reading)
    if by_template is not None:
        by_template = replace(by_template, prompt_end=prompt.text_end)
    item = router_pb.GenerateItem(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt.token_ids)))
    message = router_pb.GenerateRequest(
        request_id=request.request_id, model=request.model, items=[item], config=config
    )
    marks = [list(word.ids) for word in prompt.words]
    return replace(
        wanted,
        request=replace(parse_request(message, "", is_large=True), is_chat=True),
        reading=reading,
        by_template=by_template,
        reasoning_ids=[ids[0] for ids in marks] if all(len(ids) == 1 for ids in marks) else (),
    )
