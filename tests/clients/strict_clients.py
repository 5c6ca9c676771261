"""Takes the server's answers apart with the official packages, with every type checked: strict_clients.py http://HOST:PORT"""

import sys

import anthropic
import openai

BASE = sys.argv[1]
ai = openai.OpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0, _strict_response_validation=True)
claude = anthropic.Anthropic(base_url=BASE, api_key="none", max_retries=0, _strict_response_validation=True)
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
NONE = {"type": "object", "properties": {}}


def check(condition, what):
    if not condition:
        sys.exit(f"FAILED: {what}")


def joined(stream):
    """Content, calls and finish reason of a chat stream."""
    content, calls, reasons = "", [], []
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.id:
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    check(len(reasons) == 1, f"one finish reason: {reasons}")
    return content, [tuple(call) for call in calls], reasons[0]


chat_tools = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in [("get_weather", CITY), ("now", NONE)]]
for tools in (openai.NOT_GIVEN, chat_tools):
    for text in ("Hello", "What is the weather?"):
        ask = dict(model="demo", messages=[{"role": "user", "content": text}], tools=tools)
        whole = ai.chat.completions.create(**ask)
        message = whole.choices[0].message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
        streamed = joined(ai.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
        check(streamed == (message.content or "", calls, whole.choices[0].finish_reason), f"chat: {streamed} {whole}")
        called = tools is chat_tools and "weather" in text
        check((whole.choices[0].finish_reason == "tool_calls") == called and len(calls) == (2 if called else 0), f"chat calls: {whole}")
        with ai.chat.completions.stream(**ask) as events:
            final = events.get_final_completion()
        check(final.choices[0].message.content == message.content, "the package's own accumulation")

flat = [{"type": "function", "name": n, "parameters": p, "strict": False} for n, p in [("get_weather", CITY), ("now", NONE)]]
for text in ("Hello", "What is the weather?"):
    ask = dict(model="demo", input=text, tools=flat)
    whole = ai.responses.create(**ask)
    with ai.responses.stream(**ask) as events:
        kinds = {event.type for event in events}
        final = events.get_final_response()
    shape = [(item.type, getattr(item, "arguments", None)) for item in whole.output]
    check([(item.type, getattr(item, "arguments", None)) for item in final.output] == shape, f"responses: {final} {whole}")
    check(final.output_text == whole.output_text and "response.completed" in kinds, f"responses' text: {kinds}")
    check(("function_call" in [kind for kind, _ in shape]) == ("weather" in text), f"responses' calls: {shape}")

claude_tools = [{"name": n, "input_schema": p} for n, p in [("get_weather", CITY), ("now", NONE)]]
for thinking in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}):
    for text in ("Hello", "What is the weather?"):
        ask = dict(model="demo", max_tokens=2000, messages=[{"role": "user", "content": text}], tools=claude_tools, thinking=thinking)
        whole = claude.messages.create(**ask)
        with claude.messages.stream(**ask) as stream:
            final = stream.get_final_message()
        blocks = [(block.type, getattr(block, "text", None), getattr(block, "input", None)) for block in whole.content]
        check([(b.type, getattr(b, "text", None), getattr(b, "input", None)) for b in final.content] == blocks, f"messages: {final} {whole}")
        check(("thinking" in [kind for kind, _, _ in blocks]) == (thinking["type"] == "enabled"), f"thinking: {blocks}")
        check(whole.stop_reason == final.stop_reason == ("tool_use" if "weather" in text else "end_turn"), f"stop: {whole.stop_reason}")
        counted = claude.messages.count_tokens(model="demo", messages=ask["messages"], tools=claude_tools, thinking=thinking)
        check(counted.input_tokens == whole.usage.input_tokens, f"count_tokens: {counted} {whole.usage}")

try:
    claude.messages.create(model="demo", max_tokens=5, messages=[{"role": "user", "content": "word " * 40000}])
    check(False, "too long must be refused")
except anthropic.BadRequestError as error:
    check("prompt is too long" in error.body["error"]["message"] and error.request_id, f"{error.body}")
try:
    ai.responses.create(model="demo", input="x", previous_response_id="resp_1")
    check(False, "a store must be refused")
except openai.BadRequestError as error:
    check(error.param == "previous_response_id", f"{error.body}")
print("all checks passed")
