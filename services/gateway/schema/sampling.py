"""Request fields that chat completions and completions share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from services.gateway.schema.fields import (
    INT64_MAX,
    INT64_MIN,
    UINT32_MAX,
    Flag,
    Int,
    Lenient,
    Number,
    StringOrStrings,
    TokenBiases,
)
from services.gateway.schema.structured import ResponseFormat, StructuredOutputs

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_SALT = 128
MAX_BAD_WORDS = 128
MAX_LOGPROB_IDS = 128

BadWord = Annotated[str, Field(max_length=256, pattern=r"\S")]
TokenId = Annotated[Int, Field(ge=0, le=UINT32_MAX)]


class StreamOptions(Lenient):
    """Options of a streamed response."""

    include_usage: Flag | None = Field(None, description="true or false")
    continuous_usage_stats: Flag | None = Field(None, description="true or false")


class SamplingRequest(Lenient):
    """Model, sampling, stopping and output fields. None means that the client said nothing."""

    model: str | None = Field(None, description="the name of a served model")
    n: Int | None = Field(
        None, ge=1, le=MAX_CHOICES, description=f"an integer from 1 to {MAX_CHOICES}"
    )
    max_tokens: Int | None = Field(
        None, ge=0, le=UINT32_MAX, description="an integer of at least 1"
    )
    temperature: Number | None = Field(None, ge=0, le=2, description="a number from 0 to 2")
    top_p: Number | None = Field(None, gt=0, le=1, description="a number above 0 and at most 1")
    top_k: Int | None = Field(
        None, ge=-1, le=UINT32_MAX, description="an integer of at least -1 (-1 and 0: off)"
    )
    min_p: Number | None = Field(None, ge=0, le=1, description="a number from 0 to 1")
    presence_penalty: Number | None = Field(None, ge=-2, le=2, description="a number from -2 to 2")
    frequency_penalty: Number | None = Field(None, ge=-2, le=2, description="a number from -2 to 2")
    repetition_penalty: Number | None = Field(
        None, gt=0, allow_inf_nan=False, description="a finite number above 0"
    )
    seed: Int | None = Field(
        None, ge=INT64_MIN, le=INT64_MAX, description="a 64-bit integer (-1: none)"
    )
    stop: StringOrStrings | None = Field(
        None, description=f"a non-empty text or a list of at most {MAX_STOPS} of them"
    )
    stop_token_ids: list[TokenId] | None = Field(None, description="a list of token ids")
    include_stop_str_in_output: Flag | None = Field(None, description="true or false")
    ignore_eos: Flag | None = Field(None, description="true or false")
    min_tokens: Int | None = Field(
        None, ge=0, le=UINT32_MAX, description="an integer from 0 to max_tokens"
    )
    logit_bias: TokenBiases | None = Field(
        None, description="an object from token ids, as decimal text, to numbers"
    )
    allowed_token_ids: list[TokenId] | None = Field(
        None, min_length=1, description="a non-empty list of token ids"
    )
    bad_words: list[BadWord] | None = Field(
        None, max_length=MAX_BAD_WORDS, description=f"a list of at most {MAX_BAD_WORDS} words"
    )
    prompt_logprobs: Int | None = Field(None, ge=-1, description="an integer of at least -1")
    logprob_token_ids: list[TokenId] | None = Field(
        None,
        max_length=MAX_LOGPROB_IDS,
        description=f"a list of at most {MAX_LOGPROB_IDS} token ids",
    )
    stream: Flag | None = Field(None, description="true or false")
    stream_options: StreamOptions | None = Field(None, description="an object")
    stream_interval: Int | None = Field(
        None, ge=1, le=1024, description="an integer from 1 to 1024"
    )
    priority: Int | None = Field(None, ge=INT64_MIN, le=INT64_MAX, description="a 64-bit integer")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_SALT,
        pattern=r"^[^@/\\\x00]+$",
        description=f"a text of 1 to {MAX_SALT} characters without @, /, \\ and NUL",
    )
    request_id: str | None = Field(
        None,
        pattern=r"^[\x21-\x7e]{1,256}$",
        description="a text of 1 to 256 printable ASCII characters without spaces",
    )
    skip_special_tokens: Flag | None = Field(None, description="true or false")
    # Tokens are joined as they are, so that no spaces come between any of them.
    spaces_between_special_tokens: Flag | None = Field(None, description="true or false")
    add_special_tokens: Flag | None = Field(None, description="true or false")
    return_token_ids: Flag | None = Field(None, description="true or false")
    return_tokens_as_token_ids: Flag | None = Field(None, description="true or false")
    truncate_prompt_tokens: Int | None = Field(
        None, ge=-1, le=UINT32_MAX, description="an integer of at least 1, or -1"
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description='"left" or "right"')
    user: Any = Field(None, description="any value; it is ignored")
    response_format: ResponseFormat | None = Field(None, description="an object with a type")
    structured_outputs: StructuredOutputs | None = Field(None, description="an object")
    guided_json: Any = Field(None, description="a JSON schema")
    guided_regex: str | None = Field(None, description="a text")
    guided_choice: list[str] | None = Field(None, description="a list of texts")
    guided_grammar: str | None = Field(None, description="a text")
    guided_json_object: Flag | None = Field(None, description="true or false")
    structural_tag: Any = Field(None, description="an object")
    regex: str | None = Field(None, description="a text")
    ebnf: str | None = Field(None, description="a text")
    json_schema: Any = Field(None, description="a JSON schema")

    @property
    def wants_logprobs(self) -> bool:
        """Whether the response carries log-probabilities of its tokens."""
        raise NotImplementedError
