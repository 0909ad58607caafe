"""Fields of OpenAI's and vLLM's APIs that are not served: the values that ask for nothing are let through, all else is refused.

A field that is ignored silently gives an answer that is not what was asked for, so there is no such field.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from graftwork_platform.errors import BadRequest

_Defaults = dict[str, tuple[object, ...]]

_SHARED: _Defaults = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "early_stopping": (False,),
    "ec_transfer_params": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "mm_payload": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (),
    "session_id": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": (),
    "watermarking": (),
}

UNSERVED_CHAT: _Defaults = _SHARED | {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (True,),
    "media_io_kwargs": (),
    "metadata": ({},),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "return_prompt_text": (False,),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Per field of a chat completion, the values that ask for nothing (null always does)."""

UNSERVED_COMPLETION: _Defaults = _SHARED | {
    "add_special_tokens": (True,),
    "prompt_embeds": (),
    "suffix": ("",),
}
"""The same for a text completion."""

UNSERVED_TOKENIZE: _Defaults = {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "tools": ([],),
}
"""The same for a text or messages to be cut into tokens."""

UNSERVED_MESSAGE: _Defaults = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "refusal": ("",),
    "tool_call_id": (),
    "tool_calls": ([],),
}
"""The same inside a message: what answers carry and clients send back in the next turn."""

UNSERVED_STREAM_OPTIONS: _Defaults = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}
"""The same inside ``stream_options``."""


def refuse_unserved(fields: Mapping[str, object], served: Collection[str], unserved: _Defaults, *, within: str = "") -> None:
    """Raise `BadRequest` for the first field that is set and not served, by its name (behind the object it lies ``within``)."""
    for name, value in fields.items():
        if name in served or value is None:
            continue
        if name not in unserved:
            raise BadRequest(f"Unknown parameter: `{within}{name}`.", param=within + name, code="unknown_parameter")
        if not any(_same(value, default) for default in unserved[name]):
            raise BadRequest(
                f"`{within}{name}` is not supported by this server{_allowed(unserved[name])}.",
                param=within + name,
                code="unsupported_parameter",
            )


def _same(value: object, default: object) -> bool:
    return value == default and isinstance(value, bool) == isinstance(default, bool)  # True == 1 in Python, not in JSON


def _allowed(defaults: tuple[object, ...]) -> str:
    shown = [str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"') for value in defaults]
    return f" (only {' or '.join(shown)})" if shown else ""
