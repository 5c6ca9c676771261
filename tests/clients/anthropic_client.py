"""Drives a server with the official `anthropic` package: anthropic_client.py http://HOST:PORT"""

import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
THINK = {"type": "enabled", "budget_tokens": 1024}
TOOLS = [
    {"name": "get_weather", "description": "Get the current weather in a city.", "input_schema": {"type": "object", "properties": {"city": {"type": "string", "description": "City name"}}, "required": ["city"]}},
    {"name": "add", "description": "Add two numbers.", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}},
]


def check(condition, what):
    if not condition:
        sys.exit(f"FAILED: {what}")


model = "any"
ask = dict(model=model, max_tokens=500, temperature=0, thinking=THINK)
france = [{"role": "user", "content": "What is the capital of France?"}]
whole = client.messages.create(messages=france, **ask)
check([block.type for block in whole.content] == ["thinking", "text"] and "Paris" in whole.content[1].text, f"an answer: {whole}")
check(whole.stop_reason == "end_turn" and whole.usage.output_tokens > 0, f"its end: {whole}")
plain = client.messages.create(messages=france, model=model, max_tokens=500, temperature=0)
check([block.type for block in plain.content] == ["text"], f"no thinking unless asked for: {plain}")

history = [{"role": "user", "content": "What is the weather in Paris?"}]
called = client.messages.create(messages=history, tools=TOOLS, **ask)
use = called.content[-1]
check(called.stop_reason == "tool_use" and (use.name, use.input) == ("get_weather", {"city": "Paris"}), f"a call: {called}")
with client.messages.stream(messages=history, tools=TOOLS, **ask) as stream:
    kinds = [event.type for event in stream]
    final = stream.get_final_message()
check(kinds[0] == "message_start" and kinds[-1] == "message_stop", f"events: {kinds}")
check([(b.type, getattr(b, "input", None)) for b in final.content] == [(b.type, getattr(b, "input", None)) for b in called.content], f"streamed: {final}")
history += [{"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in called.content]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "12 C and rain"}]}]
after = client.messages.create(messages=history, tools=TOOLS, **ask)
check(after.stop_reason == "end_turn" and "12" in after.content[-1].text, f"an answer from the result: {after}")
counted = client.messages.count_tokens(model=model, messages=history, tools=TOOLS, thinking=THINK)
check(counted.input_tokens == after.usage.input_tokens + after.usage.cache_read_input_tokens, f"count_tokens: {counted} {after.usage}")

stopped = client.messages.create(messages=france, stop_sequences=["capital of"], **ask)
check(stopped.stop_reason in ("stop_sequence", "end_turn"), f"stop: {stopped}")
try:
    client.messages.create(messages=[], **ask)
    check(False, "no messages must be refused")
except anthropic.BadRequestError as error:
    check(error.body["error"]["type"] == "invalid_request_error", f"{error.body}")
print("all checks passed")
