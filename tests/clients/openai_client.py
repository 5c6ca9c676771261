"""Drives a server with the official `openai` package: openai_client.py http://HOST:PORT"""

import asyncio
import json
import sys
import typing

import openai
import pydantic

BASE = sys.argv[1]
client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0)


def check(condition, what):
    if not condition:
        sys.exit(f"FAILED: {what}")


def question(text):
    return [{"role": "user", "content": text}]


models = client.models.list().data
check(len(models) == 1, "one model is served")
model = models[0].id
check(client.models.retrieve(model).id == model, "the model can be retrieved")

answer = client.chat.completions.create(model=model, messages=question("What is the capital of France?"), temperature=0)
message = answer.choices[0].message
check("Paris" in message.content, f"Paris: {message.content!r}")
check(answer.choices[0].finish_reason == "stop", "finish_reason stop")
check(message.reasoning_content and message.reasoning, "both spellings of the reasoning")
check(answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens, "usage adds up")

text, usage, roles, reasons = "", None, [], []
stream = client.chat.completions.create(
    model=model, messages=question("What is the capital of France?"), temperature=0, stream=True, stream_options={"include_usage": True}
)
for chunk in stream:
    if chunk.usage:
        usage = chunk.usage
    for choice in chunk.choices:
        text += choice.delta.content or ""
        roles += [choice.delta.role] if choice.delta.role else []
        reasons += [choice.finish_reason] if choice.finish_reason else []
check(text == message.content, "streamed text equals the whole")
check(usage is not None and usage.completion_tokens == answer.usage.completion_tokens, "usage chunk")
check(roles == ["assistant"] and reasons == ["stop"], f"one role, one finish reason: {roles} {reasons}")

completion = client.completions.create(model=model, prompt="Hello", max_tokens=5, temperature=0, logprobs=2)
check(len(completion.choices[0].logprobs.tokens) == completion.usage.completion_tokens, "completion logprobs")

scored = client.chat.completions.create(model=model, messages=question("Hello!"), temperature=0, max_tokens=4, logprobs=True, top_logprobs=2)
check(all(len(token.top_logprobs) == 2 for token in scored.choices[0].logprobs.content), "chat logprobs")

several = client.chat.completions.create(model=model, messages=question("Tell me a story."), n=3, seed=5, temperature=1.0, max_tokens=20)
check([choice.index for choice in several.choices] == [0, 1, 2], "three choices")

try:
    client.chat.completions.create(model=model, messages=[], temperature=0)
    check(False, "no messages must be refused")
except openai.BadRequestError as error:
    check(error.body and error.body["message"], "the error body is parsed")

try:
    client.completions.create(model=model, prompt=[5] * 100_000, max_tokens=1)
    check(False, "too long must be refused")
except openai.BadRequestError as error:
    check(error.code == "context_length_exceeded", f"code {error.code}")

with client.chat.completions.create(model=model, messages=question("Count to twenty."), stream=True) as early:
    for _ in early:
        break  # leaving the block closes the connection

tools = [
    {"type": "function", "function": {"name": "get_weather", "description": "Get the current weather in a city.", "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "City name"}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}},
]
history = question("What is the weather in Paris?")
called = client.chat.completions.create(model=model, messages=history, tools=tools, temperature=0).choices[0]
check(called.finish_reason == "tool_calls", f"a call: {called}")
call = called.message.tool_calls[0]
check((call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"}), f"the call: {call}")
with client.chat.completions.stream(model=model, messages=history, tools=tools, temperature=0) as events:
    final = events.get_final_completion().choices[0]
check(final.message.tool_calls[0].function.arguments == call.function.arguments and final.finish_reason == "tool_calls", f"streamed call: {final}")
history += [called.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "12 C and rain"}]
after = client.chat.completions.create(model=model, messages=history, tools=tools, temperature=0).choices[0]
check(after.finish_reason == "stop" and "12" in after.message.content, f"an answer from the result: {after}")


class Weather(pydantic.BaseModel):
    city: str = pydantic.Field(pattern="^[A-Z][a-z]{1,9}$")
    degrees: int = pydantic.Field(ge=-50, le=60)
    sky: typing.Literal["clear", "cloudy"]


parsed = client.chat.completions.parse(model=model, messages=question("Hello!"), response_format=Weather, temperature=0, max_tokens=500).choices[0]
check(isinstance(parsed.message.parsed, Weather), f"structured output: {parsed}")

response = client.responses.create(model=model, input="What is the capital of France?", temperature=0)
check("Paris" in response.output_text and response.status == "completed", f"responses: {response}")
flat = [{"type": "function", **tool["function"]} for tool in tools]
kinds, arguments = [], ""
for event in client.responses.create(model=model, input="What is the weather in Paris?", tools=flat, temperature=0, stream=True):
    kinds.append(event.type)
    if event.type == "response.function_call_arguments.delta":
        arguments += event.delta
check(kinds[0] == "response.created" and kinds[-1] == "response.completed", f"events: {kinds}")
check(json.loads(arguments) == {"city": "Paris"}, f"responses' call: {arguments}")


async def together():
    fellow = openai.AsyncOpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0)
    asks = [fellow.chat.completions.create(model=model, messages=question(f"What is {i} + 4?"), temperature=0) for i in range(10, 18)]
    answers = await asyncio.gather(*asks)
    for i, one in zip(range(10, 18), answers):
        check(str(i + 4) in one.choices[0].message.content, f"{i} + 4: {one.choices[0].message.content!r}")


asyncio.run(together())
print("all checks passed")
